# SPDX-License-Identifier: Apache-2.0
"""Tries a connection that `kbpf trace` has predicted, and compares.

A packet runs through a copy of the packet programs (packet_path/rehearsal.py): nothing is sent or
stored. A socket calls connect() in its client's cgroup and network namespace: in repair mode
without a packet, or for real. connect() counts as any other: it may give the client a backend by
session affinity, and what the hooks refuse is listed by `kbpf inspect failures`.
"""

import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.packet_path.rehearsal import Arrival, Outcome, Rehearsal
from kbpf.dataplane.bpf.programs.hook_probe import CLIENT4, CLIENT6
from kbpf.errors import KbpfError
from kbpf.kernel.net import dial
from kbpf.kernel.net.devices import Device, list_devices
from kbpf.kernel.net.routes import find_route
from kbpf.kernel.system import sandbox
from kbpf.model.address import Addr, family_of, format_addr, format_endpoint, parse_addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol
from kbpf.model.reasons import Reason, Verdict

ACCOUNTED: Final = frozenset((Reason.REDIRECTED, Reason.RATE_LIMITED, Reason.TOO_LONG))
"""What is counted besides the reason of a decision."""


SOCKET_SECONDS: Final = 10.0
"""For a connect(), which gives up after dial.TIMEOUT_S, in the cgroup of a Pod."""
ANY_CLIENT: Final = {4: CLIENT4, 6: CLIENT6}


class Prediction(NamedTuple):
    """What `kbpf trace` says. `backends`: ``address:port`` → whether it sees the node's address.
    `by_socket`: a hook decides, so the socket's peer is the backend.
    """

    to: FrontendAddress
    service_id: int
    verdict: Verdict
    reason: Reason
    client_sees: str
    by_socket: bool
    backends: dict[str, bool]


class Result(NamedTuple):
    """Whether the outcome is the predicted one, None if it could not be tried; and the outcome."""

    matches: bool | None
    outcome: str


# ---- packets -------------------------------------------------------------------------------------


def try_packet(
    prediction: Prediction,
    client: Addr | None,
    pin_dir: Path,
    cache_dir: Path,
    from_host: bool,
    uplinks: Sequence[int] = (),
) -> Result:
    """Runs the connection's first packet through a copy of the programs. `client`: its address;
    None if it is not known. `from_host`: this node itself sends it. `uplinks`: ifindexes of the
    devices on which packets from outside may arrive; empty if the client is not outside.
    """
    ifindex, source = 0, client
    if client is None and uplinks:
        ifindex, source = uplinks[0], ANY_CLIENT[family_of(prediction.to.address)]
    elif client is None or from_host:
        route = find_route(prediction.to.address)
        ifindex, source = route.ifindex, route.source if from_host else None
    else:
        ifindex = find_route(client).ifindex
    if source is None:
        return Result(None, "the client's address is not known")
    try:
        devices = {device.ifindex: device for device in list_devices()}
        device = devices.get(ifindex)
        if device is None:
            return Result(None, "there is no route by which the packet could come or go")
        if prediction.to.protocol is Protocol.SCTP or not device.has_header:
            return Result(None, "only TCP and UDP can be tried, at devices with an Ethernet header")
        with Rehearsal(snapshot.find_pins(pin_dir), cache_dir) as rehearsal:
            arrival = Arrival(device.ifindex, device.mac, from_host, source)
            seen = rehearsal.run(arrival, prediction.to, prediction.service_id)
            if seen.destination != prediction.to and Reason.NEW_FLOW in seen.reasons:
                seen = _leave(rehearsal, seen, devices)
    except KbpfError as error:
        return Result(None, str(error))
    return compare_packet(prediction, source, seen)


def _leave(rehearsal: Rehearsal, seen: Outcome, devices: dict[int, Device]) -> Outcome:
    """What tc_egress does where the packet leaves this node, which may be by no device."""
    device = devices.get(find_route(seen.destination.address).ifindex)
    if device is None or device.loopback or not device.has_header:
        return seen
    return rehearsal.leave(device.ifindex, device.mac, seen)


def compare_packet(prediction: Prediction, sender: Addr, seen: Outcome) -> Result:
    reasons = seen.reasons - ACCOUNTED
    names = ", ".join(sorted(reason.name.lower().replace("_", " ") for reason in reasons))
    if prediction.verdict is not Verdict.TRANSLATE:
        return Result(prediction.reason in reasons, names or "it passed, and nothing was counted")
    backend = format_endpoint(seen.destination.address, seen.destination.port)
    by_node = seen.source.address != sender
    outcome = f"{names}: to {backend}, from {format_addr(seen.source.address)}"
    if prediction.reason not in reasons or backend not in prediction.backends:
        return Result(False, outcome if prediction.reason in reasons else names or "it passed")
    return Result(prediction.backends[backend] is by_node, outcome)


# ---- sockets -------------------------------------------------------------------------------------


def try_socket(prediction: Prediction, sends: bool, cgroup: Path | None, netns: Path | None) -> Result:
    """Calls connect() as the client. `sends`: with packets. `cgroup`, `netns`: the client's; None:
    those of this process.
    """
    to = prediction.to
    if to.protocol is Protocol.SCTP:
        return Result(None, "SCTP cannot be tried")
    kind = socket.SOCK_STREAM if to.protocol is Protocol.TCP else socket.SOCK_DGRAM
    action = partial(dial.try_connect, (format_addr(to.address), to.port), kind, sends)
    try:
        errno_name, peer = sandbox.run(action, cgroup, new_netns=False, enter_netns=netns, seconds=SOCKET_SECONDS)
    except KbpfError as error:
        return Result(None, str(error))
    return compare_socket(prediction, errno_name, peer, by_packet=sends)


def compare_socket(prediction: Prediction, errno_name: str, peer: Sequence[object] | None, by_packet: bool) -> Result:
    """`by_packet`: whether packets were sent, so that the backend or the network may have failed
    it.
    """
    if errno_name or peer is None:
        outcome = f"connect() failed with {errno_name}"
        is_expected = prediction.client_sees == errno_name
        if prediction.verdict is Verdict.PASS:
            return Result(None, f"{outcome}: not by kbpf, as far as this shows")
        if prediction.verdict is Verdict.TRANSLATE and by_packet:
            outcome += ": by the backend, or on the way to it"
        return Result(is_expected, outcome)
    shown = format_endpoint(parse_addr(str(peer[0])), int(str(peer[1])))
    dialled = format_endpoint(prediction.to.address, prediction.to.port)
    outcome = f"connected to {shown}"
    if prediction.verdict is not Verdict.TRANSLATE:
        return Result(prediction.verdict is Verdict.PASS and shown == dialled, outcome)
    if prediction.by_socket:
        return Result(shown in prediction.backends, outcome)
    return Result(shown == dialled, f"{outcome}; its socket does not show the backend")
