# SPDX-License-Identifier: Apache-2.0
"""The kinds of values that settings have: how each is parsed, and written in a document.

Flags, environment variables and both documents of a configuration file use the same parsers, so
that a setting has one rule everywhere. A parser's ConfigError names the origin of the text.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

from kbpf.config import durations
from kbpf.errors import ConfigError, ObjectError
from kbpf.model.address import ANY4, ANY6, Addr, family_of, format_addr, format_endpoint, parse_addr
from kbpf.model.config import Accounting, LocalMode, SocketLb
from kbpf.model.objects import Algorithm, Cidr

Parser = Callable[[str, str], Any]
"""(text, origin) → value. Raises ConfigError."""

MAX_ENTRIES: Final = 1 << 27
"""The kernel cannot create a hash map with more buckets."""
MOST_CONNECTIONS: Final = 1 << 25
"""The map `flows` has more than three entries per connection."""
MAX_PORT: Final = 65_535
MAX_DEVICE_NAME_LENGTH: Final = 15  # IFNAMSIZ - 1
DEBUG_VERBOSITY: Final = 4
"""From this klog verbosity on, the log level is debug."""


def text(text: str, where: str) -> str:
    return text


def path(text: str, where: str) -> Path:
    return Path(text)


def absolute_path(text: str, where: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise ConfigError(f"not an absolute path: {text!r}", where, "begin it with /")
    return path


def names(text: str, where: str) -> tuple[str, ...]:
    result = tuple(name.strip() for name in text.split(",") if name.strip())
    if not result:
        raise ConfigError("no names", where, "give names with commas between them")
    return result


def choice(choices: tuple[str, ...], text: str, where: str) -> str:
    if text not in choices:
        raise ConfigError(f"unknown value {text!r}", where, f"use {' or '.join(choices)}")
    return text


def boolean(text: str, where: str) -> bool:
    """Accepts Go's spellings in any case. The error names only the usual two."""
    spellings = {"1": "true", "t": "true", "0": "false", "f": "false"}
    lowered = text.lower()
    return choice(("true", "false"), spellings.get(lowered, lowered), where) == "true"


IPVS_SCHEDULERS: Final = (
    *("rr", "wrr", "lc", "wlc", "lblc", "lblcr"),
    *("sh", "mh", "dh", "sed", "nq", "fo"),
)


def verbosity(text: str, where: str) -> str:
    """Returns the log level for a klog verbosity."""
    return "debug" if number(text, where, range(1 << 31)) >= DEBUG_VERBOSITY else "info"


def node_name(text: str, where: str) -> str:
    """As in kube-proxy: stripped and in lower case."""
    if text and not text.strip():
        raise ConfigError("not a name: only blanks", where, "give the Node's name, or leave it out")
    return text.strip().lower()


# ---- numbers -------------------------------------------------------------------------------------


def number(text: str, where: str, allowed: range) -> int:
    digits = text.removeprefix("-")
    value = int(text) if digits.isascii() and digits.isdigit() else allowed.stop
    if value not in allowed:
        low, high = allowed.start, allowed.stop - 1
        raise ConfigError(f"not a number from {low} to {high}: {text!r}", where)
    return value


def count(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"not a number: {text!r}", where, "give a whole number, 0 or more")
    return int(text)


