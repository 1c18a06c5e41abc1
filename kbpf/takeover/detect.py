# SPDX-License-Identifier: Apache-2.0
"""A kube-proxy that runs in this network namespace, and how operators see it.

detect() looks for processes named kube-proxy and queries kube-proxy's default ports. Neither is
enough alone: a pod without hostPID sees only its own processes, k3s runs kube-proxy inside a process
of another name, and a kube-proxy may use other ports. kbpf serves the same ports; it is recognized
by /readyz, which kube-proxy does not have.

KubeProxyState and KubeProxyWatch add whether a kube-proxy left rules. kube_proxy_drain.py decides
what the agent does about it, kube_proxy_cleanup.py what may be removed.
"""

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.net.addresses import parse_proc_address
from kbpf.kernel.system import process
from kbpf.model.address import format_addr
from kbpf.takeover import kube_proxy_cleanup as cleanup

KUBE_PROXY_PORTS: Final = (10249, 10256)
"""kube-proxy's default ports for metrics and its health check."""
KUBE_PROXY_MODES: Final = frozenset((b"iptables", b"ipvs", b"nftables", b"userspace"))
PROBE_TIMEOUT_S: Final = 5.0
"""For an answer; one that is sent slower, byte by byte, is cut off."""
TCP_LISTEN: Final = "0A"
# Where a listener on a wildcard address is queried. `::` usually accepts IPv4 as well.
LOOPBACK: Final = {"0.0.0.0": ("127.0.0.1",), "::": ("127.0.0.1", "::1")}


class Responder(Enum):
    """Which program answers on a port."""

    KUBE_PROXY = "kube-proxy"
    KBPF = "kbpf"
    UNKNOWN = "unknown, or no answer in time"


class Detection(NamedTuple):
    """What was detected. `pids`: kube-proxy processes. `sees_all`: whether all processes of the
    machine are visible. `responders`: listener, as "address port n" → which program answers there.
    """

    pids: tuple[int, ...]
    sees_all: bool
    responders: Mapping[str, Responder]


def require_no_kube_proxy() -> None:
    """Raises KernelError if a kube-proxy runs here, or if that cannot be determined."""
    if error := removal_error(detect()):
        raise error


def removal_error(detection: Detection) -> KernelError | None:
    """Returns the reason why kube-proxy's rules must not be removed, or None."""
    message = "nothing removed: kube-proxy is running on this node"
    hint = "stop it first, or use --force"
    if where := where_it_runs(detection):
        return KernelError(message, where, hint)
    if detection.sees_all or Responder.KBPF in detection.responders.values():
        return None
    return KernelError(
        "nothing removed: cannot tell from here whether kube-proxy runs on this node",
        "not in the node's PID namespace, and kbpf does not answer on kube-proxy's ports "
        + " and ".join(map(str, KUBE_PROXY_PORTS)),
        "run it on the node itself; or make sure that no kube-proxy runs, and use --force",
    )


def detect() -> Detection:
    """Lists kube-proxy processes and queries the listeners on its ports."""
    responders = {}
    for host, port in find_listeners():
        targets = LOOPBACK.get(host, (host,))
        kinds = {identify_responder(partial(http_get, target, port)) for target in targets} - {Responder.UNKNOWN}
        responders[f"{host} port {port}"] = kinds.pop() if kinds else Responder.UNKNOWN
    return Detection(_kube_proxy_pids(), process.is_in_initial_pid_namespace(), responders)


# ---- processes -----------------------------------------------------------------------------------


def _kube_proxy_pids() -> tuple[int, ...]:
    # thread-self: threads of one process may be in different network namespaces.
    own_netns = os.readlink("/proc/thread-self/ns/net")
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            # as bytes: a process, also one of a pod, may have any name
            name_matches = (path / "comm").read_bytes() == b"kube-proxy\n"
            # One in another namespace, such as the node of a kind cluster, serves another node.
            if name_matches and os.readlink(path / "ns/net") == own_netns:
                pids.append(int(path.name))
        except OSError:
            continue  # it has exited
    return tuple(pids)


# ---- ports ---------------------------------------------------------------------------------------


def find_listeners() -> Iterator[tuple[str, int]]:
    """Yields (address, port) of the listening sockets on one of kube-proxy's ports."""
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/thread-self/net/{name}") as lines:
                yield from parse_listeners(lines, KUBE_PROXY_PORTS)
        except OSError:
            continue  # no IPv6


