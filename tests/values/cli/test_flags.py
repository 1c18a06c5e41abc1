# SPDX-License-Identifier: Apache-2.0
"""Flags, environment variables and configuration files of `kbpf run`."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from kbpf.cli import app, arguments
from kbpf.config import load
from kbpf.config.settings import SETTINGS
from kbpf.errors import ConfigError
from kbpf.model.config import Config
from tests.support.table import each_pair
from tests.values.config.documents import shown

# ---- flags -------------------------------------------------------------------------------------


def load_words(line: str) -> Config:
    """The settings of a command line that begins with variables."""
    words = [word.partition("=") for word in shlex.split(line)]
    variables, given = ({n: v for n, _, v in words if n.startswith("-") is flag} for flag in (False, True))
    return load.load(given, variables).config


@each_pair(
    "given, value",
    """\
no flag: → pin_dir = /sys/fs/bpf/kbpf
a path: --pin-dir=/run/x → pin_dir = /run/x
a variable: KBPF_PIN_DIR=/run/y → pin_dir = /run/y
a flag beats its variable: KBPF_PIN_DIR=/run/y --pin-dir=/run/x → pin_dir = /run/x
an empty variable is ignored: KBPF_PIN_DIR= → pin_dir = /sys/fs/bpf/kbpf
a node's name: --hostname-override=n1 → node_name = n1
a folder as source: --source=objects → source = objects
a mode: --mode=bpf → mode = bpf
a log level by variable: KBPF_V=4 → log_level = debug
a log format: --log-format=json → log_format = json
Maglev by default for all Services: --algorithm=maglev → algorithm = maglev
Maglev by variable: KBPF_ALGORITHM=maglev → algorithm = maglev
no NodePorts on loopback: --localhost-nodeports=False → localhost_node_ports = false
Go's short form of true: --masquerade-all=T → masquerade_all = true
Go's short form of false: --localhost-nodeports=0 → localhost_node_ports = false
NodePorts on primary addresses: --nodeport-addresses=primary → node_port_addresses = ()
NodePorts on all addresses: --nodeport-addresses=all → all_node_port_addresses = true
NodePorts in networks: --nodeport-addresses='192.0.2.0/24, fd00::/64' → node_port_addresses = 192.0.2.0/24, fd00::/64
NodePorts on primary addresses and in a network: --nodeport-addresses=192.0.2.0/24,primary → primary_node_ports = true
NodePorts on loopback alone: --nodeport-addresses=localhost → node_port_addresses = 127.0.0.0/8, ::1/128
all takes precedence over the rest: --nodeport-addresses=primary,all → all_node_port_addresses = true
host bits are ignored: --nodeport-addresses=192.0.2.77/24 → node_port_addresses = 192.0.2.0/24
all of IPv4 is not all of IPv6: --nodeport-addresses=0.0.0.0/0 → node_port_addresses = 0.0.0.0/0
all sockets: → socket_lb = on
no sockets: --socket-lb=off --packet-path=true → socket_lb = off
sockets of the host: KBPF_SOCKET_LB=hostNamespaceOnly --packet-path=true → socket_lb = hostNamespaceOnly
exempt cgroups: --socket-lb-exempt='/system.slice/istio*/, a/b' → socket_lb_exempt = system.slice/istio*, a/b
a size: --max-backends=5000 → backends = 5000
a size by variable: KBPF_MAX_AFFINITY=7 → affinity = 7
forwarding by conntrack where possible by default: → forwarding = auto
direct forwarding: --forwarding=direct → forwarding = direct
no detection of local pods by default: → detect_local_mode = ''
kubeadm's empty values: --detect-local-mode= --cluster-cidr= → detect_local_mode = ''
a network without a mode: --cluster-cidr=10.244.0.0/16 → detect_local_mode = ClusterCIDR
networks of both families: --cluster-cidr='10.244.0.0/16, fd00:10::/56' → cluster_cidrs = 10.244.0.0/16, fd00:10::/56
a network changes no mode: --detect-local-mode=NodeCIDR --cluster-cidr=10.244.0.0/16 → detect_local_mode = NodeCIDR
mode ClusterCIDR without a network: --detect-local-mode=ClusterCIDR → detect_local_mode = ClusterCIDR
a bridge of pods: --detect-local-mode=BridgeInterface --pod-bridge-interface=cni0 → pod_bridge_interface = cni0
a prefix: --detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=c → pod_interface_name_prefix = c
ports for masqueraded clients: --masquerade-ports=50000-50099 → masquerade_ports = 50000, 50099
one port: --masquerade-ports=65535-65535 → masquerade_ports = 65535, 65535
kube-proxy's mark by default: → masquerade_bit = 14
another bit of the mark: --masquerade-bit=31 → masquerade_bit = 31
kube-proxy's health port by default: → healthz = 0.0.0.0:10256
a health address: --healthz-bind-address=192.0.2.1:8 → healthz = 192.0.2.1:8
a health address without a port: --healthz-bind-address=:: → healthz = [::]:10256
an empty kubeconfig is ignored: --kubeconfig= → kubeconfig = none
an empty bind address is ignored: --bind-address= → bind_address = none
an empty list of networks is the default: --nodeport-addresses= → node_port_addresses = ()
an empty scheduler is the default: --ipvs-scheduler= → ipvs_scheduler = rr
no health server: --healthz-bind-address= → healthz = ''
two metrics addresses: --metrics-bind-address='[2001:db8::1]:9, 127.0.0.2' → metrics = [2001:db8::1]:9,127.0.0.2:10249
a bracketed address without a port: --metrics-bind-address=[::1] → metrics = [::1]:10249
failure to listen is fatal: --bind-address-hard-fail=true → hard_fail = true
no series of Services: --metrics-services=0 → service_series = 0
other sizes are unchanged: --max-backends=5000 → slots = 4194304
four slots for each backend: --max-backends=2000000 → slots = 8000000
the largest map has this many slots: --max-backends=134217728 → slots = 134217728
""",
)
def test_flag_or_variable_sets_a_field(given, value):
    """A rule: flags and variables → the field of Config, its `sizes` or its `serving`."""
    made, name = load_words(given.partition(":")[2]), value.partition(" = ")[0]
    (found,) = [getattr(part, name) for part in (made, made.sizes, made.serving) if hasattr(part, name)]
    assert f"{name} = {shown(found)}" == value


@each_pair(
    "given, words",
    """\
