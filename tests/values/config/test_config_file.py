# SPDX-License-Identifier: Apache-2.0
"""The configuration file: kube-proxy's document, kbpf's own, precedence, diagnostics, and writing.

The rules are those of kube-proxy 1.37 (pkg/proxy/apis/config, cmd/kube-proxy/app/options.go).
"""

import re
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kbpf.config import documents, durations, kinds, load, write
from kbpf.config.kbpf_configuration import KBPF_SETTINGS, KbpfConfiguration
from kbpf.config.kinds import Kind
from kbpf.config.kubeproxy import KubeProxyConfiguration
from kbpf.config.load import LoadedConfig
from kbpf.config.settings import SETTINGS, SETTINGS_BY_FLAG, UNUSED_SETTINGS
from kbpf.errors import ConfigError, ConfigErrors
from kbpf.model.address import parse_addr
from kbpf.model.config import (
    Accounting,
    Config,
    Conntrack,
    LocalMode,
    MapSizes,
    ServiceAnnotations,
    Serving,
    SocketLb,
)
from kbpf.model.objects import Algorithm, Cidr
from tests.support.cluster import kubeadm

ROOT = Path(__file__).parents[3]
PROXY = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
OWN = "apiVersion: kbpf.io/v1alpha1\nkind: KbpfConfiguration\n"


def cidr(address: str, bits: int) -> Cidr:
    return Cidr(parse_addr(address), bits)


def proxy(text: str = "", **flags: str) -> LoadedConfig:
    """Loads kube-proxy's document with these fields, and flags by name."""
    return loaded(PROXY + textwrap.dedent(text), **flags)


def ours(text: str = "", **flags: str) -> LoadedConfig:
    return loaded(OWN + textwrap.dedent(text), **flags)


def loaded(text: str, **given: str) -> LoadedConfig:
    return load.load({f"--{k.replace('_', '-')}": v for k, v in given.items()}, {}, text.encode())


