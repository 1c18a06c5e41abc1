# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect ...`: shows pinned maps, or IPVS. The agent need not run.

Each view is a row of VIEWS; their commands share all that is not in the row.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from kbpf.cli import render
from kbpf.cli.endpoints import endpoints
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
from kbpf.config import durations
from kbpf.errors import ConfigError, ObjectError
from kbpf.model.address import Addr, parse_addr
from kbpf.model.inspection import ConnectionQuery, Part
from kbpf.views import (
    affinity,
    backends,
    failures,
    maps,
    programs,
    service,
    services,
    sources,
    status,
)
from kbpf.views.packet_path import connections, devices, nat
from kbpf.views.page import Page

app = typer.Typer(
    no_args_is_help=True, help="Show what is programmed. Works while the agent is down.",
    rich_markup_mode=None,
)  # fmt: skip


# ---- filters -------------------------------------------------------------------------------------


class ConnectionState(StrEnum):
    """model.inspection.CONNECTION_STATES as an enum, because typer needs one."""

    NEW = "new"
    ESTABLISHED = "established"
    CLOSING = "closing"
    CLOSED = "closed"
    ANSWERED = "answered"
    UNPROVEN = "unproven"


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="The Service: NAME, NAMESPACE/NAME, or IP or IP:PORT of one of its frontends or "
        "backends, or :PORT, a NodePort.",
    ),
]
Namespace = Annotated[str, typer.Option("-n", "--namespace", help="Only this namespace.")]
Service = Annotated[
    str, typer.Option("--service", metavar="NAMESPACE/NAME", help="Only to this Service.")
]
Client = Annotated[str, typer.Option("--client", metavar="ADDRESS", help="Only from this client.")]
Backend = Annotated[str, typer.Option("--backend", metavar="ADDRESS", help="Only to this backend.")]
State = Annotated[ConnectionState | None, typer.Option("--state", help="Only in this state.")]
Expired = Annotated[bool, typer.Option("--expired", help="Include expired connections.")]
Limit = Annotated[
    int, typer.Option("--limit", min=0, metavar="N", help="Show at most N rows; 0: all.")
]


NoHeaders = Annotated[
    bool, typer.Option("--no-headers", help="Leave out the titles of the columns.")
]
SortBy = Annotated[
    str, typer.Option("--sort-by", metavar="COLUMN", help="The column that orders the rows.")
]
Pod = Annotated[
    str, typer.Option("--pod", metavar="NAMESPACE/NAME", help="Only of this Pod, as the client.")
]
Since = Annotated[
    str, typer.Option("--since", metavar="DURATION", help="Only of the last DURATION: 30s, 5m, 2h.")
]


def _failure_options(service: str, pod: str, since: str, limit: int) -> dict[str, Any]:
    try:
        seconds = durations.parse(since, "--since") if since else 0.0
    except ConfigError as error:
        raise typer.BadParameter(f"{error.what}; {error.hint}", param_hint="--since") from None
    return {"service": service, "pod": pod, "since": seconds, "limit": limit}


def _service_options(name: str, namespace: str) -> dict[str, Any]:
    name_namespace = name.rpartition("/")[0]
    if name_namespace and namespace not in ("", name_namespace):
        raise typer.BadParameter(
            f"{namespace} contradicts the namespace of {name}", param_hint="--namespace"
        )
    return {"name": name, "namespace": namespace}


def _connection_options(
    service: str, client: str, backend: str, state: ConnectionState | None, expired: bool,
    limit: int,
) -> dict[str, Any]:  # fmt: skip
    query = ConnectionQuery(
        service, _parse_address(client, "--client"), _parse_address(backend, "--backend"),
        str(state or ""), expired,
    )  # fmt: skip
    return {"query": query, "limit": limit}


def _parse_address(text: str, option: str) -> Addr | None:
    try:
        return parse_addr(text) if text else None
    except ObjectError as error:
        raise typer.BadParameter(error.what, param_hint=option) from None


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class View:
    """A subcommand.

    - `needs`: the parts that are read; no other maps are opened.
    - `build_page` gets the parts and the filters, which `check_filters` may have converted.
    - `filters`: name → (type, default); a filter with the default ... is required.
    - `bpf_only`: an error in mode ipvs. `is_list`: rows with columns, not a text.
    """

    name: str
    help: str
    needs: Part
    build_page: Callable[..., Page]
    filters: dict[str, tuple[Any, Any]]
    check_filters: Callable[..., dict[str, Any]] = dict
    bpf_only: bool = True
    is_list: bool = True


