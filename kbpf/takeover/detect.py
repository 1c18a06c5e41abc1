"""Whether a kube-proxy runs in this network namespace, as far as one can tell from here.

Processes are looked at, and who answers at kube-proxy's ports is asked. Neither is enough alone: a
pod without hostPID sees its own processes only, k3s has kube-proxy inside of a process of another
name, and a kube-proxy may have been given other ports. Where kbpf answers at these ports it is in
kube-proxy's place: it knows itself by /readyz, which a kube-proxy has not got.
"""

import http.client
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.system import process
from kbpf.model.address import V4_PREFIX, Addr, format_addr

PORTS: Final = (10249, 10256)
"""Of its metrics and its health check, by default."""
MODES: Final = frozenset((b"iptables", b"ipvs", b"nftables", b"userspace"))
SECONDS: Final = 5.0
LISTEN: Final = "0A"
LOOPBACK: Final = {"0.0.0.0": ("127.0.0.1",), "::": ("127.0.0.1", "::1")}


class Who(Enum):
    """Who answers at a port."""

    KUBE_PROXY = "kube-proxy"
    KBPF = "kbpf"
    OTHER = "somebody else, or nobody in time"


class Sight(NamedTuple):
    """What can be seen from here: process ids of kube-proxies, whether all processes of the machine
    are seen, and who answers where.
    """

    pids: tuple[int, ...]
    sees_all: bool
    answers: Mapping[str, Who]


def refuse_beside_kube_proxy() -> None:
    """KernelError when one runs here, or when that cannot be told."""
    if error := objection(look()):
        raise error


def is_seen(sight: Sight) -> bool:
    """Whether one runs here for certain."""
    return bool(sight.pids) or Who.KUBE_PROXY in sight.answers.values()


def objection(sight: Sight) -> KernelError | None:
    """Why kube-proxy's rules are not to be taken away."""
    runs = "nothing is removed: kube-proxy runs here"
    stop = "stop it first, or use --force"
    if sight.pids:
        return KernelError(runs, f"pid {sight.pids[0]}", stop)
    for at, who in sight.answers.items():
        if who is Who.KUBE_PROXY:
            return KernelError(runs, f"it answers at {at}", stop)
    if sight.sees_all or Who.KBPF in sight.answers.values():
        return None
    return KernelError(
        "nothing is removed: whether a kube-proxy runs on this node cannot be seen from here",
        "another PID namespace than the node's, and kbpf does not answer at kube-proxy's ports "
        + " and ".join(map(str, PORTS)),
        "call it on the node itself; or make sure that none runs, and use --force",
    )


def look() -> Sight:
    """What can be seen from here."""
    answers = {}
    for host, port in listeners():
        places = LOOPBACK.get(host, (host,))
        found = {who(partial(ask, place, port)) for place in places} - {Who.OTHER}
        answers[f"{host} port {port}"] = found.pop() if found else Who.OTHER
    return Sight(_pids(), process.sees_all(), answers)


# ---- processes -----------------------------------------------------------------------------------


def _pids() -> tuple[int, ...]:
    """Of kube-proxies in this network namespace, as far as we see processes."""
    here = os.readlink("/proc/thread-self/ns/net")
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            named = (path / "comm").read_text().strip() == "kube-proxy"
            if named and os.readlink(path / "ns/net") == here:
                found.append(int(path.name))
        except OSError:
            continue  # it has ended
    return tuple(found)


# ---- ports ---------------------------------------------------------------------------------------


def listeners() -> Iterator[tuple[str, int]]:
    """The addresses at which somebody listens at one of kube-proxy's ports."""
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/thread-self/net/{name}") as lines:
                yield from listening(lines, PORTS)
        except OSError:
            continue  # no IPv6


def listening(lines: Iterator[str], ports: Collection[int]) -> Iterator[tuple[str, int]]:
    """Those among the lines of /proc/net/tcp or tcp6, in which all that listen stand first."""
    next(lines)
    for line in lines:
        _, at, _, state, *_ = line.split()
        if state != LISTEN:
            return
        address, _, port = at.partition(":")
        if int(port, 16) in ports:
            yield _address(address), int(port, 16)


def _address(text: str) -> str:
    """Of words in the machine's own byte order."""
    words = (int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return format_addr(Addr(V4_PREFIX + raw if len(raw) == 4 else raw))


Answered = tuple[int, bytes] | None


def who(asked: Callable[[str], Answered]) -> Who:
    """Who it is that answers so: path → status and body, None for no answer."""
    for path, tells in SIGNS:
        answer = asked(path)
        if answer is None:
            return Who.OTHER
        if (found := tells(*answer)) is not None:
            return found
    return Who.OTHER


def _is_ours(_: int, body: bytes) -> Who | None:
    return Who.KBPF if body.startswith(b"kbpf ") else None


def _is_a_mode(status: int, body: bytes) -> Who | None:
    return Who.KUBE_PROXY if status == 200 and body.strip() in MODES else None


def _is_health(_: int, body: bytes) -> Who | None:
    try:
        said = json.loads(body)
    except ValueError:
        return None
    known = isinstance(said, dict) and {"lastUpdated", "currentTime"} <= said.keys()
    return Who.KUBE_PROXY if known else None


SIGNS: Final = (("/readyz", _is_ours), ("/proxyMode", _is_a_mode), ("/healthz", _is_health))


def ask(host: str, port: int, path: str) -> Answered:
    """GET; None when nothing comes of it."""
    connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(1 << 16)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