def field(config: Config, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def told(made: LoadedConfig) -> str:
    return "\n".join(note.text for note in made.notes)


# ---- kube-proxy's document -----------------------------------------------------------------------


def test_kubeadms_file_has_kube_proxys_defaults_and_no_warnings():
    made = loaded(kubeadm.config("10.244.0.0/16"))
    assert made.config == Config(
        kubeconfig=Path("/var/lib/kube-proxy/kubeconfig.conf"),
        proxy_mode="iptables",
        detect_local_mode=LocalMode.CLUSTER_CIDR,
        cluster_cidrs=(cidr("10.244.0.0", 112),),
        all_node_port_addresses=True,
        localhost_node_ports=True,
        masquerade_bit=14,
        oom_score_adj=-999,
        serving=Serving("0.0.0.0:10256", "127.0.0.1:10249", False, 60.0),
        conntrack=Conntrack(32768, 131072, 86400, 3600, False, 0, 0),
    )
    assert [note for note in made.notes if note.is_warning] == []
    assert [note.text for note in made.notes] == [
        "KubeProxyConfiguration.mode: iptables only sets defaults; the data plane is chosen "
        "by KbpfConfiguration.mode or --mode",
        "KubeProxyConfiguration.nodePortAddresses is unset: NodePorts answer on all addresses of "
        'the node; consider ["primary"]',
    ]


def test_file_of_an_old_kubeadm_means_the_same():
    """A file of kubeadm 1.14 lacks newer fields. It has removed fields: each is a warning."""
    new = kubeadm.config("10.244.0.0/16")
    old = yaml.safe_load(new)
    for name in ("bindAddressHardFail", "detectLocal", "logging", "nftables"):
        del old[name]
    old |= {"resourceContainer": "/kube-proxy", "udpIdleTimeout": "250ms"}
    old["conntrack"] = {"max": None, "maxPerCore": None, "min": None}
    made = loaded(yaml.safe_dump(old))
    assert made.config == loaded(new).config
    assert [note.text for note in made.notes if note.is_warning] == [
        "KubeProxyConfiguration.conntrack.max is an unknown field; it is ignored",
        "KubeProxyConfiguration.resourceContainer is an unknown field; it is ignored",
    ]


class FieldRow(NamedTuple):
    """Fields of a document, a field of Config and the value it gets from them."""

    text: str
    field: str
    value: object


SAYS = [
    FieldRow("clientConnection: {kubeconfig: /k}", "kubeconfig", Path("/k")),
    FieldRow("clientConnection: {kubeconfig: ''}", "kubeconfig", None),
    FieldRow("hostnameOverride: ' Node-1 '", "node_name", "node-1"),
    FieldRow("bindAddress: 192.0.2.7", "bind_address", parse_addr("192.0.2.7")),
    FieldRow("bindAddress: 'fd00::7'", "bind_address", parse_addr("fd00::7")),
    FieldRow("bindAddress: 2001:10:1:2:3:4:5:6", "bind_address", parse_addr("2001:10:1:2:3:4:5:6")),
    FieldRow("bindAddress: 0.0.0.0", "bind_address", None),
    FieldRow("bindAddress: '::'", "bind_address", None),
    FieldRow("bindAddress: '::'", "serving.healthz", "[::]:10256"),
    FieldRow("bindAddress: '::'", "serving.metrics", "[::1]:10249"),
    FieldRow("bindAddress: 192.0.2.7", "serving.healthz", "0.0.0.0:10256"),
    FieldRow("healthzBindAddress: 192.0.2.7", "serving.healthz", "192.0.2.7:10256"),
    FieldRow("healthzBindAddress: '192.0.2.7:1'", "serving.healthz", "192.0.2.7:1"),
    FieldRow("healthzBindAddress: 'fd00::1'", "serving.healthz", "[fd00::1]:10256"),
    FieldRow("metricsBindAddress: 0.0.0.0", "serving.metrics", "0.0.0.0:10249"),
    FieldRow("metricsBindAddress: '[::]:9'", "serving.metrics", "[::]:9"),
    FieldRow("metricsBindAddress: ''", "serving.metrics", "127.0.0.1:10249"),
    FieldRow("metricsBindAddress: '010.0.0.1:080'", "serving.metrics", "10.0.0.1:80"),
    FieldRow("bindAddressHardFail: true", "serving.hard_fail", True),
    FieldRow("mode: ''", "proxy_mode", ""),
    FieldRow("mode: iptables", "proxy_mode", "iptables"),
    FieldRow("mode: nftables", "proxy_mode", "nftables"),
    FieldRow("mode: ipvs", "proxy_mode", "ipvs"),
    FieldRow("mode: ipvs", "mode", "auto"),
    FieldRow("iptables: {masqueradeBit: 3}", "masquerade_bit", 3),
    FieldRow("iptables: {masqueradeBit: 0}", "masquerade_bit", 0),
    FieldRow("mode: ipvs\niptables: {masqueradeBit: 3}", "masquerade_bit", 3),
    FieldRow("mode: nftables\niptables: {masqueradeBit: 3}", "masquerade_bit", 14),
    FieldRow("mode: nftables\nnftables: {masqueradeBit: 4}", "masquerade_bit", 4),
    FieldRow("nftables: {masqueradeBit: 4}", "masquerade_bit", 14),
    FieldRow("iptables: {masqueradeAll: true}", "masquerade_all", True),
    FieldRow("nftables: {masqueradeAll: true}", "masquerade_all", False),
    FieldRow("mode: nftables\nnftables: {masqueradeAll: true}", "masquerade_all", True),
    FieldRow("mode: nftables\niptables: {masqueradeAll: true}", "masquerade_all", False),
    FieldRow("mode: ipvs\niptables: {masqueradeAll: true}", "masquerade_all", True),
    FieldRow("iptables: {syncPeriod: 1m}", "serving.late_seconds", 120.0),
    FieldRow("iptables: {syncPeriod: 0s}", "serving.late_seconds", 60.0),
    FieldRow("mode: nftables\nnftables: {syncPeriod: 5s}", "serving.late_seconds", 10.0),
    FieldRow("mode: ipvs\nipvs: {syncPeriod: 5s}", "serving.late_seconds", 10.0),
    FieldRow("nftables: {syncPeriod: 5s}", "serving.late_seconds", 60.0),
    FieldRow("iptables: {minSyncPeriod: 0s}", "min_sync_period", 0.0),
    FieldRow("iptables: {minSyncPeriod: 10s}", "min_sync_period", 10.0),
    FieldRow("iptables: {minSyncPeriod: 30s}", "min_sync_period", 30.0),
    FieldRow("mode: nftables\nnftables: {minSyncPeriod: 1500ms}", "min_sync_period", 1.5),
    FieldRow("mode: ipvs\nipvs: {minSyncPeriod: 2s}", "min_sync_period", 2.0),
    FieldRow("ipvs: {scheduler: mh}", "ipvs_scheduler", "mh"),
    FieldRow("ipvs: {scheduler: ''}", "ipvs_scheduler", "rr"),
    FieldRow("ipvs: {strictARP: true}", "strict_arp", True),
    FieldRow("iptables: {localhostNodePorts: false}", "localhost_node_ports", False),
    FieldRow("iptables: {localhostNodePorts: true}", "localhost_node_ports", True),
    FieldRow("iptables: {localhostNodePorts: null}", "localhost_node_ports", True),
    FieldRow("mode: nftables", "localhost_node_ports", False),
    FieldRow("mode: ipvs", "localhost_node_ports", False),
    FieldRow("nodePortAddresses: [primary]", "localhost_node_ports", False),
    FieldRow("nodePortAddresses: [10.0.0.0/8]", "localhost_node_ports", False),
    FieldRow("nodePortAddresses: [10.0.0.0/8, 127.0.0.0/8]", "localhost_node_ports", True),
    FieldRow("nodePortAddresses: [127.0.0.1/32]", "localhost_node_ports", True),
    FieldRow("nodePortAddresses: [0.0.0.0/0]", "localhost_node_ports", True),
    FieldRow("nodePortAddresses: ['fd00::/8']", "localhost_node_ports", True),
    FieldRow("nodePortAddresses: []", "all_node_port_addresses", True),
    FieldRow("nodePortAddresses: null", "all_node_port_addresses", True),
    FieldRow("mode: ipvs", "all_node_port_addresses", True),
    FieldRow("mode: nftables", "all_node_port_addresses", False),
    FieldRow("nodePortAddresses: [primary]", "all_node_port_addresses", False),
    FieldRow("nodePortAddresses: [primary]", "node_port_addresses", ()),
    FieldRow("nodePortAddresses: [primary]", "primary_node_ports", False),
    FieldRow("nodePortAddresses: [10.0.0.0/8]", "primary_node_ports", False),
    FieldRow("nodePortAddresses: [10.0.0.0/8, 'fd00::/8']", "node_port_addresses",
             (cidr("10.0.0.0", 104), cidr("fd00::", 8))),
    FieldRow("detectLocalMode: ''", "detect_local_mode", LocalMode.NONE),
    FieldRow("clusterCIDR: 10.0.0.0/8", "detect_local_mode", LocalMode.CLUSTER_CIDR),
    FieldRow("clusterCIDR: '10.0.0.0/8,fd00::/48'", "cluster_cidrs",
             (cidr("10.0.0.0", 104), cidr("fd00::", 48))),
    FieldRow("detectLocalMode: ClusterCIDR", "detect_local_mode", LocalMode.CLUSTER_CIDR),
    FieldRow("detectLocalMode: NodeCIDR", "detect_local_mode", LocalMode.NODE_CIDR),
    FieldRow("detectLocalMode: NodeCIDR\nclusterCIDR: 10.0.0.0/8", "cluster_cidrs", ()),
    FieldRow("detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}",
             "pod_bridge_interface", "cni0"),
    FieldRow("detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: cali}",
             "pod_interface_name_prefix", "cali"),
    FieldRow("configSyncPeriod: 0s", "config_sync_period", 900.0),
    FieldRow("configSyncPeriod: 1m", "config_sync_period", 60.0),
    FieldRow("oomScoreAdj: 0", "oom_score_adj", 0),
    FieldRow("oomScoreAdj: 5.0", "oom_score_adj", 5),
    FieldRow("oomScoreAdj: null", "oom_score_adj", -999),
    FieldRow("conntrack: {maxPerCore: 0}", "conntrack.max_per_core", 0),
    FieldRow("conntrack: {maxPerCore: 7}", "conntrack.max_per_core", 7),
    FieldRow("conntrack: {min: 0}", "conntrack.least", 0),
    FieldRow("conntrack: {min: 1.048576e+06}", "conntrack.least", 1_048_576),
    FieldRow("conntrack: {min: 1e+06}", "conntrack.least", 1_000_000),
    FieldRow("conntrack: {tcpEstablishedTimeout: 0s}", "conntrack.tcp_established", 0),
    FieldRow("conntrack: {tcpEstablishedTimeout: 2h}", "conntrack.tcp_established", 7200),
    FieldRow("conntrack: {tcpEstablishedTimeout: null}", "conntrack.tcp_established", 86400),
    FieldRow("conntrack: {tcpCloseWaitTimeout: 1m30s}", "conntrack.tcp_close_wait", 90),
    FieldRow("conntrack: {tcpBeLiberal: true}", "conntrack.tcp_be_liberal", True),
    FieldRow("conntrack: {udpTimeout: 30s}", "conntrack.udp", 30),
    FieldRow("conntrack: {udpStreamTimeout: 2m}", "conntrack.udp_stream", 120),
    FieldRow("ipvs: {tcpTimeout: 1h}", "ipvs_times.tcp", 3600),
    FieldRow("mode: ipvs\nipvs: {tcpTimeout: 1h0m0.9s}", "ipvs_times.tcp", 3600),
    FieldRow("mode: ipvs\nipvs: {tcpFinTimeout: 30s}", "ipvs_times.tcp_fin", 30),
    FieldRow("mode: ipvs\nipvs: {udpTimeout: 10s}", "ipvs_times.udp", 10),
    FieldRow("mode: ipvs\nipvs: {tcpTimeout: 0s}", "ipvs_times.tcp", 0),
    FieldRow("ipvs: {tcpTimeout: -1s}", "ipvs_times.tcp", 0),
    FieldRow("logging: {format: json}", "log_format", "json"),
    FieldRow("logging: {verbosity: 4}", "log_level", "debug"),
    FieldRow("logging: {verbosity: 2}", "log_level", "info"),
    FieldRow("iptables: null", "masquerade_bit", 14),
    FieldRow("nodePortAddresses: [primary, 10.0.0.0/8]", "primary_node_ports", True),
    FieldRow("nodePortAddresses: [10.0.0.0/8, primary]", "node_port_addresses",
             (cidr("10.0.0.0", 104),)),
    FieldRow("nodePortAddresses: [10.0.0.0/8, primary]", "localhost_node_ports", False),
    FieldRow("nodePortAddresses: [localhost]", "node_port_addresses",
             (cidr("127.0.0.0", 104), cidr("::1", 128))),
    FieldRow("nodePortAddresses: [localhost]", "localhost_node_ports", True),
    FieldRow("nodePortAddresses: [primary, localhost]", "primary_node_ports", True),
    FieldRow("nodePortAddresses: [primary, localhost]", "localhost_node_ports", True),
    FieldRow("mode: nftables\nnodePortAddresses: [primary, localhost]",
             "localhost_node_ports", False),
    *[FieldRow(f"mode: nftables\nfeatureGates: {{KubeProxyNFTablesLocalhostNodePorts: {gate}}}\n"
           f"nodePortAddresses: [{words}]", "localhost_node_ports", value)
      for gate, words, value in (
          ("true", "primary, localhost", True),
          ("false", "primary, localhost", False),
          ("true", "127.0.0.1/32", True),
          ("true", "'::1/128'", True),
          ("true", "primary", False),
          ("true", "10.0.0.0/8", False),
          ("true", "0.0.0.0/0", False),
          ("true", "'::/0'", False),
          ("true", "all", False),
          ("true", "all, localhost", True),
      )],
    FieldRow("nodePortAddresses: [all]", "all_node_port_addresses", True),
    FieldRow("nodePortAddresses: [all]", "localhost_node_ports", True),
    FieldRow("nodePortAddresses: [primary, all, localhost]", "all_node_port_addresses", True),
    FieldRow("nodePortAddresses: [primary, all, localhost]", "primary_node_ports", False),
    FieldRow("mode: nftables\nnodePortAddresses: [all]", "all_node_port_addresses", True),
    FieldRow("mode: nftables\nnodePortAddresses: [all]", "localhost_node_ports", False),
]  # fmt: skip


@pytest.mark.parametrize("row", SAYS, ids=lambda row: f"{row.text} → {row.field}")
def test_field_of_kube_proxys_document(row: FieldRow):
    assert field(proxy(row.text).config, row.field) == row.value


class Wrong(NamedTuple):
    """A document that is refused; each item of `words` occurs in one error."""

    text: str
    words: tuple[str, ...]


P = "KubeProxyConfiguration."
WRONG = [
    Wrong("mode: userspace", (f"'userspace' ({P}mode); use iptables",)),
    Wrong("mode: kernelspace", (f"({P}mode)",)),
    Wrong("bindAddress: here", (f"'here' ({P}bindAddress)",)),
    Wrong("healthzBindAddress: '0.0.0.0:0'", (f"0.0.0.0:0' ({P}healthzBindAddress)",)),
    Wrong("metricsBindAddress: 'localhost:1'", (f"({P}metricsBindAddress)",)),
    Wrong("iptables: {masqueradeBit: 32}", (f"'32' ({P}iptables.masqueradeBit)",)),
    Wrong("mode: nftables\niptables: {masqueradeBit: -1}", (f"({P}iptables.masqueradeBit)",)),
    Wrong("mode: nftables\nnftables: {masqueradeBit: 32}", (f"({P}nftables.masqueradeBit)",)),
    Wrong("iptables: {syncPeriod: -1s}", (f"({P}iptables.syncPeriod)",)),
    Wrong("iptables: {syncPeriod: soon}", (f"'soon' ({P}iptables.syncPeriod)",)),
    Wrong("iptables: {syncPeriod: 30}",
          (f"expected a string, got an integer ({P}iptables.syncPeriod); write 30s",)),
    Wrong("configSyncPeriod: 1.5", (f"got a fraction ({P}configSyncPeriod); write 1.5s",)),
    Wrong("conntrack: {udpTimeout: 0}", (f"got an integer ({P}conntrack.udpTimeout); write 0s",)),
    Wrong("conntrack: {udpTimeout: true}",
          (f"expected a string, got a boolean ({P}conntrack.udpTimeout)",)),
    Wrong("iptables: {minSyncPeriod: 31s}", (f"30s ({P}iptables.minSyncPeriod)",)),
    Wrong("mode: ipvs\nipvs: {minSyncPeriod: -1s}", (f"({P}ipvs.minSyncPeriod)",)),
    Wrong("mode: ipvs\nipvs: {tcpTimeout: -1s}", (f"({P}ipvs.tcpTimeout)",)),
    Wrong("mode: ipvs\nipvs: {excludeCIDRs: [10.0.0.0/8, x]}", (f"'x' ({P}ipvs.excludeCIDRs[1])",)),
    Wrong("mode: ipvs\nipvs: {scheduler: best}", (f"'best' ({P}ipvs.scheduler)",)),
    Wrong("configSyncPeriod: -1s", (f"({P}configSyncPeriod)",)),
    Wrong("nodePortAddresses: [primary, second]", (f"'second' ({P}nodePortAddresses)",)),
    Wrong("nodePortAddresses: [all, 10.0.0.0/33]", (f"'10.0.0.0/33' ({P}nodePortAddresses)",)),
    Wrong("nodePortAddresses: [Localhost]", (f"'Localhost' ({P}nodePortAddresses)",)),
    *[Wrong(f"nodePortAddresses: [{word}, 10.0.0.0/8, {word}]",
            (f"'{word}' is given twice ({P}nodePortAddresses)",))
      for word in ("primary", "localhost", "all")],
    Wrong("nodePortAddresses: primary", (f"expected a list, got a string ({P}nodePortAddresses)",)),
    Wrong("detectLocalMode: Cluster", (f"'Cluster' ({P}detectLocalMode)",)),
    Wrong("detectLocalMode: BridgeInterface", (f"({P}detectLocal.bridgeInterface)",)),
    Wrong("detectLocalMode: InterfaceNamePrefix", (f"({P}detectLocal.interfaceNamePrefix)",)),
    Wrong("detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: a/b}",
          (f"'a/b' ({P}detectLocal.bridgeInterface)",)),
    Wrong("clusterCIDR: 10.0.0.0", (f"'10.0.0.0' ({P}clusterCIDR)",)),
    Wrong("clusterCIDR: '10.0.0.0/8,10.1.0.0/16'", (f"more than one network of a family: '10.0.0.0"
          f"/8,10.1.0.0/16' ({P}clusterCIDR)",)),
    Wrong("oomScoreAdj: 1001", (f"'1001' ({P}oomScoreAdj)",)),
    Wrong("oomScoreAdj: 5.5", (f"expected an integer, got a fraction ({P}oomScoreAdj)",)),
    Wrong("conntrack: {min: 1e400}", (f"expected an integer, got a string ({P}conntrack.min)",)),
    Wrong("oomScoreAdj: low", (f"expected an integer, got a string ({P}oomScoreAdj)",)),
    Wrong("conntrack: {maxPerCore: -1}", (f"-1 ({P}conntrack.maxPerCore)",)),
    Wrong("conntrack: {min: -1}", (f"-1 ({P}conntrack.min)",)),
    Wrong("conntrack: {tcpEstablishedTimeout: -1s}", (f"({P}conntrack.tcpEstablishedTimeout)",)),
    Wrong("conntrack: {udpTimeout: -1s}", (f"({P}conntrack.udpTimeout)",)),
    Wrong("conntrack: []", (f"expected an object ({P}conntrack)",)),
    Wrong("clientConnection: {burst: -1}", (f"-1 ({P}clientConnection.burst)",)),
    Wrong("logging: {format: xml}", (f"'xml' ({P}logging.format)",)),
    Wrong("hostnameOverride: 7", (f"expected a string, got an integer ({P}hostnameOverride)",)),
    Wrong("hostnameOverride: ' '", (f"({P}hostnameOverride)",)),
    Wrong("bindAddressHardFail: 'yes'",
          (f"expected true or false, got a string ({P}bindAddressHardFail)",)),
    Wrong("mode: x\noomScoreAdj: 5000\nbindAddress: 1\nclusterCIDR: z",
          (f"({P}bindAddress)", f"({P}oomScoreAdj)", f"({P}mode)", f"({P}clusterCIDR)")),
]  # fmt: skip


def complaints(text: str, **given: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(text, **given)
    error = caught.value
    return [str(each) for each in (error.errors if isinstance(error, ConfigErrors) else (error,))]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.text)
def test_all_mistakes_are_reported_at_once_with_their_paths(row: Wrong):
    lines = complaints(PROXY + row.text)
    assert len(lines) == len(row.words)
    for words, line in zip(row.words, lines, strict=True):
        assert words in line


NOT_USED = [
    ("featureGates: {A: true}", "featureGates"),
    ("clientConnection: {acceptContentTypes: a/b}", "clientConnection.acceptContentTypes"),
    ("clientConnection: {contentType: application/cbor}", "clientConnection.contentType"),
    ("clientConnection: {qps: 50}", "clientConnection.qps"),
    ("clientConnection: {burst: 100}", "clientConnection.burst"),
    ("logging: {flushFrequency: 1s}", "logging.flushFrequency"),
    ("logging: {vmodule: [{filePattern: a, verbosity: 9}]}", "logging.vmodule"),
    ("logging: {options: {json: {splitStream: true}}}", "logging.options"),
    ("showHiddenMetricsForVersion: '1.35'", "showHiddenMetricsForVersion"),
    ("enableProfiling: true", "enableProfiling"),
    ("iptables: {snatNodeInternalIP: true}", "iptables.snatNodeInternalIP"),
    ("ipvs: {excludeCIDRs: [10.0.0.0/8]}", "ipvs.excludeCIDRs"),
    ("winkernel: {enableDSR: true}", "winkernel"),
    ("windowsRunAsService: true", "windowsRunAsService"),
    ("portRange: 1-2", "portRange"),
    ("udpIdleTimeout: 250ms", "udpIdleTimeout"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "path"), NOT_USED, ids=[path for _, path in NOT_USED])
def test_unused_field_is_one_diagnostic_and_changes_nothing(text: str, path: str):
    made = proxy(text)
    assert made.config == proxy().config
    lines = [note.text for note in made.notes if f"{P}{path} is accepted but not used" in note.text]
    assert len(lines) == 1
    assert len(made.notes) == len(proxy().notes) + 1


def test_snat_node_internal_ip_is_a_warning():
    for text, warns in (("true", True), ("false", False), ("null", False)):
        made = proxy(f"iptables: {{snatNodeInternalIP: {text}}}")
        lines = [note.is_warning for note in made.notes if "snatNodeInternalIP" in note.text]
        assert lines == [True] * warns


def test_every_unused_field_has_a_row():
    paths = {unused.path for unused in UNUSED_SETTINGS if unused.path}
    assert paths == {path for _, path in NOT_USED}


DIAGNOSTICS = [
    ("mode: nftables", "KbpfConfiguration.mode"),
    ("mode: ipvs", "KbpfConfiguration.mode"),
    ("ipvs: {scheduler: wrr}", "kbpf.io/algorithm"),
    ("", "KubeProxyConfiguration.mode is unset: kbpf reads it as iptables, kube-proxy from 1.40"),
    ("mode: ipvs", "KubeProxyConfiguration.mode: kube-proxy's mode ipvs is deprecated"),
    ("", "nodePortAddresses is unset"),
    ("", "clusterCIDR is empty"),
    (
        "mode: nftables\nnodePortAddresses: [localhost]",
        "localhost has no effect in mode nftables without the feature gate "
        "KubeProxyNFTablesLocalhostNodePorts, as with kube-proxy; "
        "KbpfConfiguration.localhostNodePorts: true",
    ),
    ("mode: ipvs\nnodePortAddresses: [localhost]", "no effect in mode ipvs, as with kube-proxy"),
    ("detectLocalMode: NodeCIDR\nclusterCIDR: 10.0.0.0/8", "clusterCIDR is not used"),
    (
        "detectLocal: {bridgeInterface: a-name-too-long-for-a-device}",
        "detectLocal.bridgeInterface is not used: detectLocalMode is ClusterCIDR",
    ),
    (
        "detectLocalMode: NodeCIDR\ndetectLocal: {interfaceNamePrefix: cali}",
        "detectLocal.interfaceNamePrefix is not used: detectLocalMode is NodeCIDR",
    ),
    ("clusterCIDRs: 10.0.0.0/8", "clusterCIDRs is an unknown field; is clusterCIDR meant?"),
    ("conntrack: {maximum: 8}", "conntrack.maximum is an unknown field"),
    ("mode: ''\nmode: ''", "mode occurs twice"),
]


@pytest.mark.parametrize(("text", "words"), DIAGNOSTICS, ids=[f"{w}: {t}" for t, w in DIAGNOSTICS])
def test_diagnostic_about_a_field(text: str, words: str):
    assert told(proxy(text)).count(words) == 1


EVENTS = [
    (PROXY, {}, {"KubeProxyDefaultMode"}),
    (f"{PROXY}mode: ''", {}, {"KubeProxyDefaultMode"}),
    (f"{PROXY}nodePortAddresses: [primary]", {}, set()),
    (f"{PROXY}nodePortAddresses: [0.0.0.0/0]", {}, {"KubeProxyDefaultMode"}),
    (f"{PROXY}mode: iptables", {}, set()),
    (f"{PROXY}mode: nftables", {}, set()),
    (f"{PROXY}mode: ipvs", {}, {"IPVSDeprecation"}),
    (OWN, {}, set()),
    (OWN, {"proxy_mode": "ipvs"}, {"IPVSDeprecation"}),
    (f"{OWN}mode: ipvs", {}, set()),
]  # fmt: skip


EVENT_IDS = (
    "mode missing", "mode empty", "mode missing, NodePorts at primary addresses",
    "mode missing, NodePorts at all addresses", "mode iptables", "mode nftables", "mode ipvs",
    "kbpf document", "kbpf document, flag --proxy-mode ipvs", "kbpf document, mode ipvs",
)  # fmt: skip


@pytest.mark.parametrize(("text", "flags", "reasons"), EVENTS, ids=EVENT_IDS)
def test_which_diagnostics_are_sent_as_events(text: str, flags: dict[str, str], reasons: set[str]):
    """The Events of kube-proxy 1.37. An unset mode sends one only where NodePorts depend on it.

    Without kube-proxy's document kbpf's own defaults apply, and kbpf's own mode `ipvs` is not
    kube-proxy's.
    """
    assert {note.event for note in loaded(text, **flags).notes} - {""} == reasons


def test_unknown_field_changes_nothing():
    assert proxy("futureField: {a: 1}\nmasquerade: x").config == proxy().config


def test_of_a_duplicate_field_the_last_is_used():
    assert proxy("oomScoreAdj: 1\noomScoreAdj: 2").config.oom_score_adj == 2


# ---- kbpf's own document -------------------------------------------------------------------------

OURS = [
    FieldRow("mode: ipvs", "mode", "ipvs"),
    FieldRow("master: https://192.0.2.1:6443", "master", "https://192.0.2.1:6443"),
    FieldRow("source: /objects", "source", Path("/objects")),
    FieldRow("sourceEmptyGrace: 90s", "source_empty_grace", 90.0),
    FieldRow("allowInsecureApi: true", "allow_insecure_api", True),
    FieldRow("pinDir: /sys/fs/bpf/x", "pin_dir", Path("/sys/fs/bpf/x")),
    FieldRow("cgroup: /sys/fs/cgroup/x", "cgroup", Path("/sys/fs/cgroup/x")),
    FieldRow("cacheDir: /c", "cache_dir", Path("/c")),
    FieldRow("algorithm: maglev", "algorithm", Algorithm.MAGLEV),
    FieldRow("serviceAnnotations: algorithm", "service_annotations", ServiceAnnotations.ALGORITHM),
    FieldRow("serviceAnnotations: off", "service_annotations", ServiceAnnotations.OFF),
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
    FieldRow("watchNodes: all", "watch_nodes", "all"),
    FieldRow("socketLB: {mode: hostNamespaceOnly}", "socket_lb", SocketLb.HOST_NAMESPACE_ONLY),
    FieldRow("socketLB: {mode: off}", "socket_lb", SocketLb.OFF),
    FieldRow("socketLB: {mode: 'on'}", "socket_lb", SocketLb.ON),
    FieldRow(
        "socketLB: {exempt: [system.slice/a*, b]}", "socket_lb_exempt", ("system.slice/a*", "b")
    ),
    FieldRow("socketLB: {label: true}", "socket_lb_label", True),
    FieldRow("packetPath: {enabled: false}", "packet_path", False),
    FieldRow("packetPath: {devices: [eth0, bond*]}", "devices", ("eth0", "bond*")),
    FieldRow("packetPath: {excludeDevices: [eth1]}", "excluded_devices", ("eth1",)),
    FieldRow("packetPath: {masqueradePorts: 50000-50099}", "masquerade_ports", (50_000, 50_099)),
    FieldRow("packetPath: {forwarding: direct}", "forwarding", "direct"),
    FieldRow("ipvs: {device: svc0}", "ipvs_device", "svc0"),
    FieldRow("ipvs: {nftTable: services}", "nft_table", "services"),
    FieldRow("ipvs: {stateDir: /run/x}", "state_dir", Path("/run/x")),
    FieldRow("mapSizes: {frontends: 7}", "sizes.frontends", 7),
    FieldRow("mapSizes: {slots: 7}", "sizes.slots", 7),
    FieldRow("mapSizes: {backends: 7}", "sizes.backends", 7),
    FieldRow("mapSizes: {connections: 7000}", "sizes.connections", 7000),
    FieldRow("mapSizes: {affinity: 7}", "sizes.affinity", 7),
    FieldRow("mapSizes: {counts: 7}", "sizes.counts", 7),
    FieldRow("metrics: {services: 0}", "serving.service_series", 0),
    FieldRow("metrics: {backends: 7}", "serving.backend_series", 7),
    FieldRow("metrics: {accounting: full}", "accounting", Accounting.FULL),
    FieldRow("metrics: {accounting: off}", "accounting", Accounting.OFF),
    FieldRow("logLevel: warning", "log_level", "warning"),
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
    Wrong("mapSizes: {slots: 0}", (f"'0' ({O}mapSizes.slots)",)),
    Wrong("mapSizes: {connections: 5}", (f"5 ({O}mapSizes.connections)",)),
    Wrong("socketLB: {mode: pods}", (f"'pods' ({O}socketLB.mode)",)),
    Wrong("socketLB: {exempt: [/]}", (f"({O}socketLB.exempt)",)),
    Wrong("socketLB: {mode: off}\npacketPath: {enabled: false}", (f"({O}socketLB.mode)",)),
    Wrong("packetPath: {future: 1}",
          (f"unknown field ({O}packetPath.future); leave it out",)),
    Wrong("mapSizes: {conections: 7000}\nsocketLb: {mode: off}\npinDir: x",
          (f"({O}mapSizes.conections); is connections meant?",
           f"({O}socketLb); is socketLB meant?", f"({O}pinDir)")),
    Wrong("source: /a\nmaster: https://b", (f"({O}source)",)),
    Wrong("mode: x\nlogLevel: z\nmapSizes: {affinity: -1}",
          (f"({O}mode)", f"({O}logLevel)", f"({O}mapSizes.affinity)")),
]  # fmt: skip


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
    PrecedenceRow("a node name on the command line beats the file's", f"{PROXY}hostnameOverride: a",
                  {"hostname_override": "B"}, "node_name", "b"),
    PrecedenceRow("an empty node name on the command line is ignored",
                  f"{PROXY}hostnameOverride: a", {"hostname_override": ""},
                  "node_name", "a"),
    PrecedenceRow("an empty flag of kbpf is ignored", f"{OWN}cgroup: /c", {"cgroup": ""}, "cgroup",
                  Path("/c")),
    PrecedenceRow("--master is used with kube-proxy's document",
                  PROXY, {"master": "https://x"}, "master",
                  "https://x"),
    PrecedenceRow("verbosity on the command line beats the file's",
                  f"{PROXY}logging: {{verbosity: 0}}",
                  {"log_level": "debug"}, "log_level", "debug"),
    PrecedenceRow("unused logging flags cause no warning that they are ignored", PROXY,
                  {"vmodule": "proxier=4", "log_flush_frequency": "1s"}, "log_level", "info"),
    PrecedenceRow("kube-proxy's flags are ignored with its document",
                  f"{PROXY}clusterCIDR: 10.0.0.0/8",
                  {"cluster_cidr": "192.168.0.0/16", "kubeconfig": "/k"}, "cluster_cidrs",
                  (cidr("10.0.0.0", 104),), ("--cluster-cidr", "--kubeconfig")),
    PrecedenceRow("kube-proxy's flags are ignored even if the document lacks the field",
                  PROXY, {"masquerade_all": "true"}, "masquerade_all",
                  False, ("--masquerade-all",)),
    PrecedenceRow("an invalid flag of kube-proxy is ignored, too",
                  PROXY, {"proxy_mode": "userspace"}, "proxy_mode", "",
                  ("--proxy-mode",)),
    PrecedenceRow("kbpf's flags beat its document",
                  f"{OWN}pinDir: /a", {"pin_dir": "/b"}, "pin_dir",
                  Path("/b")),
    PrecedenceRow("kbpf's flags are used with kube-proxy's document",
                  PROXY, {"pin_dir": "/b"}, "pin_dir",
                  Path("/b")),
    PrecedenceRow("kube-proxy's flags are used without its document",
                  OWN, {"cluster_cidr": "10.0.0.0/8"},
                  "cluster_cidrs", (cidr("10.0.0.0", 104),)),
    PrecedenceRow("kbpf's document beats kube-proxy's", f"{PROXY}mode: nftables\n---\n"
                  f"{OWN}localhostNodePorts: true", {}, "localhost_node_ports", True),
    PrecedenceRow("kbpf's document beats kube-proxy's in either order",
                  f"{OWN}localhostNodePorts: true\n---\n{PROXY}"
                  "mode: nftables", {}, "localhost_node_ports", True),
    PrecedenceRow("kube-proxy's gate switches ExternalIPs off",
         f"{PROXY}featureGates: {{AllowServiceExternalIPs: false}}", {}, "external_ips", ()),
    PrecedenceRow("kube-proxy's gate switches ExternalIPs on",
                  f"{PROXY}featureGates: {{AllowServiceExternalIPs: true}}", {},
                  "external_ips", "all"),
    PrecedenceRow("--feature-gates switches ExternalIPs off",
                  OWN, {"feature_gates": "AllowServiceExternalIPs=false"},
                  "external_ips", ()),
    PrecedenceRow("--feature-gates is ignored with kube-proxy's document", PROXY,
                  {"feature_gates": "AllowServiceExternalIPs=false"}, "external_ips", "all",
                  ("--feature-gates",)),
    PrecedenceRow("kbpf's externalIPs beats the gate",
                  f"{PROXY}featureGates: {{AllowServiceExternalIPs: false}}\n---\n"
                  f"{OWN}externalIPs: 192.0.2.0/24", {}, "external_ips", (cidr("192.0.2.0", 120),)),
    PrecedenceRow("--external-ips beats the gate",
                  f"{PROXY}featureGates: {{AllowServiceExternalIPs: false}}",
                  {"external_ips": "all"}, "external_ips", "all"),
    PrecedenceRow("a flag of kbpf beats both documents",
                  f"{PROXY}---\n{OWN}logLevel: error", {"log_level": "info"},
                  "log_level", "info"),
]  # fmt: skip


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
        "KubeProxyConfiguration.mode", "KbpfConfiguration.mode", "--pin-dir"
    ]  # fmt: skip


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
    ({"--detect-local-mode": "NodeCIDR", "--cluster-cidr": "10.0.0.0/8"},
     "--cluster-cidr is not used: pods are recognized by NodeCIDR"),
    ({"--cluster-cidr": "10.0.0.0/8,fd00::/48", "--nodeport-addresses": "192.0.2.0/24"},
     "--nodeport-addresses has IPv4 networks only"),
    ({"--feature-gates": "A=true,AllowServiceExternalIPs=false"},
     "--feature-gates: A is accepted but not used"),
    ({"--profiling": "true"}, "--profiling is accepted but not used"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words"), QUESTIONABLE, ids=[words for _, words in QUESTIONABLE])
def test_questionable_setting_is_one_diagnostic(given: dict[str, str], words: str):
    (note,) = load.load(given, {}).notes
    assert words in note.text


@pytest.mark.parametrize("given", [{}, {"--masquerade-ports": "32768-40000"},
    {"--masquerade-ports": "1024-29999"}, {"--cluster-cidr": "10.0.0.0/8"},
    {"--masquerade-ports": "30000-31000", "--packet-path": "false"},
    {"--cluster-cidr": "10.0.0.0/8", "--nodeport-addresses": "192.0.2.0/24"},
    {"--cluster-cidr": "10.0.0.0/8,fd00::/48", "--nodeport-addresses": "primary"},
    {"--cluster-cidr": "10.0.0.0/8,fd00::/48", "--nodeport-addresses": "primary,192.0.2.0/24"},
    {"--cluster-cidr": "10.0.0.0/8,fd00::/48",
     "--nodeport-addresses": "192.0.2.0/24,2001:db8::/32"}], ids=str)  # fmt: skip
def test_reasonable_settings_have_no_diagnostic(given: dict[str, str]):
    assert load.load(given, {}).notes == ()


IGNORED_IN_IPVS: list[tuple[dict[str, str], str]] = [
    ({}, ""),
    ({"socket_lb": "off"}, "--socket-lb"),
    ({"forwarding": "direct", "accounting": "full"}, "--forwarding --accounting"),
    ({"max_frontends": "1000", "max_counts": "1"}, "--max-frontends --max-counts"),
    ({"metrics_backends": "5"}, "--metrics-backends"),
    ({"packet_path": "false", "device": "eth0"}, "--packet-path --device"),
    ({"masquerade_all": "true", "ipvs_scheduler": "lc", "ipvs_strict_arp": "true"}, ""),
]


@pytest.mark.parametrize(("given", "names"), IGNORED_IN_IPVS, ids=str)
def test_settings_without_effect_in_mode_ipvs(given: dict[str, str], names: str):
    assert ours(**given).config.ignored_in_ipvs == tuple(names.split())


def test_all_map_sizes_have_no_effect_in_mode_ipvs():
    sizes = [setting for setting in SETTINGS if setting.field.startswith("sizes.")]
    assert len(sizes) == len(MapSizes.__slots__)
    assert {setting.only for setting in sizes} == {"bpf"}


# ---- writing -------------------------------------------------------------------------------------

WRITTEN = [
    Config(),
    Config(node_name="n1", kubeconfig=Path("/k"), proxy_mode="iptables",
           all_node_port_addresses=True, min_sync_period=2.5, config_sync_period=61.0,
           oom_score_adj=5,
           conntrack=Conntrack(0, 7, 60, 0, True, 30, 5400),
           serving=Serving("[::]:1", "127.0.0.1:2,192.0.2.1:3", True, 90.0, 5)),
    Config(proxy_mode="nftables", masquerade_bit=3, masquerade_all=True, localhost_node_ports=False,
           bind_address=parse_addr("fd00::1"), log_format="json", log_level="debug",
           detect_local_mode=LocalMode.CLUSTER_CIDR,
           cluster_cidrs=(cidr("10.0.0.0", 104), cidr("fd00::", 48))),
    Config(proxy_mode="ipvs", mode="ipvs", ipvs_scheduler="wrr", strict_arp=True, ipvs_device="i0",
           source_empty_grace=5.0, allow_insecure_api=True,
           nft_table="t", state_dir=Path("/s"), log_level="error", algorithm=Algorithm.MAGLEV,
           service_annotations=ServiceAnnotations.ALGORITHM, system_namespaces=("a", "b"),
           detect_local_mode=LocalMode.BRIDGE_INTERFACE, pod_bridge_interface="cni0"),
    Config(node_port_addresses=(cidr("10.0.0.0", 104),), primary_node_ports=True,
           localhost_node_ports=False),
    Config(node_port_addresses=(cidr("10.0.0.0", 104), cidr("fd00::", 8)), source=Path("/o"),
           pin_dir=Path("/p"), cgroup=Path("/c"), cache_dir=Path("/d"), socket_lb=SocketLb.OFF,
           socket_lb_exempt=("a*", "b"), devices=("e*",), excluded_devices=("f",),
           masquerade_ports=(5, 6), forwarding="direct", master="",
           sizes=MapSizes(1, 2, 3, 6000, 7)),
]  # fmt: skip


@pytest.mark.parametrize("config", WRITTEN, ids=range(len(WRITTEN)))
def test_written_configuration_is_read_as_the_same(config: Config):
    made = loaded(write.format_documents(config))
    mode = config.detect_local_mode or LocalMode.CLUSTER_CIDR
    assert made.config == load.replace(config, detect_local_mode=mode)
    assert "unknown field" not in told(made)


SAMPLES: dict[Kind, tuple[str, ...]] = {
    kinds.BOOLEAN: ("true", "false"),
    kinds.SECONDS: ("0s", "90s", "1.5s", "1h0m1s"),
    kinds.WHOLE_SECONDS: ("0s", "90s", "25h"),
    kinds.PERIOD: ("90s", "0.25s"),
    kinds.DOUBLED_PERIOD: ("90s", "0.5s"),
    kinds.COUNT: ("0", "7"),
    kinds.ENTRIES: ("6000",),
    kinds.CONNECTIONS: ("6000",),
    kinds.OOM_SCORE: ("-5",),
    kinds.BIT: ("3",),
    kinds.PORTS: ("5-6",),
    kinds.NETWORKS: ("10.0.0.0/8,fd00::/48",),
    kinds.CLUSTER_CIDRS: ("10.0.0.0/8,fd00::/48",),
    kinds.EXTERNAL_IPS: ("all", "off", "10.0.0.0/8,fd00::/48"),
    kinds.NODE_PORTS: ("primary", "primary,10.0.0.0/8", "all"),
    kinds.BIND_ADDRESS: ("192.0.2.1", "fd00::1"),
    kinds.HEALTHZ: ("[::1]:7",),
    kinds.METRICS: ("127.0.0.1:7,192.0.2.1:7",),
    kinds.NAMES: ("a,b*",),
    kinds.CGROUPS: ("a/b,c*",),
    kinds.FILE: ("/a/b",),
    kinds.DIR: ("/a/b",),
    kinds.ABSOLUTE_DIR: ("/a/b",),
    kinds.URL: ("https://192.0.2.1:6443",),
    kinds.NODE_NAME: ("n-1",),
    kinds.DEVICE: ("cni0",),
    kinds.DEVICE_PREFIX: ("cni0",),
    kinds.TABLE: ("t_1",),
    kinds.WATCH_NODES: ("auto", "own", "all"),
    kinds.MODE: ("auto", "bpf", "ipvs"),
    kinds.PROXY_MODE: ("iptables", "nftables", "ipvs"),
    kinds.SCHEDULER: ("wlc",),
    kinds.FORWARDING: ("stack", "direct"),
    kinds.LOG_LEVEL: ("debug",),
    kinds.LOG_FORMAT: ("text", "json"),
    kinds.VERBOSITY: ("2", "4"),
    kinds.ALGORITHM: tuple(Algorithm),
    kinds.SERVICE_ANNOTATIONS: tuple(ServiceAnnotations),
    kinds.ACCOUNTING: tuple(Accounting),
    kinds.SOCKET_LB: tuple(SocketLb),
    kinds.LOCAL_MODE: ("ClusterCIDR", "NodeCIDR"),
    kinds.EXTERNAL_IPS_GATE: ("AllowServiceExternalIPs=false",),
}
"""Kind → texts that flags of this kind accept. A new kind needs a line here."""

GIVEN_WITH = {
    "--pod-bridge-interface": {"--detect-local-mode": "BridgeInterface"},
    "--pod-interface-name-prefix": {"--detect-local-mode": "InterfaceNamePrefix"},
    "--min-sync-period": {"--sync-period": "2h"},
}
"""Flag → other flags without which it is refused, or has no effect."""

GIVEN = [(row.name, text) for row in SETTINGS if row.field for text in SAMPLES[row.kind]]


@pytest.mark.parametrize(("flag", "text"), GIVEN, ids=map("=".join, GIVEN))
def test_every_flag_is_written_and_read_again(flag: str, text: str):
    config = load.load_config({flag: text, **GIVEN_WITH.get(flag, {})}, {})
    made = loaded(write.format_documents(config))
    mode = config.detect_local_mode or LocalMode.CLUSTER_CIDR
    assert made.config == load.replace(config, detect_local_mode=mode)


def test_configuration_is_written_atomically(tmp_path: Path):
    target = tmp_path / "config.yaml"
    write.write(Config(), target)
    assert loaded(target.read_text()).config.pin_dir == Config().pin_dir
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    with pytest.raises(ConfigError, match="cannot write the configuration"):
        write.write(Config(), tmp_path / "no" / "config.yaml")


# ---- durations -----------------------------------------------------------------------------------

TIMES = [
    ("0", 0.0, "0s"), ("0s", 0.0, "0s"), ("1s", 1.0, "1s"), ("1h0m0s", 3600.0, "1h0m0s"),
    ("90s", 90.0, "1m30s"), ("1.5s", 1.5, "1.5s"), ("250ms", 0.25, "0.25s"), ("24h", 86400.0,
    "24h0m0s"), ("-1s", -1.0, None), ("+2m", 120.0, "2m0s"), ("1h1ms", 3600.001, "1h0m0.001s"),
    (".5s", 0.5, "0.5s"), ("5us", 5e-6, None), ("5µs", 5e-6, None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "seconds", "again"), TIMES, ids=[row[0] for row in TIMES])
def test_durations_are_parsed_as_in_go(text: str, seconds: float, again: str | None):
    assert durations.parse(text, "") == pytest.approx(seconds)
    if again is not None:
        assert durations.format_duration(seconds) == again


@pytest.mark.parametrize(
    "text", ["", "5", "s", "1d", "1 s", "1s x", "--1s", "1h-1m", ".", "2562048h", "9" * 30 + "s"]
)
def test_durations_that_go_refuses_are_errors(text: str):
    with pytest.raises(ConfigError, match=r"not a time.*\(here\)"):
        durations.parse(text, "here")


def test_duration_of_a_million_digits_is_refused_at_once():
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        durations.parse("9" * 1_000_000, "here")
    assert time.process_time() - began < 1
    assert len(str(caught.value)) < 200


# ---- docs/configuration.md -----------------------------------------------------------------------


def table(heading: str) -> dict[str, list[str]]:
    """The table below this heading: its first column without backquotes → the other columns."""
    text = (ROOT / "docs/configuration.md").read_text()
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    assert section is not None
    rows = [line.strip("|").split("|") for line in section[1].splitlines() if line.startswith("|")]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in rows[2:]}


