"""IPVS: virtual services and their real servers in the network namespace of the calling thread.

Messages are made and read here instead of by pyroute2, whose encoder takes a millisecond for each
(a node with 10,000 Services has 100,000 servers) and which writes IPv6 prefixes wrongly; a test
reads with pyroute2 what is written here. Many changes go in one datagram: `Ipvs.change()`.
"""

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Netlink, Request, attribute, attributes, number, text
from kbpf.kernel.system import sysctl
from kbpf.model.address import ANY4, ANY6, V4_PREFIX, Addr, family_of, format_endpoint, parse_addr
from kbpf.model.objects import Protocol

FAMILY: Final = "IPVS"
CONNECTIONS: Final = Path("/proc/thread-self/net/ip_vs_conn")
CONNTRACK: Final = "net.ipv4.vs.conntrack"
"""Whether IPVS keeps its connections in conntrack as well, by which they can be masqueraded."""
USUAL: Final = "net.ipv4.vs.expire_nodest_conn"
"""A setting that IPVS always has."""
HINT: Final = "load the kernel module ip_vs (modprobe ip_vs)"
NETLINK_GENERIC: Final = 16
NESTED: Final = 0x8000
CREATE_EXCLUSIVELY: Final = 0x600  # NLM_F_CREATE | NLM_F_EXCL

_VERBS: Final = {"NEW": "make", "SET": "change", "DEL": "remove", "GET": "read"}
_NOUNS: Final = {"SERVICE": "virtual service", "SERVER": "real server"}
_STATS64: Final = 12
_COUNTED: Final = (1, 4, 5)  # of its attributes: connections, bytes in, bytes out
_GENERIC: Final = struct.Struct("=BBH")  # command, version, reserved
_FLAGS: Final = struct.Struct("=II")
_U16: Final = struct.Struct("=H")
_U32: Final = struct.Struct("=I")
_PORT: Final = struct.Struct(">H")
_GET_FAMILY: Final = _GENERIC.pack(3, 1, 0)
_CONTROL: Final = 0x10
_FAMILY_ID: Final = 1
_FAMILY_NAME: Final = 2
_ATTR_SERVICE: Final = 1
_ATTR_DEST: Final = 2
_TIMES: Final = (4, 5, 6)  # IPVS_CMD_ATTR_TIMEOUT_TCP, _TCP_FIN, _UDP


def knows_conntrack() -> bool | None:
    """Whether this kernel's IPVS has CONNTRACK (CONFIG_IP_VS_NFCT); None where none of its settings
    are to be seen.
    """
    for name, known in ((CONNTRACK, True), (USUAL, False)):
        try:
            sysctl.read(name)
        except KernelError as error:
            if error.errno != errno.ENOENT:
                return None
        else:
            return known
    return None


class Command(IntEnum):
    """linux/ip_vs.h; DEL_DEST and the like."""

    NEW_SERVICE = 1
    SET_SERVICE = 2
    DEL_SERVICE = 3
    GET_SERVICE = 4
    NEW_SERVER = 5
    SET_SERVER = 6
    DEL_SERVER = 7
    GET_SERVER = 8
    SET_CONFIG = 12
    GET_CONFIG = 13


class ServiceFlag(IntFlag):
    """What the operator may set of IP_VS_SVC_F_*. The last two belong to the scheduler: `sh` and
    `mh` take the next server for one without weight, and hash the client's port too.
    """

    PERSISTENT = 0x01
    FALLBACK = 0x08
    BY_PORT = 0x10


class Service(NamedTuple):
    """The key of a virtual service: an address and port, or, with a mark, all packets that carry
    it; then the address says the family only, and the protocol nothing.
    """

    protocol: int
    address: Addr
    port: int
    mark: int = 0

    def __str__(self) -> str:
        if self.mark:
            return f"mark {self.mark:#x} IPv{family_of(self.address)}"
        return f"{format_endpoint(self.address, self.port)}/{self.protocol}"


class Settings(NamedTuple):
    """How a virtual service spreads. `persistence` in seconds, 0 for none."""

    scheduler: str
    persistence: int = 0
    flags: ServiceFlag = ServiceFlag(0)


class Server(NamedTuple):
    """The key of a real server in its virtual service."""

    address: Addr
    port: int

    def __str__(self) -> str:
        return format_endpoint(self.address, self.port)


class Counts(NamedTuple):
    """Of a virtual service since it was made: connections, bytes from and to clients."""

    connections: int
    bytes_in: int
    bytes_out: int


class Times(NamedTuple):
    """After how many seconds IPVS forgets an idle connection; `tcp_fin`: after an end's FIN."""

    tcp: int = 0
    tcp_fin: int = 0
    udp: int = 0


class Load(NamedTuple):
    """A real server as the kernel has it, with its connections."""

    server: Server
    weight: int
    active: int
    inactive: int


class Change(NamedTuple):
    """One change; `weight` goes with a server, `settings` without."""

    command: Command
    service: Service
    settings: Settings | None = None
    server: Server | None = None
    weight: int = 0

    def __str__(self) -> str:
        verb, _, noun = self.command.name.partition("_")
        words = f"{_VERBS[verb]} {_NOUNS[noun]}"
        return f"{words} {self.service}" + (f" -> {self.server}" if self.server else "")


