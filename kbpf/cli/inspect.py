# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect ...`: shows pinned maps, or IPVS. The agent need not run."""

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbpf.cli import render
from kbpf.cli.options import (
    DEFAULT,
    ConfigFile,
    IpvsDevice,
    Output,
    OutputOption,
    PinDir,
    StateDir,
    Watch,
)
from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.errors import ObjectError
from kbpf.model.address import Addr, parse_addr
from kbpf.views.columns import Column

if TYPE_CHECKING:
    from kbpf.views.node import Locations

app = typer.Typer(
    no_args_is_help=True, help="Show what is programmed. Works while the agent is down.",
    rich_markup_mode=None,
)  # fmt: skip


def _show(page: Callable[[], str], output: Output, repeat: bool = False) -> None:
    if not repeat:
        print(page())
        return
    if output in (Output.JSON, Output.YAML):
        raise typer.BadParameter("it requires -o table or wide", param_hint="--watch")
    from kbpf.cli.render import watch

    watch(page)


def _locations(pin_dir: Path, state_dir: Path, device: str) -> "Locations":
    from kbpf.views.node import Locations

    return Locations(pin_dir, state_dir / device)


def _print_rows(
    locations: "Locations",
    parts: Part,
    build: Callable[[Snapshot], Sequence[Any]],
    columns: Sequence[Column],
    output: Output,
    repeat: bool = False,
    namespace: str = "",
) -> None:
    from kbpf.views import node

    count = 0

    def page() -> str:
        nonlocal count
        rows = build(node.read(locations, parts))
        count = len(rows)
        return render.format_rows(rows, columns, output)

    _show(page, output, repeat)
    _print_no_resources(count, output, namespace)


def _read_pins(pin_dir: Path, parts: Part, state_dir: Path, device: str) -> Snapshot:
    """Reads the pins, for views that exist in mode bpf only."""
    from kbpf.views import node

    return node.read_pins(_locations(pin_dir, state_dir, device), parts)


def _print_note(text: str) -> None:
    """Prints a line about the rows to stderr, so that it does not get into a pipe."""
    if text:
        sys.stdout.flush()
        print(f"kbpf: {text}", file=sys.stderr)


def _print_no_resources(count: int, output: Output, namespace: str = "") -> None:
    """Prints what kubectl prints for an empty list."""
    if not count and output in (Output.TABLE, Output.WIDE):
        sys.stdout.flush()
        scope = f" in {namespace} namespace" if namespace else ""
        print(f"No resources found{scope}.", file=sys.stderr)


def _print_stream(
    rows: Iterable[Any], columns: Sequence[Column], output: Output, header: Any = None
) -> None:
    sys.stdout.writelines(render.stream_rows(rows, columns, output, header))


def _parse_address(text: str, option: str) -> Addr | None:
    try:
        return parse_addr(text) if text else None
    except ObjectError as error:
        raise typer.BadParameter(error.what, param_hint=option) from None


class ConnectionState(StrEnum):
    """views.packet_path.connections.STATES as an enum, because typer needs one."""

    NEW = "new"
    ESTABLISHED = "established"
    CLOSING = "closing"
    CLOSED = "closed"
    ANSWERED = "answered"
    UNPROVEN = "unproven"


Limit = Annotated[
    int, typer.Option("--limit", min=0, metavar="N", help="Show at most N rows; 0: all.")
]


