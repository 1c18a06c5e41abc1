# SPDX-License-Identifier: Apache-2.0
"""Netlink sockets: requests, dumps and notifications.

Written by hand, because importing pyroute2 would cost the agent 19 MB. Messages about devices,
addresses and qdiscs are in modules of their own.
"""

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Self

from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.net import uapi
from kbpf.kernel.system import threads
from kbpf.kernel.system.polling import wait_readable

MAX_DUMP_TRIES: Final = 5
"""An interrupted dump (NLM_F_DUMP_INTR) is tried this many times; then we use the last one, because
the monitor of changes reports the change anyway.
"""

MAX_DATAGRAMS: Final = 1024
"""Datagrams received at a time, so that many notifications do not delay the reaction to them."""

LARGE_RCVBUF: Final = 4 << 20
"""Receive buffer in bytes for replies that do not fit into the default (net.core.rmem_default)."""

MAX_REQUESTS_PER_DATAGRAM: Final = 64
"""Requests in one datagram: their replies must fit into the socket's receive buffer."""

AF: Final = {4: socket.AF_INET, 6: socket.AF_INET6}

_NLMSGHDR: Final = struct.Struct("=IHHII")
_NLATTR: Final = struct.Struct("=HH")
_INT32: Final = struct.Struct("=i")


STOP_POLL_INTERVAL_S: Final = 0.5
"""How often a thread that waits for notifications checks whether it should stop."""

CHANGE_INTERVAL_S: Final = 0.1
"""watch() reports a change at once, and those that follow together after this time: an address that
comes and goes all the time must not cost the agent a processor."""


class Message(NamedTuple):
    """A netlink message without its header. `sequence`: of the request that it replies to."""

    msg_type: int
    flags: int
    body: bytes
    sequence: int = 0


class Notifications(NamedTuple):
    """Notifications. `lost`: some were dropped because the buffer was full (ENOBUFS)."""

    messages: list[Message]
    lost: bool


def pack_attribute(attr_type: int, value: bytes) -> bytes:
    """Encodes one attribute, padded to 4 bytes."""
    return _NLATTR.pack(4 + len(value), attr_type) + value + bytes(-len(value) % 4)


def pack_nested(attr_type: int, *inner: bytes) -> bytes:
    """Encodes an attribute that contains these attributes."""
    return pack_attribute(attr_type | uapi.NLA_F_NESTED, b"".join(inner))


def pack_string(attr_type: int, text: str) -> bytes:
    """Encodes an attribute with a zero-terminated string."""
    return pack_attribute(attr_type, text.encode() + b"\0")


def parse_attributes(raw: bytes) -> dict[int, bytes]:
    """Maps attribute types, without the flags for nesting and byte order, to values."""
    return dict(iterate_attributes(raw))