def test_example_of_the_page_loads_and_its_error_is_the_actual_one():
    page = (ROOT / "docs/configuration.md").read_text()
    example = re.search(r"```yaml\n(.*?)```", page, re.S)
    assert example is not None
    made = loaded(example[1])
    assert made.notes == ()
    assert made.config.devices == ("eth0",)
    assert made.config.sizes.connections == 262_144
    (line,) = complaints(OWN + "packetPath: {masqueradePorts: 9-8}")
    assert f"kbpf run: {line}" in page.replace("\n", " ")


def test_page_has_every_field_of_kube_proxys_document():
    leaves = [path.partition(".")[2] for path in documents.leaf_paths(KubeProxyConfiguration, "K")]
    assert list(table("KubeProxyConfiguration")) == leaves


def test_page_has_every_field_of_kbpfs_document_with_its_flag():
    rows = table("KbpfConfiguration")
    assert list(rows) == list(KBPF_SETTINGS)
    for path, cells in rows.items():
        assert cells[0].strip("`") == KBPF_SETTINGS[path].name


def test_page_has_every_flag_with_its_field():
    rows = table("Flags")
    assert list(rows) == [setting.name for setting in SETTINGS]
    for setting in SETTINGS:
        field = rows[setting.name][0].strip("`")
        if setting.kbpf:
            assert field == f"KbpfConfiguration.{setting.kbpf}"
        elif setting.kube_proxy:
            assert field in setting.kube_proxy.split()


