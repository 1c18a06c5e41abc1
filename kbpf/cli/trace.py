# SPDX-License-Identifier: Apache-2.0
"""`kbpf trace FROM TO`: what happens to a connection on this node, step by step, and why."""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
import typer

from kbpf.cli import render
from kbpf.cli.endpoints import Kubeconfig
from kbpf.cli.options import DEFAULT, CacheDir, ConfigFile, Output, OutputOption, PinDir, StateDir
from kbpf.errors import KbpfError, KernelError, ObjectError
from kbpf.kernel.system import pods
from kbpf.model.address import Addr, family_of, parse_addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.inspection import Inspection, Route, parse_place
from kbpf.model.objects import Protocol
from kbpf.model.reasons import Reason, Verdict
from kbpf.views import status, trace_page
from kbpf.views import trace as view
from kbpf.views.trace_page import Client, Confirmation, NodeFacts, Origin, Step, Trace

if TYPE_CHECKING:
    from kbpf.checks.connection import Prediction
    from kbpf.checks.row import CheckRow
    from kbpf.source.api.credentials import Cluster
    from kbpf.views.endpoints import EndpointRow

PORTS: Final = {"http": 80, "https": 443}

From = Annotated[
    str,
    typer.Argument(
        metavar="FROM", help="host, outside, an IP of a client outside, or NAMESPACE/NAME of a Pod of this node."
    ),
]
To = Annotated[str, typer.Argument(metavar="TO", help="IP:PORT[/udp], NAMESPACE/NAME[:PORT] of a Service, or a URL.")]
Confirm = Annotated[
    bool,
    typer.Option(
        "--confirm",
        help="Try it without sending anything: a packet on a copy of the programs, or a connect() "
        "of the client without packets. Exit code 1 if the outcome differs.",
    ),
]
Connect = Annotated[
    bool,
    typer.Option(
        "--connect",
        help="Connect for real, in the client's cgroup and network: this opens a connection to a "
        "backend, and closes it. Exit code 1 if the outcome differs.",
    ),
]


def trace_connection(
    source: From,
    to: To,
    confirm: Confirm = False,
    connect: Connect = False,
    output: OutputOption = Output.TABLE,
    kubeconfig: Kubeconfig = None,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    cache_dir: CacheDir = DEFAULT.cache_dir,
) -> None:
    """Explain a connection: which program sees it, which Service it is for, which backends it may
    reach, and why. Reads what is programmed on this node and, if the API server can be asked, why
    each endpoint is used or not. A packet is tried on a copy of the programs. Sends nothing to a
    Service unless told to.
    """
    from kbpf.dataplane import reader as dataplane

    cluster = _find_cluster(kubeconfig)
    locations = dataplane.Locations.of_settings(pin_dir, state_dir)
    inspection = dataplane.read(locations, view.NEEDS)
    caller = find_caller(source, inspection, cluster)
    targets = find_targets(inspection, to, caller.client.origin)
    facts = read_facts(caller, pin_dir)
    traces, notes = [], {status.describe_age(inspection), caller.note}
    for target in targets:
        trace = view.build_trace(inspection, caller.client, target, facts)
        tried = []
        if confirm:
            tried.append(confirm_trace(inspection, caller, target, trace, pin_dir, cache_dir))
        elif not connect and _is_determined(trace):
            tried += _try_unasked(inspection, caller, target, trace, pin_dir, cache_dir)
        if connect:
            tried.append(try_socket(inspection, caller, target, trace, sends=True))
        endpoints, note = _read_endpoints(cluster, inspection, trace)
        notes.add(note)
        traces.append(msgspec.structs.replace(trace, confirmations=tuple(tried), endpoints=endpoints))
    page = trace_page.build_page(traces, sorted(notes))
    render.show(page, output)


# ---- FROM and TO ---------------------------------------------------------------------------------


class Caller(NamedTuple):
    """The client, and for a Pod a process of it, if one is visible from here. `note`: what could
    not be read of it; "" if nothing.
    """

    client: Client
    process: pods.PodProcess | None = None
    note: str = ""


def find_caller(text: str, inspection: Inspection, cluster: "Cluster | None") -> Caller:
    """The client that FROM names. Raises NotFoundError for a Pod that is not on this node, which
    names its node if a Service or the API server knows it, and typer.BadParameter if several Pods
    have this name.
    """
    if text in (Origin.HOST, Origin.OUTSIDE):
        return Caller(Client(Origin(text)))
    with contextlib.suppress(ObjectError):
        return Caller(Client(Origin.OUTSIDE, addresses=(parse_addr(text),)))
    uids = pods.find_uids(text, lambda: _find_node_of_pod(text, inspection, cluster))
    if len(names := sorted(set(uids.values()))) > 1:
        raise typer.BadParameter(f"{text} may be {' or '.join(names)}", param_hint="FROM")
    # One that was replaced by a Pod of the same name has neither processes nor a cgroup.
    process, cgroups = max(
        ((pods.find_process(uid), pods.find_cgroup_ids(uid)) for uid in uids),
        key=lambda pod: (pod[0] is not None, bool(pod[1])),
    )
    client = Client(Origin.POD, names[0], cgroups)
    if process is None:
        return Caller(
            client,
            note="no process of the Pod is visible from here, so its address and "
            "network namespace are not known: run this on the node itself",
        )
    try:
        netns_cookie, addresses, is_of_cluster = _read_netns(process)
    except KernelError as error:
        return Caller(client, process, f"the Pod's address and network are not known: {error}")
    client = client._replace(netns=netns_cookie, addresses=addresses, is_of_cluster=is_of_cluster)
    return Caller(client, process)


