# SPDX-License-Identifier: Apache-2.0
"""The kinds of values that settings have: how each is parsed, and written in a document."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kbpf.config import parsers
from kbpf.config.durations import format_duration
from kbpf.config.parsers import Parser
from kbpf.model.address import format_addr
from kbpf.model.config import Accounting, LocalMode, SocketLb
from kbpf.model.objects import Algorithm

LIST: Final = tuple[str, ...]
ON_OFF: Final = str | bool
"""Text with the values `on` and `off`, which YAML reads as true and false."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """`metavar`: the placeholder for a value in the help. `json_type`: the type in a document.
    `write`: the inverse of `parse`, for a document. `repeatable`: the flag may be repeated, each
    time with further values. `accepts_empty`: an empty value has a meaning (no server); otherwise
    it counts as unset.
    """

    parse: Parser
    metavar: str
    json_type: Any = str
    write: Callable[[Any], Any] = lambda value: "" if value is None else str(value)
    repeatable: bool = False
    accepts_empty: bool = False

    def flag_text(self, value: Any) -> str:
        """Returns a value of a document as it would be written for the flag; "" for null."""
        match value:
            case None:
                return ""
            case bool() if self.json_type == ON_OFF:
                return "on" if value else "off"
            case bool():
                return str(value).lower()
            case tuple():
                return ",".join(value)
            case _:
                return str(value)


def _integer(parse: Parser) -> Kind:
    return Kind(parse, "NUMBER", int, int)


def _time(parse: Parser, write: Callable[[float], str] = format_duration) -> Kind:
    return Kind(parse, "TIME", write=write)


def _name_list(parse: Parser, metavar: str) -> Kind:
    return Kind(parse, metavar, LIST, list, repeatable=True)


def _one_of(choices: tuple[str, ...] | type[StrEnum], metavar: str = "") -> Kind:
    values = tuple(choices)
    to_value = choices if isinstance(choices, type) else str
    json_type = ON_OFF if "off" in values else str
    return Kind(
        lambda text, where: to_value(parsers.choice(values, text, where)),
        metavar or "|".join(values),
        json_type,
    )


def _write_external_ips(value: Any) -> str:
    return value if isinstance(value, str) else _join_cidrs(value) or "off"


def _join_cidrs(cidrs: Any) -> str:
    return ",".join(map(str, cidrs))


TEXT: Final = Kind(parsers.text, "VALUE")
URL: Final = Kind(parsers.text, "URL")
FILE: Final = Kind(parsers.path, "FILE")
DIR: Final = Kind(parsers.path, "DIR")
ABSOLUTE_DIR: Final = Kind(parsers.absolute_path, "DIR")
BOOLEAN: Final = Kind(parsers.boolean, "true|false", bool, bool)

COUNT: Final = _integer(parsers.count)
ENTRIES: Final = _integer(parsers.entries)
CONNECTIONS: Final = _integer(parsers.connections)
OOM_SCORE: Final = _integer(parsers.oom_score)
BIT: Final = _integer(parsers.bit)
VERBOSITY: Final = Kind(parsers.verbosity, "NUMBER", int, lambda level: 4 * (level == "debug"))

SECONDS: Final = _time(parsers.seconds)
WHOLE_SECONDS: Final = _time(parsers.whole_seconds)
PERIOD: Final = _time(parsers.period)
DOUBLED_PERIOD: Final = _time(parsers.doubled_period, lambda seconds: format_duration(seconds / 2))

NAMES: Final = _name_list(parsers.names, "NAMES")
CGROUPS: Final = _name_list(parsers.cgroups, "PATTERNS")
NODE_NAME: Final = Kind(parsers.node_name, "NAME")
DEVICE: Final = Kind(parsers.device, "NAME")
DEVICE_PREFIX: Final = Kind(parsers.device, "PREFIX")

NETWORKS: Final = Kind(parsers.networks, "CIDRS", LIST, lambda cidrs: [str(cidr) for cidr in cidrs])
CLUSTER_CIDRS: Final = Kind(parsers.networks, "CIDRS", write=_join_cidrs)
NODE_PORTS: Final = Kind(parsers.node_ports, "CIDRS", repeatable=True)
EXTERNAL_IPS: Final = Kind(parsers.external_ips, "all|off|CIDRS", ON_OFF, _write_external_ips)
EXTERNAL_IPS_GATE: Final = Kind(parsers.external_ips_gate, "NAME=true|false")
PORTS: Final = Kind(parsers.ports, "LOW-HIGH", write=lambda ports: f"{ports[0]}-{ports[1]}")
BIND_ADDRESS: Final = Kind(
    parsers.bind_address, "IP", write=lambda addr: format_addr(addr) if addr else "0.0.0.0"
)
HEALTHZ: Final = Kind(parsers.healthz, "IP:PORT", accepts_empty=True)
METRICS: Final = Kind(parsers.metrics, "IP:PORT", accepts_empty=True)

MODE: Final = _one_of(("auto", "bpf", "ipvs"))
PROXY_MODE: Final = _one_of(("", "iptables", "nftables", "ipvs"), "MODE")
SCHEDULER: Final = _one_of(parsers.IPVS_SCHEDULERS, "NAME")
SOCKET_LB: Final = _one_of(SocketLb)
FORWARDING: Final = _one_of(("auto", "stack", "direct", "netfilter"))
ALGORITHM: Final = _one_of(Algorithm)
ACCOUNTING: Final = _one_of(Accounting)
LOCAL_MODE: Final = Kind(
    parsers.local_mode, "MODE", write=lambda mode: str(mode or LocalMode.CLUSTER_CIDR)
)
LOG_FORMAT: Final = _one_of(("text", "json"))