class Connection(NamedTuple):
    """A connection that IPVS tracks: addresses with ports, IPVS' word for its state, and in how
    many seconds it is forgotten unless a packet comes.
    """

    protocol: Protocol
    client: tuple[Addr, int]
    frontend: tuple[Addr, int]
    server: tuple[Addr, int]
    state: str
    expires: int


def connections(path: Path = CONNECTIONS) -> tuple[Connection, ...]:
    """All of this network namespace. KernelError if they cannot be read."""
    try:
        text_ = path.read_text()
    except OSError as error:
        raise KernelError(
            "cannot read the connections of IPVS", str(path), HINT, error.errno or 0
        ) from error
    return tuple(parse_connections(text_))


def parse_connections(lines: str) -> Iterator[Connection]:
    """From the kernel's list. What only remembers where a client belongs has no port of the client
    and is left out, and so is what is of no protocol that Services have.
    """
    for line in lines.splitlines()[1:]:
        kind, *words = line.split()
        if kind not in Protocol.__members__ or len(words) < 8 or int(words[1], 16) == 0:
            continue
        client, frontend, server = (
            (_proc_address(words[i]), int(words[i + 1], 16)) for i in (0, 2, 4)
        )
        yield Connection(Protocol[kind], client, frontend, server, words[6], int(words[7]))


def _proc_address(word: str) -> Addr:
    if ":" in word:
        return parse_addr(word)
    return Addr(V4_PREFIX + bytes.fromhex(word))


# ---- bytes ---------------------------------------------------------------------------------------


def encode(change: Change) -> bytes:
    """The message's body: command and attributes."""
    parts = [_GENERIC.pack(change.command, 1, 0), _nest(_ATTR_SERVICE, _service(change))]
    if change.server is not None:
        parts.append(_nest(_ATTR_DEST, _server(change.server, change.weight)))
    return b"".join(parts)


def encode_times(times: Times) -> bytes:
    """The body that sets them, but for those that are 0."""
    said = (attribute(kind, _U32.pack(t)) for kind, t in zip(_TIMES, times, strict=True) if t)
    return _GENERIC.pack(Command.SET_CONFIG, 1, 0) + b"".join(said)


def decode_times(body: bytes) -> Times:
    """From the body of an answer to GET_CONFIG."""
    found = attributes(body[_GENERIC.size :])
    return Times(*(number(found.get(kind)) for kind in _TIMES))


def _nest(kind: int, value: bytes) -> bytes:
    return attribute(kind | NESTED, value)


def _service(change: Change) -> bytes:
    service, settings = change.service, change.settings
    v4 = family_of(service.address) == 4
    parts = [attribute(1, _U16.pack(socket.AF_INET if v4 else socket.AF_INET6))]
    if service.mark:
        parts.append(attribute(5, _U32.pack(service.mark)))
    else:
        parts.append(attribute(2, _U16.pack(service.protocol)))
        parts.append(attribute(3, _raw(service.address)))
        parts.append(attribute(4, _PORT.pack(service.port)))
    if settings is not None:
        flags = settings.flags | (ServiceFlag.PERSISTENT if settings.persistence else 0)
        parts.append(attribute(6, settings.scheduler.encode() + b"\0"))
        parts.append(attribute(7, _FLAGS.pack(flags, sum(ServiceFlag))))
        parts.append(attribute(8, _U32.pack(settings.persistence)))
        # Whose persistence is shared: a mask in network order, or the length of an IPv6 prefix.
        parts.append(attribute(9, b"\xff\xff\xff\xff" if v4 else _U32.pack(128)))
    return b"".join(parts)


def _server(server: Server, weight: int) -> bytes:
    v4 = family_of(server.address) == 4
    return b"".join(
        (
            attribute(11, _U16.pack(socket.AF_INET if v4 else socket.AF_INET6)),
            attribute(1, _raw(server.address)),
            attribute(2, _PORT.pack(server.port)),
            attribute(3, _U32.pack(0)),  # masquerading: the address is translated
            attribute(4, _U32.pack(weight)),
            attribute(5, _U32.pack(0)),
            attribute(6, _U32.pack(0)),
        )
    )


def _raw(address: Addr) -> bytes:
    return address[12:] if family_of(address) == 4 else address


def _address(raw: bytes, family: int) -> Addr:
    """The kernel writes 16 bytes for either family."""
    return Addr(V4_PREFIX + raw[:4]) if family == socket.AF_INET else Addr(raw[:16])


