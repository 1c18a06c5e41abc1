# SPDX-License-Identifier: Apache-2.0
"""Precedence of flags, variables and documents (cmd/kube-proxy/app/options.go of kube-proxy
1.37), and diagnostics about settings.
"""

import re
from pathlib import Path

import pytest

from kbpf.config import load
from kbpf.config.load import LoadedConfig
from kbpf.config.settings import SETTINGS
from kbpf.model.config import MapSizes
from tests.support.table import each_pair
from tests.values.config.documents import OWN, PROXY, complaints, field, shown, told

# ---- precedence ----------------------------------------------------------------------------------


PRECEDENCE = """\
a node name on the command line beats the file's
  PROXY hostnameOverride: a | --hostname-override=B → node_name = b
an empty node name on the command line is ignored
  PROXY hostnameOverride: a | --hostname-override= → node_name = a
an empty flag of kbpf is ignored
  OWN cgroup: /c | --cgroup= → cgroup = /c
--master is used with kube-proxy's document
  PROXY | --master=https://x → master = https://x
a logging flag on the command line beats the file's
  PROXY logging: {format: text} | --log-format=json → log_format = json
unused logging flags cause no warning that they are ignored
  PROXY | --vmodule=proxier=4 --log-flush-frequency=1s → log_level = info
kube-proxy's flags are ignored with its document
  PROXY clusterCIDR: 10.0.0.0/8 | --cluster-cidr=192.168.0.0/16 --kubeconfig=/k → \
cluster_cidrs = 10.0.0.0/8 ignored: --cluster-cidr --kubeconfig
kube-proxy's flags are ignored even if the document lacks the field
  PROXY | --masquerade-all=true → masquerade_all = false ignored: --masquerade-all
an invalid flag of kube-proxy is ignored, too
  PROXY | --proxy-mode=userspace → proxy_mode = '' ignored: --proxy-mode
kbpf's flags beat its document
  OWN pinDir: /a | --pin-dir=/b → pin_dir = /b
kbpf's flags are used with kube-proxy's document
  PROXY | --pin-dir=/b → pin_dir = /b
kube-proxy's flags are used without its document
  OWN | --cluster-cidr=10.0.0.0/8 → cluster_cidrs = 10.0.0.0/8
kbpf's document beats kube-proxy's
  PROXY mode: nftables --- OWN localhostNodePorts: true | → localhost_node_ports = true
kbpf's document beats kube-proxy's in either order
  OWN localhostNodePorts: true --- PROXY mode: nftables | → localhost_node_ports = true
kube-proxy's gate switches ExternalIPs off
  PROXY featureGates: {AllowServiceExternalIPs: false} | → external_ips = ()
kube-proxy's gate switches ExternalIPs on
  PROXY featureGates: {AllowServiceExternalIPs: true} | → external_ips = all
--feature-gates switches ExternalIPs off
  OWN | --feature-gates=AllowServiceExternalIPs=false → external_ips = ()
--feature-gates is ignored with kube-proxy's document
  PROXY | --feature-gates=AllowServiceExternalIPs=false → external_ips = all ignored: --feature-gates
kbpf's externalIPs beats the gate
  PROXY featureGates: {AllowServiceExternalIPs: false} --- OWN externalIPs: 10.0.0.0/8 | → external_ips = 10.0.0.0/8
--external-ips beats the gate
  PROXY featureGates: {AllowServiceExternalIPs: false} | --external-ips=all → external_ips = all
a flag of kbpf beats both documents
  PROXY featureGates: {AllowServiceExternalIPs: false} --- OWN externalIPs: 10.0.0.0/8 | --external-ips=all → \
external_ips = all
""".splitlines()
"""A rule; below it kube-proxy's or kbpf's document, or both | flags → the resulting field, and the flags that one
warning names.
"""


