"""`kbpf check --attached`: proof that the hooks of the running agent work, by real connections.

A child process in the hooked cgroup goes into a network namespace of its own, where the addresses
of a Service's backends, and nothing else, are on loopback and served by itself. It dials the
Service. Only a connection that the hooks translate can arrive, and where it arrives shows to which
backend; no packet leaves the namespace, so the real backends notice nothing. (A connect() from the
node's own namespace would either knock at a backend or prove little: UDP alone, and only the
address that getpeername() is told.)

With --socket-lb hostNamespaceOnly it is the other way round: only sockets of the node's own network
are led anywhere. There the child connects in the node's own namespace, without a packet (dial.py,
silently()), and one in a namespace of its own must get nowhere.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from kbpf.checks.row import CheckRow
from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.maps.layout import ServiceFlag, ServiceValue
from kbpf.dataplane.bpf.programs import foreign
from kbpf.errors import KernelError
from kbpf.kernel.net import dial
from kbpf.kernel.system import cgroups, netns, sandbox
from kbpf.model.address import family_of, format_addr
from kbpf.model.config import SocketLb
from kbpf.model.desired import Backend, FrontendAddress
from kbpf.model.objects import Protocol

NEEDS: Final = Part.SERVICES | Part.HOOKS
MOST_BACKENDS: Final = 64
"""A bigger set is not tried: each of its backends is an address and a socket in the sandbox."""

Place = tuple[str, int]
Target = tuple[FrontendAddress, tuple[Backend, ...]]


def targets(snapshot: Snapshot) -> tuple[Target, ...]:
    """For each family and protocol the ClusterIP with the fewest backends, without session
    affinity where possible: what is dialled to see whether it works.
    """
    best: dict[tuple[int, Protocol], tuple[tuple[bool, int, FrontendAddress], Target]] = {}
    for at, value in snapshot.frontends.items():
        backends = _behind(value, snapshot)
        if (
            at.protocol not in (Protocol.TCP, Protocol.UDP)
            or not 0 < len(backends) <= MOST_BACKENDS
        ):
            continue
        rank = (value.affinity_timeout > 0, len(backends), at)
        key = (family_of(at.address), at.protocol)
        if key not in best or rank < best[key][0]:
            best[key] = (rank, (at, backends))
    return tuple(target for _, (_, target) in sorted(best.items()))


def _behind(value: ServiceValue, snapshot: Snapshot) -> tuple[Backend, ...]:
    flags = ServiceFlag(value.flags)
    if ServiceFlag.CLUSTER_IP not in flags or ServiceFlag.RESTRICTED in flags:
        return ()
    local = ServiceFlag.INTERNAL_LOCAL in flags
    slots = snapshot.sets.get(value.local_set if local else value.cluster_set, {})
    distinct = sorted(set(slots.values()))
    found = tuple(snapshot.backends[b] for b in distinct if b in snapshot.backends)
    return found if len(found) == len(distinct) else ()


def rows(snapshot: Snapshot) -> Iterator[CheckRow]:
    """Whether the hooks are attached, and whether they do what they should."""
    if snapshot.socket_lb is SocketLb.OFF:
        yield _none_attached(snapshot)
        return
    missing = [f.hook.name for f in snapshot.hooks if f.hook.required and not f.attached]
    yield CheckRow(
        "attached", "no" if missing else "yes", True, ", ".join(missing) or "all needed hooks",
        "start the agent: `kbpf run`" if missing else "",
    )  # fmt: skip
    if missing:
        return
    connect = next(f for f in snapshot.hooks if f.attached)
    if connect.cgroup is None:
        yield _unproven("the hooked cgroup is not visible from here", "run it on the host")
        return
    found = targets(snapshot)
    if not found:
        yield _unproven(
            "no ClusterIP with backends is programmed", "create a Service and try again"
        )
    if snapshot.socket_lb is SocketLb.HOST_ONLY:
        yield from _host_only(found, snapshot.host_netns, connect.cgroup)
        return
    with_names = any(f.hook.name.startswith("getpeername") and f.attached for f in snapshot.hooks)
    for at, backends in found:
        name = f"dial {at}"
        try:
            arrived, shown = _run(partial(_dial, at, backends), connect.cgroup)
        except KernelError as error:
            hint = "see `kbpf inspect service` and the agent's log"
            yield CheckRow(name, "no", True, str(error), hint)
            continue
        yield _judge(name, at, arrived, shown, with_names)


def others(snapshot: Snapshot) -> Iterator[CheckRow]:
    """A row for each program of another load balancer beside those of the agent."""
    cgroup = next((f.cgroup for f in snapshot.hooks if f.attached), None)
    for line in foreign.lines(foreign.all_of(snapshot.pin_dir, cgroup)):
        yield CheckRow("alone at its hooks", "no", False, line, "see docs/troubleshoot.md")


def _none_attached(snapshot: Snapshot) -> CheckRow:
    left = [f.hook.name for f in snapshot.hooks if f.attached]
    return CheckRow(
        "attached", "no" if left else "yes", True,
        f"still there: {', '.join(left)}" if left else "no hook, as --socket-lb off wants it",
        "restart the agent" if left else "",
    )  # fmt: skip


def _host_only(found: Sequence[Target], host_netns: int, cgroup: Path) -> Iterator[CheckRow]:
    """The node's own sockets are led to a backend, and those of another namespace are not."""
    if netns.cookie() != host_netns:
        yield _unproven("this is not the node's own network", "run it on the host")
        return
    for at, backends in found:
        kind = socket.SOCK_STREAM if at.protocol is Protocol.TCP else socket.SOCK_DGRAM
        dialled = (format_addr(at.address), at.port)
        name = f"dial {at} from the host"
        try:
            arrived, shown = _run(partial(dial.silently, dialled, kind), cgroup, apart=False)
        except KernelError as error:
            yield CheckRow(name, "no", True, str(error), "see the agent's log")
            continue
        if arrived not in {(format_addr(b.address), b.port) for b in backends}:
            detail = f"led to {arrived[0]} port {arrived[1]}, which is no backend"
            yield CheckRow(name, "no", True, detail, "see the agent's log")
            continue
        yield _judge(name, at, arrived, shown, with_names=True)
    for at, backends in found[:1]:
        name = f"leave {at} from a pod"
        try:
            arrived, _ = _run(partial(_dial, at, backends), cgroup)
        except KernelError:
            yield CheckRow(name, "yes", True, "it is for the packet path", "")
            continue
        detail = f"led to {arrived[0]} port {arrived[1]}"
        yield CheckRow(name, "no", True, detail, "see the agent's log")


