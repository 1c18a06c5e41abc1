# SPDX-License-Identifier: Apache-2.0
"""The parts of the command line that need no kernel: flags, output formats, exit codes, imports."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from kbpf import __version__
from kbpf.checks import bpf as bpf_checks
from kbpf.checks import packet_path
from kbpf.checks.row import Check, CheckRow
from kbpf.checks.verdict import compute_verdict, to_document
from kbpf.cli import app, arguments, check, cleanup, inspect, render
from kbpf.cli.options import Output
from kbpf.cli.render import watch
from kbpf.config import load, locations
from kbpf.config.settings import SETTINGS
from kbpf.dataplane.bpf.maps.layout import NodeFlag
from kbpf.errors import ConfigError, NotFoundError
from kbpf.kernel.net.devices import Device
from kbpf.kernel.netfilter.forward_rules import BaseChain
from kbpf.kernel.probe_result import Probe
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, LocalMode, SocketLb
from kbpf.model.objects import Algorithm, Cidr
from kbpf.views import node
from kbpf.views.columns import Column, format_duration
from kbpf.views.columns import format_size as bytes_text
from kbpf.views.packet_path import connections


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
    """A command line and the flags parsed from it."""

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


def test_error_about_an_unreadable_file_has_the_log_format(
    capsys: pytest.CaptureFixture[str],
):
    assert app.call(["run", "--config", "/nowhere", "--log-format=json"]) == 1
    assert "/nowhere" in json.loads(capsys.readouterr().err)["message"]


# ---- exit codes --------------------------------------------------------------------------------


class ExitRow(NamedTuple):
    """Arguments, the exit code, and words on stdout and stderr."""

    arguments: tuple[str, ...]
    code: int
    out: str
    err: str


EXIT_ROWS = [
    ExitRow(("--help",), 0, "inspect", ""),
    ExitRow(("--version",), 0, __version__, ""),
    ExitRow(("run", "--help"), 0, "--nodeport-addresses", ""),
    ExitRow(("inspect", "--help"), 0, "affinity", ""),
    ExitRow(("demo", "--help"), 0, "--once", ""),
    ExitRow(("nonsense",), 2, "", "nonsense"),
    ExitRow(("inspect", "nonsense"), 2, "", "nonsense"),
    ExitRow(("inspect", "services", "-o", "xml"), 2, "", "xml"),
    ExitRow(("inspect", "services", "--watch", "-o", "json"), 2, "", "--watch"),
    ExitRow(("inspect", "service"), 2, "", "NAME"),
    ExitRow(("inspect", "service", "shop/web", "-n", "edge"), 2, "",
            "Invalid value for --namespace: "
            "edge contradicts the namespace of shop/web"),
    ExitRow(("inspect", "service", "shop/web", "-n", "shop", "--pin-dir", "/nowhere"), 1, "",
            "/nowhere"),
    ExitRow(("inspect", "connections", "--help"), 0, "socket hooks", ""),
    *(ExitRow(("inspect", view, "--pin-dir", "/nowhere"), 1, "", "/nowhere")
      for view in ("connections", "nat", "sources", "devices", "affinity")),
    ExitRow(("run", "--mode", "iptables"), 2, "", "iptables"),
    ExitRow(("run", "--nonsense"), 2, "", "--nonsense"),
    ExitRow(("run", "extra"), 2, "", "extra"),
    ExitRow(("demo", "-o", "json"), 2, "", "--once"),
    ExitRow(("demo", "--once", "--requests", "0"), 2, "", "--requests"),
    ExitRow(("run", "--source", "/nowhere", "--pin-dir", "/proc/no"), 1, "", "kbpf no such "
            "folder of objects (/nowhere)"),
    ExitRow(("run", "--source", "/etc/hostname", "--pin-dir", "/proc/no"), 1, "", "--source DIR"),
    ExitRow(("run", "--config", "/nowhere"), 1, "", "cannot read the configuration"),
    ExitRow(("run", "--mode", "x", "--pin-dir", "y"), 2, "", "(--pin-dir)"),
    ExitRow(("run", "--masquerade-all", "--v=4", "-v", "2", "--proxy-mode", "x"), 2, "",
            "(--proxy-mode)"),
    ExitRow(("run", "--masquerade-all=maybe"), 2, "", "maybe"),
    ExitRow(("run", "--version"), 0, __version__, ""),
    ExitRow(("run", "--cleanup"), 2, "", "kbpf cleanup"),
    ExitRow(("inspect", "services", "--pin-dir", "/nowhere"), 1, "", "/nowhere"),
    ExitRow(("inspect", "status", "--pin-dir", "/nowhere"), 1, "", "kbpf run"),
    ExitRow(("check", "--attached", "--pin-dir", "/nowhere"), 1, "", "/nowhere"),
]  # fmt: skip


@pytest.mark.parametrize("ends", EXIT_ROWS, ids=lambda ends: " ".join(ends.arguments))
def test_exit_code_and_output(ends: ExitRow, capsys: pytest.CaptureFixture[str]):
    assert app.call(ends.arguments) == ends.code
    out, err = capsys.readouterr()
    assert ends.out in out
    assert ends.err in err
    assert bool(err) == (ends.code != 0)


def test_no_command_prints_the_help_and_returns_2(
    capsys: pytest.CaptureFixture[str],
):
    assert app.call([]) == 2
    assert "compile" in "".join(capsys.readouterr())


def raises(error: BaseException) -> Any:
    def command(*_: object) -> int:
        raise error

    return command


def test_error_of_kbpf_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(app, "_dispatch", raises(NotFoundError("no cow", "on\nice", "look")))
    assert app.call([]) == 1
    assert capsys.readouterr().err == "kbpf: no cow (on ice); look\n"


def test_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "_dispatch", raises(KeyboardInterrupt()))
    assert app.call([]) == 130


def test_closed_pipe_ends_by_sigpipe_without_output():
    command = [sys.executable, "-m", "kbpf", "run", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
        child.wait()
    assert child.returncode == -signal.SIGPIPE


FILE = """\
apiVersion: kbpf.io/v1alpha1
kind: KbpfConfiguration
pinDir: /sys/fs/bpf/file
ipvs: {device: file0, nftTable: file, stateDir: /run/file}
"""
CLEANUP_ROWS = [
    ("the file's locations", (), {}, ("/sys/fs/bpf/file", "file0", "file", "/run/file")),
    ("a flag beats the file", ("--pin-dir", "/sys/fs/bpf/flag", "--nft-table", "flag"), {},
     ("/sys/fs/bpf/flag", "file0", "flag", "/run/file")),
    ("a variable beats the file", (), {"KBPF_IPVS_DEVICE": "var0"},
     ("/sys/fs/bpf/file", "var0", "file", "/run/file")),
    ("a flag with the default value beats the file", ("--state-dir", "/run/kbpf"), {},
     ("/sys/fs/bpf/file", "file0", "file", "/run/kbpf")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "environ", "wanted"), CLEANUP_ROWS, ids=[row[0] for row in CLEANUP_ROWS]
)
def test_cleanup_uses_the_locations_of_the_file(
    name: str, given: tuple[str, ...], environ: dict[str, str], wanted: tuple[str, ...],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    for variable, text in environ.items():
        monkeypatch.setenv(variable, text)
    code, looked = cleaned(monkeypatch, tmp_path, FILE, *given)
    assert (code, looked) == (0, wanted)


def cleaned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, *given: str
) -> tuple[int, tuple[str, ...]]:
    """Runs `kbpf cleanup` with this file; returns its exit code and the locations it cleans."""
    looked: list[object] = []
    monkeypatch.setattr(cleanup, "remove_pins", lambda pins, _: looked.append(pins) or ())

    def remove_ipvs(config: Config) -> tuple[()]:
        looked.extend((config.ipvs_device, config.nft_table, config.state_dir))
        return ()

    monkeypatch.setattr(cleanup, "remove_ipvs", remove_ipvs)
    (tmp_path / "config.conf").write_text(text)
    code = app.call(["cleanup", "--config", str(tmp_path / "config.conf"), *given])
    return code, tuple(map(str, looked))


PROXYS = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
LOCATIONS = ("/sys/fs/bpf/file", "file0", "file", "/run/file")
ALL = ("pin_dir", "cgroup", "cache_dir", "ipvs_device", "nft_table", "state_dir")


class Mistake(NamedTuple):
    """A file, words of its error, and the locations that cannot be read because of it."""

    name: str
    text: str
    told: str
    names: tuple[str, ...] = ()


MISTAKES = [
    Mistake("no mistake", FILE, ""),
    Mistake("a value of kube-proxy's document", f"{FILE}---\n{PROXYS}mode: best\n", "'best'"),
    Mistake("a value in each document", f"{FILE}algorithm: x\n---\n{PROXYS}oomScoreAdj: a\n",
            "KubeProxyConfiguration.oomScoreAdj"),
    Mistake("a value of kbpf's document",
            f"{FILE}algorithm: best\n", "KbpfConfiguration.algorithm"),
    Mistake("an unknown field of kbpf's document",
            f"{FILE}colour: red\n", "KbpfConfiguration.colour"),
    Mistake("the version of kube-proxy's document",
            f"{FILE}---\n{PROXYS.replace('v1alpha1', 'v9')}", "/v9"),
    Mistake("kube-proxy's document twice", f"{FILE}---\n{PROXYS}---\n{PROXYS}", "occurs twice"),
    Mistake("contradicting values", f"{FILE}socketLB: {{mode: off}}\n"
            "packetPath: {enabled: false}\n", ""),
    Mistake("a location's value", f"{FILE}pinDir: not/absolute\n", "not/absolute", ("pin_dir",)),
    Mistake("a location's type", f"{FILE}cgroup: 5\n", "got an integer", ("cgroup",)),
    Mistake("a location's spelling",
            FILE.replace("pinDir", "pinDirs"), "is pinDir meant", ("pin_dir",)),
    Mistake("a location twice, one of them misspelt", f"{FILE}pinDirs: /x\n", "is pinDir meant"),
    Mistake("the spelling of the section ipvs", FILE.replace("ipvs", "ipv"), "is ipvs meant",
            ("ipvs_device", "nft_table", "state_dir")),
    Mistake("the spelling of a location in the section ipvs",
            FILE.replace("nftTable", "nftTables"), "is nftTable meant",
            ("nft_table",)),
    Mistake("the type of the section ipvs",
            FILE.replace("ipvs: {", "ipvs: [5] #"), "expected an object",
            ("ipvs_device", "nft_table", "state_dir")),
    Mistake("the version of kbpf's document",
            f"{FILE.replace('v1alpha1', 'v9')}---\n{PROXYS}", "/v9", ALL),
    Mistake("kbpf's document twice", f"{FILE}---\n{FILE}", "occurs twice", ALL),
    Mistake("a document of another kind", f"{FILE}---\nkind: Pod\n", "'Pod'"),
    Mistake("an unknown kind in place of kbpf's document",
            FILE.replace("KbpfC", "C"), "'Configuration'", ALL),
    Mistake("YAML", f"{FILE}---\na: b: c\n", "not YAML", ALL),
    Mistake("an empty file", "", "the file is empty", ALL),
]  # fmt: skip


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row.name)
def test_locations_are_read_despite_other_mistakes(row: Mistake):
    found = locations.parse_locations(row.text.encode(), "FILE")
    assert row.told in "; ".join(map(str, found.errors))
    assert bool(found.errors) == bool(row.told)
    assert found.unreadable.keys() == set(row.names)
    if set(row.names) != set(ALL):
        said = dict(
            zip(("pin_dir", "ipvs_device", "nft_table", "state_dir"), LOCATIONS, strict=True)
        )
        assert {name: str(value) for name, value in found.values.items()} == {
            name: value for name, value in said.items() if name not in row.names
        }


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row.name)
def test_cleanup_needs_only_the_locations(
    row: Mistake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    code, looked = cleaned(monkeypatch, tmp_path, row.text)
    err = capsys.readouterr().err
    assert row.told in err
    assert err.count("\n") == bool(row.told)
    needed = {"pin_dir", "ipvs_device", "nft_table", "state_dir"} & {*row.names}
    assert (code, looked) == ((1, ()) if needed else (0, LOCATIONS))


def test_cleanup_does_not_need_a_location_of_the_file_that_is_set_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = f"{FILE}pinDir: not/absolute\n"
    assert cleaned(monkeypatch, tmp_path, text, "--pin-dir=/a") == (0, ("/a", *LOCATIONS[1:]))
    monkeypatch.setenv("KBPF_PIN_DIR", "/b")
    assert cleaned(monkeypatch, tmp_path, text) == (0, ("/b", *LOCATIONS[1:]))


INSPECT_ROWS = [
    (("inspect", "services"), "/sys/fs/bpf/file", "/run/file/file0"),
    (("inspect", "status"), "/sys/fs/bpf/file", "/run/file/file0"),
    (("inspect", "maps"), "/sys/fs/bpf/file", "/run/file/file0"),
    (("inspect", "connections", "--state-dir", "/flag"), "/sys/fs/bpf/file", "/flag/file0"),
    (("inspect", "nat", "--pin-dir", "/flag"), "/flag", "/run/file/file0"),
    (("inspect", "devices", "--ipvs-device=kbpf-ipvs0"), "/sys/fs/bpf/file",
     "/run/file/kbpf-ipvs0"),
]  # fmt: skip


def looked_for(monkeypatch: pytest.MonkeyPatch, *command: str) -> tuple[str, str]:
    """The pin directory and the state directory of mode ipvs that `kbpf inspect` reads."""
    looked: list[node.Locations] = []

    def look(where: node.Locations, *_: object) -> None:
        looked.append(where)
        raise ConfigError("seen")

    for name in ("read", "read_pins", "find_connections"):
        monkeypatch.setattr(node, name, look)
    assert app.call(command) == 1
    return str(looked[0].pin_dir), str(looked[0].state_dir)


@pytest.mark.parametrize("by_variable", [True, False])
@pytest.mark.parametrize(("command", "pins", "ipvs"), INSPECT_ROWS, ids=str)
def test_inspect_uses_the_locations_of_the_file_unless_overridden(
    command: tuple[str, ...], pins: str, ipvs: str, by_variable: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    file = tmp_path / "config.conf"
    file.write_text(FILE)
    given = () if by_variable else ("--config", str(file))
    if by_variable:
        monkeypatch.setenv("KBPF_CONFIG", str(file))
    assert looked_for(monkeypatch, *command, *given) == (pins, ipvs)
    assert capsys.readouterr().err == "kbpf: seen\n"
    monkeypatch.setenv("KBPF_PIN_DIR", "/variable")
    flagged = pins if pins == "/flag" else "/variable"
    assert looked_for(monkeypatch, *command, *given)[0] == flagged


BAD_FILES = [
    (f"{FILE}algorithm: best\n", "algorithm", "/sys/fs/bpf/file", "/run/file/file0"),
    (f"{FILE}pinDir: no/where\n", "no/where", "/sys/fs/bpf/kbpf", "/run/file/file0"),
    ("a: b: c", "not YAML", "/sys/fs/bpf/kbpf", "/run/kbpf/kbpf-ipvs0"),
    (None, "cannot read", "/sys/fs/bpf/kbpf", "/run/kbpf/kbpf-ipvs0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told", "pins", "ipvs"), BAD_FILES, ids=[row[1] for row in BAD_FILES]
)
def test_inspect_warns_of_a_bad_file_and_continues(
    text: str | None, told: str, pins: str, ipvs: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    file = tmp_path / "config.conf"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("KBPF_CONFIG", str(file))
    assert looked_for(monkeypatch, "inspect", "status") == (pins, ipvs)
    warning, seen = capsys.readouterr().err.splitlines()
    assert told in warning
    assert str(file) in warning
    assert seen.endswith("seen")


def test_check_uses_the_locations_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looked: list[tuple[object, ...]] = []

    def look(*where: object) -> None:
        looked.append(where)
        raise ConfigError("seen")

    monkeypatch.setattr(bpf_checks, "rows", look)
    file = tmp_path / "config.conf"
    file.write_text(f"{FILE}cgroup: /cg\ncacheDir: /cache\n")
    monkeypatch.setenv("KBPF_CONFIG", str(file))
    assert app.call(["check"]) == 1
    assert app.call(["check", "--cgroup", "/flag"]) == 1
    pins = Path("/sys/fs/bpf/file")
    assert looked == [(Path(cgroup), pins, Path("/cache")) for cgroup in ("/cg", "/flag")]


# ---- imports -----------------------------------------------------------------------------------

HEAVY = ("bcc", "pyroute2", "kubernetes", "rich")


def imported(*argv: str) -> set[str]:
    """The top-level modules that are imported after a command."""
    script = (
        "import sys, contextlib, io, json\n"
        "from kbpf.cli import app\n"
        "out, err = io.StringIO(), io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "    app.call(sys.argv[1:])\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_agent_does_not_import_the_command_line():
    # The agent exits because the source is missing, after it has imported all modules.
    found = imported("run", "--source", "/nowhere", "--pin-dir", "/proc/nowhere")
    assert "msgspec" in found
    assert not found & {"typer", "pydantic", *HEAVY}


def test_inspect_services_imports_no_heavy_module():
    found = imported("inspect", "services", "-o", "json", "--pin-dir", "/nowhere")
    assert "typer" in found
    assert not found & set(HEAVY)


# ---- formats -----------------------------------------------------------------------------------

COLUMNS = (
    Column("NAME", lambda r: r["name"]),
    Column("COUNT", lambda r: str(r["count"]), right=True),
    Column("MORE", lambda r: "x", wide=True),
)
ROWS = ({"name": "a", "count": 1}, {"name": "a longer one", "count": 1000})


def test_table_is_aligned_without_truncation():
    assert render.format_rows(ROWS, COLUMNS, Output.TABLE).splitlines() == [
        "NAME           COUNT",
        "a                  1",
        "a longer one    1000",
    ]


def test_table_without_rows_has_its_header():
    assert render.format_rows((), COLUMNS, Output.TABLE) == "NAME   COUNT"


def test_wide_adds_columns():
    assert render.format_rows(ROWS, COLUMNS, Output.WIDE).splitlines()[0].split() == [
        "NAME", "COUNT", "MORE",
    ]  # fmt: skip


def test_json_and_yaml_have_the_same_content_in_the_same_order():
    as_json = render.format_rows(ROWS, COLUMNS, Output.JSON)
    as_yaml = render.format_rows(ROWS, COLUMNS, Output.YAML)
    assert json.loads(as_json) == yaml.safe_load(as_yaml) == list(ROWS)
    assert as_yaml.splitlines()[0] == "- name: a"


class Thing(msgspec.Struct):
    """A row."""

    name: str
    count: int
    parts: tuple[str, ...] = ("x", "y")


THINGS = (Thing("a", 1), Thing("a {longer} one", 1000, ()))
THING_COLUMNS = (
    Column("NAME", lambda t: t.name),
    Column("COUNT", lambda t: str(t.count), right=True),
    Column("MORE", lambda t: "", wide=True),
)


@pytest.mark.parametrize("output", Output)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_streamed_rows_equal_formatted_rows(output: Output, count: int):
    some = THINGS[:count]
    streamed = "".join(render.stream_rows(iter(some), THING_COLUMNS, output))
    assert streamed == render.format_rows(some, THING_COLUMNS, output) + "\n"


@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_rows_streamed_below_a_value_are_one_document(output: Output, count: int):
    some = THINGS[:count]
    streamed = "".join(render.stream_rows(iter(some), THING_COLUMNS, output, Thing("above", 5)))
    whole = {**msgspec.to_builtins(Thing("above", 5)), "rows": msgspec.to_builtins(some)}
    read = json.loads if output is Output.JSON else yaml.safe_load
    assert read(streamed) == json.loads(json.dumps(whole))
    assert streamed.count("\n") == streamed.rstrip("\n").count("\n") + 1
    if output is Output.JSON:
        assert streamed == json.dumps(whole, indent=2) + "\n"


def test_states_to_filter_by_are_those_shown():
    assert tuple(inspect.ConnectionState) == connections.STATES


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0s"), (59, "59s"), (61, "1m01s"), (3600, "1h00m"), (90_061, "1d01h")],
)
def test_format_duration(seconds: float, text: str):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0B"),
        (812, "812B"),
        (1536, "1.5KiB"),
        (64 << 10, "64KiB"),
        (3 << 30, "3.0GiB"),
    ],
)
def test_format_size(count: int | None, text: str):
    assert bytes_text(count) == text


def test_watch_prints_the_page_until_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", nap)
    with pytest.raises(KeyboardInterrupt):
        watch(lambda: f"page {len(naps)}", 2.0)
    assert capsys.readouterr().out == "page 0\n\npage 1\n\npage 2\n\n"
    assert naps == [2.0] * 3


# ---- check -------------------------------------------------------------------------------------


def check_row(result: str, needed: bool = True) -> CheckRow:
    return CheckRow(Check.BPFFS, result, needed, "", "")


class VerdictRow(NamedTuple):
    """Rows of `kbpf check` and of `--attached` (`proof`), and the resulting verdict."""

    rows: list[CheckRow]
    proof: list[CheckRow] | None
    usable: bool
    attached: bool | None


class Node(NamedTuple):
    """Files below /proc, and the expected row of `kbpf check`.

    `row` is its name; `detail` and `advice` are words of its other columns.
    """

    name: str
    files: dict[str, str]
    row: str
    result: str
    detail: str
    advice: str = ""


RANGE, RESERVED = "sys/net/ipv4/ip_local_port_range", "sys/net/ipv4/ip_local_reserved_ports"
V4, V6 = "sys/net/ipv4/ip_forward", "sys/net/ipv6/conf/all/forwarding"
CONF = "sys/net/ipv4/conf"
PORTS = "masquerade ports"
NODES = [
    Node("disjoint ranges",
         {RANGE: "32768\t60999\n", RESERVED: "\n"}, PORTS, "yes", "61000 to 65535"),
    Node("ranges that overlap in one port", {RANGE: "32768\t61000\n", RESERVED: "\n"}, PORTS, "no",
         "may use 61000 to 61000 too", "ip_local_reserved_ports"),
    Node("ranges that overlap completely",
         {RANGE: "1024 65535", RESERVED: ""}, PORTS, "no", "61000 to 65535", "61000-65535"),
    Node("reserved", {RANGE: "1024 65535", RESERVED: "8080,61000-65535\n"}, PORTS, "yes",
         "reserved"),
    Node("reserved in pieces", {RANGE: "1024 65535", RESERVED: "62000-65535,60000-61999"}, PORTS,
         "yes", "reserved"),
    Node("reserved except one port",
         {RANGE: "1024 65535", RESERVED: "61000-62000,62002-65535"}, PORTS,
         "no", "too", "61000-65535"),
    Node("reserved where the ranges overlap",
         {RANGE: "1024 61001", RESERVED: "61000,61001"}, PORTS, "yes", ""),
    Node("reserved where the ranges overlap, at the end",
         {RANGE: "62000 65535", RESERVED: "62000-65535"}, PORTS,
         "yes", "reserved"),
    Node("not readable", {}, PORTS, "unknown", "ip_local_port_range"),
    Node("enabled", {V4: "1\n"}, "IPv4 forwarding", "yes", ""),
    Node("disabled", {V4: "0\n"}, "IPv4 forwarding", "no", "ip_forward = 0",
         "sysctl -w net.ipv4.ip_forward=1"),
    Node("enabled", {V6: "2"}, "IPv6 forwarding", "yes", ""),
    Node("disabled", {V6: "0"}, "IPv6 forwarding", "no", "",
         "sysctl -w net.ipv6.conf.all.forwarding=1"),
    Node("no IPv6", {}, "IPv6 forwarding", "unknown", "no IPv6"),
    Node("loose", {f"{CONF}/all/rp_filter": "0", f"{CONF}/eth0/rp_filter": "2"}, "rp_filter",
         "yes", "not strict"),
    Node("strict", {f"{CONF}/all/rp_filter": "0", f"{CONF}/eth0/rp_filter": "1"}, "rp_filter",
         "yes", "strict (1) on eth0: "),
    Node("strict by conf/all", {f"{CONF}/all/rp_filter": "1", f"{CONF}/eth0/rp_filter": "0"},
         "rp_filter", "yes", "strict (1) on eth0: "),
    Node("the maximum of both is used",
         {f"{CONF}/all/rp_filter": "2", f"{CONF}/eth0/rp_filter": "1"},
         "rp_filter", "yes", "not strict"),
    Node("a vanished device", {f"{CONF}/all/rp_filter": "1"}, "rp_filter", "yes", "not strict"),
    Node("SCTP", {"net/protocols": "protocol size\nSCTPv6 1\nTCP 2\n"}, "SCTP sockets", "yes", ""),
    Node("no SCTP", {"net/protocols": "protocol size\nTCP 2\n"}, "SCTP sockets", "no",
         "not loaded"),
    Node("conntrack", {"sys/net/netfilter/nf_conntrack_max": "1"}, "without conntrack", "yes",
         "other programs use it"),
    Node("no conntrack", {}, "without conntrack", "yes", "not needed"),
]  # fmt: skip


@pytest.mark.parametrize("node", NODES, ids=lambda node: f"{node.row}: {node.name}")
def test_check_row_of_a_node(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    devices = (Device(1, "lo", loopback=True), Device(2, "eth0"), Device(3, "c0", "bridge"))
    monkeypatch.setattr(packet_path, "list_devices", lambda: devices)
    told = packet_path.PacketSettings(NodeFlag(0), 61_000, 65_535, 1 << 14)
    monkeypatch.setattr(packet_path, "read_settings", lambda _: told)
    for name, text in node.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (row,) = [
        r for r in packet_path.check_packet_path(Path("/nowhere"), tmp_path) if r.name == node.row
    ]
    assert row.result == node.result
    assert node.detail in row.detail
    assert node.advice in row.advice
    assert bool(row.advice) == bool(node.advice)
    assert not row.needed


class Chains(NamedTuple):
    """The chains in nf_tables and iptables, and the expected row FORWARD.

    `row` is its result, words of its detail and of its advice. `others` are chains of other tables
    that drop, `legacy` the families with rules of iptables-legacy.
    """

    name: str
    row: tuple[str, str, str]
    available: Probe = Probe(True)
    chains: tuple[BaseChain, ...] = ()
    others: tuple[str, ...] = ()
    legacy: tuple[str, ...] = ()


OPEN, SHUT = BaseChain("ip", "filter", "FORWARD", False), BaseChain("ip", "filter", "FORWARD", True)
FORWARDS = [
    Chains("no chain", ("yes", "no chain drops", "")),
    Chains("policy accept", ("yes", "no chain drops", ""), chains=(OPEN,)),
    Chains("policy drop", ("yes", "drops by default: ip filter FORWARD", ""), chains=(SHUT,)),
    Chains("another table that drops", ("no", "not read inet fw forward,", "with mark 0x4000"),
           others=("inet fw forward",)),
    Chains("iptables-legacy", ("no", "ip6 filter (iptables-legacy)", "with mark 0x4000"),
           chains=(SHUT,), legacy=("ip6",)),
    Chains("no library", ("unknown", "python3", "install python3-nftables"),
           Probe(None, "python3-nftables is missing")),
    Chains("no nf_tables", ("unknown", "no nf_tables", ""), Probe(None, "has no nf_tables")),
]  # fmt: skip


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.name)
def test_check_row_forward(forward: Chains, monkeypatch: pytest.MonkeyPatch):
    netfilter = packet_path.forward_rules
    monkeypatch.setattr(netfilter, "probe_nf_tables", lambda: forward.available)
    monkeypatch.setattr(netfilter, "list_forward_chains", lambda: forward.chains)
    monkeypatch.setattr(netfilter, "list_other_drop_chains", lambda: forward.others)
    monkeypatch.setattr(netfilter, "list_legacy_families", lambda: forward.legacy)
    (row,) = [r for r in packet_path.check_packet_path(Path("/nowhere")) if r.name == "FORWARD"]
    result, detail, advice = forward.row
    assert row.result == result
    assert detail in row.detail
    assert advice in row.advice
    assert bool(row.advice) == bool(advice)


@pytest.mark.parametrize(
    ("result", "needed", "usable", "packet_path"),
    [
        ("yes", False, True, True),
        ("no", False, True, False),
        ("unknown", False, True, False),
        ("no", True, False, False),
    ],
)
def test_missing_packet_path_does_not_make_kbpf_unusable(
    result: str, needed: bool, usable: bool, packet_path: bool
):
    rows = [check_row("yes"), CheckRow(Check.HOOK, result, needed, "", "", True, subject="y")]
    made = compute_verdict(rows)
    assert (made.usable, made.packet_path) == (usable, packet_path)
    page = check.format_page(made)
    assert ("the packet path can be used" in page) == packet_path
    assert ("the packet path cannot be used: hook y" in page) == (usable and not packet_path)


VERDICTS = [
    VerdictRow([check_row("yes")], None, True, None),
    VerdictRow([check_row("no")], None, False, None),
    VerdictRow([check_row("unknown")], None, False, None),
    VerdictRow([check_row("yes"), check_row("no", needed=False)], None, True, None),
    VerdictRow([check_row("yes")], [check_row("yes")], True, True),
    VerdictRow([check_row("yes")], [check_row("yes"), check_row("no")], True, False),
    VerdictRow([check_row("yes")], [check_row("unknown")], True, False),
]


IPVS = CheckRow(Check.IPVS, "yes", False, "", "", ipvs=True)
NO_IPVS = CheckRow(Check.IPVS, "no", False, "", "", ipvs=True)
UNSURE = CheckRow(Check.DUMMY, "unknown", False, "", "", ipvs=True)


@pytest.mark.parametrize(
    ("rows", "mode", "says"),
    [
        ([check_row("yes"), IPVS], "bpf", "mode ipvs can be used"),
        ([check_row("yes"), NO_IPVS], "bpf", "mode ipvs cannot be used: IPVS"),
        ([check_row("no"), IPVS], "ipvs", "mode bpf cannot be used"),
        ([check_row("no"), NO_IPVS], "none", "mode ipvs cannot be used: IPVS"),
        ([check_row("no"), NO_IPVS, UNSURE], "none", "mode ipvs cannot be used: IPVS"),
        (
            [check_row("no"), IPVS, UNSURE],
            "ipvs",
            "this machine, unless this is missing (not known): dummy devices",
        ),
    ],
)
def test_check_verdict_on_the_modes(rows: list[CheckRow], mode: str, says: str):
    """`mode` is what `--mode auto` would choose."""
    made = compute_verdict(rows)
    assert (made.mode, made.usable) == (mode, mode != "none")
    assert says in check.format_page(made)


@pytest.mark.parametrize("means", VERDICTS)
def test_check_verdict(means: VerdictRow):
    made = compute_verdict(means.rows, means.proof)
    assert (made.usable, made.attached) == (means.usable, means.attached)
    assert made.mode == ("bpf" if means.usable else "none")


def test_check_document_has_names_instead_of_ids():
    row = CheckRow(Check.HOOK, "no", True, "why", "what to do", subject="connect4")
    (shown,) = to_document(compute_verdict([row]))["rows"]
    assert list(shown.items()) == [
        ("name", "hook connect4"), ("result", "no"), ("needed", True), ("detail", "why"),
        ("advice", "what to do"), ("packets", False), ("ipvs", False),
    ]  # fmt: skip
