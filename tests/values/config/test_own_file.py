# SPDX-License-Identifier: Apache-2.0
"""kbpf's own document, and what holds for both documents."""

import re
from pathlib import Path

import pytest

from kbpf.config import documents
from kbpf.config.documents import KBPF_SETTINGS, KbpfConfiguration
from kbpf.errors import ConfigErrors
from kbpf.model.address import parse_addr
from kbpf.model.config import Accounting, SocketLb
from kbpf.model.objects import Algorithm, Cidr
from tests.values.config.documents import OWN, FieldRow, P, Wrong, complaints, field, loaded, ours, proxy

# ---- kbpf's own document -------------------------------------------------------------------------

OURS = [
    FieldRow("mode: ipvs", "mode", "ipvs"),
    FieldRow("master: https://192.0.2.1:6443", "master", "https://192.0.2.1:6443"),
    FieldRow("source: /objects", "source", Path("/objects")),
    FieldRow("allowInsecureApi: true", "allow_insecure_api", True),
    FieldRow("pinDir: /sys/fs/bpf/x", "pin_dir", Path("/sys/fs/bpf/x")),
    FieldRow("cgroup: /sys/fs/cgroup/x", "cgroup", Path("/sys/fs/cgroup/x")),
    FieldRow("cacheDir: /c", "cache_dir", Path("/c")),
    FieldRow("algorithm: maglev", "algorithm", Algorithm.MAGLEV),
    FieldRow("systemNamespaces: [kube-system, dns]", "system_namespaces", ("kube-system", "dns")),
    FieldRow("localhostNodePorts: false", "localhost_node_ports", False),
    FieldRow(
        "nodePortSourceRanges: [192.0.2.0/24, '2001:db8::/64']",
        "node_port_source_ranges",
        (Cidr(parse_addr("192.0.2.0"), 120), Cidr(parse_addr("2001:db8::"), 64)),
    ),
    FieldRow("externalIPs: all", "external_ips", "all"),
    FieldRow("externalIPs: off", "external_ips", ()),
    FieldRow("externalIPs: 'off'", "external_ips", ()),
    FieldRow(
        "externalIPs: '192.0.2.0/24,2001:db8::/64'",
        "external_ips",
        (Cidr(parse_addr("192.0.2.0"), 120), Cidr(parse_addr("2001:db8::"), 64)),
    ),
    FieldRow("socketLB: {mode: hostNamespaceOnly}", "socket_lb", SocketLb.HOST_NAMESPACE_ONLY),
    FieldRow("socketLB: {mode: off}", "socket_lb", SocketLb.OFF),
    FieldRow("socketLB: {mode: 'on'}", "socket_lb", SocketLb.ON),
    FieldRow("socketLB: {exempt: [system.slice/a*, b]}", "socket_lb_exempt", ("system.slice/a*", "b")),
    FieldRow("socketLB: {label: true}", "socket_lb_label", True),
    FieldRow("socketLB: {meshPods: false}", "mesh_pods", False),
    FieldRow("packetPath: {enabled: false}", "packet_path", False),
    FieldRow("packetPath: {devices: [eth0, bond*]}", "devices", ("eth0", "bond*")),
    FieldRow("packetPath: {excludeDevices: [eth1]}", "excluded_devices", ("eth1",)),
    FieldRow("packetPath: {masqueradePorts: 50000-50099}", "masquerade_ports", (50_000, 50_099)),
    FieldRow("packetPath: {forwarding: direct}", "forwarding", "direct"),
    FieldRow("ipvs: {stateDir: /run/x}", "state_dir", Path("/run/x")),
    FieldRow("mapSizes: {frontends: 7}", "sizes.frontends", 7),
    FieldRow("mapSizes: {backends: 7}", "sizes.backends", 7),
    FieldRow("mapSizes: {connections: 7000}", "sizes.connections", 7000),
    FieldRow("mapSizes: {affinity: 7}", "sizes.affinity", 7),
    FieldRow("metrics: {services: 0}", "serving.service_series", 0),
    FieldRow("metrics: {backends: 7}", "serving.backend_series", 7),
    FieldRow("metrics: {accounting: full}", "accounting", Accounting.FULL),
    FieldRow("metrics: {accounting: off}", "accounting", Accounting.OFF),
    FieldRow("verify: {period: 1m}", "verify_period", 60.0),
    FieldRow("verify: {readiness: true}", "verify_readiness", True),
    FieldRow("mode: ''\ncgroup: null\npacketPath: {devices: []}", "mode", "auto"),
]


@pytest.mark.parametrize("row", OURS, ids=lambda row: row.text)
def test_field_of_kbpfs_document(row: FieldRow):
    made = ours(row.text)
    assert field(made.config, row.field) == row.value
    assert made.notes == ()


