# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's document, by the rules of kube-proxy 1.37 (pkg/proxy/apis/config)."""

from pathlib import Path

import pytest
import yaml

from kbpf.config.settings import UNUSED_SETTINGS
from kbpf.errors import ConfigErrors
from kbpf.model.config import Config, Conntrack, LocalMode, Serving
from tests.support.cluster import kubeadm
from tests.support.table import pairs
from tests.values.config.documents import (
    OWN,
    PROXY,
    P,
    assert_mistakes,
    cidr,
    document,
    field,
    loaded,
    proxy,
    shown,
    told,
)
from tests.values.config.rows_kube_proxy_file import EVENTS, GATE, NOT_USED, PATHS, SAYS, WRONG


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


@pytest.mark.parametrize(("text", "value"), SAYS)
def test_field_of_kube_proxys_document(text, value):
    name = value.partition(" = ")[0]
    assert f"{name} = {shown(field(proxy(document(text)).config, name))}" == value


@pytest.mark.parametrize(("text", "values"), GATE)
def test_gate_for_node_ports_on_loopback(text, values):
    gate, _, addresses = text.partition(" ")
    gates = f"featureGates: {{KubeProxyNFTablesLocalhostNodePorts: {gate}}}\n" if gate != "null" else ""
    file = f"{PROXY}mode: nftables\n{gates}nodePortAddresses: {addresses}\n---\n{OWN}kubernetesVersion: "
    made = [loaded(f"{file}'{version}'").config for version in ("1.37", "1.38")]
    assert [shown(each.localhost_node_ports) for each in made] == values.split()
    assert proxy(f"mode: nftables\n{gates}nodePortAddresses: {addresses}").config == made[0]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_all_mistakes_are_reported_at_once_with_their_paths(text, words):
    assert_mistakes(PROXY + document(text), words, P)


@pytest.mark.parametrize(("text", "paths"), PATHS)
def test_errors_name_the_paths_that_kube_proxy_names(text, paths):
    found = []
    try:
        proxy(document(text))
    except ConfigErrors as errors:
        found = [error.where.removeprefix(P) for error in errors.errors]
    assert sorted(found) == sorted(paths.split())


@pytest.mark.parametrize(("text", "path"), NOT_USED, ids=[path for _, path in NOT_USED])
def test_unused_field_is_one_diagnostic_and_changes_nothing(text, path):
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


DIAGNOSTICS = pairs("""\
mode: nftables → KbpfConfiguration.mode
mode: ipvs → KbpfConfiguration.mode
ipvs: {scheduler: wrr} → kbpf.io/algorithm
 → KubeProxyConfiguration.mode is unset: kbpf reads it as iptables, kube-proxy from 1.40
mode: ipvs → KubeProxyConfiguration.mode: kube-proxy's mode ipvs is deprecated
 → nodePortAddresses is unset
 → clusterCIDR is empty
mode: nftables; nodePortAddresses: [localhost] → localhost has no effect in mode nftables without the feature gate
mode: nftables; nodePortAddresses: [localhost] → KubeProxyNFTablesLocalhostNodePorts, as with kube-proxy
mode: ipvs; nodePortAddresses: [localhost] → no effect in mode ipvs, as with kube-proxy
detectLocalMode: NodeCIDR; clusterCIDR: 10.0.0.0/8 → clusterCIDR is not used
detectLocal: {bridgeInterface: a-name-too-long-for-it} → bridgeInterface is not used: detectLocalMode is ClusterCIDR
detectLocalMode: NodeCIDR; detectLocal: {interfaceNamePrefix: c} → Prefix is not used: detectLocalMode is NodeCIDR
clusterCIDRs: 10.0.0.0/8 → clusterCIDRs is an unknown field; is clusterCIDR meant?
conntrack: {maximum: 8} → conntrack.maximum is an unknown field
mode: ''; mode: '' → mode occurs twice
""")


@pytest.mark.parametrize(("text", "words"), DIAGNOSTICS, ids=[f"{w}: {t}" for t, w in DIAGNOSTICS])
def test_diagnostic_about_a_field(text, words):
    assert told(proxy(document(text))).count(words) == 1


@pytest.mark.parametrize(("given", "reasons"), EVENTS)
def test_which_diagnostics_are_sent_as_events(given, reasons):
    """The Events of kube-proxy 1.37. An unset mode sends one only where NodePorts depend on it.

    Without kube-proxy's document kbpf's own defaults apply, and kbpf's own mode `ipvs` is not
    kube-proxy's.
    """
    text, _, mode = given.partition(": ")[2].partition("--proxy-mode ")
    made = loaded(
        text.replace("PROXY", PROXY).replace("OWN", OWN).replace("\n ", "\n"), **({"proxy_mode": mode} if mode else {})
    )
    assert {note.event for note in made.notes} - {""} == set(reasons.split())


def test_unknown_field_changes_nothing():
    assert proxy("futureField: {a: 1}\nmasquerade: x").config == proxy().config


def test_of_a_duplicate_field_the_last_is_used():
    assert proxy("oomScoreAdj: 1\noomScoreAdj: 2").config.oom_score_adj == 2