def parse_listeners(lines: Iterator[str], ports: Collection[int]) -> Iterator[tuple[str, int]]:
    """Parses lines of /proc/net/tcp or tcp6. The kernel lists all listening sockets first."""
    next(lines)
    for line in lines:
        _, endpoint, _, state, *_ = line.split()
        if state != TCP_LISTEN:
            return
        address, _, port = endpoint.partition(":")
        if int(port, 16) in ports:
            yield format_addr(parse_proc_address(address)), int(port, 16)


ProbeAnswer = tuple[int, bytes] | None


def identify_responder(get: Callable[[str], ProbeAnswer]) -> Responder:
    """Queries a server and returns which program it is. `get`: path → (status, body), or None
    without an answer.
    """
    # First, since kbpf answers the other two as well.
    if (answer := get("/readyz")) is None:
        return Responder.UNKNOWN
    if answer[1].startswith(b"kbpf "):
        return Responder.KBPF
    if (answer := get("/proxyMode")) is None:
        return Responder.UNKNOWN
    status, body = answer
    if status == 200 and body.strip() in KUBE_PROXY_MODES:
        return Responder.KUBE_PROXY
    if (answer := get("/healthz")) is None:
        return Responder.UNKNOWN
    return Responder.KUBE_PROXY if _is_healthz_of_kube_proxy(answer[1]) else Responder.UNKNOWN


def _is_healthz_of_kube_proxy(body: bytes) -> bool:
    try:
        document = json.loads(body)
    except ValueError:
        return False
    # Both fields are in every reply of kube-proxy's pkg/proxy/healthcheck.
    return isinstance(document, dict) and {"lastUpdated", "currentTime"} <= document.keys()


def http_get(host: str, port: int, path: str) -> ProbeAnswer:
    """Sends GET; returns (status, body), or None on any error."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.connect()
        assert connection.sock is not None
        cut = threading.Timer(PROBE_TIMEOUT_S, _shut_down, (connection.sock,))
        cut.start()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read(1 << 16)
        finally:
            cut.cancel()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed meanwhile
        sock.shutdown(socket.SHUT_RDWR)


# ---- as operators see it -------------------------------------------------------------------------

CLEANUP_HINT: Final = "once this node serves, run `kbpf cleanup --kube-proxy`"
STOP_HINT: Final = "if it is not meant to run beside kbpf, stop it (docs/migration.md); where both serve, kbpf is first"
CHECK_INTERVAL_S: Final = 60.0
MAX_CPU_SHARE: Final = 0.005
"""Of the time of one CPU: reading the rules of a large cluster takes a second."""


class KubeProxyState(NamedTuple):
    """`running`: where it was seen, "" if it was not. `unreadable`: why the rules cannot be read,
    "" if they can.
    """

    running: str = ""
    has_rules: bool = False
    unreadable: str = ""


def find_kube_proxy() -> KubeProxyState:
    """Looks for its process, its ports and its rules. May take seconds if a port does not answer,
    and reads all rules.
    """
    running = where_it_runs(detect())
    try:
        return KubeProxyState(running, cleanup.has_rules())
    except KernelError as error:
        return KubeProxyState(running, unreadable=str(error))


def where_it_runs(detection: Detection) -> str:
    """Where a kube-proxy certainly runs; "" if none does."""
    if detection.pids:
        return f"pid {detection.pids[0]}"
    return next(
        (
            f"it answers on {listener}"
            for listener, responder in detection.responders.items()
            if responder is Responder.KUBE_PROXY
        ),
        "",
    )


class KubeProxyWatch:
    """The state for metrics. refresh() may wait, so it has a thread that may; any thread may read
    `state`.
    """

    def __init__(self) -> None:
        self.state = KubeProxyState()
        self._due = float("-inf")

    def refresh(self) -> None:
        """Looks again if CHECK_INTERVAL_S have passed, and more if looking takes long."""
        if time.monotonic() < self._due:
            return
        start = time.thread_time()
        self.state = find_kube_proxy()
        cost = time.thread_time() - start
        self._due = time.monotonic() + max(CHECK_INTERVAL_S, cost / MAX_CPU_SHARE)


def describe(state: KubeProxyState) -> tuple[str, str]:
    """A line about it and what to do; both "" if there is none."""
    if state.running:
        return f"a kube-proxy runs on this node ({state.running})", STOP_HINT
    if state.has_rules:
        return "a kube-proxy has left rules on this node, which no process updates", CLEANUP_HINT
    return "", ""