def test_every_path_of_a_setting_is_a_field_of_kube_proxys_document():
    paths = {path for setting in SETTINGS for path in setting.kube_proxy.split()}
    assert paths <= set(table("KubeProxyConfiguration"))


def test_page_has_the_aliases_of_flags_and_which_are_ignored():
    for name, (_, others, ignored) in table("Flags").items():
        setting = SETTINGS_BY_FLAG[name]
        assert tuple(re.findall("`(.*?)`", others)) == setting.aliases, name
        assert (ignored == "yes") is setting.is_ignored_with_kube_proxy_document, name


def test_default_in_the_help_is_the_actual_one():
    shown = {
        setting: match[1]
        for setting in SETTINGS
        if (match := re.search(r"\(default ([^:,)]+)[:,)]", setting.help))
        and setting.field != "node_ports"  # depends on --proxy-mode
    }
    assert len(shown) == 51
    for setting, text in shown.items():
        assert setting.parse(text, "") == field(Config(), setting.field), setting.name


def test_defaults_on_the_page_are_the_actual_ones():
    made = write.kbpf_fields(Config())
    for path, (_, default, _) in table("KbpfConfiguration").items():
        head, _, tail = path.partition(".")
        value = made.get(head, {}).get(tail, "") if tail else made.get(head, "")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        assert default.strip("`") == text, path