VIEWS: Final = (
    View(
        "services", "List Service ports with frontends, policies and backends.",
        services.NEEDS, services.build_page, {"namespace": (Namespace, "")},
        bpf_only=False,
    ),
    View(
        "service", "Show one Service: frontends, backend sets and traffic.",
        service.NEEDS, service.build_page,
        {"name": (Name, Parameter.empty), "namespace": (Namespace, "")}, _service_options,
        bpf_only=False, is_list=False,
    ),
    View(
        "backends", "List all backends, and the Services that use them.",
        backends.NEEDS, backends.build_page, {}, bpf_only=False,
    ),
    View(
        "affinity", "List session affinity: the backend that each client keeps.",
        affinity.NEEDS, affinity.build_page, {},
    ),
    View(
        "connections",
        """List the connections that the packet path or IPVS tracks. Shows client, frontend,
        backend, the source that the backend sees, and state.

        Connections that the socket hooks translated are not listed: only the kernel tracks them.
        `ss` shows them with their backends.
        """,
        connections.NEEDS, connections.build_page,
        {"service": (Service, ""), "client": (Client, ""), "backend": (Backend, ""),
         "state": (State, None), "expired": (Expired, False), "limit": (Limit, 0)},
        _connection_options, bpf_only=False,
    ),
    View(
        "failures",
        """List failed connections: client, Service, backend, and why. Connections of one client
        that fail in the same way are one row.
        """,
        failures.NEEDS, failures.build_page,
        {"service": (Service, ""), "pod": (Pod, ""), "since": (Since, ""), "limit": (Limit, 0)},
        _failure_options,
    ),
    View(
        "nat",
        """List translated sources (SNAT) and the node's port usage. Usage is counted for each
        backend; `!` marks 80 % and more.
        """,
        nat.NEEDS, nat.build_page, {"limit": (Limit, 0)},
    ),
    View(
        "sources",
        "List Services with source ranges. Also shows which clients count as pods of this node.",
        sources.NEEDS, sources.build_page, {},
    ),
    View(
        "devices", "List network devices with role, programs and problems.",
        devices.NEEDS, devices.build_page, {},
    ),
    View(
        "maps", "List the maps and how full they are; `!` marks 80 % and more.",
        maps.NEEDS, maps.build_page, {},
    ),
    View(
        "programs", "List the socket hooks and the program at each of them.",
        programs.NEEDS, programs.build_page, {},
    ),
    View(
        "status",
        """Show the status of the agent. Exits with 0 if it runs, has synced, reports no error, all
        hooks are attached, all Service ports are programmed and the packet path, if it is on, is on
        all its devices; otherwise with 1.
        """,
        status.NEEDS, status.build_page, {}, bpf_only=False, is_list=False,
    ),
)  # fmt: skip

SHARED: Final = {
    "output": (OutputOption, Output.TABLE),
    "repeat": (Watch, False),
    "no_headers": (NoHeaders, False),
    "sort_by": (SortBy, ""),
    "config": (ConfigFile, None),
    "pin_dir": (PinDir, DEFAULT.pin_dir),
    "state_dir": (StateDir, DEFAULT.state_dir),
    "ipvs_device": (IpvsDevice, DEFAULT.ipvs_device),
}


OF_LISTS: Final = frozenset(("no_headers", "sort_by"))
"""The options of lists only."""


def _make_command(view: View) -> Callable[..., None]:
    """The function whose signature typer turns into options."""
    shared = {name: row for name, row in SHARED.items() if view.is_list or name not in OF_LISTS}

    def command(
        output: Output, config: object, pin_dir: Path, state_dir: Path, ipvs_device: str,
        repeat: bool, no_headers: bool = False, sort_by: str = "", **filters: Any,
    ) -> None:  # fmt: skip
        folders = pin_dir, state_dir / ipvs_device
        _show(view, filters, folders, Format(output, repeat, not no_headers, sort_by))

    options = {**view.filters, **shared}
    command.__doc__ = view.help
    command.__annotations__ = {name: type_ for name, (type_, _) in options.items()}
    vars(command)["__signature__"] = Signature(
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=type_)
            for name, (type_, default) in options.items()
        ]
    )
    return command


class Format(NamedTuple):
    """How a page is shown; `sort_by` is a column's title, "" for the view's own order."""

    output: Output
    repeat: bool
    titles: bool
    sort_by: str


def _show(view: View, filters: dict[str, Any], folders: tuple[Path, Path], chosen: Format) -> None:
    from kbpf.dataplane import inspect as dataplane

    checked, output = view.check_filters(**filters), chosen.output
    locations = dataplane.Locations(*folders)

    def read() -> Page:
        inspection = dataplane.read(locations, view.needs, view.bpf_only)
        return _sort(view.build_page(inspection, **checked), chosen.sort_by)

    def render_text(page: Page) -> Iterator[str]:
        return render.render_page(page, output, chosen.titles)

    if chosen.repeat:
        if output in (Output.JSON, Output.YAML):
            raise typer.BadParameter("it requires -o table or wide", param_hint="--watch")
        render.watch(lambda: "".join(render_text(read())).removesuffix("\n"))
    page = read()
    sys.stdout.writelines(render_text(page))
    sys.stdout.flush()
    if page.empty and output in (Output.TABLE, Output.WIDE):
        print(page.empty, file=sys.stderr)
    for note in filter(None, page.notes):
        print(f"kbpf: {note}", file=sys.stderr)
    if not page.ok:
        raise typer.Exit(1)


def _sort(page: Page, title: str) -> Page:
    if not title:
        return page
    try:
        return page.sorted_by(title)
    except KeyError:
        titles = ", ".join(column.title for column in page.columns)
        raise typer.BadParameter(
            f"no column {title}; there are {titles}", param_hint="--sort-by"
        ) from None


for _view in VIEWS:
    app.command(_view.name)(_make_command(_view))
app.command("endpoints")(endpoints)
