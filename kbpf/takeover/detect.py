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

KUBE_PROXY_PORTS: Final = (10249, 10256)
"""Of its metrics and its health check, by default."""
KUBE_PROXY_MODES: Final = frozenset((b"iptables", b"ipvs", b"nftables", b"userspace"))
PROBE_TIMEOUT_S: Final = 5.0
TCP_LISTEN: Final = "0A"
LOOPBACK: Final = {"0.0.0.0": ("127.0.0.1",), "::": ("127.0.0.1", "::1")}


class Responder(Enum):
    """Who answers at a port."""

    KUBE_PROXY = "kube-proxy"
    KBPF = "kbpf"
    UNKNOWN = "somebody else, or nobody in time"


class Detection(NamedTuple):
    """What can be seen from here: process ids of kube-proxies, whether all processes of the machine
    are seen, and who answers where.
    """

    pids: tuple[int, ...]
    sees_all: bool
    responders: Mapping[str, Responder]


def require_no_kube_proxy() -> None:
    """KernelError when one runs here, or when that cannot be told."""
    if error := removal_error(detect()):
        raise error


def is_kube_proxy_running(detection: Detection) -> bool:
    """Whether one runs here for certain."""
    return bool(detection.pids) or Responder.KUBE_PROXY in detection.responders.values()


def removal_error(detection: Detection) -> KernelError | None:
    """Why kube-proxy's rules are not to be taken away."""
    message = "nothing is removed: kube-proxy runs here"
    hint = "stop it first, or use --force"
    if detection.pids:
        return KernelError(message, f"pid {detection.pids[0]}", hint)
    for listener, responder in detection.responders.items():
        if responder is Responder.KUBE_PROXY:
            return KernelError(message, f"it answers at {listener}", hint)
    if detection.sees_all or Responder.KBPF in detection.responders.values():
        return None
    return KernelError(
        "nothing is removed: whether a kube-proxy runs on this node cannot be seen from here",
        "another PID namespace than the node's, and kbpf does not answer at kube-proxy's ports "
        + " and ".join(map(str, KUBE_PROXY_PORTS)),
        "call it on the node itself; or make sure that none runs, and use --force",
    )


def detect() -> Detection:
    """What can be seen from here."""
    responders = {}
    for host, port in find_listeners():
        targets = LOOPBACK.get(host, (host,))
        kinds = {identify_responder(partial(http_get, target, port)) for target in targets} - {
            Responder.UNKNOWN
        }
        responders[f"{host} port {port}"] = kinds.pop() if kinds else Responder.UNKNOWN
    return Detection(_kube_proxy_pids(), process.is_in_initial_pid_namespace(), responders)


# ---- processes -----------------------------------------------------------------------------------


def _kube_proxy_pids() -> tuple[int, ...]:
    """Of kube-proxies in this network namespace, as far as we see processes."""
    own_netns = os.readlink("/proc/thread-self/ns/net")
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name_matches = (path / "comm").read_text().strip() == "kube-proxy"
            if name_matches and os.readlink(path / "ns/net") == own_netns:
                pids.append(int(path.name))
        except OSError:
            continue  # it has ended
    return tuple(pids)


# ---- ports ---------------------------------------------------------------------------------------


def find_listeners() -> Iterator[tuple[str, int]]:
    """The addresses at which somebody listens at one of kube-proxy's ports."""
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/thread-self/net/{name}") as lines:
                yield from parse_listeners(lines, KUBE_PROXY_PORTS)
        except OSError:
            continue  # no IPv6


def parse_listeners(lines: Iterator[str], ports: Collection[int]) -> Iterator[tuple[str, int]]:
    """Those among the lines of /proc/net/tcp or tcp6, in which all that listen stand first."""
    next(lines)
    for line in lines:
        _, endpoint, _, state, *_ = line.split()
        if state != TCP_LISTEN:
            return
        address, _, port = endpoint.partition(":")
        if int(port, 16) in ports:
            yield _parse_address(address), int(port, 16)


def _parse_address(text: str) -> str:
    """Of words in the machine's own byte order."""
    chunks = (int(text[offset : offset + 8], 16) for offset in range(0, len(text), 8))
    raw = b"".join(chunk.to_bytes(4, sys.byteorder) for chunk in chunks)
    return format_addr(Addr(V4_PREFIX + raw if len(raw) == 4 else raw))


ProbeAnswer = tuple[int, bytes] | None


def identify_responder(get: Callable[[str], ProbeAnswer]) -> Responder:
    """Who it is that answers so: path → status and body, None for no answer."""
    for path, recognize in PROBES:
        answer = get(path)
        if answer is None:
            return Responder.UNKNOWN
        if (responder := recognize(*answer)) is not None:
            return responder
    return Responder.UNKNOWN


def _recognize_kbpf(_: int, body: bytes) -> Responder | None:
    return Responder.KBPF if body.startswith(b"kbpf ") else None


def _recognize_proxy_mode(status: int, body: bytes) -> Responder | None:
    return Responder.KUBE_PROXY if status == 200 and body.strip() in KUBE_PROXY_MODES else None


def _recognize_healthz(_: int, body: bytes) -> Responder | None:
    try:
        document = json.loads(body)
    except ValueError:
        return None
    is_kube_proxy = isinstance(document, dict) and {"lastUpdated", "currentTime"} <= document.keys()
    return Responder.KUBE_PROXY if is_kube_proxy else None


PROBES: Final = (
    ("/readyz", _recognize_kbpf),
    ("/proxyMode", _recognize_proxy_mode),
    ("/healthz", _recognize_healthz),
)


def http_get(host: str, port: int, path: str) -> ProbeAnswer:
    """GET; None when nothing comes of it."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(1 << 16)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
