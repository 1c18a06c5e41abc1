"""Rtnetlink: asking the kernel about its network, and hearing of changes.

By hand instead of pyroute2, whose import costs the agent 19 MB. What is said in it about devices,
addresses and queueing disciplines is in modules of their own.
"""

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Self

from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.system import threads
from kbpf.kernel.system.polling import readable

NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
REQUEST: Final = 0x1  # NLM_F_REQUEST
REQUEST_ACK: Final = 0x5  # NLM_F_REQUEST | NLM_F_ACK
REQUEST_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
INTERRUPTED: Final = 0x10  # NLM_F_DUMP_INTR
SO_RCVBUFFORCE: Final = 33
SOL_NETLINK: Final = 270
NETLINK_CAP_ACK: Final = 10
NETLINK_EXT_ACK: Final = 11
GROUP_LINK: Final = 0x1  # RTMGRP_LINK
GROUP_ADDRESSES: Final = 0x10 | 0x100  # RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR

DUMP_TRIES: Final = 5
"""A dump that a change ran into is asked for again; in a storm the last one has to do, because
whoever watches is told of the change anyway."""

MOST_NEWS: Final = 1024
"""Datagrams that are taken at a time: a storm must not keep anybody from acting on it."""

LARGE: Final = 4 << 20
"""Bytes of a buffer for answers that did not fit into the usual one (net.core.rmem_default)."""

AT_ONCE: Final = 64
"""Requests in one datagram: their answers must fit into the socket's buffer."""

_HEADER: Final = struct.Struct("=IHHII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_NUMBER: Final = struct.Struct("=i")


TURN_SECONDS: Final = 0.5
"""So often a thread that waits for news looks whether it is to end."""


class Message(NamedTuple):
    """One netlink message without its header."""

    kind: int
    flags: int
    body: bytes


class News(NamedTuple):
    """Messages that nobody asked for; `lost`: there were more than fit (ENOBUFS)."""

    messages: list[Message]
    lost: bool


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded."""
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(raw: bytes) -> dict[int, bytes]:
    """The attributes by type, without the flags for nesting and byte order."""
    found = {}
    while len(raw) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(raw)
        if length < _ATTRIBUTE.size:
            break
        found[kind & 0x3FFF] = raw[_ATTRIBUTE.size : length]
        raw = raw[(length + 3) & ~3 :]
    return found


def text(raw: bytes) -> str:
    """A string as the kernel writes it: it ends with a zero byte."""
    return raw.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def number(raw: bytes | None) -> int:
    """A number of 32 bits; 0 if there is none."""
    return int(_NUMBER.unpack(raw)[0]) if raw else 0


class Request(NamedTuple):
    """One message of many that are sent together; `flags` beside those of REQUEST_ACK."""

    kind: int
    body: bytes
    flags: int = 0


class Netlink:
    """A conversation with the network namespace that this thread is in when it begins."""

    def __init__(self, protocol: int, name: str, groups: int = 0) -> None:
        self._protocol = protocol
        self._name = name
        self._groups = groups
        self.socket = self._open()

    def _open(self) -> socket.socket:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        with kernel_errors("cannot open a netlink socket", self._name):
            made = socket.socket(socket.AF_NETLINK, kind, self._protocol)
            try:
                made.bind((0, self._groups))
                # Errors come with the kernel's own words instead of our request.
                made.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
                made.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
            except OSError:
                made.close()
                raise
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it."""
        self.socket.close()

    def ask(self, kind: int, body: bytes, flags: int = 0) -> list[Message]:
        """What the kernel says before it acknowledges. A refusal's hint is the kernel's words."""
        return self._talk(kind, flags | REQUEST_ACK, body)

    def dump(self, kind: int, body: bytes) -> list[Message]:
        """Everything of one kind. What does not fit into the socket's buffer is asked for again
        with a larger one, unless the socket hears of changes, too: some of those are lost then.
        """
        try:
            return self._dump(kind, body)
        except KernelError as error:
            if error.errno != errno.ENOBUFS or self._groups:
                raise
        self.close()
        self.socket = self._open()
        for option in (socket.SO_RCVBUF, SO_RCVBUFFORCE):
            with contextlib.suppress(OSError):  # the second needs CAP_NET_ADMIN
                self.socket.setsockopt(socket.SOL_SOCKET, option, LARGE)
        return self._dump(kind, body)

    def _dump(self, kind: int, body: bytes) -> list[Message]:
        found: list[Message] = []
        for _ in range(DUMP_TRIES):
            found = self._talk(kind, REQUEST_DUMP, body)
            if not any(message.flags & INTERRUPTED for message in found):
                break
        return found

    def many(self, requests: Sequence[Request]) -> list[int]:
        """Asks for all of them, in order, whatever becomes of the others; an errno for each, 0 for
        those that were done. AT_ONCE of them cost two system calls.
        """
        codes: list[int] = []
        for start in range(0, len(requests), AT_ONCE):
            codes += self._send_together(requests[start : start + AT_ONCE])
        return codes

    def _send_together(self, requests: Sequence[Request]) -> list[int]:
        text = bytearray()
        for number_, (kind, body, flags) in enumerate(requests):
            text += _message(kind, flags | REQUEST_ACK, number_, body)
        self._send(text)
        codes: dict[int, int] = {}
        while len(codes) < len(requests):
            data = self._receive()
            while len(data) >= _HEADER.size:
                length, kind, _, asked, _ = _HEADER.unpack_from(data)
                if kind == NLMSG_ERROR:
                    codes[asked] = -number(data[_HEADER.size : _HEADER.size + 4])
                data = data[max(_HEADER.size, (length + 3) & ~3) :]
        return [codes[asked] for asked in range(len(requests))]

    def batch(self, begin: Request, requests: Sequence[Request], end: Request) -> None:
        """Asks for all of them or none. KernelError with the first refusal."""
        framed = ((begin, 0), *((one, REQUEST_ACK) for one in requests), (end, 0))
        text = bytearray()
        for number_, ((kind, body, flags), more) in enumerate(framed):
            text += _message(kind, flags | more | REQUEST, number_, body)
        self._send(text)
        done = 0
        while done < len(requests):
            for message in _messages(self._receive()):
                if message.kind == NLMSG_ERROR:
                    _refusal(message, self._name)
                    done += 1

    def news(self) -> News:
        """What was told since the last time; nothing if nothing waits."""
        found: list[Message] = []
        lost = False
        for _ in range(MOST_NEWS):
            try:
                found += _messages(self.socket.recv(1 << 16, socket.MSG_DONTWAIT))
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise KernelError(
                        "cannot hear of changes", self._name, errno=error.errno or 0
                    ) from error
                lost = True
        return News(found, lost)

    def _talk(self, kind: int, flags: int, body: bytes) -> list[Message]:
        self._send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)
        found: list[Message] = []
        while True:
            for message in _messages(self._receive()):
                if message.kind in (NLMSG_ERROR, NLMSG_DONE):
                    _refusal(message, self._name)
                    return found
                found.append(message)

    def _send(self, data: bytes | bytearray) -> None:
        with kernel_errors("cannot ask the kernel", self._name):
            self.socket.send(data)

    def _receive(self) -> bytes:
        with kernel_errors("cannot hear the kernel's answer", self._name):
            return self.socket.recv(1 << 16)