--mode=iptables → iptables | --mode | auto or bpf
KBPF_MODE=x → KBPF_MODE
--pin-dir=kbpf → 'kbpf' | --pin-dir | /
--max-backends=0 → '0' | --max-backends
--max-backends=many → 'many' | --max-backends
--max-backends=-1 → '-1'
--nodeport-addresses=192.0.2.0/33 → 192.0.2.0/33 | 192.0.2.0/24
--nodeport-addresses=192.0.2.0 → 192.0.2.0
--nodeport-addresses=here → 'here' | --nodeport-addresses
--nodeport-addresses=' , ' → no networks
--forwarding=fast → 'fast' | --forwarding | stack or direct
--detect-local-mode=clustercidr → 'clustercidr' | ClusterCIDR or NodeCIDR
--cluster-cidr=10.244.0.0 → '10.244.0.0' | --cluster-cidr
--detect-local-mode=BridgeInterface → BridgeInterface | --pod-bridge-interface
--detect-local-mode=InterfaceNamePrefix --pod-bridge-interface=cni0 → InterfaceNamePrefix | --pod-interface-name-prefix
--pod-bridge-interface=a-name-of-16-ch. → a-name-of-16-ch. | 15
--pod-interface-name-prefix='a b' → 'a b'
--algorithm=ring → ring | random or maglev
--masquerade-ports=61000 → '61000' | --masquerade-ports | 1024-29999
--max-connections=999 → 999 | --max-connections | 1000
--masquerade-ports=0-9 → '0-9'
--masquerade-ports=9-8 → '9-8'
--masquerade-ports=1-65536 → '1-65536'
--masquerade-bit=32 → '32' | --masquerade-bit | 0 to 31
--masquerade-bit=-1 → '-1'
--min-sync-period=31s → --min-sync-period | --sync-period, 30s
--min-sync-period=2s --sync-period=1s → --sync-period, 1s
--healthz-bind-address=localhost:1 → localhost:1 | 10256
--healthz-bind-address=0.0.0.0:0 → 0.0.0.0:0
--metrics-bind-address=127.0.0.1:x → 127.0.0.1:x | 10249
--metrics-services=-1 → '-1' | --metrics-services
--localhost-nodeports=maybe → maybe | true or false
--socket-lb=pods → pods | off or hostNamespaceOnly or on
--socket-lb=off --packet-path=false → off | --socket-lb | --packet-path false
--socket-lb=hostNamespaceOnly --packet-path=false → hostNamespaceOnly | --packet-path false
--socket-lb-exempt=a,/ → root | --socket-lb-exempt | off
--source=a --kubeconfig=b → --source | --kubeconfig
KBPF_MASTER=https://x --source=a → --master
""",
)
def test_invalid_flag_or_variable_is_named_in_the_error(given, words):
    """Invalid flags or variables → words that the error must contain."""
    with pytest.raises(ConfigError) as caught:
        load_words(given)
    assert [word for word in words.split(" | ") if word not in str(caught.value)] == []


def test_every_flag_is_in_the_help_of_run():
    text = arguments.build_parser().format_help()
    for flag in SETTINGS:
        assert flag.name in text
    assert "KBPF_PIN_DIR" in text


def test_every_flag_names_a_field_of_the_config():
    known = set(Config.__slots__) | {"node_ports", "feature_gates"}
    for flag in SETTINGS:
        head, _, tail = (flag.field or "mode").partition(".")  # no field: unused, kube-proxy's
        assert tail in getattr(Config(), head).__slots__ if tail else head in known


def test_parsed_flags_include_those_by_variable():
    environ = {"KBPF_PIN_DIR": "/a", "KBPF_MODE": "bpf", "KBPF_CGROUP": "", "KBPF_CONFIG": "/c"}
    line = ["-v", "4", "--mode=ipvs", "--metrics-bind-address=", "--kube-api-qps=5"]
    assert arguments.parse_options(line, environ).flags == {
        "--config": "/c",
        "--pin-dir": "/a",
        "--mode": "ipvs",
        "--metrics-bind-address": "",
        "-v": "4",
        "--kube-api-qps": "5",
    }


def test_node_name_is_the_hostname_unless_set(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Node-7")
    assert arguments.with_node_name(Config()).node_name == "node-7"
    said = arguments.parse_options(["--hostname-override", " N1 "], {}).load(None).config
    assert arguments.with_node_name(said).node_name == "n1"


@each_pair(
    "line, flags",
    """\
