# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect ...`: shows pinned maps, or IPVS. The agent need not run. `kbpf page` shows some of
them as one HTML page, for a person with a browser.

Each view is a row of VIEWS; their commands share all that is not in the row.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kbpf.cli import options, render
from kbpf.cli.endpoints import endpoints
from kbpf.cli.options import (
    DEFAULT,
    AllNamespaces,
    ConfigFile,
    Namespace,
    Output,
    OutputOption,
    PinDir,
    Selection,
    StateDir,
    Watch,
)
from kbpf.errors import KbpfError, ObjectError
from kbpf.model.address import Addr, parse_addr
from kbpf.model.inspection import ConnectionState, Part
from kbpf.views import affinity, backends, failures, maps, programs, service, services, sources, status
from kbpf.views.packet_path import connections, devices, nat
from kbpf.views.page import Page

app = typer.Typer(
    no_args_is_help=True, help="Show what is programmed. Works while the agent is down.", rich_markup_mode=None
)


# ---- filters -------------------------------------------------------------------------------------


def _parse_address(text: str) -> Addr | None:
    try:
        return parse_addr(text) if text else None
    except ObjectError as error:
        raise typer.BadParameter(error.what) from None


def _parse_since(text: str) -> float | None:
    return options.parse_duration(text, "--since") if text else None


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="The Service: NAME, NAMESPACE/NAME, or IP or IP:PORT of one of its frontends or "
        "endpoints, or :PORT, a NodePort, or the name of a Pod behind it.",
    ),
]
BackendName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Only these: a Pod, IP or IP:PORT of a backend, or all of a Service: NAME, "
        "NAMESPACE/NAME, IP or IP:PORT of a frontend, or :PORT, a NodePort.",
    ),
]
Service = Annotated[str, typer.Option("--service", metavar="NAMESPACE/NAME", help="Only to this Service.")]
Client = Annotated[
    Addr | None,
    typer.Option("--client", metavar="ADDRESS", parser=_parse_address, help="Only from this client."),
]
Backend = Annotated[
    Addr | None,
    typer.Option("--backend", metavar="ADDRESS", parser=_parse_address, help="Only to this backend."),
]
State = Annotated[ConnectionState | None, typer.Option("--state", help="Only in this state.")]
Expired = Annotated[bool, typer.Option("--expired", help="Include expired connections.")]
Pod = Annotated[str, typer.Option("--pod", metavar="NAMESPACE/NAME", help="Only of this Pod, as the client.")]
Since = Annotated[
    float | None,
    typer.Option("--since", metavar="DURATION", parser=_parse_since, help="Only of the last DURATION: 30s, 5m, 2h."),
]


NAMESPACE: Final = {"namespace": (Namespace, ""), "all_namespaces": (AllNamespaces, False)}
"""The options of views whose rows are of Services."""

LIST: Final = {
    "no_headers": (options.NoHeaders, False),
    "sort_by": (options.SortBy, ""),
    "limit": (options.Limit, 0),
}
"""The options of lists."""


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class View:
    """A subcommand.

    - `module`: of views/. The parts of its NEEDS are read; no other maps are opened, but those of
      the agent's status. Its build_page() gets them and the filters.
    - `filters`: name → (type, default); a filter with the default ... is required.
    - `bpf_only`: an error in mode ipvs. `is_list`: rows with columns, not a text. `namespaced`:
      the rows are of Services.
    """

    name: str
    help: str
    module: Any
    filters: dict[str, tuple[Any, Any]]
    bpf_only: bool = True
    is_list: bool = True
    namespaced: bool = False