@pytest.mark.parametrize(("rule", "row"), list(zip(PRECEDENCE[::2], PRECEDENCE[1::2], strict=True)))
def test_precedence(rule, row):
    given, _, expected = row.strip().partition(" → ")
    text, _, flags = given.partition(" |")
    value, _, ignored = expected.partition(" ignored: ")
    for name, head in (("PROXY", PROXY), ("OWN", OWN)):
        text = re.sub(f"{name} ?", head, text)
    made = load.load(dict(flag.split("=", 1) for flag in flags.split()), {}, text.replace(" --- ", "\n---\n").encode())
    name = value.partition(" = ")[0]
    assert f"{name} = {shown(field(made.config, name))}" == value
    warned = [note.text for note in made.notes if note.text.startswith("ignored")]
    assert len(warned) == bool(ignored)
    assert [flag for flag in ignored.split() if flag not in warned[0]] == []


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


@each_pair(
    "flags, everywhere",
    """\
 → false
--proxy-mode=iptables → true
--proxy-mode=ipvs → true
--proxy-mode=nftables → false
--proxy-mode=iptables --nodeport-addresses=primary → false
""",
)
def test_default_node_port_addresses_depend_on_kube_proxys_mode(flags, everywhere):
    assert shown(with_flags(flags).config.all_node_port_addresses) == everywhere


def with_flags(words: str) -> LoadedConfig:
    return load.load(dict(word.split("=", 1) for word in words.split()), {})


@each_pair(
    "flags, words",
    """\
--masquerade-ports=30500-31000 → --masquerade-ports 30500-31000 overlaps 30000-32767
--masquerade-ports=1024-30000 → 30000
--detect-local-mode=NodeCIDR --cluster-cidr=10.0.0.0/8 → --cluster-cidr is not used: pods are recognized by NodeCIDR
--cluster-cidr=10.0.0.0/8,fd00::/48 --nodeport-addresses=10.0.0.0/8 → --nodeport-addresses has IPv4 networks only
--feature-gates=A=true,AllowServiceExternalIPs=false → --feature-gates: A is accepted but not used
--profiling=true → --profiling is accepted but not used
--localhost-nodeports=true --nodeport-addresses=10.0.0.0/8 → --localhost-nodeports has no effect, as with kube-proxy
--proxy-mode=nftables --nodeport-addresses=localhost → --nodeport-addresses: localhost has no effect in mode nftables
--ipvs-sync-period=5s → --ipvs-sync-period is not used: kube-proxy's mode is iptables
""",
)
def test_questionable_setting_is_one_diagnostic(flags, words):
    (note,) = with_flags(flags).notes
    assert words in note.text


REASONABLE = """\

--masquerade-ports=32768-40000
--masquerade-ports=1024-29999
--cluster-cidr=10.0.0.0/8
--masquerade-ports=30000-31000 --packet-path=false
--cluster-cidr=10.0.0.0/8 --nodeport-addresses=192.0.2.0/24
--cluster-cidr=10.0.0.0/8,fd00::/48 --nodeport-addresses=primary
--cluster-cidr=10.0.0.0/8,fd00::/48 --nodeport-addresses=primary,192.0.2.0/24
--cluster-cidr=10.0.0.0/8,fd00::/48 --nodeport-addresses=192.0.2.0/24,2001:db8::/32
""".splitlines()


@pytest.mark.parametrize("flags", REASONABLE)
def test_reasonable_settings_have_no_diagnostic(flags):
    assert with_flags(flags).notes == ()


@each_pair(
    "flags, names",
    """\
 →
--socket-lb=off → --socket-lb
--forwarding=direct --accounting=full → --forwarding --accounting
--max-frontends=1000 --max-affinity=1 → --max-frontends --max-affinity
--metrics-backends=5 → --metrics-backends
--packet-path=false --device=eth0 → --packet-path --device
--masquerade-all=true --ipvs-scheduler=lc --ipvs-strict-arp=true →
""",
)
def test_settings_without_effect_in_mode_ipvs(flags, names):
    assert with_flags(flags).config.ignored_in_ipvs == tuple(names.split())


def test_all_map_sizes_have_no_effect_in_mode_ipvs():
    sizes = [setting for setting in SETTINGS if setting.field.startswith("sizes.")]
    derived = {"slots", "counts"}
    assert {setting.field for setting in sizes} == {f"sizes.{name}" for name in {*MapSizes.__slots__} - derived}
    assert {setting.only for setting in sizes} == {"bpf"}
