# SPDX-License-Identifier: Apache-2.0
"""An operator's mistakes in the settings: the lines on stderr and the exit code.

tests/programs/node/test_bad_inputs.py has the rows that need a machine (folders, cgroups, devices),
tests/values/source/test_bad_objects.py those about objects in a folder.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.cli import app
from tests.values.config.documents import OWN, PROXY

QUIET = "nodePortAddresses: [primary]\nclusterCIDR: 10.244.0.0/16\n"
"""Without these fields, two lines of information are printed for any kube-proxy document."""


class Setting(NamedTuple):
    """A configuration file (`text`), flags and variables, with the exit code and lines of stderr.

    `{F}` in a line is replaced by the file's path. With code 0 the settings are accepted.
    """

    name: str
    text: str | None
    flags: tuple[str, ...]
    code: int
    lines: tuple[str, ...]


def proxy(name: str, text: str, code: int, *lines: str) -> Setting:
    """A row with kube-proxy's document. `(.x` in a line means the document's field x."""
    expected = tuple(line.replace("(.", "(KubeProxyConfiguration.") for line in lines)
    return Setting(name, f"{PROXY}{QUIET}{text}\n", (), code, expected)


def ours(name: str, text: str, code: int, *lines: str) -> Setting:
    expected = tuple(line.replace("(.", "(KbpfConfiguration.") for line in lines)
    return Setting(name, f"{OWN}{text}\n", (), code, expected)


def flags(name: str, words: str, code: int, *lines: str) -> Setting:
    """A row with flags and KBPF_ variables, separated by spaces as in a shell."""
    return Setting(name, None, tuple(words.split()), code, lines)


USAGE = "usage: kbpf run [--config FILE] [flag ...]"
LISTEN = "not an address to listen on"
TIMES = "write it as 30s, 5m or 1h30m"
PORTS = "choose another port for one of them"
SETTINGS = [
    proxy(
        "mode userspace",
        "mode: userspace",
        2,
        "unknown value 'userspace' (.mode); use iptables or nftables or ipvs, or none",
    ),
    proxy(
        "mode kernelspace",
        "mode: kernelspace",
        2,
        "unknown value 'kernelspace' (.mode); use iptables or nftables or ipvs, or none",
    ),
    proxy(
        "mode ipvs",
        "mode: ipvs",
        0,
        "info: KubeProxyConfiguration.mode: ipvs only sets "
        "defaults; the data plane is chosen by KbpfConfiguration.mode or --mode",
        "warning: KubeProxyConfiguration.mode: kube-proxy's mode ipvs is deprecated: 1.40 "
        "rejects it by default, 1.43 removes it; kbpf's own mode ipvs stays",
    ),
    proxy("a number for a word", "mode: 5", 2, "expected a string, got an integer (.mode)"),
    proxy("a list for an object", "detectLocal: []", 2, "expected an object (.detectLocal)"),
    proxy(
        "invalid networks",
        "nodePortAddresses: [192.0.2.0/24, bogus, 192.0.2.5, primary]",
        2,
        "not networks: 'bogus', '192.0.2.5' (.nodePortAddresses); write it as 192.0.2.0/24 or 2001:db8::/32",
        "warning: line 5: nodePortAddresses occurs twice; the last one is used",
    ),
    proxy(
        "a string for a list of networks",
        "nodePortAddresses: primary",
        2,
        "expected a list, got a string (.nodePortAddresses)",
        "warning: line 5: nodePortAddresses occurs twice; the last one is used",
    ),
    proxy(
        "a number among networks",
        "nodePortAddresses: [primary, 5]",
        2,
        "expected a string, got an integer (.nodePortAddresses[1])",
        "warning: line 5: nodePortAddresses occurs twice; the last one is used",
    ),
    proxy(
        "a feature gate that is neither true nor false",
        "featureGates: {Foo: maybe, Bar: true}",
        2,
        "expected true or false, got a string (.featureGates.Foo)",
    ),
    proxy(
        "a time without a unit",
        "conntrack: {tcpCloseWaitTimeout: 24}",
        2,
        "expected a string, got an integer (.conntrack.tcpCloseWaitTimeout); write 24s",
    ),
    proxy(
        "more conntrack entries than the limit",
        "conntrack: {maxPerCore: 99999999999}",
        0,
        "warning: KubeProxyConfiguration.conntrack.maxPerCore: 99999999999 is limited to "
        "1048576, the maximum for all cores together",
    ),
    proxy(
        "a name that no Node can have",
        'hostnameOverride: "Node_1!"',
        0,
        "warning: KubeProxyConfiguration.hostnameOverride: no Node can have the name 'node_1!' "
        "(a-z, 0-9, - and ., 253 characters at most): no endpoint counts as local to this node",
    ),
    flags(
        "a name that no Node can have, as a flag",
        "--hostname-override -n",
        2,
        USAGE,
        "error: argument --hostname-override: expected one argument",
    ),
    flags(
        "a device in both lists",
        "--device eth0,eth1 --exclude-device eth1",
        0,
        "warning: --device and --exclude-device both name eth1: it is ignored",
    ),
    flags(
        "an unknown variable",
        "KBPF_FOO=1 KBPF_PINDIR=/x KBPF_METRICS_SERVICE_HOST=1 KBPF_METRICS_PORT_9_TCP_ADDR=1",
        0,
        "warning: KBPF_FOO is an unknown variable; it is ignored",
        "warning: KBPF_PINDIR is an unknown variable; is KBPF_PIN_DIR meant?",
    ),
    ours(
        "more entries than a map holds",
        "mapSizes: {connections: 99999999999}",
        2,
        "not a number of entries: '99999999999' (.mapSizes.connections); give a whole number, 1 to 33554432",
    ),
    flags(
        "more connections than a map holds",
        "--max-connections 1000000000",
        2,
        "not a number of entries: '1000000000' (--max-connections); give a whole number, 1 to 33554432",
    ),
    flags(
        "more backends than a map holds",
        "--max-backends 134217729",
        2,
        "not a number of entries: '134217729' (--max-backends); give a whole number, 1 to 134217728",
    ),
    flags("the largest map sizes", "--max-backends 134217728 --max-connections 33554432", 0),
    ours(
        "a word for a number",
        "mapSizes: {connections: many}",
        2,
        "expected an integer, got a string (.mapSizes.connections)",
    ),
    ours(
        "six mistakes at once",
        "packetPath: {devices: eth0, enabled: 5, forwarding: x}\nmode: z\npinDir: z\nfoo: 1",
        2,
        "expected a list, got a string (.packetPath.devices)",
        "expected true or false, got an integer (.packetPath.enabled)",
        "unknown field (.foo); leave it out",
        "unknown value 'z' (.mode); use auto or bpf or ipvs",
        "not an absolute path: 'z' (.pinDir); begin it with /",
        "unknown value 'x' (.packetPath.forwarding); use auto or stack or direct or netfilter",
    ),
    flags(
        "neither socket hooks nor packet path",
        "--socket-lb off --packet-path false",
        2,
        "with --socket-lb off the packet path must be on (--socket-lb); leave out --packet-path false, or --socket-lb",
    ),
    proxy("no mode", 'mode: ""', 0),
    proxy(
        "conntrack",
        "conntrack: {maxPerCore: -1, tcpEstablishedTimeout: 1 day, udpTimeout: -5s}",
        2,
        "less than 0: -1 (.conntrack.maxPerCore)",
        f"not a time: '1 day' (.conntrack.tcpEstablishedTimeout); {TIMES}",
        f"less than 0: -5s (.conntrack.udpTimeout); {TIMES}",
    ),
    proxy(
        "an unknown local mode",
        "detectLocalMode: Magic",
        2,
        "unknown value 'Magic' "
        "(.detectLocalMode); use ClusterCIDR or NodeCIDR or BridgeInterface or "
        "InterfaceNamePrefix",
    ),
    proxy(
        "a bridge without a name",
        "detectLocalMode: BridgeInterface",
        2,
        "BridgeInterface needs a name (.detectLocal.bridgeInterface); set it",
    ),
    proxy(
        "a feature gate that kbpf does not use",
        "featureGates: {Foo: true}",
        0,
        "info: KubeProxyConfiguration.featureGates is accepted but not used: kbpf uses "
        "AllowServiceExternalIPs and KubeProxyNFTablesLocalhostNodePorts and no other feature "
        "gate of Kubernetes",
    ),
    proxy(
        "names to listen on",
        "metricsBindAddress: nonsense\nhealthzBindAddress: localhost:1",
        2,
        f"{LISTEN}: 'localhost:1' (.healthzBindAddress); write it as 0.0.0.0:10256",
        f"{LISTEN}: 'nonsense' (.metricsBindAddress); write it as 0.0.0.0:10249",
    ),
    proxy(
        "ports to listen on",
        "metricsBindAddress: 0.0.0.0:99999\nhealthzBindAddress: ::1:10249",
        2,
        f"{LISTEN}: '::1:10249' (.healthzBindAddress); write it as 0.0.0.0:10256",
        f"{LISTEN}: '0.0.0.0:99999' (.metricsBindAddress); write it as 0.0.0.0:10249",
    ),
    proxy(
        "one port for both",
        "metricsBindAddress: 0.0.0.0:10256",
        2,
        "0.0.0.0:10256 and 0.0.0.0:10256 cannot both be listened on "
        "(.healthzBindAddress, KubeProxyConfiguration.metricsBindAddress); " + PORTS,
    ),
    flags(
        "all addresses and one of them",
        "--metrics-bind-address 127.0.0.1:10256",
        2,
        "0.0.0.0:10256 and 127.0.0.1:10256 cannot both be listened on (--healthz-bind-address, "
        f"--metrics-bind-address); {PORTS}",
    ),
    flags(
        "all addresses of IPv6",
        "--metrics-bind-address 127.0.0.1:1 --healthz-bind-address [::]:1",
        2,
        f"[::]:1 and 127.0.0.1:1 cannot both be listened on (--healthz-bind-address, --metrics-bind-address); {PORTS}",
    ),
    flags(
        "one address twice",
        "--metrics-bind-address 127.0.0.1:1,127.0.0.1:1",
        2,
        f"127.0.0.1:1 and 127.0.0.1:1 cannot both be listened on (--metrics-bind-address); {PORTS}",
    ),
    flags("one port of two addresses", "--metrics-bind-address 127.0.0.1:1 --healthz-bind-address 127.0.0.2:1", 0),
    proxy(
        "addresses and numbers",
        "clusterCIDR: 10.0.0.0/99\nbindAddress: eth0\noomScoreAdj: -5000\niptables: {masqueradeBit: 32}",
        2,
        "not an IP address: 'eth0' (.bindAddress)",
        "not a number from -1000 to 1000: '-5000' (.oomScoreAdj)",
        "not a bit of the mark: '32' (.iptables.masqueradeBit); give a number, 0 to 31",
        "not a network: '10.0.0.0/99' (.clusterCIDR); write it as 192.0.2.0/24 or 2001:db8::/32",
        "warning: line 5: clusterCIDR occurs twice; the last one is used",
    ),
    proxy(
        "three networks",
        "clusterCIDR: 10.0.0.0/8,10.1.0.0/16,fd00::/8",
        2,
        "more than one network of a family: '10.0.0.0/8,10.1.0.0/16,fd00::/8' (.clusterCIDR); "
        "give at most one of each family",
        "warning: line 5: clusterCIDR occurs twice; the last one is used",
    ),
    proxy(
        "periods",
        "iptables: {minSyncPeriod: 1m, syncPeriod: 30s}",
        2,
        "longer than syncPeriod, 30s (.iptables.minSyncPeriod)",
    ),
    proxy(
        "a field in lower case",
        "clustercidr: 10.0.0.0/8",
        0,
        "warning: KubeProxyConfiguration.clustercidr is an unknown field; is clusterCIDR meant?",
    ),
    Setting(
        "an older version",
        PROXY.replace("v1alpha1", "v1beta1"),
        (),
        2,
        (
            "KubeProxyConfiguration.apiVersion: 'kubeproxy.config.k8s.io/v1beta1' is not supported "
            "({F}); write kubeproxy.config.k8s.io/v1alpha1",
        ),
    ),
    Setting(
        "another kind",
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration",
        (),
        2,
        ("kind: 'KubeletConfiguration' is not supported ({F}); write KubeProxyConfiguration or KbpfConfiguration",),
    ),
    Setting(
        "an empty file",
        "",
        (),
        2,
        ("the file is empty ({F}); write a document of kind KubeProxyConfiguration or KbpfConfiguration",),
    ),
    Setting("not YAML", "{{{{", (), 2, ("not YAML: did not find expected node content ({F}:2)",)),
    Setting(
        "one kind twice",
        f"{PROXY}---\n{PROXY}",
        (),
        2,
        ("KubeProxyConfiguration occurs twice ({F}); remove one of them",),
    ),
    ours("an unknown field", "packetPath: {device: eth0}", 2, "unknown field (.packetPath.device); is devices meant?"),
    ours(
        "a reversed range of ports",
        "packetPath: {masqueradePorts: 9-8}",
        2,
        "not a range of ports: '9-8' (.packetPath.masqueradePorts); write it as 1024-29999",
    ),
    ours(
        "a range that includes NodePorts",
        "packetPath: {masqueradePorts: 1-65535}",
        0,
        "warning: KbpfConfiguration.packetPath.masqueradePorts 1-65535 overlaps 30000-32767, the "
        "API server's default range of NodePorts: a client of one may be mistaken for a client "
        "of the other; choose ports below or above",
    ),
    flags("an unknown mode", "--mode cilium", 2, "unknown value 'cilium' (--mode); use auto or bpf or ipvs"),
    flags(
        "neither true nor false", "--packet-path maybe", 2, "unknown value 'maybe' (--packet-path); use true or false"
    ),
    flags("an unknown log format", "--log-format xml", 2, "unknown value 'xml' (--log-format); use text or json"),
    flags("a variable", "KBPF_PACKET_PATH=perhaps", 2, "unknown value 'perhaps' (KBPF_PACKET_PATH); use true or false"),
    flags(
        "no such file",
        "--config /nope",
        1,
        "cannot read the configuration: No such file or directory (/nope); give --config FILE",
    ),
    flags("a flag that is misspelt", "--pin-dri=/x", 2, USAGE, "error: unrecognized arguments: --pin-dri=/x"),
    flags("a positional argument", "positional", 2, USAGE, "error: unrecognized arguments: positional"),
    flags("a flag without its value", "-v", 2, USAGE, "error: argument -v/--v: expected one argument"),
    flags(
        "a setting that is gone",
        "--source-speed 2",
        0,
        "warning: --source-speed has no effect: `--source` is a folder of YAML",
    ),
    flags(
        "its variable",
        "KBPF_SOURCE_SPEED=x",
        0,
        "warning: KBPF_SOURCE_SPEED has no effect: `--source` is a folder of YAML",
    ),
    ours(
        "its field",
        "sourceSpeed: [x]",
        0,
        "warning: KbpfConfiguration.sourceSpeed has no effect: `--source` is a folder of YAML",
    ),
    flags(
        "a folder and a server",
        "--source / --kubeconfig x",
        2,
        "a folder and an "
        "API server cannot both be the source (--source); leave out --source, or --kubeconfig "
        "and --master",
    ),
]


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_setting(
    row: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in row.flags if not word.startswith("KBPF_")]
    for word in row.flags:
        if word.startswith("KBPF_"):
            monkeypatch.setenv(*word.split("=", 1))
    if row.text is not None:
        (tmp_path / "file").write_text(row.text)
        words += ["--config", str(tmp_path / "file")]
    code = app.call(["run", *words, "--write-config-to", "/dev/null"])
    lines = capsys.readouterr().err.replace(str(tmp_path / "file"), "{F}").splitlines()
    assert [line.removeprefix("kbpf run: ") for line in lines] == list(row.lines)
    assert code == row.code
