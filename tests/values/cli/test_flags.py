# SPDX-License-Identifier: Apache-2.0
"""Flags, environment variables and configuration files of `kbpf run`."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kbpf.cli import app, arguments
from kbpf.config import load
from kbpf.config.settings import SETTINGS
from kbpf.errors import ConfigError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, LocalMode, SocketLb
from kbpf.model.objects import Algorithm, Cidr


def cidr(address: str, bits: int) -> Cidr:
    return Cidr(parse_addr(address), bits)


# ---- flags -------------------------------------------------------------------------------------


class FlagRow(NamedTuple):
    """Flags and variables, and the resulting field of Config, its `sizes` or its `serving`."""

    name: str
    given: dict[str, str]
    environ: dict[str, str]
    field: str
    value: Any


FLAG_ROWS = [
    FlagRow("nothing: the defaults", {}, {}, "pin_dir", Config().pin_dir),
    FlagRow("a path", {"--pin-dir": "/run/x"}, {}, "pin_dir", Path("/run/x")),
    FlagRow("a variable", {}, {"KBPF_PIN_DIR": "/run/y"}, "pin_dir", Path("/run/y")),
    FlagRow("a flag beats its variable", {"--pin-dir": "/run/x"}, {"KBPF_PIN_DIR": "/run/y"},
            "pin_dir", Path("/run/x")),
    FlagRow("an empty variable is ignored", {}, {"KBPF_PIN_DIR": ""}, "pin_dir", Config().pin_dir),
    FlagRow("a node's name", {"--hostname-override": "n1"}, {}, "node_name", "n1"),
    FlagRow("a folder as source", {"--source": "objects"}, {}, "source", Path("objects")),
    FlagRow("a mode", {"--mode": "bpf"}, {}, "mode", "bpf"),
    FlagRow("a log level by variable", {}, {"KBPF_LOG_LEVEL": "debug"}, "log_level", "debug"),
    FlagRow("a log format", {"--log-format": "json"}, {}, "log_format", "json"),
    FlagRow("Maglev by default for all Services", {"--algorithm": "maglev"}, {},
            "algorithm", Algorithm.MAGLEV),
    FlagRow("Maglev by variable", {}, {"KBPF_ALGORITHM": "maglev"},
            "algorithm", Algorithm.MAGLEV),
    FlagRow("no NodePorts on loopback", {"--localhost-nodeports": "False"}, {},
            "localhost_node_ports", False),
    FlagRow("Go's short form of true", {"--masquerade-all": "T"}, {}, "masquerade_all", True),
    FlagRow("Go's short form of false",
            {"--localhost-nodeports": "0"}, {}, "localhost_node_ports", False),
    FlagRow("NodePorts on primary addresses", {"--nodeport-addresses": "primary"}, {},
            "node_port_addresses", ()),
    FlagRow("NodePorts on all addresses", {"--nodeport-addresses": "all"}, {},
            "all_node_port_addresses", True),
    FlagRow("NodePorts in networks of both families",
            {"--nodeport-addresses": "192.0.2.0/24, fd00::/64"}, {}, "node_port_addresses",
            (cidr("192.0.2.0", 120), cidr("fd00::", 64))),
    FlagRow("NodePorts on primary addresses and in a network",
            {"--nodeport-addresses": "192.0.2.0/24,primary"}, {}, "primary_node_ports", True),
    FlagRow("NodePorts on loopback alone", {"--nodeport-addresses": "localhost"}, {},
            "node_port_addresses", (cidr("127.0.0.0", 104), cidr("::1", 128))),
    FlagRow("all takes precedence over the rest", {"--nodeport-addresses": "primary,all"}, {},
            "all_node_port_addresses", True),
    FlagRow("host bits are ignored", {"--nodeport-addresses": "192.0.2.77/24"}, {},
            "node_port_addresses", (cidr("192.0.2.0", 120),)),
    FlagRow("all of IPv4 is not all of IPv6", {"--nodeport-addresses": "0.0.0.0/0"}, {},
            "node_port_addresses", (cidr("0.0.0.0", 96),)),
    FlagRow("all sockets", {}, {}, "socket_lb", SocketLb.ON),
    FlagRow("no sockets", {"--socket-lb": "off", "--packet-path": "true"}, {}, "socket_lb",
            SocketLb.OFF),
    FlagRow("sockets of the host's network namespace",
            {"--packet-path": "true"}, {"KBPF_SOCKET_LB": "hostNamespaceOnly"},
            "socket_lb", SocketLb.HOST_NAMESPACE_ONLY),
    FlagRow("exempt cgroups", {"--socket-lb-exempt": "/system.slice/istio*/, a/b"}, {},
            "socket_lb_exempt", ("system.slice/istio*", "a/b")),
    FlagRow("a size", {"--max-backends": "5000"}, {}, "backends", 5000),
    FlagRow("a size by variable", {}, {"KBPF_MAX_AFFINITY": "7"}, "affinity", 7),
    FlagRow("forwarding through the stack by default", {}, {}, "forwarding", "stack"),
    FlagRow("direct forwarding", {"--forwarding": "direct"}, {}, "forwarding", "direct"),
    FlagRow("no detection of local pods by default", {}, {}, "detect_local_mode", LocalMode.NONE),
    FlagRow("kubeadm's empty values", {"--detect-local-mode": "", "--cluster-cidr": ""}, {},
            "detect_local_mode", LocalMode.NONE),
    FlagRow("a network without a mode", {"--cluster-cidr": "10.244.0.0/16"}, {},
            "detect_local_mode", LocalMode.CLUSTER_CIDR),
    FlagRow("networks of both families", {"--cluster-cidr": "10.244.0.0/16, fd00:10::/56"}, {},
            "cluster_cidrs", (cidr("10.244.0.0", 112), cidr("fd00:10::", 56))),
    FlagRow("a network does not override another mode",
            {"--detect-local-mode": "NodeCIDR", "--cluster-cidr": "10.244.0.0/16"}, {},
            "detect_local_mode", LocalMode.NODE_CIDR),
    FlagRow("mode ClusterCIDR without a network", {"--detect-local-mode": "ClusterCIDR"}, {},
            "detect_local_mode", LocalMode.CLUSTER_CIDR),
    FlagRow("a bridge of pods",
            {"--detect-local-mode": "BridgeInterface", "--pod-bridge-interface": "cni0"}, {},
            "pod_bridge_interface", "cni0"),
    FlagRow("a prefix of pods' devices",
            {"--detect-local-mode": "InterfaceNamePrefix", "--pod-interface-name-prefix": "cali"},
            {}, "pod_interface_name_prefix", "cali"),
    FlagRow("ports for masqueraded clients", {"--masquerade-ports": "50000-50099"}, {},
            "masquerade_ports", (50_000, 50_099)),
    FlagRow("one port", {"--masquerade-ports": "65535-65535"}, {}, "masquerade_ports",
            (65_535, 65_535)),
    FlagRow("kube-proxy's mark by default", {}, {}, "masquerade_bit", 14),
    FlagRow("another bit of the mark", {"--masquerade-bit": "31"}, {}, "masquerade_bit", 31),
    FlagRow("kube-proxy's health port by default", {}, {}, "healthz", "0.0.0.0:10256"),
    FlagRow("a health address", {"--healthz-bind-address": "192.0.2.1:8"}, {}, "healthz",
            "192.0.2.1:8"),
    FlagRow("a health address without a port", {"--healthz-bind-address": "::"}, {}, "healthz",
            "[::]:10256"),
    FlagRow("an empty kubeconfig is ignored", {"--kubeconfig": ""}, {}, "kubeconfig", None),
    FlagRow("an empty bind address is ignored", {"--bind-address": ""}, {}, "bind_address", None),
    FlagRow("an empty list of networks is the default", {"--nodeport-addresses": ""}, {},
            "node_port_addresses", ()),
    FlagRow("an empty scheduler is the default",
            {"--ipvs-scheduler": ""}, {}, "ipvs_scheduler", "rr"),
    FlagRow("no health server", {"--healthz-bind-address": ""}, {}, "healthz", ""),
    FlagRow("two metrics addresses", {"--metrics-bind-address": "[2001:db8::1]:9, 127.0.0.2"}, {},
            "metrics", "[2001:db8::1]:9,127.0.0.2:10249"),
    FlagRow("a bracketed address without a port",
            {"--metrics-bind-address": "[::1]"}, {}, "metrics",
            "[::1]:10249"),
    FlagRow("failure to listen is fatal",
            {"--bind-address-hard-fail": "true"}, {}, "hard_fail", True),
    FlagRow("no series of Services", {"--metrics-services": "0"}, {}, "service_series", 0),
    FlagRow("other sizes are unchanged",
            {"--max-backends": "5000"}, {}, "slots", Config().sizes.slots),
]  # fmt: skip


@pytest.mark.parametrize("said", FLAG_ROWS, ids=lambda said: said.name)
def test_flag_or_variable_sets_a_field(said: FlagRow):
    made = load.load_config(said.given, said.environ)
    found = [
        getattr(part, said.field)
        for part in (made, made.sizes, made.serving)
        if hasattr(part, said.field)
    ]
    assert found == [said.value]


class Wrong(NamedTuple):
    """Invalid flags or variables, and words that the error must contain."""

    given: dict[str, str]
    environ: dict[str, str]
    words: tuple[str, ...]


WRONG = [
    Wrong({"--mode": "iptables"}, {}, ("iptables", "--mode", "auto or bpf")),
    Wrong({}, {"KBPF_MODE": "x"}, ("KBPF_MODE",)),
    Wrong({"--pin-dir": "kbpf"}, {}, ("'kbpf'", "--pin-dir", "/")),
    Wrong({"--max-slots": "0"}, {}, ("'0'", "--max-slots")),
    Wrong({"--max-slots": "many"}, {}, ("'many'", "--max-slots")),
    Wrong({"--max-slots": "-1"}, {}, ("'-1'",)),
    Wrong({"--nodeport-addresses": "192.0.2.0/33"}, {}, ("192.0.2.0/33", "192.0.2.0/24")),
    Wrong({"--nodeport-addresses": "192.0.2.0"}, {}, ("192.0.2.0",)),
    Wrong({"--nodeport-addresses": "here"}, {}, ("'here'", "--nodeport-addresses")),
    Wrong({"--nodeport-addresses": " , "}, {}, ("no networks",)),
    Wrong({"--forwarding": "fast"}, {}, ("'fast'", "--forwarding", "stack or direct")),
    Wrong({"--detect-local-mode": "clustercidr"}, {}, ("'clustercidr'", "ClusterCIDR or NodeCIDR")),
    Wrong({"--cluster-cidr": "10.244.0.0"}, {}, ("'10.244.0.0'", "--cluster-cidr")),
    Wrong({"--detect-local-mode": "BridgeInterface"}, {},
          ("BridgeInterface", "--pod-bridge-interface")),
    Wrong({"--detect-local-mode": "InterfaceNamePrefix", "--pod-bridge-interface": "cni0"}, {},
          ("InterfaceNamePrefix", "--pod-interface-name-prefix")),
    Wrong({"--pod-bridge-interface": "a-name-of-16-ch."}, {}, ("a-name-of-16-ch.", "15")),
    Wrong({"--pod-interface-name-prefix": "a b"}, {}, ("'a b'",)),
    Wrong({"--algorithm": "ring"}, {}, ("ring", "random or maglev")),
    Wrong({"--masquerade-ports": "61000"}, {}, ("'61000'", "--masquerade-ports", "1024-29999")),
    Wrong({"--max-connections": "999"}, {}, ("999", "--max-connections", "1000")),
    Wrong({"--masquerade-ports": "0-9"}, {}, ("'0-9'",)),
    Wrong({"--masquerade-ports": "9-8"}, {}, ("'9-8'",)),
    Wrong({"--masquerade-ports": "1-65536"}, {}, ("'1-65536'",)),
    Wrong({"--masquerade-bit": "32"}, {}, ("'32'", "--masquerade-bit", "0 to 31")),
    Wrong({"--masquerade-bit": "-1"}, {}, ("'-1'",)),
    Wrong({"--min-sync-period": "31s"}, {}, ("--min-sync-period", "--sync-period, 30s")),
    Wrong({"--min-sync-period": "2s", "--sync-period": "1s"}, {}, ("--sync-period, 1s",)),
    Wrong({"--healthz-bind-address": "localhost:1"}, {}, ("localhost:1", "10256")),
    Wrong({"--healthz-bind-address": "0.0.0.0:0"}, {}, ("0.0.0.0:0",)),
    Wrong({"--metrics-bind-address": "127.0.0.1:x"}, {}, ("127.0.0.1:x", "10249")),
    Wrong({"--metrics-services": "-1"}, {}, ("'-1'", "--metrics-services")),
    Wrong({"--localhost-nodeports": "maybe"}, {}, ("maybe", "true or false")),
    Wrong({"--socket-lb": "pods"}, {}, ("pods", "off or hostNamespaceOnly or on")),
    Wrong({"--socket-lb": "off", "--packet-path": "false"}, {},
          ("off", "--socket-lb", "--packet-path false")),
    Wrong(
        {"--socket-lb": "hostNamespaceOnly", "--packet-path": "false"},
        {},
        ("hostNamespaceOnly", "--packet-path false"),
    ),
    Wrong({"--socket-lb-exempt": "a,/"}, {}, ("root", "--socket-lb-exempt", "off")),
    Wrong({"--source": "a", "--kubeconfig": "b"}, {}, ("--source", "--kubeconfig")),
    Wrong({"--source": "a"}, {"KBPF_MASTER": "https://x"}, ("--master",)),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong.given or wrong.environ))
def test_invalid_flag_or_variable_is_named_in_the_error(wrong: Wrong):
    with pytest.raises(ConfigError) as caught:
        load.load_config(wrong.given, wrong.environ)
    for word in wrong.words:
        assert word in str(caught.value)


def test_every_flag_is_in_the_help_of_run():
    text = arguments.build_parser().format_help()
    for flag in SETTINGS:
        assert flag.name in text
    assert "KBPF_PIN_DIR" in text


def test_every_flag_names_a_field_of_the_config():
    known = set(Config.__slots__) | {"node_ports"}
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


def test_node_name_is_the_hostname_unless_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Node-7")
    assert arguments.with_node_name(Config()).node_name == "node-7"
    said = arguments.parse_options(["--hostname-override", " N1 "], {}).load(None).config
    assert arguments.with_node_name(said).node_name == "n1"


class CommandLine(NamedTuple):
    line: str
    given: dict[str, str]


COMMAND_LINES = [
    CommandLine("--config=/c --hostname-override=n1", {"--hostname-override": "n1"}),
    CommandLine("--masquerade-all", {"--masquerade-all": "true"}),
    CommandLine("--masquerade-all=false", {"--masquerade-all": "false"}),
    CommandLine("--masquerade-all false --pin-dir /p",
                {"--masquerade-all": "false", "--pin-dir": "/p"}),
    CommandLine("--masquerade-all --pin-dir /p", {"--masquerade-all": "true", "--pin-dir": "/p"}),
    CommandLine("-v=4", {"-v": "4"}),
    CommandLine("-v4", {"-v": "4"}),
    CommandLine("--v=4", {"-v": "4"}),
    CommandLine("--v 4", {"-v": "4"}),
    CommandLine("--iptables-masquerade-bit 3", {"--masquerade-bit": "3"}),
    CommandLine("--iptables-localhost-nodeports=false", {"--localhost-nodeports": "false"}),
    CommandLine("--logging-format json", {"--log-format": "json"}),
    CommandLine("--ipvs-min-sync-period 5s", {"--min-sync-period": "5s"}),
    CommandLine("--conntrack-tcp-be-liberal", {"--conntrack-tcp-be-liberal": "true"}),
    CommandLine("--feature-gates=A=true,B=false", {"--feature-gates": "A=true,B=false"}),
    CommandLine("--masquerade_all --iptables_masquerade_bit=3",
                {"--masquerade-all": "true", "--masquerade-bit": "3"}),
    CommandLine("--pod_bridge_interface=a_b", {"--pod-bridge-interface": "a_b"}),
    CommandLine("--nodeport-addresses=10.0.0.0/8 --nodeport-addresses fd00::/8,fe00::/8",
                {"--nodeport-addresses": "10.0.0.0/8,fd00::/8,fe00::/8"}),
    CommandLine("--device eth0 --device=bond*", {"--device": "eth0,bond*"}),
    CommandLine("--socket-lb-exempt a --socket-lb-exempt b", {"--socket-lb-exempt": "a,b"}),
    CommandLine("--hostname-override a --hostname-override b", {"--hostname-override": "b"}),
    CommandLine("--oom-score-adj=-998", {"--oom-score-adj": "-998"}),
    CommandLine("--oom-score-adj -998", {"--oom-score-adj": "-998"}),
]  # fmt: skip


@pytest.mark.parametrize("typed", COMMAND_LINES, ids=lambda typed: typed.line)
def test_flag_syntax_is_that_of_kube_proxy(typed: CommandLine):
    assert arguments.parse_options(typed.line.split(), {}).explicit_flags == typed.given


def test_configuration_file_by_flag_or_variable():
    assert arguments.parse_options([], {}).file is None
    assert arguments.parse_options([], {"KBPF_CONFIG": "/a"}).file == Path("/a")
    assert arguments.parse_options(["--config", "/b"], {"KBPF_CONFIG": "/a"}).file == Path("/b")


def test_write_config_to_writes_the_settings_and_exits(tmp_path: Path):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("apiVersion: kbpf.io/v1alpha1\nkind: KbpfConfiguration\npinDir: /p\n")
    assert app.call(["run", "--config", str(source), "--write-config-to", str(target)]) == 0
    written = list(yaml.safe_load_all(target.read_text()))
    assert [each["kind"] for each in written] == ["KubeProxyConfiguration", "KbpfConfiguration"]
    assert written[1]["pinDir"] == "/p"


FORMS = [
    ("flag", "", ("--log-format", "json"), True),
    ("file", "logging: {format: json}", (), True),
    ("text", "", (), False),
]


@pytest.mark.parametrize(("name", "more", "flags", "is_json"), FORMS, ids=[f[0] for f in FORMS])
def test_diagnostics_of_a_file_have_the_log_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, more: str,
    flags: tuple[str, ...], is_json: bool,
):  # fmt: skip
    """Also with `--write-config-to`, and for warnings next to errors."""
    head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    source, target = tmp_path / "in", tmp_path / "out"
    command = ["run", "--config", str(source), "--write-config-to", str(target), *flags]
    lines = []
    for wrong, code in (("", 0), ("\noomScoreAdj: 5000\nbindAddress: x", 2)):
        source.write_text(f"{head}{more}\nportRange: 1-2\nclusterCIDRs: x{wrong}")
        assert app.call(command) == code
        lines.append(capsys.readouterr().err.splitlines())
    if is_json:
        made = [[json.loads(line) for line in each] for each in lines]
        told = [[(one["level"], one["message"]) for one in each] for each in made]
        assert all(
            set(one) == {"time", "level", "logger", "message"} for each in made for one in each
        )
    else:
        found = re.compile(r"kbpf run: (?:(warning|info): )?(.*)")
        told = [[(m[1] or "error", m[2]) for line in each if (m := found.fullmatch(line))]
                for each in lines]  # fmt: skip
        assert [len(each) for each in told] == [len(each) for each in lines]
    unknown = ("warning", "KubeProxyConfiguration.clusterCIDRs is an unknown field; is "
               "clusterCIDR meant?")  # fmt: skip
    assert unknown in told[0]
    assert unknown in told[1]
    assert {level for level, _ in told[0]} == {"warning", "info"}
    assert [level for level, _ in told[1]] == ["error", "error", "warning"]
    for place, message in zip(("bindAddress", "oomScoreAdj"), told[1], strict=False):
        assert f"(KubeProxyConfiguration.{place})" in message[1]


def test_error_about_an_unreadable_file_has_the_log_format(capsys: pytest.CaptureFixture[str]):
    assert app.call(["run", "--config", "/nowhere", "--log-format=json"]) == 1
    assert "/nowhere" in json.loads(capsys.readouterr().err)["message"]