class Rtnetlink(Netlink):
    """Devices, addresses and the like."""

    def __init__(self, groups: int = 0) -> None:
        super().__init__(socket.NETLINK_ROUTE, "rtnetlink", groups)


def _message(kind: int, flags: int, number_: int, body: bytes) -> bytes:
    """One of several in a datagram, padded."""
    head = _HEADER.pack(_HEADER.size + len(body), kind, flags, number_, 0)
    return head + body + bytes(-len(body) % 4)


def _messages(data: bytes) -> Iterator[Message]:
    """What one datagram says."""
    while len(data) >= _HEADER.size:
        length, kind, flags, *_ = _HEADER.unpack_from(data)
        if length < _HEADER.size:
            break
        yield Message(kind, flags, data[_HEADER.size : length])
        data = data[(length + 3) & ~3 :]


def watch(groups: int, changed: Callable[[], None], stop: threading.Event) -> None:
    """Calls `changed` at once, for what happened before there was somebody to hear it, and after
    each change that these groups tell of, until `stop` is set. Runs in its thread.
    """
    with Rtnetlink(groups) as netlink:
        changed()
        while not stop.is_set():
            threads.beat()
            if readable([netlink.socket.fileno()], TURN_SECONDS):
                netlink.news()
                changed()


def _refusal(message: Message, name: str) -> None:
    """Raises what the end of an answer says: 0 or -errno; our header and the words behind it."""
    code = -number(message.body[:4])
    if not code:
        return
    words = attributes(message.body[4 + _HEADER.size :]) if message.kind == NLMSG_ERROR else {}
    hint = text(words.get(1, b"")) or ("it needs CAP_NET_ADMIN" if code == errno.EPERM else "")
    raise KernelError(f"{name} refuses", hint=hint, errno=code)