--config=/c --hostname-override=n1 → --hostname-override=n1
--masquerade-all → --masquerade-all=true
--masquerade-all=false → --masquerade-all=false
--masquerade-all false --pin-dir /p → --masquerade-all=false --pin-dir=/p
--masquerade-all --pin-dir /p → --masquerade-all=true --pin-dir=/p
--status-page=local → --status-page=local
-v=4 → -v=4
-v4 → -v=4
--v=4 → -v=4
--v 4 → -v=4
--iptables-masquerade-bit 3 → --iptables-masquerade-bit=3
--iptables-localhost-nodeports=false → --localhost-nodeports=false
--logging-format json → --log-format=json
--ipvs-min-sync-period 5s → --ipvs-min-sync-period=5s
--conntrack-tcp-be-liberal → --conntrack-tcp-be-liberal=true
--feature-gates=A=true,B=false → --feature-gates=A=true,B=false
--masquerade_all --iptables_masquerade_bit=3 → --masquerade-all=true --iptables-masquerade-bit=3
--pod_bridge_interface=a_b → --pod-bridge-interface=a_b
--nodeport-addresses=10.0.0.0/8 --nodeport-addresses fd00::/8,::/0 → --nodeport-addresses=10.0.0.0/8,fd00::/8,::/0
--device eth0 --device=bond* → --device=eth0,bond*
--socket-lb-exempt a --socket-lb-exempt b → --socket-lb-exempt=a,b
--hostname-override a --hostname-override b → --hostname-override=b
--oom-score-adj=-998 → --oom-score-adj=-998
--oom-score-adj -998 → --oom-score-adj=-998
""",
)
def test_flag_syntax_is_that_of_kube_proxy(line, flags):
    """A command line → each flag with its value."""
    found = arguments.parse_options(line.split(), {}).explicit_flags
    assert sorted(map("=".join, found.items())) == sorted(flags.split())


def test_configuration_file_by_flag_or_variable():
    assert arguments.parse_options([], {}).file is None
    assert arguments.parse_options([], {"KBPF_CONFIG": "/a"}).file == Path("/a")
    assert arguments.parse_options(["--config", "/b"], {"KBPF_CONFIG": "/a"}).file == Path("/b")


def test_write_config_to_writes_the_settings_and_exits(tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("apiVersion: kbpf.io/v1alpha1\nkind: KbpfConfiguration\npinDir: /p\n")
    assert app.call(["run", "--config", str(source), "--write-config-to", str(target)]) == 0
    written = list(yaml.safe_load_all(target.read_text()))
    assert [each["kind"] for each in written] == ["KubeProxyConfiguration", "KbpfConfiguration"]
    assert written[1]["pinDir"] == "/p"


@each_pair(
    "form, more",
    """\
flag: json --log-format=json →
file: json → logging: {format: json}
text: text →
""",
)
def test_diagnostics_of_a_file_have_the_log_format(tmp_path, capsys, form, more):
    """Also with `--write-config-to`, and for warnings next to errors."""
    _, log_format, *flags = form.split()
    source = tmp_path / "in"
    head = f"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{more}\nclusterCIDRs: x\n"
    for wrong, code, levels in (
        ("", 0, "warning info info info"),
        ("oomScoreAdj: 5000\nbindAddress: x", 2, "error error warning"),
    ):
        source.write_text(head + wrong)
        assert app.call(["run", "--config", str(source), "--write-config-to", str(tmp_path / "out"), *flags]) == code
        lines = capsys.readouterr().err.splitlines()
        if log_format == "json":
            records = [json.loads(line) for line in lines]
            assert all(record.keys() == {"time", "level", "logger", "message"} for record in records)
            told = [(record["level"], record["message"]) for record in records]
        else:
            told = [re.fullmatch(r"kbpf run: (?:(warning|info): )?(.*)", line).groups("error") for line in lines]
        assert " ".join(level for level, _ in told) == levels
        unknown = "KubeProxyConfiguration.clusterCIDRs is an unknown field; is clusterCIDR meant?"
        assert ("warning", unknown) in told
    assert "(KubeProxyConfiguration.bindAddress)" in told[0][1]
    assert "(KubeProxyConfiguration.oomScoreAdj)" in told[1][1]
