"""`kbpf inspect ...`: what the kernel holds, in pinned maps or in IPVS. The agent may be down."""

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
    from kbpf.views.node import Where

app = typer.Typer(
    no_args_is_help=True, help="Show what is programmed; works with the agent down.",
    rich_markup_mode=None,
)  # fmt: skip


def _show(page: Callable[[], str], output: Output, again: bool = False) -> None:
    if not again:
        print(page())
        return
    if output in (Output.JSON, Output.YAML):
        raise typer.BadParameter("it goes with a table only", param_hint="--watch")
    from kbpf.cli.render import watch

    watch(page)


def _where(pin_dir: Path, state_dir: Path, device: str) -> "Where":
    from kbpf.views.node import Where

    return Where(pin_dir, state_dir / device)


def _rows(
    where: "Where",
    parts: Part,
    make: Callable[[Snapshot], Sequence[Any]],
    columns: Sequence[Column],
    output: Output,
    again: bool = False,
    namespace: str = "",
) -> None:
    from kbpf.views import node

    count = 0

    def page() -> str:
        nonlocal count
        found = make(node.read(where, parts))
        count = len(found)
        return render.rows(found, columns, output)

    _show(page, output, again)
    _note_none(count, output, namespace)


def _pins(pin_dir: Path, parts: Part, state_dir: Path, device: str) -> Snapshot:
    """For views of maps, hooks and devices."""
    from kbpf.views import node

    return node.read_pins(_where(pin_dir, state_dir, device), parts)


def _note(text: str) -> None:
    """What is not among the rows, for whoever sits before them: not into a pipe."""
    if text:
        sys.stdout.flush()
        print(f"kbpf: {text}", file=sys.stderr)


def _note_none(count: int, output: Output, namespace: str = "") -> None:
    """In kubectl's words."""
    if not count and output in (Output.TABLE, Output.WIDE):
        sys.stdout.flush()
        where = f" in {namespace} namespace" if namespace else ""
        print(f"No resources found{where}.", file=sys.stderr)


def _stream(
    found: Iterable[Any], columns: Sequence[Column], output: Output, above: Any = None
) -> None:
    sys.stdout.writelines(render.stream(found, columns, output, above))


def _address(text: str, option: str) -> Addr | None:
    try:
        return parse_addr(text) if text else None
    except ObjectError as error:
        raise typer.BadParameter(error.what, param_hint=option) from None


class State(StrEnum):
    """views.connections.STATES, for typer."""

    NEW = "new"
    ESTABLISHED = "established"
    CLOSING = "closing"
    CLOSED = "closed"
    ANSWERED = "answered"
    UNPROVEN = "unproven"


Limit = Annotated[int, typer.Option("--limit", min=0, metavar="N", help="At most so many; 0: all.")]