def iterate_attributes(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The same in order, for lists of attributes of one type."""
    while len(raw) >= _NLATTR.size:
        length, attr_type = _NLATTR.unpack_from(raw)
        if length < _NLATTR.size:
            break
        yield attr_type & uapi.NLA_TYPE_MASK, raw[_NLATTR.size : length]
        raw = raw[(length + 3) & ~3 :]  # `length` does not include the padding


def parse_string(raw: bytes) -> str:
    """Decodes a zero-terminated string."""
    return raw.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def parse_int32(raw: bytes | None) -> int:
    """Decodes a 32-bit number; 0 if there is none."""
    return int(_INT32.unpack(raw)[0]) if raw else 0


class NetlinkRequest(NamedTuple):
    """A message to send. NLM_F_REQUEST is added to `flags`, and NLM_F_ACK if it is to be answered."""

    msg_type: int
    body: bytes
    flags: int = 0


class Netlink:
    """A netlink socket in the network namespace in which the thread opens it."""

    def __init__(self, protocol: int, name: str, groups: int = 0) -> None:
        self._protocol = protocol
        self._name = name
        self._groups = groups
        self.socket = self._open()

    def _open(self) -> socket.socket:
        sock_type = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        with kernel_errors("cannot open a netlink socket", self._name):
            sock = socket.socket(socket.AF_NETLINK, sock_type, self._protocol)
            try:
                sock.bind((0, self._groups))
                # Acknowledgements carry the kernel's error text instead of a copy of our request.
                sock.setsockopt(uapi.SOL_NETLINK, uapi.NETLINK_CAP_ACK, 1)
                sock.setsockopt(uapi.SOL_NETLINK, uapi.NETLINK_EXT_ACK, 1)
            except OSError:
                sock.close()
                raise
        return sock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def request(self, msg_type: int, body: bytes, flags: int = 0) -> list[Message]:
        """Sends a request; returns the messages before its acknowledgement. The kernel's error
        text, if any, is the hint of the KernelError.
        """
        return list(self._stream(msg_type, flags | uapi.NLM_F_ACK, body))

    def dump(self, msg_type: int, body: bytes) -> list[Message]:
        """Dumps all objects of one kind. If the replies overflow the receive buffer, the dump is
        repeated with a larger one, unless the socket also receives notifications, which would be
        lost.
        """
        try:
            return self._dump(msg_type, body)
        except KernelError as error:
            if error.errno != errno.ENOBUFS or self._groups:
                raise
        self.close()
        self.socket = self._open()
        for option in (socket.SO_RCVBUF, uapi.SO_RCVBUFFORCE):
            with contextlib.suppress(OSError):  # SO_RCVBUFFORCE needs CAP_NET_ADMIN
                self.socket.setsockopt(socket.SOL_SOCKET, option, LARGE_RCVBUF)
        return self._dump(msg_type, body)

    def _dump(self, msg_type: int, body: bytes) -> list[Message]:
        messages: list[Message] = []
        for _ in range(MAX_DUMP_TRIES):
            messages = list(self.dump_lazily(msg_type, body))
            if not any(message.flags & uapi.NLM_F_DUMP_INTR for message in messages):
                break
        return messages

    def dump_lazily(self, msg_type: int, body: bytes) -> Iterator[Message]:
        """Dumps objects of one kind as the caller asks for them. A caller that stops earlier has to
        close the socket.
        """
        return self._stream(msg_type, uapi.NLM_F_DUMP, body)

    def request_many(self, requests: Sequence[NetlinkRequest]) -> list[int]:
        """Sends all requests in order, regardless of errors; returns an errno for each, 0 for
        success. MAX_REQUESTS_PER_DATAGRAM of them cost two system calls.
        """
        codes: list[int] = []
        for start in range(0, len(requests), MAX_REQUESTS_PER_DATAGRAM):
            codes += self._request_together(requests[start : start + MAX_REQUESTS_PER_DATAGRAM])
        return codes

    def _request_together(self, requests: Sequence[NetlinkRequest]) -> list[int]:
        self._send_together(map(_with_acknowledgement, requests))
        # Each request is acknowledged, several per datagram; the sequence number says which one.
        codes: dict[int, int] = {}
        while len(codes) < len(requests):
            for message in _parse_messages(self._receive()):
                if message.msg_type == uapi.NLMSG_ERROR:
                    codes[message.sequence] = -parse_int32(message.body[:4])
        return [codes[sequence] for sequence in range(len(requests))]

    def _send_together(self, requests: Iterable[NetlinkRequest]) -> None:
        """Sends all requests in one datagram, numbered from 0."""
        self._send(b"".join(_pack_message(request, sequence) for sequence, request in enumerate(requests)))

    def send_batch(self, begin: NetlinkRequest, requests: Sequence[NetlinkRequest], end: NetlinkRequest) -> None:
        """Sends a batch, which takes effect entirely or not at all. Raises KernelError for the
        first error.
        """
        # Only the requests between begin and end ask for an acknowledgement.
        self._send_together((begin, *map(_with_acknowledgement, requests), end))
        acknowledged = 0
        while acknowledged < len(requests):
            for message in _parse_messages(self._receive()):
                if message.msg_type == uapi.NLMSG_ERROR:
                    _raise_for_error(message, self._name)
                    acknowledged += 1

    def receive_notifications(self) -> Notifications:
        """Returns the notifications since the last call, without waiting."""
        messages: list[Message] = []
        lost = False
        for _ in range(MAX_DATAGRAMS):
            try:
                messages += _parse_messages(self.socket.recv(1 << 16, socket.MSG_DONTWAIT))
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise KernelError("cannot receive notifications", self._name, errno=error.errno or 0) from error
                # The buffer overflowed and notifications were dropped. The socket stays usable.
                lost = True
        return Notifications(messages, lost)

    def _stream(self, msg_type: int, flags: int, body: bytes) -> Iterator[Message]:
        self._send(_pack_message(NetlinkRequest(msg_type, body, flags), 1))
        while True:
            for message in _parse_messages(self._receive()):
                # A dump ends with NLMSG_DONE, any other request with an acknowledgement, which is
                # an NLMSG_ERROR with errno 0.
                if message.msg_type in (uapi.NLMSG_ERROR, uapi.NLMSG_DONE):
                    _raise_for_error(message, self._name)
                    return
                yield message

    def _send(self, data: bytes) -> None:
        with kernel_errors("cannot send a request to the kernel", self._name):
            self.socket.send(data)

    def _receive(self) -> bytes:
        with kernel_errors("cannot receive the kernel's reply", self._name):
            return self.socket.recv(1 << 16)


class Rtnetlink(Netlink):
    """A netlink socket for devices, addresses, routes and qdiscs."""

    def __init__(self, groups: int = 0) -> None:
        super().__init__(socket.NETLINK_ROUTE, "rtnetlink", groups)


def _with_acknowledgement(request: NetlinkRequest) -> NetlinkRequest:
    return request._replace(flags=request.flags | uapi.NLM_F_ACK)


def _pack_message(request: NetlinkRequest, sequence: int) -> bytes:
    """Encodes one of the messages in a datagram, padded."""
    msg_type, body, flags = request
    header = _NLMSGHDR.pack(_NLMSGHDR.size + len(body), msg_type, flags | uapi.NLM_F_REQUEST, sequence, 0)
    return header + body + bytes(-len(body) % 4)


def _parse_messages(data: bytes) -> Iterator[Message]:
    """Splits a datagram into its messages."""
    while len(data) >= _NLMSGHDR.size:
        length, msg_type, flags, sequence, _ = _NLMSGHDR.unpack_from(data)
        if length < _NLMSGHDR.size:
            break
        yield Message(msg_type, flags, data[_NLMSGHDR.size : length], sequence)
        data = data[(length + 3) & ~3 :]


def watch(
    groups: int,
    on_change: Callable[[], None],
    stop: threading.Event,
    concerns: Callable[[Notifications], bool] = lambda _: True,
) -> None:
    """Calls `on_change` at once, for changes before it listened, and after notifications for
    `groups` that it `concerns`, at most once in CHANGE_INTERVAL_S, until `stop` is set. Run it in a
    separate thread.
    """
    with Rtnetlink(groups) as netlink:
        on_change()
        while not stop.is_set():
            threads.heartbeat()
            is_readable = wait_readable([netlink.socket.fileno()], STOP_POLL_INTERVAL_S)
            if is_readable and concerns(netlink.receive_notifications()):
                on_change()
                stop.wait(CHANGE_INTERVAL_S)


def _raise_for_error(message: Message, name: str) -> None:
    """Raises KernelError if NLMSG_ERROR or NLMSG_DONE carries an errno. An NLMSG_ERROR has the
    header of our request and then attributes, one of which is the error text.
    """
    code = -parse_int32(message.body[:4])
    if not code:
        return
    attrs = parse_attributes(message.body[4 + _NLMSGHDR.size :]) if message.msg_type == uapi.NLMSG_ERROR else {}
    hint = parse_string(attrs.get(uapi.NLMSGERR_ATTR_MSG, b"")) or (
        "it needs CAP_NET_ADMIN" if code == errno.EPERM else ""
    )
    raise KernelError(f"the kernel refused the {name} request", hint=hint, errno=code)