def _run(action: Callable[[], object], cgroup: Path, apart: bool = True) -> tuple[Place, Place]:
    """Where it arrived and what the client was shown, from a cgroup below this one: a new one, or
    where the hierarchy is mounted read-only, as in our pod, that of this process.
    """
    with contextlib.ExitStack() as stack:
        folder: Path | None = None
        try:
            name = f"kbpf-check-dial-{os.getpid()}"
            folder = stack.enter_context(cgroups.temporary(cgroup, name))
        except KernelError as error:
            if error.errno != errno.EROFS:
                raise
        arrived, shown = sandbox.run(action, folder, apart)
    return tuple(arrived), tuple(shown)


def _unproven(why: str, advice: str) -> CheckRow:
    return CheckRow("dial", "unknown", True, why, advice)


def _judge(
    name: str, at: FrontendAddress, arrived: Place, shown: Place, with_names: bool
) -> CheckRow:
    dialled = (format_addr(at.address), at.port)
    detail = f"arrived at {arrived[0]} port {arrived[1]}"
    if shown != dialled and (with_names or at.protocol is Protocol.UDP):
        detail += f", but the client is shown {shown[0]} port {shown[1]}"
        return CheckRow(name, "no", True, detail, "see the agent's log")
    return CheckRow(name, "yes", True, detail, "")


def _dial(at: FrontendAddress, backends: tuple[Backend, ...]) -> tuple[Place, Place]:
    """In the sandbox."""
    from kbpf.kernel.net.links import Links

    prefix = 32 if family_of(at.address) == 4 else 128
    with Links() as links:
        links.up("lo")
        for address in {b.address for b in backends}:
            links.address("lo", format_addr(address), prefix)
    call = dial.tcp if at.protocol is Protocol.TCP else dial.udp
    return call(
        (format_addr(at.address), at.port), [(format_addr(b.address), b.port) for b in backends]
    )