@app.command("services")
def services(
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Only this namespace.")] = "",
    output: OutputOption = Output.TABLE,
    again: Watch = False,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """All Service ports: addresses, policies, how many backends."""
    from kbpf.views import services as view

    def some(snapshot: Snapshot) -> Sequence[view.ServiceRow]:
        return [r for r in view.rows(snapshot) if namespace in ("", r.namespace)]

    _rows(
        _where(pin_dir, state_dir, ipvs_device),
        view.NEEDS,
        some,
        view.COLUMNS,
        output,
        again,
        namespace,
    )


@app.command("service")
def service(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, or NAMESPACE/NAME.")],
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Its namespace.")] = "",
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """One Service in full: its frontends, its backend sets, its backends."""
    from kbpf.cli import pages
    from kbpf.views import node
    from kbpf.views import service as view

    in_name = name.rpartition("/")[0]
    if in_name and namespace not in ("", in_name):
        raise typer.BadParameter(f"{name} names another one", param_hint="--namespace")
    found = view.details(
        node.read(_where(pin_dir, state_dir, ipvs_device), view.NEEDS), name, namespace
    )
    if output in (Output.JSON, Output.YAML):
        print(render.document(found, output))
    else:
        print(pages.service(found))


@app.command("backends")
def backends(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """All backends, and which Services use them."""
    from kbpf.views import backends as view

    _rows(_where(pin_dir, state_dir, ipvs_device), view.NEEDS, view.rows, view.COLUMNS, output)


@app.command("affinity")
def affinity(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """Which client is kept at which backend."""
    from kbpf.views import affinity as view

    found = view.rows(_pins(pin_dir, view.NEEDS, state_dir, ipvs_device))
    print(render.rows(found, view.COLUMNS, output))
    _note_none(len(found), output)


@app.command("connections")
def connections(
    service: Annotated[
        str, typer.Option("--service", metavar="NAMESPACE/NAME", help="Only to this Service.")
    ] = "",
    client: Annotated[
        str, typer.Option("--client", metavar="ADDRESS", help="Only of this client.")
    ] = "",
    backend: Annotated[
        str, typer.Option("--backend", metavar="ADDRESS", help="Only to this backend.")
    ] = "",
    state: Annotated[State | None, typer.Option("--state", help="Only in this state.")] = None,
    expired: Annotated[
        bool, typer.Option("--expired", help="Also those whose time is over.")
    ] = False,
    limit: Limit = 0,
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """The connections that the packet path or IPVS tracks: who, to whom, as whom, in which state.

    Not shown: connections that the socket hooks translated. They cost nothing per packet, nobody
    tracks them but the kernel itself, and `ss` lists them with their backends.
    """
    from kbpf.views import node
    from kbpf.views.packet_path import connections as view

    wanted = view.Wanted(
        service, _address(client, "--client"), _address(backend, "--backend"),
        str(state or ""), expired,
    )  # fmt: skip
    found = node.find_connections(_where(pin_dir, state_dir, ipvs_device), wanted, limit)
    _stream(found.rows, view.COLUMNS, output)
    if not found.words:
        _note_none(found.total, output)
    _note(found.words)
    _note(_more(found.total, limit, "connections"))
    _note(f"and {found.over} whose time is over: --expired shows them" if found.over else "")


def _more(count: int, limit: int, what: str) -> str:
    return f"and {count - limit} more {what}" if 0 < limit < count else ""


@app.command("nat")
def nat(
    limit: Limit = 0,
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """Translated sources: as whom the node speaks for whom, and how many of its ports are in use
    before each backend; `!` from 80 % on.
    """
    from kbpf.cli import pages
    from kbpf.views.packet_path import availability
    from kbpf.views.packet_path import nat as view

    held = _pins(pin_dir, view.NEEDS, state_dir, ipvs_device)
    found = view.translated(held)
    above = view.view(held, found)
    if output not in (Output.JSON, Output.YAML):
        print(pages.nat(above), end="\n\n")
    _stream(view.rows(held, islice(found, limit or None)), view.COLUMNS, output, above)
    _note(availability.words(held))
    _note(_more(len(found), limit, "sources"))


@app.command("sources")
def sources(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """Who may dial the LoadBalancer VIPs that are not for everybody, and who counts as a pod of
    this node.
    """
    from kbpf.cli import pages
    from kbpf.views import sources as view
    from kbpf.views.packet_path import availability

    held = _pins(pin_dir, view.NEEDS, state_dir, ipvs_device)
    found = view.view(held)
    if output in (Output.JSON, Output.YAML):
        print(render.document(found, output))
    else:
        print(pages.sources(found, output is Output.WIDE))
    _note(availability.words(held))


@app.command("devices")
def devices(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """Network devices: to other machines or to pods, which program each runs, and why not."""
    from kbpf.views.packet_path import availability
    from kbpf.views.packet_path import devices as view

    held = _pins(pin_dir, view.NEEDS, state_dir, ipvs_device)
    print(render.rows(view.rows(held, view.look(held)), view.COLUMNS, output))
    _note(availability.words(held))


@app.command("maps")
def maps(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """How full the maps are; `!` from 80 % on."""
    from kbpf.views import maps as view

    held = _pins(pin_dir, view.NEEDS, state_dir, ipvs_device)
    print(render.rows(view.rows(held), view.COLUMNS, output))


@app.command("programs")
def programs(
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """What is attached to each hook."""
    from kbpf.views import programs as view

    held = _pins(pin_dir, view.NEEDS, state_dir, ipvs_device)
    print(render.rows(view.rows(held), view.COLUMNS, output))


@app.command("status")
def status(
    output: OutputOption = Output.TABLE,
    again: Watch = False,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
    ipvs_device: IpvsDevice = DEFAULT.ipvs_device,
) -> None:
    """How the agent is doing. Ends with 1 unless it runs, has synced, all hooks are attached, all
    Service ports are programmed and the packet path, if it is switched on, is on all its devices.
    """
    from kbpf.cli import pages
    from kbpf.views import node
    from kbpf.views import status as view

    well = True

    def page() -> str:
        nonlocal well
        now = view.view(node.read(_where(pin_dir, state_dir, ipvs_device), view.NEEDS))
        well = now.ok
        if output in (Output.JSON, Output.YAML):
            return render.document(now, output)
        return pages.status(now)

    _show(page, output, again)
    raise typer.Exit(0 if well else 1)