def decode_service(body: bytes) -> tuple[Service, Settings]:
    """From the body of an answer to GET_SERVICE."""
    found = attributes(attributes(body[_GENERIC.size :])[_ATTR_SERVICE])
    family = _U16.unpack(found[1])[0]
    any_ = ANY4 if family == socket.AF_INET else ANY6
    mark = number(found.get(5)) & 0xFFFFFFFF
    flags = _FLAGS.unpack(found[7])[0]
    settings = Settings(
        text(found[6]),
        number(found.get(8)) if flags & ServiceFlag.PERSISTENT else 0,
        ServiceFlag(flags & (ServiceFlag.FALLBACK | ServiceFlag.BY_PORT)),
    )
    if mark:
        return Service(socket.IPPROTO_TCP, any_, 0, mark), settings
    address = _address(found[3], family)
    port = _PORT.unpack(found[4])[0]
    return Service(_U16.unpack(found[2])[0], address, port), settings


def decode_counts(body: bytes) -> tuple[Service, Counts]:
    """From the same answer as decode_service(). All 0 before Linux v4.1, which has 32 bits only."""
    found = attributes(attributes(body[_GENERIC.size :])[_ATTR_SERVICE])
    counts = attributes(found.get(_STATS64, b""))
    numbers = (int.from_bytes(counts.get(kind, b""), sys.byteorder) for kind in _COUNTED)
    return decode_service(body)[0], Counts(*numbers)


def decode_server(body: bytes, family: int) -> Load:
    """From the body of an answer to GET_SERVER; `family` is that of the service, 4 or 6."""
    found = attributes(attributes(body[_GENERIC.size :])[_ATTR_DEST])
    usual = socket.AF_INET if family == 4 else socket.AF_INET6
    own = _U16.unpack(found[11])[0] if 11 in found else usual
    server = Server(_address(found[1], own), _PORT.unpack(found[2])[0])
    return Load(server, number(found[4]), number(found.get(7)), number(found.get(8)))


# ---- talking -------------------------------------------------------------------------------------


class Ipvs:
    """A conversation. KernelError with ENOENT where the kernel has no IPVS."""

    def __init__(self) -> None:
        self._netlink = Netlink(NETLINK_GENERIC, "IPVS")
        try:
            self._kind = self._find()
        except KernelError:
            self.close()
            raise

    def _find(self) -> int:
        body = _GET_FAMILY + attribute(_FAMILY_NAME, FAMILY.encode() + b"\0")
        try:
            answer = self._netlink.ask(_CONTROL, body)
        except KernelError as error:
            raise KernelError("this kernel has no IPVS", "", HINT, error.errno) from error
        found = attributes(answer[0].body[_GENERIC.size :])
        return int(_U16.unpack(found[_FAMILY_ID])[0])

    def close(self) -> None:
        """Ends it."""
        self._netlink.close()

    def times(self) -> Times:
        """Those of this network namespace."""
        body = _GENERIC.pack(Command.GET_CONFIG, 1, 0)
        return decode_times(self._netlink.ask(self._kind, body)[0].body)

    def set_times(self, times: Times) -> None:
        """Those that are 0 stay as they are."""
        self._netlink.ask(self._kind, encode_times(times))

    def services(self) -> list[tuple[Service, Settings]]:
        """All virtual services, whoever made them."""
        asked = self._netlink.dump(self._kind, _GENERIC.pack(Command.GET_SERVICE, 1, 0))
        return [decode_service(message.body) for message in asked]

    def settings(self, service: Service) -> Settings | None:
        """Those of one virtual service; None if it is not there."""
        body = encode(Change(Command.GET_SERVICE, service))
        try:
            (answer, *_) = self._netlink.ask(self._kind, body)
        except KernelError as error:
            if error.errno in (errno.ESRCH, errno.ENOENT):
                return None
            raise
        return decode_service(answer.body)[1]

    def counts(self) -> list[tuple[Service, Counts]]:
        """What each virtual service has had, whoever made it."""
        asked = self._netlink.dump(self._kind, _GENERIC.pack(Command.GET_SERVICE, 1, 0))
        return [decode_counts(message.body) for message in asked]

    def servers(self, service: Service) -> list[Load]:
        """The real servers of a virtual service; none if it is not there."""
        body = encode(Change(Command.GET_SERVER, service))
        family = family_of(service.address)
        try:
            asked = self._netlink.dump(self._kind, body)
        except KernelError as error:
            if error.errno in (errno.ESRCH, errno.ENOENT):
                return []
            raise
        return [decode_server(message.body, family) for message in asked]

    def connections(self, service: Service) -> int:
        """How many a virtual service has, those included that have ended and are remembered."""
        return sum(load.active + load.inactive for load in self.servers(service))

    def try_(self, changes: Sequence[Change]) -> list[int]:
        """An errno for each change, in order; 0 for those that were made."""
        creates = (Command.NEW_SERVICE, Command.NEW_SERVER)
        return self._netlink.many(
            [
                Request(self._kind, encode(c), CREATE_EXCLUSIVELY if c.command in creates else 0)
                for c in changes
            ]
        )

    def change(self, changes: Sequence[Change], allowed: Iterable[int] = ()) -> None:
        """Makes all of them. KernelError names the first that was refused, but for these errnos;
        those after it were tried all the same.
        """
        fine = {0, *allowed}
        for change, code in zip(changes, self.try_(changes), strict=True):
            if code not in fine:
                raise KernelError(f"cannot {change}", "IPVS", os.strerror(code), code)