def test_every_field_of_kbpfs_document_has_a_row():
    said = {path for row in OURS[:-1] for path in _paths(row.text)}
    assert said == set(KBPF_SETTINGS)
    leaves = [path.partition(".")[2] for path in documents.leaf_paths(KbpfConfiguration, "K")]
    assert leaves == list(KBPF_SETTINGS)


def _paths(text: str) -> list[str]:
    head, _, tail = text.partition(": ")
    below = re.match(r"\{(\w+):", tail)
    return [f"{head}.{below[1]}" if below else head]


O = "KbpfConfiguration."  # noqa: E741
OURS_WRONG = [
    Wrong("mode: iptables", (f"'iptables' ({O}mode); use auto or bpf or ipvs",)),
    Wrong("pinDir: kbpf", (f"'kbpf' ({O}pinDir)",)),
    Wrong("packetPath: {masqueradePorts: 7}", (f"got an integer ({O}packetPath.masqueradePorts)",)),
    Wrong("packetPath: {masqueradePorts: 9-8}", (f"'9-8' ({O}packetPath.masqueradePorts)",)),
    Wrong("packetPath: {enabled: maybe}", (f"got a string ({O}packetPath.enabled)",)),
    Wrong("packetPath: true", (f"expected an object ({O}packetPath)",)),
    Wrong("mapSizes: {frontends: 0}", (f"'0' ({O}mapSizes.frontends)",)),
    Wrong("mapSizes: {connections: 5}", (f"5 ({O}mapSizes.connections)",)),
    Wrong("socketLB: {mode: pods}", (f"'pods' ({O}socketLB.mode)",)),
    Wrong("socketLB: {exempt: [/]}", (f"({O}socketLB.exempt)",)),
    Wrong("socketLB: {mode: off}\npacketPath: {enabled: false}", (f"({O}socketLB.mode)",)),
    Wrong("packetPath: {future: 1}", (f"unknown field ({O}packetPath.future); leave it out",)),
    Wrong(
        "mapSizes: {conections: 7000}\nsocketLb: {mode: off}\npinDir: x",
        (f"({O}mapSizes.conections); is connections meant?", f"({O}socketLb); is socketLB meant?", f"({O}pinDir)"),
    ),
    Wrong("source: /a\nmaster: https://b", (f"({O}source)",)),
    Wrong(
        "mode: x\nalgorithm: z\nmapSizes: {affinity: -1}", (f"({O}mode)", f"({O}algorithm)", f"({O}mapSizes.affinity)")
    ),
]


@pytest.mark.parametrize("row", OURS_WRONG, ids=lambda row: row.text)
def test_mistakes_in_kbpfs_document_are_reported_with_their_paths(row: Wrong):
    lines = complaints(OWN + row.text)
    assert len(lines) == len(row.words)
    for words, line in zip(row.words, lines, strict=True):
        assert words in line


def test_errors_come_with_the_warnings():
    with pytest.raises(ConfigErrors) as caught:
        proxy("oomScoreAdj: 5000\nclusterCIDRs: 10.0.0.0/8\nenableProfiling: true")
    (error,) = caught.value.errors
    assert f"({P}oomScoreAdj)" in str(error)
    (warning,) = caught.value.warnings
    assert warning == f"{P}clusterCIDRs is an unknown field; is clusterCIDR meant?"


FILES = [
    ("", "the file is empty"),
    ("# nothing\n---\n", "the file is empty"),
    ("a: [", "not YAML"),
    ("- a", "not an object"),
    ("kind: KubeProxyConfiguration", "KubeProxyConfiguration.apiVersion: None"),
    ("kind: KubeProxyConfiguration\napiVersion: kubeproxy.config.k8s.io/v1", "v1alpha1"),
    ("kind: KbpfConfiguration\napiVersion: v1", "kbpf.io/v1alpha1"),
    ("kind: ConfigMap\napiVersion: v1", "'ConfigMap' is not supported"),
    (f"{OWN}---\n{OWN}", "KbpfConfiguration occurs twice"),
]


@pytest.mark.parametrize(("text", "words"), FILES, ids=[words for _, words in FILES])
def test_other_file_is_refused(text: str, words: str):
    (line,) = complaints(text)
    assert words in line
    assert "--config" in line


def test_json_is_accepted():
    version = "kubeproxy.config.k8s.io/v1alpha1"
    text = f'{{"kind":"KubeProxyConfiguration","apiVersion":"{version}","mode":""}}'
    assert loaded(text).config == proxy().config
    again = loaded(text.replace(",", ",\n\t").replace("{", "{\n\t"))
    assert again.config == proxy().config