def _read_netns(process: pods.PodProcess) -> tuple[int | None, tuple[Addr, ...], bool]:
    """The cookie of a Pod's network namespace, its addresses, and whether it leads to this node."""
    from kbpf.kernel.bpf import kernel_members
    from kbpf.kernel.net.addresses import local_addresses
    from kbpf.kernel.net.devices import has_way_to
    from kbpf.kernel.system import netns

    def read() -> tuple[int | None, tuple[Addr, ...], bool]:
        is_of_cluster = has_way_to(Path("/proc/self/ns/net")) or not kernel_members.probe_networks().works
        return netns.read_cookie(), local_addresses(), is_of_cluster

    return netns.run_in(process.netns, read)


def _find_node_of_pod(text: str, inspection: Inspection, cluster: "Cluster | None") -> str:
    """The node of a Pod, if the endpoints of a Service or the API server name it; otherwise ""."""
    namespace, _, name = text.rpartition("/")
    entries = (entry for port in inspection.services for entry in port.endpoints.values())
    node = next((entry.node for entry in entries if entry.is_pod(name, namespace)), "")
    if not node and cluster is not None and namespace:
        from kbpf.source.api import one_service

        with contextlib.suppress(KbpfError):
            node = one_service.find_node_of_pod(cluster, namespace, name)
    return node


def find_targets(inspection: Inspection, text: str, origin: Origin) -> list[FrontendAddress]:
    """What TO means. Raises typer.BadParameter, or NotFoundError for a Service."""
    if "://" in text:
        text = _from_url(text)
    place_text, _, name = text.partition("/") if text.count("/") == 1 else (text, "", "")
    protocol = Protocol.__members__.get(name.upper())
    if (place := parse_place(place_text if protocol else text)) is None:
        return view.find_targets(inspection, text, origin)
    address, port = place
    if address is None or not 0 < port < 65536:
        raise typer.BadParameter(f"{text} needs an address and a port, as in 10.96.0.1:80", param_hint="TO")
    return [FrontendAddress(Addr(address), port, protocol or Protocol.TCP)]


def _from_url(text: str) -> str:
    url = urlsplit(text)
    host, port = url.hostname or "", url.port or PORTS.get(url.scheme, 0)
    if not host or not port:
        raise typer.BadParameter(f"{text} has no host, or no known port", param_hint="TO")
    if match := re.fullmatch(r"([^.]+)\.([^.]+)(\.svc(\..*)?)?", host):
        with contextlib.suppress(ObjectError):
            parse_addr(host)
            return f"{host}:{port}"
        return f"{match[2]}/{match[1]}:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---- the node ------------------------------------------------------------------------------------


def read_facts(caller: Caller, pin_dir: Path) -> NodeFacts:
    """The routes of this node and of the client, and the rules that its packets may meet."""
    from kbpf.checks import packet_path
    from kbpf.kernel.net.routes import find_route
    from kbpf.kernel.system import netns

    process = caller.process

    def find_client_route(to: Addr, source: Addr | None, came_in_by: int) -> Route:
        if process is None:
            return find_route(to, source, came_in_by)
        return netns.run_in(process.netns, lambda: find_route(to, source, came_in_by))

    is_visible = caller.client.origin is Origin.HOST or caller.client.netns is not None
    if caller.client.origin is Origin.HOST:
        return NodeFacts(find_route, find_client_route)
    rules = packet_path.check_rules_of_others(pin_dir)
    return NodeFacts(
        find_route,
        find_client_route if is_visible else None,
        [_make_step("FORWARD", rules.masqueraded, MASQUERADED_WORDS)],
        [_make_step("FORWARD", rules.forwarded, FORWARDED_WORDS)],
        [_make_step("before DNAT", rules.before_dnat, EARLY_WORDS)],
    )


MASQUERADED_WORDS: Final = {"yes": "masqueraded packets pass", "no": "may drop it"}
FORWARDED_WORDS: Final = {"yes": "passes", "no": "may drop it", "unknown": "may drop it"}
EARLY_WORDS: Final = {"yes": "no rule is bypassed", "no": "rules are bypassed"}