VIEWS: Final = (
    View(
        "services",
        "List Service ports with frontends, policies and backends.",
        services,
        {},
        bpf_only=False,
        namespaced=True,
    ),
    View(
        "service",
        "Show one Service: frontends, and endpoints with Pod, node, zone, state and traffic.",
        service,
        {"name": (Name, Parameter.empty)},
        bpf_only=False,
        is_list=False,
        namespaced=True,
    ),
    View(
        "backends",
        "List backends: Pod, node, zone, state, and the Services that use them.",
        backends,
        {"name": (BackendName, "")},
        bpf_only=False,
        namespaced=True,
    ),
    View("affinity", "List session affinity: the backend that each client keeps.", affinity, {}, namespaced=True),
    View(
        "connections",
        """List the connections that the packet path or IPVS tracks. Shows client, frontend,
        backend, the source that the backend sees, and state.

        Connections that the socket hooks translated are not listed: only the kernel tracks them.
        `ss` shows them with their backends.
        """,
        connections,
        {
            "service": (Service, ""),
            "client": (Client, None),
            "backend": (Backend, None),
            "state": (State, None),
            "expired": (Expired, False),
        },
        bpf_only=False,
        namespaced=True,
    ),
    View(
        "failures",
        """List failed connections: client, Service, backend, and why. Connections of one client
        that fail in the same way are one row.
        """,
        failures,
        {"service": (Service, ""), "pod": (Pod, ""), "since": (Since, None)},
        namespaced=True,
    ),
    View(
        "nat",
        """List translated sources (SNAT) and the node's port usage. Usage is counted for each
        backend; `!` marks 80 % and more.
        """,
        nat,
        {},
        namespaced=True,
    ),
    View(
        "sources",
        "List Services with source ranges. Also shows which clients count as pods of this node.",
        sources,
        {},
        namespaced=True,
    ),
    View("devices", "List network devices with role, programs and problems.", devices, {}),
    View("maps", "List the maps and how full they are; `!` marks 80 % and more.", maps, {}),
    View("programs", "List the socket hooks and the program at each of them.", programs, {}),
    View(
        "status",
        """Show the status of the agent. Exits with 0 if it runs, has synced, reports no error, all
        hooks are attached, all Service ports are programmed and the packet path, if it is on, is on
        all its devices; otherwise with 1.
        """,
        status,
        {},
        bpf_only=False,
        is_list=False,
    ),
)

SHARED: Final = {
    "output": (OutputOption, Output.TABLE),
    "repeat": (Watch, False),
    "config": (ConfigFile, None),
    "pin_dir": (PinDir, DEFAULT.pin_dir),
    "state_dir": (StateDir, DEFAULT.state_dir),
}
"""The options of all views."""


def _make_command(view: View) -> Callable[..., None]:
    """The function whose signature typer turns into options."""
    parameters = {**view.filters, **(NAMESPACE if view.namespaced else {}), **(LIST if view.is_list else {}), **SHARED}

    def command(
        output: Output,
        config: object,
        pin_dir: Path,
        state_dir: Path,
        repeat: bool,
        no_headers: bool = False,
        sort_by: str = "",
        limit: int = 0,
        **values: Any,
    ) -> None:
        from kbpf.dataplane import reader as dataplane

        filters = {name: values[name] for name in view.filters}
        namespace = "" if values.get("all_namespaces") else values.get("namespace", "")
        if view.module is service:
            options.split_name(filters["name"], namespace)  # refuses another namespace
            filters["namespace"] = namespace
        selection = Selection(namespace, sort_by, limit)
        locations = dataplane.Locations.of_settings(pin_dir, state_dir)

        def read() -> Page:
            inspection = dataplane.read(locations, view.module.NEEDS, view.bpf_only)
            page = selection.apply(view.module.build_page(inspection, **filters))
            if view.module is status:
                return page
            with contextlib.suppress(KbpfError):  # an agent of another version may have pinned it
                if Part.STATUS not in view.module.NEEDS:
                    inspection = dataplane.read(locations, Part.STATUS)
                page = replace(page, notes=(*page.notes, status.describe_age(inspection)))
            return page

        render.show_or_watch(read, output, repeat, not no_headers)

    command.__doc__ = view.help
    command.__annotations__ = {name: type_ for name, (type_, _) in parameters.items()}
    vars(command)["__signature__"] = Signature(
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=type_)
            for name, (type_, default) in parameters.items()
        ]
    )
    return command


for _view in VIEWS:
    app.command(_view.name)(_make_command(_view))
app.command("endpoints")(endpoints)


# ---- one HTML page -------------------------------------------------------------------------------


def print_page(
    config: ConfigFile = None, pin_dir: PinDir = DEFAULT.pin_dir, state_dir: StateDir = DEFAULT.state_dir
) -> None:
    """Print the state of this node as an HTML page: Services, backends, failed connections, maps.
    The page needs no other file.
    """
    from kbpf.dataplane import reader as dataplane
    from kbpf.views import html_page

    locations = dataplane.Locations.of_settings(pin_dir, state_dir)
    inspection = dataplane.read(locations, html_page.NEEDS)
    text = html_page.format_html(inspection, time.strftime("%Y-%m-%d %H:%M:%S %Z"))
    sys.stdout.write(text.encode("ascii", "xmlcharrefreplace").decode())