def ports(text: str, where: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if all(part.isascii() and part.isdigit() for part in (low, high)):
        port_range = int(low), int(high)
        if 0 < port_range[0] <= port_range[1] <= MAX_PORT:
            return port_range
    raise ConfigError(f"not a range of ports: {text!r}", where, "write it as 1024-29999")


# ---- times ---------------------------------------------------------------------------------------


def seconds(text: str, where: str) -> float:
    value = durations.parse(text, where)
    if value < 0:
        raise ConfigError(f"less than 0: {text}", where, "write it as 30s, 5m or 1h30m")
    return value


def whole_seconds(text: str, where: str) -> int:
    """Truncates to whole seconds, as kube-proxy does."""
    return int(seconds(text, where))


def period(text: str, where: str) -> float:
    value = seconds(text, where)
    if not value:
        raise ConfigError(f"not greater than 0: {text}", where, "write it as 30s, 5m or 1h30m")
    return value


def doubled_period(text: str, where: str) -> float:
    """The age at which a change is late: twice the period, as in kube-proxy."""
    return 2 * period(text, where)


# ---- addresses -----------------------------------------------------------------------------------


def cidr(text: str, where: str) -> Cidr:
    """A network. Host bits need not be zero."""
    try:
        return Cidr.parse(text)
    except ObjectError as error:
        hint = "write it as 192.0.2.0/24 or 2001:db8::/32"
        raise ConfigError(f"not a network: {text!r}", where, hint) from error


def networks(text: str, where: str) -> tuple[Cidr, ...]:
    """Networks; an empty text is an empty list, as in kube-proxy."""
    return _parse_cidrs([item.strip() for item in text.split(",") if item.strip()], where)


def _parse_cidrs(texts: Collection[str], where: str) -> tuple[Cidr, ...]:
    """Parses all networks. The ConfigError names every invalid one."""
    cidrs, errors = [], []
    for text in texts:
        try:
            cidrs.append(cidr(text, where))
        except ConfigError as error:
            errors.append(error)
    if len(errors) > 1:
        quoted = ", ".join(error.what.removeprefix("not a network: ") for error in errors)
        raise ConfigError(f"not networks: {quoted}", where, errors[0].hint)
    if errors:
        raise errors[0]
    return tuple(cidrs)


def external_ips(text: str, where: str) -> str | tuple[Cidr, ...]:
    """Returns "all", or networks: none for `off`."""
    if text == "all":
        return text
    cidrs = () if text == "off" else networks(text, where)
    if not cidrs and text != "off":
        raise ConfigError("no networks", where, "give all, off, or networks")
    return cidrs


EXTERNAL_IPS_GATE: Final = "AllowServiceExternalIPs"
"""A feature gate of kube-proxy since Kubernetes 1.36. false: no rules for ExternalIPs."""
LOCALHOST_GATE: Final = "KubeProxyNFTablesLocalhostNodePorts"
"""A feature gate of kube-proxy since 1.37, on by default since 1.38. true: NodePorts answer on loopback in mode
nftables, if nodePortAddresses has a loopback network."""
USED_GATES: Final = frozenset((EXTERNAL_IPS_GATE, LOCALHOST_GATE))


def feature_gate_values(text: str, where: str) -> dict[str, bool]:
    """Parses Kubernetes feature gates as in a flag: ``A=true,B=false``."""
    values = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"not a feature gate: {item!r}", where, "write it as NAME=true")
        values[name.strip()] = boolean(value.strip(), where)
    return values


def cluster_cidrs(text: str, where: str) -> tuple[Cidr, ...]:
    """One network, or one of each family; kube-proxy rejects more in a file."""
    cidrs = networks(text, where)
    families = [family_of(network.address) for network in cidrs]
    if len(set(families)) != len(families):
        raise ConfigError(f"more than one network of a family: {text!r}", where, "give at most one of each family")
    return cidrs


LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
"""What `localhost` means in nodePortAddresses."""

NODE_PORT_KEYWORDS: Final = ("primary", "localhost", "all")
NodePorts = tuple[Cidr | str, ...]
"""The keywords `primary` and `all`, if given, and the networks."""


def node_ports(text: str, where: str) -> NodePorts:
    return node_port_list([item.strip() for item in text.split(",") if item.strip()], where)


def node_port_list(items: Sequence[str], where: str) -> NodePorts:
    """Follows kube-proxy 1.37: networks and keywords in any combination, each keyword once. Older
    versions know only `primary`, alone.
    """
    if not items:
        raise ConfigError("no networks", where, "give networks, or `primary`, `localhost` or `all`")
    for item in NODE_PORT_KEYWORDS:
        if items.count(item) > 1:
            raise ConfigError(f"{item!r} is given twice", where, "give each keyword once")
    keywords = [item for item in items if item in ("primary", "all")]
    groups = [LOOPBACK if item == "localhost" else (item,) for item in items]
    cidrs = _parse_cidrs([text for group in groups for text in group if text not in keywords], where)
    return (*keywords, *cidrs)


def bind_address(text: str, where: str) -> Addr | None:
    """An address of the node; None for the unspecified addresses, which override nothing."""
    addr = address(text, where)
    return None if addr in (ANY4, ANY6) else addr


def address(text: str, where: str) -> Addr:
    try:
        return parse_addr(text)
    except (ObjectError, ValueError) as error:
        raise ConfigError(f"not an IP address: {text!r}", where) from error


def listen(port: int, text: str, where: str) -> str:
    """Addresses to listen on, each with an optional port (default `port`); "" for none."""
    return ",".join(_parse_listen_address(item.strip(), port, where) for item in text.split(",") if item.strip())


def _parse_listen_address(text: str, port: int, where: str) -> str:
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, number = text, str(port)  # an address without a port
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = number.isascii() and number.isdigit() and 0 < int(number) <= MAX_PORT
    try:
        address = parse_addr(bare) if is_port else None
    except (ObjectError, ValueError):
        address = None
    if address is None:
        raise ConfigError(f"not an address to listen on: {text!r}", where, f"write it as 0.0.0.0:{port}")
    return format_endpoint(address, int(number))


healthz: Final = partial(listen, 10_256)
metrics: Final = partial(listen, 10_249)


def local_mode(text: str, where: str) -> LocalMode:
    if not text:
        return LocalMode.NONE
    return LocalMode(choice(tuple(filter(None, LocalMode)), text, where))