def _make_step(name: str, row: "CheckRow", words: Mapping[str, str]) -> Step:
    return Step(name, words.get(row.result, row.result), row.detail)


# ---- trying it -----------------------------------------------------------------------------------


def confirm_trace(
    inspection: Inspection, caller: Caller, to: FrontendAddress, trace: Trace, pin_dir: Path, cache_dir: Path
) -> Confirmation:
    """Tries it without packets."""
    from kbpf.checks import connection

    client = caller.client
    if trace.seen_by == "ipvs":
        return Confirmation("a packet", None, "IPVS cannot be tried without packets: use --connect")
    if trace.seen_by != "packet":
        return try_socket(inspection, caller, to, trace, sends=False)
    result = connection.try_packet(
        _predict(inspection, to, trace),
        client.address(family_of(to.address)),
        pin_dir,
        cache_dir,
        from_host=client.is_on_host(inspection.host_netns),
        uplinks=_list_uplinks(inspection) if client.origin is Origin.OUTSIDE else (),
    )
    return Confirmation("a packet, on a copy of the programs", result.matches, result.outcome)


def _is_determined(trace: Trace) -> bool:
    """Whether it is explained without what is not known of the client."""
    return not any("depends on" in step.result for step in trace.steps)


def _try_unasked(
    inspection: Inspection, caller: Caller, to: FrontendAddress, trace: Trace, pin_dir: Path, cache_dir: Path
) -> list[Confirmation]:
    """Tries a packet, which has no effect, unlike a connect(). Returns nothing if it cannot be tried;
    the explanation is then all there is.
    """
    if trace.seen_by != "packet":
        return []
    tried = confirm_trace(inspection, caller, to, trace, pin_dir, cache_dir)
    return [tried] if tried.matches is not None else []


def _list_uplinks(inspection: Inspection) -> list[int]:
    devices = inspection.devices.items()
    return sorted(ifindex for ifindex, device in devices if device.role == "host")


def try_socket(inspection: Inspection, caller: Caller, to: FrontendAddress, trace: Trace, sends: bool) -> Confirmation:
    from kbpf.checks import connection

    how = f"connect() {'for real' if sends else 'without packets'}, as {caller.client}"
    if caller.client.origin is Origin.OUTSIDE:
        return Confirmation("connect()", None, "a client outside is not on this node")
    process = caller.process
    if caller.client.origin is Origin.POD and process is None:
        return Confirmation(how, None, "no process of the Pod is visible from here")
    result = connection.try_socket(
        _predict(inspection, to, trace), sends, process.cgroup if process else None, process.netns if process else None
    )
    return Confirmation(how, result.matches, result.outcome)


def _predict(inspection: Inspection, to: FrontendAddress, trace: Trace) -> "Prediction":
    from kbpf.checks.connection import Prediction

    ids = (port.id for port in inspection.services if port.text == trace.service)
    return Prediction(
        to,
        next(ids, 0) or 0,
        Verdict(trace.verdict),
        Reason[trace.reason.upper()],
        trace.client_sees,
        trace.seen_by == "socket",
        {candidate.backend: candidate.source == "node" for candidate in trace.candidates},
    )


# ---- the API server ------------------------------------------------------------------------------

API_HINT: Final = (
    "why each endpoint is used or not is known to the API server: name it with --kubeconfig, or run this in kbpf's Pod"
)


def _find_cluster(kubeconfig: Path | None) -> "Cluster | None":
    """How to reach the API server; None if nothing says so. Raises KbpfError for a kubeconfig that
    was named.
    """
    from kbpf.source.api.credentials import Cluster
    from kbpf.source.api.kubeconfig import find_access

    try:
        return Cluster(find_access(kubeconfig))
    except KbpfError:
        if kubeconfig is not None:
            raise
        return None


def _read_endpoints(
    cluster: "Cluster | None", inspection: Inspection, trace: Trace
) -> "tuple[tuple[EndpointRow, ...], str]":
    """The endpoints of the Service port, and a line about what is not known of them. Those that are
    pinned, if the API server cannot be asked.
    """
    from kbpf.cli.endpoints import build_rows
    from kbpf.source.api import one_service
    from kbpf.source.api.credentials import default_node_name

    port = next((port for port in inspection.services if port.text == trace.service), None)
    if port is None or port.key is None:
        return trace.endpoints, ""
    if cluster is None:
        is_unknown = not trace.endpoints or any(row.why == view.UNKNOWN for row in trace.endpoints)
        return trace.endpoints, API_HINT if is_unknown else ""
    node = inspection.status.node if inspection.status else ""
    try:
        objects = one_service.read(cluster, port.key.namespace, port.key.name, node or default_node_name())
    except KbpfError as error:
        return trace.endpoints, f"the API server does not say why endpoints are used: {error}"
    return tuple(
        row
        for row in build_rows(objects)
        if row.port == port.key.port and family_of(parse_addr(row.address)) == port.key.family
    ), "; ".join(objects.errors)
