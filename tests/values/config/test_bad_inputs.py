# SPDX-License-Identifier: Apache-2.0
"""An operator's mistakes in the settings: the lines on stderr and the exit code.

tests/programs/node/test_bad_inputs.py has the rows that need a machine (folders, cgroups, devices),
tests/values/source/test_bad_objects.py those about objects in a folder.
"""

import re

import pytest

from kbpf.cli import app
from tests.values.config.documents import OWN, PROXY

QUIET = "nodePortAddresses: [primary]\nclusterCIDR: 10.244.0.0/16\n"
"""Without these fields, two lines of information are printed for any kube-proxy document."""


SETTINGS = """\
mode userspace: proxy mode: userspace → 2
    unknown value 'userspace' (.mode); use iptables or nftables or ipvs, or none
mode kernelspace: proxy mode: kernelspace → 2
    unknown value 'kernelspace' (.mode); use iptables or nftables or ipvs, or none
mode ipvs: proxy mode: ipvs → 0
    info: KubeProxyConfiguration.mode: ipvs only sets defaults; the data plane is chosen by KbpfConfiguration.mode or \
--mode
    warning: KubeProxyConfiguration.mode: kube-proxy's mode ipvs is deprecated: 1.40 rejects it by default, 1.43 \
removes it; kbpf's own mode ipvs stays
a number for a word: proxy mode: 5 → 2
    expected a string, got an integer (.mode)
a list for an object: proxy detectLocal: [] → 2
    expected an object (.detectLocal)
invalid networks: proxy nodePortAddresses: [192.0.2.0/24, bogus, 192.0.2.5, primary] → 2
    not a network: 'bogus' (.nodePortAddresses[1]); write it as 192.0.2.0/24 or 2001:db8::/32
    not a network: '192.0.2.5' (.nodePortAddresses[2]); write it as 192.0.2.0/24 or 2001:db8::/32
    warning: line 5: nodePortAddresses occurs twice; the last one is used
a string for a list of networks: proxy nodePortAddresses: primary → 2
    expected a list, got a string (.nodePortAddresses)
    warning: line 5: nodePortAddresses occurs twice; the last one is used
a number among networks: proxy nodePortAddresses: [primary, 5] → 2
    expected a string, got an integer (.nodePortAddresses[1])
    warning: line 5: nodePortAddresses occurs twice; the last one is used
a feature gate that is neither true nor false: proxy featureGates: {Foo: maybe, Bar: true} → 2
    expected true or false, got a string (.featureGates.Foo)
a time without a unit: proxy conntrack: {tcpCloseWaitTimeout: 24} → 2
    expected a string, got an integer (.conntrack.tcpCloseWaitTimeout); write 24s
more conntrack entries than the limit: proxy conntrack: {maxPerCore: 99999999999} → 0
    warning: KubeProxyConfiguration.conntrack.maxPerCore: 99999999999 is limited to 1048576, the maximum for all \
cores together
a name that no Node can have: proxy hostnameOverride: "Node_1!" → 0
    warning: KubeProxyConfiguration.hostnameOverride: no Node can have the name 'node_1!' (a-z, 0-9, - and ., 253 \
characters at most): no endpoint counts as local to this node
a name that no Node can have, as a flag: --hostname-override -n → 2
    usage: kbpf run [--config FILE] [flag ...]
    error: argument --hostname-override: expected one argument
a device in both lists: --device eth0,eth1 --exclude-device eth1 → 0
    warning: --device and --exclude-device both name eth1: it is ignored
an unknown variable: KBPF_FOO=1 KBPF_PINDIR=/x KBPF_METRICS_SERVICE_HOST=1 KBPF_METRICS_PORT_9_TCP_ADDR=1 → 0
    warning: KBPF_FOO is an unknown variable; it is ignored
    warning: KBPF_PINDIR is an unknown variable; is KBPF_PIN_DIR meant?
more entries than a map holds: ours mapSizes: {connections: 99999999999} → 2
    not a number from 1 to 33554432: '99999999999' (.mapSizes.connections)
more connections than a map holds: --max-connections 1000000000 → 2
    not a number from 1 to 33554432: '1000000000' (--max-connections)
more backends than a map holds: --max-backends 134217729 → 2
    not a number from 1 to 134217728: '134217729' (--max-backends)
the largest map sizes: --max-backends 134217728 --max-connections 33554432 → 0
a word for a number: ours mapSizes: {connections: many} → 2
    expected an integer, got a string (.mapSizes.connections)
six mistakes at once: ours packetPath: {devices: eth0, enabled: 5, forwarding: x}; mode: z; pinDir: z; foo: 1 → 2
    expected a list, got a string (.packetPath.devices)
    expected true or false, got an integer (.packetPath.enabled)
    unknown field (.foo); leave it out
    unknown value 'z' (.mode); use auto or bpf or ipvs
    not an absolute path: 'z' (.pinDir); begin it with /
    unknown value 'x' (.packetPath.forwarding); use auto or stack or direct or netfilter
neither socket hooks nor packet path: --socket-lb off --packet-path false → 2
    with --socket-lb off the packet path must be on (--socket-lb); leave out --packet-path false, or --socket-lb
no mode: proxy mode: "" → 0
conntrack: proxy conntrack: {maxPerCore: -1, tcpEstablishedTimeout: 1 day, udpTimeout: -5s} → 2
    less than 0: -1 (.conntrack.maxPerCore)
    not a time: '1 day' (.conntrack.tcpEstablishedTimeout); write it as 30s, 5m or 1h30m
    less than 0: -5s (.conntrack.udpTimeout); write it as 30s, 5m or 1h30m
an unknown local mode: proxy detectLocalMode: Magic → 2
    unknown value 'Magic' (.detectLocalMode); use ClusterCIDR or NodeCIDR or BridgeInterface or InterfaceNamePrefix
a bridge without a name: proxy detectLocalMode: BridgeInterface → 2
    BridgeInterface needs a name (.detectLocal.bridgeInterface); set it
a feature gate that kbpf does not use: proxy featureGates: {Foo: true} → 0
    info: KubeProxyConfiguration.featureGates is accepted but not used: kbpf uses AllowServiceExternalIPs and \
KubeProxyNFTablesLocalhostNodePorts and no other feature gate of Kubernetes
names to listen on: proxy metricsBindAddress: nonsense; healthzBindAddress: localhost:1 → 2
    not an address to listen on: 'localhost:1' (.healthzBindAddress); write it as 0.0.0.0:10256
    not an address to listen on: 'nonsense' (.metricsBindAddress); write it as 0.0.0.0:10249
ports to listen on: proxy metricsBindAddress: 0.0.0.0:99999; healthzBindAddress: ::1:10249 → 2
    not an address to listen on: '::1:10249' (.healthzBindAddress); write it as 0.0.0.0:10256
    not an address to listen on: '0.0.0.0:99999' (.metricsBindAddress); write it as 0.0.0.0:10249
one port for both: proxy metricsBindAddress: 0.0.0.0:10256 → 2
    0.0.0.0:10256 and 0.0.0.0:10256 cannot both be listened on (.healthzBindAddress, \
KubeProxyConfiguration.metricsBindAddress); choose another port for one of them
all addresses and one of them: --metrics-bind-address 127.0.0.1:10256 → 2
    0.0.0.0:10256 and 127.0.0.1:10256 cannot both be listened on (--healthz-bind-address, --metrics-bind-address); \
choose another port for one of them
all addresses of IPv6: --metrics-bind-address 127.0.0.1:1 --healthz-bind-address [::]:1 → 2
    [::]:1 and 127.0.0.1:1 cannot both be listened on (--healthz-bind-address, --metrics-bind-address); choose \
another port for one of them
one address twice: --metrics-bind-address 127.0.0.1:1,127.0.0.1:1 → 2
    127.0.0.1:1 and 127.0.0.1:1 cannot both be listened on (--metrics-bind-address); choose another port for one of \
them
one port of two addresses: --metrics-bind-address 127.0.0.1:1 --healthz-bind-address 127.0.0.2:1 → 0
addresses and numbers: proxy clusterCIDR: 10.0.0.0/99; bindAddress: eth0; oomScoreAdj: -5000; iptables: \
{masqueradeBit: 32} → 2
    not an IP address: 'eth0' (.bindAddress)
    not a number from -1000 to 1000: '-5000' (.oomScoreAdj)
    not a number from 0 to 31: '32' (.iptables.masqueradeBit)
    not a network: '10.0.0.0/99' (.clusterCIDR); write it as 192.0.2.0/24 or 2001:db8::/32
    warning: line 5: clusterCIDR occurs twice; the last one is used
three networks: proxy clusterCIDR: 10.0.0.0/8,10.1.0.0/16,fd00::/8 → 2
    more than one network of a family: '10.0.0.0/8,10.1.0.0/16,fd00::/8' (.clusterCIDR); give at most one of each \
family
    warning: line 5: clusterCIDR occurs twice; the last one is used
periods: proxy iptables: {minSyncPeriod: 1m, syncPeriod: 30s} → 2
    shorter than minSyncPeriod, 1m0s (.iptables.syncPeriod)
a field in lower case: proxy clustercidr: 10.0.0.0/8 → 0
    warning: KubeProxyConfiguration.clustercidr is an unknown field; is clusterCIDR meant?
an older version: file apiVersion: kubeproxy.config.k8s.io/v1beta1; kind: KubeProxyConfiguration → 2
    KubeProxyConfiguration.apiVersion: 'kubeproxy.config.k8s.io/v1beta1' is not supported ({F}); write \
kubeproxy.config.k8s.io/v1alpha1
another kind: file apiVersion: kubelet.config.k8s.io/v1beta1; kind: KubeletConfiguration → 2
    kind: 'KubeletConfiguration' is not supported ({F}); write KubeProxyConfiguration or KbpfConfiguration
an empty file: file  → 2
    the file is empty ({F}); write a document of kind KubeProxyConfiguration or KbpfConfiguration
a comment alone: file # nothing; --- → 2
    the file is empty ({F}); write a document of kind KubeProxyConfiguration or KbpfConfiguration
a list: file - a → 2
    a document is not an object ({F}); begin it with apiVersion and kind
no version: file kind: KubeProxyConfiguration → 2
    KubeProxyConfiguration.apiVersion: None is not supported ({F}); write kubeproxy.config.k8s.io/v1alpha1
another version: file kind: KbpfConfiguration; apiVersion: v1 → 2
    KbpfConfiguration.apiVersion: 'v1' is not supported ({F}); write kbpf.io/v1alpha1
not YAML: file {{{{ → 2
    not YAML: did not find expected node content ({F}:2)
one kind twice: file PROXY; ---; apiVersion: kubeproxy.config.k8s.io/v1alpha1; kind: KubeProxyConfiguration → 2
    KubeProxyConfiguration occurs twice ({F}); remove one of them
an unknown field: ours packetPath: {device: eth0} → 2
    unknown field (.packetPath.device); is devices meant?
a reversed range of ports: ours packetPath: {masqueradePorts: 9-8} → 2
    not a range of ports: '9-8' (.packetPath.masqueradePorts); write it as 1024-29999
a range that includes NodePorts: ours packetPath: {masqueradePorts: 1-65535} → 0
    warning: KbpfConfiguration.packetPath.masqueradePorts 1-65535 overlaps 30000-32767, the API server's default \
range of NodePorts: a client of one may be mistaken for a client of the other; choose ports below or above
an unknown mode: --mode cilium → 2
    unknown value 'cilium' (--mode); use auto or bpf or ipvs
neither true nor false: --packet-path maybe → 2
    unknown value 'maybe' (--packet-path); use true or false
an unknown log format: --log-format xml → 2
    unknown value 'xml' (--log-format); use text or json
a variable: KBPF_PACKET_PATH=perhaps → 2
    unknown value 'perhaps' (KBPF_PACKET_PATH); use true or false
no such file: --config /nope → 1
    cannot read the configuration: No such file or directory (/nope); give --config FILE
a flag that is misspelt: --pin-dri=/x → 2
    usage: kbpf run [--config FILE] [flag ...]
    error: unrecognized arguments: --pin-dri=/x
a positional argument: positional → 2
    usage: kbpf run [--config FILE] [flag ...]
    error: unrecognized arguments: positional
a flag without its value: -v → 2
    usage: kbpf run [--config FILE] [flag ...]
    error: argument -v/--v: expected one argument
a setting that is gone: --source-speed 2 → 0
    warning: --source-speed has no effect: `--source` is a folder of YAML
its variable: KBPF_SOURCE_SPEED=x → 0
    warning: KBPF_SOURCE_SPEED has no effect: `--source` is a folder of YAML
its field: ours sourceSpeed: [x] → 0
    warning: KbpfConfiguration.sourceSpeed has no effect: `--source` is a folder of YAML
a field of a section: ours mapSizes: {counts: x} → 0
    warning: KbpfConfiguration.mapSizes.counts has no effect: 131072 pairs are counted
a folder and a server: --source / --kubeconfig x → 2
    a folder and an API server cannot both be the source (--source); leave out --source, or --kubeconfig and --master
"""
"""A rule: kube-proxy's (`proxy`) or kbpf's document (`ours`), another `file`, or flags and variables → the exit code;
below it the lines of stderr. `; ` separates the lines of a document, `(.x` means its field x, `{F}` is the file. With
code 0 the settings are accepted.
"""
ROWS = re.findall(r"^(\S.*) → (\d)\n((?: .*\n)*)", SETTINGS, re.M)
HEADS = {"proxy": PROXY + QUIET, "ours": OWN, "file": ""}
KINDS = {"proxy": "(KubeProxyConfiguration.", "ours": "(KbpfConfiguration."}


@pytest.mark.parametrize(("row", "code", "lines"), ROWS, ids=[row[0] for row in ROWS])
def test_setting(row, code, lines, tmp_path, monkeypatch, capsys):
    given = row.partition(": ")[2]
    kind, _, text = given.partition(" ")
    if kind in HEADS:
        (tmp_path / "file").write_text(HEADS[kind] + text.replace("PROXY; ", PROXY).replace("; ", "\n"))
        given = f"--config {tmp_path / 'file'}"
    words = given.split()
    for word in words:
        if word.startswith("KBPF_"):
            monkeypatch.setenv(*word.split("=", 1))
    flags = [word for word in words if not word.startswith("KBPF_")]
    assert app.call(["run", *flags, "--write-config-to", "/dev/null"]) == int(code)
    found = capsys.readouterr().err.replace(str(tmp_path / "file"), "{F}").splitlines()
    assert [line.removeprefix("kbpf run: ") for line in found] == [
        line.strip().replace("(.", KINDS.get(kind, "(.")) for line in lines.splitlines()
    ]