def device(text: str, where: str) -> str:
    """A device name, or a prefix of one."""
    if len(text) > MAX_DEVICE_NAME_LENGTH or "/" in text or any(c.isspace() for c in text):
        raise ConfigError(
            f"not the name of a device: {text!r}",
            where,
            f"at most {MAX_DEVICE_NAME_LENGTH} characters, no / and no blanks",
        )
    return text


def cgroups(text: str, where: str) -> tuple[str, ...]:
    """Patterns of folders below the cgroup v2 root. The root itself is rejected: it holds all
    processes.
    """
    patterns = tuple(pattern.strip("/") for pattern in names(text, where))
    if not all(patterns):
        raise ConfigError("the root of all cgroups cannot be exempt", where, "use --socket-lb off instead")
    return patterns


# ---- kinds ---------------------------------------------------------------------------------------

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


def _number(allowed: range) -> Kind:
    return _integer(partial(number, allowed=allowed))


def _time(parse: Parser, write: Callable[[float], str] = durations.format_duration) -> Kind:
    return Kind(parse, "TIME", write=write)


def _name_list(parse: Parser, metavar: str) -> Kind:
    return Kind(parse, metavar, LIST, list, repeatable=True)


def _one_of(choices: tuple[str, ...] | type[StrEnum], metavar: str = "") -> Kind:
    values = tuple(choices)
    to_value = choices if isinstance(choices, type) else str
    json_type = ON_OFF if "off" in values else str
    return Kind(
        lambda text, where: to_value(choice(values, text, where)),
        metavar or "|".join(values),
        json_type,
    )


def _write_external_ips(value: Any) -> str:
    return value if isinstance(value, str) else _join_cidrs(value) or "off"


def _join_cidrs(cidrs: Any) -> str:
    return ",".join(map(str, cidrs))


TEXT: Final = Kind(text, "VALUE")
URL: Final = Kind(text, "URL")
FILE: Final = Kind(path, "FILE")
DIR: Final = Kind(path, "DIR")
ABSOLUTE_DIR: Final = Kind(absolute_path, "DIR")
BOOLEAN: Final = Kind(boolean, "true|false", bool, bool)

COUNT: Final = _integer(count)
ENTRIES: Final = _number(range(1, MAX_ENTRIES + 1))
CONNECTIONS: Final = _number(range(1, MOST_CONNECTIONS + 1))
OOM_SCORE: Final = _number(range(-1000, 1001))
BIT: Final = _number(range(32))
VERBOSITY: Final = Kind(verbosity, "NUMBER", int, lambda level: 4 * (level == "debug"))

SECONDS: Final = _time(seconds)
WHOLE_SECONDS: Final = _time(whole_seconds)
PERIOD: Final = _time(period)
DOUBLED_PERIOD: Final = _time(doubled_period, lambda seconds: durations.format_duration(seconds / 2))

NAMES: Final = _name_list(names, "NAMES")
CGROUPS: Final = _name_list(cgroups, "PATTERNS")
NODE_NAME: Final = Kind(node_name, "NAME")
DEVICE: Final = Kind(device, "NAME")
DEVICE_PREFIX: Final = Kind(device, "PREFIX")

NETWORKS: Final = Kind(networks, "CIDRS", LIST, lambda cidrs: [str(cidr) for cidr in cidrs])
CLUSTER_CIDRS: Final = Kind(networks, "CIDRS", write=_join_cidrs)
NODE_PORTS: Final = Kind(node_ports, "CIDRS", LIST, repeatable=True)
EXTERNAL_IPS: Final = Kind(external_ips, "all|off|CIDRS", ON_OFF, _write_external_ips)
KUBERNETES_VERSION: Final = _one_of(("1.37", "1.38"))
FEATURE_GATES: Final = Kind(feature_gate_values, "NAME=true|false", dict[str, bool])
PORTS: Final = Kind(ports, "LOW-HIGH", write=lambda ports: f"{ports[0]}-{ports[1]}")
BIND_ADDRESS: Final = Kind(bind_address, "IP", write=lambda addr: format_addr(addr) if addr else "0.0.0.0")
HEALTHZ: Final = Kind(healthz, "IP:PORT", accepts_empty=True)
METRICS: Final = Kind(metrics, "IP:PORT", accepts_empty=True)

MODE: Final = _one_of(("auto", "bpf", "ipvs"))
PROXY_MODE: Final = _one_of(("", "iptables", "nftables", "ipvs"), "MODE")
SCHEDULER: Final = _one_of(IPVS_SCHEDULERS, "NAME")
SOCKET_LB: Final = _one_of(SocketLb)
FORWARDING: Final = _one_of(("auto", "stack", "direct", "netfilter"))
ALGORITHM: Final = _one_of(Algorithm)
ACCOUNTING: Final = _one_of(Accounting)
LOCAL_MODE: Final = Kind(local_mode, "MODE", write=lambda mode: str(mode or LocalMode.CLUSTER_CIDR))
LOG_FORMAT: Final = _one_of(("text", "json"))
