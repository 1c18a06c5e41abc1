# SPDX-License-Identifier: Apache-2.0
"""Precedence of flags, variables and documents (cmd/kube-proxy/app/options.go of kube-proxy
1.37), and diagnostics about settings.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.config import load
from kbpf.config.settings import REMOVED_SETTINGS, SETTINGS, Setting
from kbpf.model.config import MapSizes
from tests.values.config.documents import OWN, PROXY, cidr, complaints, field, loaded, ours, told

# ---- precedence ----------------------------------------------------------------------------------


class PrecedenceRow(NamedTuple):
    """A file, flags by name, and the resulting field; `ignored`: flags that one warning names."""

    name: str
    text: str
    given: dict[str, str]
    field: str
    value: object
    ignored: tuple[str, ...] = ()


PRECEDENCE = [
    PrecedenceRow(
        "a node name on the command line beats the file's",
        f"{PROXY}hostnameOverride: a",
        {"hostname_override": "B"},
        "node_name",
        "b",
    ),
    PrecedenceRow(
        "an empty node name on the command line is ignored",
        f"{PROXY}hostnameOverride: a",
        {"hostname_override": ""},
        "node_name",
        "a",
    ),
    PrecedenceRow("an empty flag of kbpf is ignored", f"{OWN}cgroup: /c", {"cgroup": ""}, "cgroup", Path("/c")),
    PrecedenceRow("--master is used with kube-proxy's document", PROXY, {"master": "https://x"}, "master", "https://x"),
    PrecedenceRow(
        "a logging flag on the command line beats the file's",
        f"{PROXY}logging: {{format: text}}",
        {"log_format": "json"},
        "log_format",
        "json",
    ),
    PrecedenceRow(
        "unused logging flags cause no warning that they are ignored",
        PROXY,
        {"vmodule": "proxier=4", "log_flush_frequency": "1s"},
        "log_level",
        "info",
    ),
    PrecedenceRow(
        "kube-proxy's flags are ignored with its document",
        f"{PROXY}clusterCIDR: 10.0.0.0/8",
        {"cluster_cidr": "192.168.0.0/16", "kubeconfig": "/k"},
        "cluster_cidrs",
        (cidr("10.0.0.0", 104),),
        ("--cluster-cidr", "--kubeconfig"),
    ),
    PrecedenceRow(
        "kube-proxy's flags are ignored even if the document lacks the field",
        PROXY,
        {"masquerade_all": "true"},
        "masquerade_all",
        False,
        ("--masquerade-all",),
    ),
    PrecedenceRow(
        "an invalid flag of kube-proxy is ignored, too",
        PROXY,
        {"proxy_mode": "userspace"},
        "proxy_mode",
        "",
        ("--proxy-mode",),
    ),
    PrecedenceRow("kbpf's flags beat its document", f"{OWN}pinDir: /a", {"pin_dir": "/b"}, "pin_dir", Path("/b")),
    PrecedenceRow("kbpf's flags are used with kube-proxy's document", PROXY, {"pin_dir": "/b"}, "pin_dir", Path("/b")),
    PrecedenceRow(
        "kube-proxy's flags are used without its document",
        OWN,
        {"cluster_cidr": "10.0.0.0/8"},
        "cluster_cidrs",
        (cidr("10.0.0.0", 104),),
    ),
    PrecedenceRow(
        "kbpf's document beats kube-proxy's",
        f"{PROXY}mode: nftables\n---\n{OWN}localhostNodePorts: true",
        {},
        "localhost_node_ports",
        True,
    ),
    PrecedenceRow(
        "kbpf's document beats kube-proxy's in either order",
        f"{OWN}localhostNodePorts: true\n---\n{PROXY}mode: nftables",
        {},
        "localhost_node_ports",
        True,
    ),
    PrecedenceRow(
        "kube-proxy's gate switches ExternalIPs off",
        f"{PROXY}featureGates: {{AllowServiceExternalIPs: false}}",
        {},
        "external_ips",
        (),
    ),
    PrecedenceRow(
        "kube-proxy's gate switches ExternalIPs on",
        f"{PROXY}featureGates: {{AllowServiceExternalIPs: true}}",
        {},
        "external_ips",
        "all",
    ),
    PrecedenceRow(
        "--feature-gates switches ExternalIPs off",
        OWN,
        {"feature_gates": "AllowServiceExternalIPs=false"},
        "external_ips",
        (),
    ),
    PrecedenceRow(
        "--feature-gates is ignored with kube-proxy's document",
        PROXY,
        {"feature_gates": "AllowServiceExternalIPs=false"},
        "external_ips",
        "all",
        ("--feature-gates",),
    ),
    PrecedenceRow(
        "kbpf's externalIPs beats the gate",
        f"{PROXY}featureGates: {{AllowServiceExternalIPs: false}}\n---\n{OWN}externalIPs: 192.0.2.0/24",
        {},
        "external_ips",
        (cidr("192.0.2.0", 120),),
    ),
    PrecedenceRow(
        "--external-ips beats the gate",
        f"{PROXY}featureGates: {{AllowServiceExternalIPs: false}}",
        {"external_ips": "all"},
        "external_ips",
        "all",
    ),
    PrecedenceRow(
        "a flag of kbpf beats both documents",
        f"{PROXY}featureGates: {{AllowServiceExternalIPs: false}}\n---\n{OWN}externalIPs: 192.0.2.0/24",
        {"external_ips": "all"},
        "external_ips",
        "all",
    ),
]


@pytest.mark.parametrize("row", PRECEDENCE, ids=lambda row: row.name)
def test_precedence(row: PrecedenceRow):
    made = loaded(row.text, **row.given)
    assert field(made.config, row.field) == row.value
    warned = [note.text for note in made.notes if note.text.startswith("ignored")]
    assert len(warned) == bool(row.ignored)
    for name in row.ignored:
        assert name in warned[0]


def test_variable_is_ignored_like_its_flag():
    given = {"KBPF_CLUSTER_CIDR": "192.168.0.0/16", "KBPF_PIN_DIR": "/b"}
    made = load.load({}, given, PROXY.encode())
    assert made.config.cluster_cidrs == ()
    assert made.config.pin_dir == Path("/b")
    assert "KBPF_CLUSTER_CIDR" in told(made)


def test_mistakes_in_flags_and_documents_are_reported_together():
    lines = complaints(f"{PROXY}mode: x\n---\n{OWN}mode: z", pin_dir="z")
    assert [re.search(r"\((.*?)\)", line)[1] for line in lines] == [
        "KubeProxyConfiguration.mode",
        "KbpfConfiguration.mode",
        "--pin-dir",
    ]


MODES = [
    ({}, False),
    ({"--proxy-mode": "iptables"}, True),
    ({"--proxy-mode": "ipvs"}, True),
    ({"--proxy-mode": "nftables"}, False),
    ({"--proxy-mode": "iptables", "--nodeport-addresses": "primary"}, False),
]


@pytest.mark.parametrize(("given", "everywhere"), MODES, ids=str)
def test_default_node_port_addresses_depend_on_kube_proxys_mode(given, everywhere):
    assert load.load_config(given, {}).all_node_port_addresses is everywhere


QUESTIONABLE = [
    ({"--masquerade-ports": "30500-31000"}, "--masquerade-ports 30500-31000 overlaps 30000-32767"),
    ({"--masquerade-ports": "1024-30000"}, "30000"),
    (
        {"--detect-local-mode": "NodeCIDR", "--cluster-cidr": "10.0.0.0/8"},
        "--cluster-cidr is not used: pods are recognized by NodeCIDR",
    ),
    (
        {"--cluster-cidr": "10.0.0.0/8,fd00::/48", "--nodeport-addresses": "192.0.2.0/24"},
        "--nodeport-addresses has IPv4 networks only",
    ),
    ({"--feature-gates": "A=true,AllowServiceExternalIPs=false"}, "--feature-gates: A is accepted but not used"),
    ({"--profiling": "true"}, "--profiling is accepted but not used"),
]


@pytest.mark.parametrize(("given", "words"), QUESTIONABLE, ids=[words for _, words in QUESTIONABLE])
def test_questionable_setting_is_one_diagnostic(given: dict[str, str], words: str):
    (note,) = load.load(given, {}).notes
    assert words in note.text


@pytest.mark.parametrize("setting", REMOVED_SETTINGS, ids=lambda setting: setting.name)
def test_removed_setting_is_one_note(setting: Setting):
    section, _, name = setting.kbpf.rpartition(".")
    text = f"{section}: {{{name}: x}}" if section else f"{name}: x"
    for made, origin in (
        (load.load({setting.name: "x"}, {}), setting.name),
        (load.load({}, {setting.environment_variable: "x"}), setting.environment_variable),
        (ours(text), f"KbpfConfiguration.{setting.kbpf}"),
    ):
        (note,) = made.notes
        assert note.text == f"{origin} has no effect: {setting.text}"
        assert note.is_warning
        assert made.config == load.load_config({}, {})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"--masquerade-ports": "32768-40000"},
        {"--masquerade-ports": "1024-29999"},
        {"--cluster-cidr": "10.0.0.0/8"},
        {"--masquerade-ports": "30000-31000", "--packet-path": "false"},
        {"--cluster-cidr": "10.0.0.0/8", "--nodeport-addresses": "192.0.2.0/24"},
        {"--cluster-cidr": "10.0.0.0/8,fd00::/48", "--nodeport-addresses": "primary"},
        {"--cluster-cidr": "10.0.0.0/8,fd00::/48", "--nodeport-addresses": "primary,192.0.2.0/24"},
        {"--cluster-cidr": "10.0.0.0/8,fd00::/48", "--nodeport-addresses": "192.0.2.0/24,2001:db8::/32"},
    ],
    ids=str,
)
def test_reasonable_settings_have_no_diagnostic(given: dict[str, str]):
    assert load.load(given, {}).notes == ()


IGNORED_IN_IPVS: list[tuple[dict[str, str], str]] = [
    ({}, ""),
    ({"socket_lb": "off"}, "--socket-lb"),
    ({"forwarding": "direct", "accounting": "full"}, "--forwarding --accounting"),
    ({"max_frontends": "1000", "max_affinity": "1"}, "--max-frontends --max-affinity"),
    ({"metrics_backends": "5"}, "--metrics-backends"),
    ({"packet_path": "false", "device": "eth0"}, "--packet-path --device"),
    ({"masquerade_all": "true", "ipvs_scheduler": "lc", "ipvs_strict_arp": "true"}, ""),
]


@pytest.mark.parametrize(("given", "names"), IGNORED_IN_IPVS, ids=str)
def test_settings_without_effect_in_mode_ipvs(given: dict[str, str], names: str):
    assert ours(**given).config.ignored_in_ipvs == tuple(names.split())


def test_all_map_sizes_have_no_effect_in_mode_ipvs():
    sizes = [setting for setting in SETTINGS if setting.field.startswith("sizes.")]
    derived = {"slots", "counts"}
    assert {setting.field for setting in sizes} == {f"sizes.{name}" for name in {*MapSizes.__slots__} - derived}
    assert {setting.only for setting in sizes} == {"bpf"}
