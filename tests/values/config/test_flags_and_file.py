# SPDX-License-Identifier: Apache-2.0
"""Each field of kube-proxy's document that is also a flag means the same in both."""

from itertools import product
from typing import Any

import pytest
import yaml

from kbpf.config import kinds, load
from kbpf.config.settings import SETTINGS, Setting
from kbpf.model.config import Config
from tests.support.table import each_pair
from tests.values.config.documents import PROXY, loaded
from tests.values.config.test_written_file import GIVEN_WITH, TEXTS

MODES = ("iptables", "nftables", "ipvs")
FIELDS = [row for row in SETTINGS if row.field and row.kube_proxy]


def path_in(mode: str, row: Setting) -> str:
    """The field in the section that kube-proxy reads in this mode; masqueradeAll and masqueradeBit
    of iptables are also read in mode ipvs.
    """
    paths = row.kube_proxy.split()
    return next((path for path in paths if path.startswith(f"{mode}.")), paths[0])


def value_of(row: Setting, text: str) -> Any:
    """The text of a flag as its field in the document has it."""
    if row.kind is kinds.FEATURE_GATES:
        return kinds.feature_gate_values(text, "")
    if row.kind.json_type == kinds.LIST:
        return text.split(",")
    return yaml.safe_load(text) if row.kind.json_type in (int, bool) else text


def by_flags(mode: str, given: dict[str, str]) -> Config:
    return load.load({**({"--proxy-mode": mode} if mode else {}), **given}, {}).config


def by_file(mode: str, given: dict[str, str]) -> Config:
    fields: dict[str, Any] = {"mode": mode}
    for name, text in given.items():
        (row,) = (row for row in FIELDS if row.name == name)
        *sections, last = path_in(mode, row).split(".")
        holder = fields
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[last] = value_of(row, text)
    return loaded(PROXY + yaml.safe_dump(fields)).config


GIVEN = [(mode, row.name, text) for row in FIELDS for text in TEXTS[row.kind] for mode in MODES]
GIVEN += [(mode, "--cluster-cidr", "10.0.0.0/8") for mode in MODES]
OTHERS = {
    **GIVEN_WITH,
    "--detect-local-mode": {"--cluster-cidr": "10.0.0.0/8", "--pod-bridge-interface": "cni0"},
    "--bind-address": {"--healthz-bind-address": "0.0.0.0", "--metrics-bind-address": "127.0.0.1"},
}
"""Flags that are given with a flag, since one depends on the other. kube-proxy derives the two addresses from
bindAddress in a file, but not from --bind-address.
"""


@pytest.mark.parametrize(("mode", "flag", "text"), GIVEN, ids=map(" ".join, GIVEN))
def test_a_flag_and_its_field_mean_the_same(mode, flag, text):
    if flag == "--proxy-mode":
        assert by_flags(text, {}) == by_file(text, {})
        return
    given = {flag: text, **OTHERS.get(flag, {})}
    assert by_flags(mode, given) == by_file(mode, given)


ADDRESSES = """\

primary
localhost
all
primary,localhost
all,localhost
10.0.0.0/8
10.0.0.0/8,127.0.0.0/8
127.0.0.1/32
0.0.0.0/0
::/0
fd00::/8
::1/128
primary,::1/128
""".splitlines()
"""Of --nodeport-addresses; the first is unset."""


@pytest.mark.parametrize("mode", ["", *MODES])
def test_node_ports_answer_on_the_same_addresses(mode):
    """Of all combinations only an unset mode with unset addresses differs: kbpf's defaults apply."""
    gate = f"{kinds.LOCALHOST_GATE}="
    for addresses, localhost, enabled in product(ADDRESSES, ("", "true", "false"), ("", "true", "false")):
        given = {
            **({"--nodeport-addresses": addresses} if addresses else {}),
            **({"--localhost-nodeports": localhost} if localhost else {}),
            **({"--feature-gates": gate + enabled} if enabled else {}),
        }
        if mode or addresses:
            assert by_flags(mode, given) == by_file(mode, given), given


@each_pair(
    "flags, value",
    """\
 → true
--nodeport-addresses=198.18.0.0/24 → false
--proxy-mode=iptables → true
--proxy-mode=iptables --nodeport-addresses=198.18.0.0/24 → false
--proxy-mode=iptables --nodeport-addresses=198.18.0.0/24 --localhost-nodeports=true → false
--proxy-mode=iptables --nodeport-addresses=198.18.0.0/24,127.0.0.0/8 → true
--proxy-mode=iptables --nodeport-addresses=localhost --localhost-nodeports=false → false
--proxy-mode=nftables → false
--proxy-mode=nftables --nodeport-addresses=localhost → false
--proxy-mode=nftables --nodeport-addresses=localhost --feature-gates=KubeProxyNFTablesLocalhostNodePorts=true → true
--proxy-mode=nftables --nodeport-addresses=localhost --kubernetes-version=1.38 → true
--proxy-mode=nftables --kubernetes-version=1.38 → false
--proxy-mode=ipvs --nodeport-addresses=localhost --kubernetes-version=1.38 → false
--proxy-mode=ipvs → false
""",
)
def test_node_ports_on_loopback_by_flags(flags, value):
    """Flags → whether NodePorts answer on loopback."""
    made = load.load(dict(word.split("=", 1) for word in flags.split()), {}).config
    assert made.localhost_node_ports is (value == "true")
