# SPDX-License-Identifier: Apache-2.0
"""kbpf's own document, and what holds for both documents."""

import re

import pytest

from kbpf.config.documents import KBPF_SETTINGS
from kbpf.errors import ConfigErrors
from tests.support.table import each_pair, pairs
from tests.values.config.documents import (
    OWN,
    P,
    assert_mistakes,
    document,
    field,
    loaded,
    ours,
    proxy,
    shown,
)

# ---- kbpf's own document -------------------------------------------------------------------------

OURS = pairs("""\
mode: ipvs → mode = ipvs
master: https://192.0.2.1:6443 → master = https://192.0.2.1:6443
source: /objects → source = /objects
allowInsecureApi: true → allow_insecure_api = true
pinDir: /sys/fs/bpf/x → pin_dir = /sys/fs/bpf/x
cgroup: /sys/fs/cgroup/x → cgroup = /sys/fs/cgroup/x
cacheDir: /c → cache_dir = /c
algorithm: maglev → algorithm = maglev
systemNamespaces: [kube-system, dns] → system_namespaces = kube-system, dns
localhostNodePorts: false → localhost_node_ports = false
nodePortSourceRanges: [192.0.2.0/24, '2001:db8::/64'] → node_port_source_ranges = 192.0.2.0/24, 2001:db8::/64
kubernetesVersion: '1.38' → kubernetes_version = 1.38
externalIPs: all → external_ips = all
externalIPs: off → external_ips = ()
externalIPs: 'off' → external_ips = ()
externalIPs: '192.0.2.0/24,2001:db8::/64' → external_ips = 192.0.2.0/24, 2001:db8::/64
socketLB: {mode: hostNamespaceOnly} → socket_lb = hostNamespaceOnly
socketLB: {mode: off} → socket_lb = off
socketLB: {mode: 'on'} → socket_lb = on
socketLB: {exempt: [system.slice/a*, b]} → socket_lb_exempt = system.slice/a*, b
socketLB: {label: true} → socket_lb_label = true
socketLB: {meshPods: false} → mesh_pods = false
packetPath: {enabled: false} → packet_path = false
packetPath: {devices: [eth0, bond*]} → devices = eth0, bond*
packetPath: {excludeDevices: [eth1]} → excluded_devices = eth1
packetPath: {masqueradePorts: 50000-50099} → masquerade_ports = 50000, 50099
packetPath: {forwarding: direct} → forwarding = direct
ipvs: {stateDir: /run/x} → state_dir = /run/x
mapSizes: {frontends: 7} → sizes.frontends = 7
mapSizes: {backends: 7} → sizes.backends = 7
mapSizes: {connections: 7000} → sizes.connections = 7000
mapSizes: {affinity: 7} → sizes.affinity = 7
metrics: {services: 0} → serving.service_series = 0
metrics: {backends: 7} → serving.backend_series = 7
metrics: {accounting: full} → accounting = full
metrics: {accounting: off} → accounting = off
verify: {period: 1m} → verify_period = 60.0
verify: {readiness: true} → verify_readiness = true
mode: ''; cgroup: null; packetPath: {devices: []} → mode = auto
""")


@pytest.mark.parametrize(("text", "value"), OURS)
def test_field_of_kbpfs_document(text, value):
    made, name = ours(document(text)), value.partition(" = ")[0]
    assert f"{name} = {shown(field(made.config, name))}" == value
    assert made.notes == ()


def test_every_field_of_kbpfs_document_has_a_row():
    said = {path for text, _ in OURS[:-1] for path in _paths(text)}
    assert said == set(KBPF_SETTINGS)


def _paths(text: str) -> list[str]:
    head, _, tail = text.partition(": ")
    below = re.match(r"\{(\w+):", tail)
    return [f"{head}.{below[1]}" if below else head]


@each_pair(
    "text, words",
    """\
mode: iptables → 'iptables' (.mode); use auto or bpf or ipvs
pinDir: kbpf → 'kbpf' (.pinDir)
packetPath: {masqueradePorts: 7} → got an integer (.packetPath.masqueradePorts)
packetPath: {masqueradePorts: 9-8} → '9-8' (.packetPath.masqueradePorts)
packetPath: {enabled: maybe} → got a string (.packetPath.enabled)
packetPath: true → expected an object (.packetPath)
mapSizes: {frontends: 0} → '0' (.mapSizes.frontends)
mapSizes: {connections: 5} → 5 (.mapSizes.connections)
socketLB: {mode: pods} → 'pods' (.socketLB.mode)
socketLB: {exempt: [/]} → (.socketLB.exempt)
socketLB: {mode: off}; packetPath: {enabled: false} → (.socketLB.mode)
packetPath: {future: 1} → unknown field (.packetPath.future); leave it out
mapSizes: {conections: 7}; pinDir: x → (.mapSizes.conections); is connections meant? | (.pinDir)
socketLb: {mode: off} → (.socketLb); is socketLB meant?
source: /a; master: https://b → (.source)
mode: x; algorithm: z; mapSizes: {affinity: -1} → (.mode) | (.algorithm) | (.mapSizes.affinity)
""",
)
def test_mistakes_in_kbpfs_document_are_reported_with_their_paths(text, words):
    assert_mistakes(OWN + document(text), words, "KbpfConfiguration.")


def test_errors_come_with_the_warnings():
    with pytest.raises(ConfigErrors) as caught:
        proxy("oomScoreAdj: 5000\nclusterCIDRs: 10.0.0.0/8\nenableProfiling: true")
    (error,) = caught.value.errors
    assert f"({P}oomScoreAdj)" in str(error)
    (warning,) = caught.value.warnings
    assert warning == f"{P}clusterCIDRs is an unknown field; is clusterCIDR meant?"


def test_json_is_accepted():
    version = "kubeproxy.config.k8s.io/v1alpha1"
    text = f'{{"kind":"KubeProxyConfiguration","apiVersion":"{version}","mode":""}}'
    assert loaded(text).config == proxy().config
    again = loaded(text.replace(",", ",\n\t").replace("{", "{\n\t"))
    assert again.config == proxy().config
