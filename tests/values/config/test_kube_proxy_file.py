# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's document, by the rules of kube-proxy 1.37 (pkg/proxy/apis/config)."""

from pathlib import Path

import pytest
import yaml

from kbpf.config.settings import UNUSED_SETTINGS
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, Conntrack, LocalMode, Serving
from tests.support.cluster import kubeadm
from tests.values.config.documents import (
    OWN,
    PROXY,
    FieldRow,
    P,
    Wrong,
    cidr,
    complaints,
    field,
    loaded,
    proxy,
    told,
)

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