@app.command("services")
def services(
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Only this namespace.")] = "",
    output: OutputOption = Output.TABLE,
    repeat: Watch = False,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """List Service ports with frontends, policies and backends."""
    from kbpf.views import services as view

    def select_rows(snapshot: Snapshot) -> Sequence[view.ServiceRow]:
        return [r for r in view.build_rows(snapshot) if namespace in ("", r.namespace)]

    _print_rows(
        _locations(pin_dir, state_dir, ipvs_device),
        view.NEEDS,
        select_rows,
        view.COLUMNS,
        output,
        repeat,
        namespace,
    )


@app.command("service")
def service(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The Service, as NAME or NAMESPACE/NAME.")
    ],
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Only this namespace.")] = "",
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """Show one Service: frontends, backend sets and traffic."""
    from kbpf.cli import pages
    from kbpf.views import node
    from kbpf.views import service as view

    name_namespace = name.rpartition("/")[0]
    if name_namespace and namespace not in ("", name_namespace):
        raise typer.BadParameter(
            f"{namespace} contradicts the namespace of {name}", param_hint="--namespace"
        )
    details = view.build_details(
        node.read(_locations(pin_dir, state_dir, ipvs_device), view.NEEDS), name, namespace
    )
    if output in (Output.JSON, Output.YAML):
        print(render.format_document(details, output))
    else:
        print(pages.format_service(details))


@app.command("backends")
def backends(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """List all backends, and the Services that use them."""
    from kbpf.views import backends as view

    _print_rows(
        _locations(pin_dir, state_dir, ipvs_device),
        view.NEEDS,
        view.build_rows,
        view.COLUMNS,
        output,
    )


@app.command("affinity")
def affinity(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """List session affinity: the backend that each client keeps."""
    from kbpf.views import affinity as view

    rows = view.build_rows(_read_pins(pin_dir, view.NEEDS, state_dir, ipvs_device))
    print(render.format_rows(rows, view.COLUMNS, output))
    _print_no_resources(len(rows), output)


@app.command("connections")
def connections(
    service: Annotated[
        str, typer.Option("--service", metavar="NAMESPACE/NAME", help="Only to this Service.")
    ] = "",
    client: Annotated[
        str, typer.Option("--client", metavar="ADDRESS", help="Only from this client.")
    ] = "",
    backend: Annotated[
        str, typer.Option("--backend", metavar="ADDRESS", help="Only to this backend.")
    ] = "",
    state: Annotated[
        ConnectionState | None, typer.Option("--state", help="Only in this state.")
    ] = None,
    expired: Annotated[
        bool, typer.Option("--expired", help="Include expired connections.")
    ] = False,
    limit: Limit = 0,
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """List the connections that the packet path or IPVS tracks. Shows client, frontend, backend,
    the source that the backend sees, and state.

    Connections that the socket hooks translated are not listed: only the kernel tracks them. `ss`
    shows them with their backends.
    """
    from kbpf.views import node
    from kbpf.views.packet_path import connections as view

    query = view.ConnectionQuery(
        service, _parse_address(client, "--client"), _parse_address(backend, "--backend"),
        str(state or ""), expired,
    )  # fmt: skip
    page = node.find_connections(_locations(pin_dir, state_dir, ipvs_device), query, limit)
    _print_stream(page.rows, view.COLUMNS, output)
    if not page.notice:
        _print_no_resources(page.total, output)
    _print_note(page.notice)
    _print_note(_format_more(page.total, limit, "connections"))
    _print_note(
        f"and {page.expired_count} expired connections: --expired shows them"
        if page.expired_count
        else ""
    )


def _format_more(count: int, limit: int, noun: str) -> str:
    return f"and {count - limit} more {noun}" if 0 < limit < count else ""


@app.command("nat")
def nat(
    limit: Limit = 0,
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """List translated sources (SNAT) and the node's port usage. Usage is counted for each backend;
    `!` marks 80 % and more.
    """
    from kbpf.cli import pages
    from kbpf.views.packet_path import availability
    from kbpf.views.packet_path import nat as view

    snapshot = _read_pins(pin_dir, view.NEEDS, state_dir, ipvs_device)
    translated = view.select_translated(snapshot)
    summary = view.build_view(snapshot, translated)
    if output not in (Output.JSON, Output.YAML):
        print(pages.format_nat(summary), end="\n\n")
    _print_stream(
        view.build_rows(snapshot, islice(translated, limit or None)), view.COLUMNS, output, summary
    )
    _print_note(availability.unavailable_notice(snapshot))
    _print_note(_format_more(len(translated), limit, "sources"))


@app.command("sources")
def sources(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """List Services with source ranges. Also shows which clients count as pods of this node."""
    from kbpf.cli import pages
    from kbpf.views import sources as view
    from kbpf.views.packet_path import availability

    snapshot = _read_pins(pin_dir, view.NEEDS, state_dir, ipvs_device)
    sources_view = view.build_view(snapshot)
    if output in (Output.JSON, Output.YAML):
        print(render.format_document(sources_view, output))
    else:
        print(pages.format_sources(sources_view, output is Output.WIDE))
    _print_note(availability.unavailable_notice(snapshot))


@app.command("devices")
def devices(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """List network devices with role, programs and problems."""
    from kbpf.views.packet_path import availability
    from kbpf.views.packet_path import devices as view

    snapshot = _read_pins(pin_dir, view.NEEDS, state_dir, ipvs_device)
    print(
        render.format_rows(
            view.build_rows(snapshot, view.read_host_devices(snapshot)), view.COLUMNS, output
        )
    )
    _print_note(availability.unavailable_notice(snapshot))


@app.command("maps")
def maps(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """List the maps and how full they are; `!` marks 80 % and more."""
    from kbpf.views import maps as view

    snapshot = _read_pins(pin_dir, view.NEEDS, state_dir, ipvs_device)
    print(render.format_rows(view.build_rows(snapshot), view.COLUMNS, output))


@app.command("programs")
def programs(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """List the socket hooks and the program at each of them."""
    from kbpf.views import programs as view

    snapshot = _read_pins(pin_dir, view.NEEDS, state_dir, ipvs_device)
    print(render.format_rows(view.build_rows(snapshot), view.COLUMNS, output))


@app.command("status")
def status(
    output: OutputOption = Output.TABLE,
    repeat: Watch = False,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """Show the status of the agent. Exits with 0 if it runs, has synced, reports no error, all
    hooks are attached, all Service ports are programmed and the packet path, if it is on, is on all
    its devices; otherwise with 1.
    """
    from kbpf.cli import pages
    from kbpf.views import node
    from kbpf.views import status as view

    is_ok = True

    def page() -> str:
        nonlocal is_ok
        status_view = view.build_view(
            node.read(_locations(pin_dir, state_dir, ipvs_device), view.NEEDS)
        )
        is_ok = status_view.ok
        if output in (Output.JSON, Output.YAML):
            return render.format_document(status_view, output)
        return pages.format_status(status_view)

    _show(page, output, repeat)
    raise typer.Exit(0 if is_ok else 1)
