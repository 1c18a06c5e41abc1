# SPDX-License-Identifier: Apache-2.0
"""`kbpf check --attached`: proves with real connections that the attached hooks work.

A child process in the hooked cgroup enters a new network namespace, which a pair of devices connects
to the node, like a pod's. There it adds the addresses of a Service's backends to the loopback
device, listens on them itself and dials the Service. A connection can arrive only if a hook
translates it, and where it arrives shows which backend was chosen. No packet leaves the namespace,
so the real backends notice nothing. (A connect() in the node's own namespace would either reach a
real backend or prove little: only UDP works without a packet, and it shows only the address that
getpeername() returns.)

With --socket-lb hostNamespaceOnly it is reversed: only sockets in the node's own network namespace
are translated. Then the child connects in the node's namespace without sending a packet
(dial.connect_without_packets()), and a connection from a new namespace must fail.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from kbpf.checks.row import Check, CheckRow
from kbpf.dataplane.bpf.packet_path.device_roles import OWN_PREFIX
from kbpf.errors import KernelError
from kbpf.kernel.net import dial
from kbpf.kernel.system import cgroups, netns, sandbox
from kbpf.model.address import family_of, format_addr
from kbpf.model.config import SocketLb
from kbpf.model.desired import Backend, FrontendAddress, FrontendKind
from kbpf.model.inspection import FrontendEntry, Inspection, Part, ServicePort
from kbpf.model.objects import Protocol

NEEDS: Final = Part.SERVICES | Part.HOOKS | Part.STATUS | Part.PACKETS
MAX_BACKENDS: Final = 64
"""Larger sets are not tested: each backend needs an address and a socket in the sandbox."""

SEE_LOG: Final = "see the agent's log"
_row: Final = partial(CheckRow, needed=True)

SocketAddress = tuple[str, int]
DialTarget = tuple[FrontendAddress, tuple[Backend, ...]]


def select_targets(inspection: Inspection) -> tuple[DialTarget, ...]:
    """Returns what to dial for each family and protocol: the ClusterIP with the fewest backends,
    without session affinity where possible.
    """
    best: dict[tuple[int, Protocol], tuple[tuple[bool, int, FrontendAddress], DialTarget]] = {}
    for port in inspection.services:
        for frontend in port.frontends:
            at, backends = frontend.at, _cluster_ip_backends(port, frontend)
            if at.protocol not in (Protocol.TCP, Protocol.UDP) or not 0 < len(backends) <= MAX_BACKENDS:
                continue
            rank = (port.affinity_timeout > 0, len(backends), at)
            key = (family_of(at.address), at.protocol)
            if key not in best or rank < best[key][0]:
                best[key] = (rank, (at, backends))
    return tuple(target for _, (_, target) in sorted(best.items()))


def _cluster_ip_backends(port: ServicePort, frontend: FrontendEntry) -> tuple[Backend, ...]:
    if frontend.kind is not FrontendKind.CLUSTER_IP or frontend.restricted:
        return ()
    slots = (frontend.local if port.internal_local else frontend.cluster).slots
    # Each once: a backend has several slots if it has a weight, or with Maglev.
    entries = sorted(set(slots.values()), key=lambda entry: entry.id or 0)
    backends = tuple(entry.backend for entry in entries if entry.backend is not None)
    return backends if len(backends) == len(entries) else ()


def check_attached(inspection: Inspection, parent: Path | None = None) -> Iterator[CheckRow]:
    """Yields rows: whether the hooks are attached, and whether each target can be dialled.
    `parent`: the cgroup below which clients run; None: the hooked one.
    """
    if inspection.socket_lb is SocketLb.OFF:
        yield _not_attached_row(inspection)
        return
    missing = [f.name for f in inspection.hooks if f.required and not f.attached]
    if missing:
        yield _row(Check.ATTACHED, "no", ", ".join(missing), "start the agent: `kbpf run`")
        return
    yield _row(Check.ATTACHED, "yes", "all needed hooks")
    connect = next(f for f in inspection.hooks if f.attached)
    if not connect.cgroup:
        yield _row(Check.DIAL, "unknown", "the hooked cgroup is not visible here", "run it on the host")
        return
    dial_targets = select_targets(inspection)
    if not dial_targets:
        yield _row(Check.DIAL, "unknown", "no ClusterIP with backends is programmed", "create a Service and try again")
    cgroup = parent or Path(connect.cgroup)
    if inspection.socket_lb is SocketLb.HOST_NAMESPACE_ONLY:
        yield from _host_only_rows(dial_targets, inspection.host_netns, cgroup)
        return
    has_peer_name_hooks = any(f.name.startswith("getpeername") and f.attached for f in inspection.hooks)
    for frontend, backends in dial_targets:
        try:
            destination, peer_name = _dial_in_sandbox(frontend, backends, cgroup)
        except KernelError as error:
            hint = "see `kbpf inspect service` and the agent's log"
            yield _row(Check.DIAL.of(str(frontend)), "no", str(error), hint)
            continue
        yield _dial_row(Check.DIAL.of(str(frontend)), frontend, destination, peer_name, has_peer_name_hooks)


def _not_attached_row(inspection: Inspection) -> CheckRow:
    remaining = [f.name for f in inspection.hooks if f.attached]
    if remaining:
        return _row(Check.ATTACHED, "no", f"still attached: {', '.join(remaining)}", "restart the agent")
    return _row(Check.ATTACHED, "yes", "no hook, as --socket-lb off requires")


def _host_only_rows(dial_targets: Sequence[DialTarget], host_netns: int, cgroup: Path) -> Iterator[CheckRow]:
    """Sockets of the node must reach a backend, and sockets of another namespace must not."""
    if netns.read_cookie() != host_netns:
        yield _row(Check.DIAL, "unknown", "not in the node's own network namespace", "run it on the host")
        return
    for frontend, backends in dial_targets:
        kind = socket.SOCK_STREAM if frontend.protocol is Protocol.TCP else socket.SOCK_DGRAM
        service_address = (format_addr(frontend.address), frontend.port)
        name = Check.DIAL.of(f"{frontend} from the host")
        try:
            destination, peer_name = _run_in_cgroup(
                partial(dial.connect_without_packets, service_address, kind), cgroup, isolated=False
            )
        except KernelError as error:
            yield _row(name, "no", str(error), SEE_LOG)
            continue
        if destination not in {(format_addr(b.address), b.port) for b in backends}:
            detail = f"arrived at {destination[0]} port {destination[1]}, which is not a backend"
            yield _row(name, "no", detail, SEE_LOG)
            continue
        yield _dial_row(name, frontend, destination, peer_name, has_peer_name_hooks=True)
    for frontend, backends in dial_targets[:1]:
        not_from_pod = partial(_row, Check.NO_DIAL_FROM_POD.of(str(frontend)))
        try:
            destination, _ = _dial_in_sandbox(frontend, backends, cgroup)
        except KernelError:
            yield not_from_pod("yes", "not translated at connect(); left to the packet path")
            continue
        yield not_from_pod("no", f"arrived at {destination[0]} port {destination[1]}", SEE_LOG)


def _dial_in_sandbox(
    frontend: FrontendAddress, backends: tuple[Backend, ...], cgroup: Path
) -> tuple[SocketAddress, SocketAddress]:
    """See _run_in_cgroup()."""
    with open("/proc/thread-self/ns/net") as own:
        action = partial(_dial, frontend, backends, Path(f"/proc/self/fd/{own.fileno()}"))
        return _run_in_cgroup(action, cgroup)


def _run_in_cgroup(
    action: Callable[[], object], cgroup: Path, isolated: bool = True
) -> tuple[SocketAddress, SocketAddress]:
    """Returns (where the connection arrived, the peer name that the client saw).

    The client runs in a new cgroup below `cgroup`; if the hierarchy is mounted read-only, as in
    our pod, it stays in the cgroup of this process.
    """
    with contextlib.ExitStack() as stack:
        child_cgroup: Path | None = None
        try:
            name = f"kbpf-check-dial-{os.getpid()}"
            child_cgroup = stack.enter_context(cgroups.temporary(cgroup, name))
        except KernelError as error:
            if error.errno != errno.EROFS:
                raise
        destination, peer_name = sandbox.run(action, child_cgroup, isolated)
    return tuple(destination), tuple(peer_name)


def _dial_row(
    name: str,
    frontend: FrontendAddress,
    destination: SocketAddress,
    peer_name: SocketAddress,
    has_peer_name_hooks: bool,
) -> CheckRow:
    service_address = (format_addr(frontend.address), frontend.port)
    detail = f"arrived at {destination[0]} port {destination[1]}"
    if peer_name != service_address and (has_peer_name_hooks or frontend.protocol is Protocol.UDP):
        detail += f", but getpeername() shows {peer_name[0]} port {peer_name[1]}"
        return _row(name, "no", detail, SEE_LOG)
    return _row(name, "yes", detail)


def _dial(
    frontend: FrontendAddress, backends: tuple[Backend, ...], node_netns: Path
) -> tuple[SocketAddress, SocketAddress]:
    """Runs in the sandbox: connects it to the node, adds the backends' addresses and dials the Service."""
    from kbpf.kernel.net.links import Links

    prefix = 32 if family_of(frontend.address) == 4 else 128
    with Links() as links:
        links.add_veth("eth0", f"{OWN_PREFIX}{os.urandom(4).hex()}", node_netns)
        links.set_up("lo")
        for address in {b.address for b in backends}:
            links.add_address("lo", format_addr(address), prefix)
    dial_protocol = dial.connect_tcp if frontend.protocol is Protocol.TCP else dial.exchange_udp
    return dial_protocol(
        (format_addr(frontend.address), frontend.port), [(format_addr(b.address), b.port) for b in backends]
    )
