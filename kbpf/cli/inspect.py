"""`kbpf inspect ...`: what the kernel holds, out of the pinned maps. The agent may be down."""

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, Output, OutputOption, PinDir, Watch
from kbpf.errors import ObjectError
from kbpf.model.address import Addr, parse_addr
from kbpf.views.columns import Column
from kbpf.views.snapshot import Part, Snapshot

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
    from kbpf.cli.watch import watch

    watch(page)


def _rows(
    pin_dir: Path,
    parts: Part,
    make: Callable[[Snapshot], Sequence[Any]],
    columns: Sequence[Column],
    output: Output,
    again: bool = False,
) -> None:
    from kbpf.views import snapshot

    _show(lambda: render.rows(make(snapshot.read(pin_dir, parts)), columns, output), output, again)


def _note(text: str) -> None:
    """What is not among the rows, for whoever sits before them: not into a pipe."""
    if text:
        sys.stdout.flush()
        print(f"kbpf: {text}", file=sys.stderr)


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


Limit = Annotated[int, typer.Option("--limit", min=0, metavar="N", help="At most so many; 0: all.")]


@app.command("services")
def services(
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Only this namespace.")] = "",
    output: OutputOption = Output.TABLE,
    again: Watch = False,
    pin_dir: PinDir = DEFAULT.pin_dir,
) -> None:
    """All Service ports: addresses, policies, how many backends."""
    from kbpf.views import services as view

    def some(snapshot: Snapshot) -> Sequence[view.ServiceRow]:
        return [r for r in view.rows(snapshot) if namespace in ("", r.namespace)]

    _rows(pin_dir, view.NEEDS, some, view.COLUMNS, output, again)


@app.command("service")
def service(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, or NAMESPACE/NAME.")],
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Its namespace.")] = "",
    output: OutputOption = Output.TABLE,
    pin_dir: PinDir = DEFAULT.pin_dir,
) -> None:
    """One Service in full: its frontends, its backend sets, its backends."""
    from kbpf.cli import pages
    from kbpf.views import service as view
    from kbpf.views import snapshot

    found = view.details(snapshot.read(pin_dir, view.NEEDS), name, namespace)
    if output in (Output.JSON, Output.YAML):
        print(render.document(found, output))
    else:
        print(pages.service(found))


@app.command("backends")
def backends(output: OutputOption = Output.TABLE, pin_dir: PinDir = DEFAULT.pin_dir) -> None:
    """All backends, and which Services use them."""
    from kbpf.views import backends as view

    _rows(pin_dir, view.NEEDS, view.rows, view.COLUMNS, output)


@app.command("affinity")
def affinity(output: OutputOption = Output.TABLE, pin_dir: PinDir = DEFAULT.pin_dir) -> None:
    """Which client is kept at which backend."""
    from kbpf.views import affinity as view

    _rows(pin_dir, view.NEEDS, view.rows, view.COLUMNS, output)


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
    pin_dir: PinDir = DEFAULT.pin_dir,
) -> None:
    """The connections that the packet path tracks: who, to whom, as whom, in which state.

    Not shown: connections that the socket hooks translated. They cost nothing per packet, nobody
    tracks them but the kernel itself, and `ss` lists them with their backends.
    """
    from kbpf.views import connections as view
    from kbpf.views import packets, snapshot

    wanted = view.Wanted(
        service, _address(client, "--client"), _address(backend, "--backend"),
        str(state or ""), expired,
    )  # fmt: skip
    held = snapshot.read(pin_dir, view.NEEDS)
    found, over = view.select(held, wanted)
    shown = islice(found, limit or None)
    _stream(view.rows(held, shown), view.COLUMNS, output)
    _note(packets.words(held))
    _note(_more(len(found), limit, "connections"))
    _note(f"and {over} whose time is over: --expired shows them" if over else "")


def _more(count: int, limit: int, what: str) -> str:
    return f"and {count - limit} more {what}" if 0 < limit < count else ""


@app.command("nat")
def nat(
    limit: Limit = 0, output: OutputOption = Output.TABLE, pin_dir: PinDir = DEFAULT.pin_dir
) -> None:
    """Translated sources: as whom the node speaks for whom, and how many of its ports are in use
    before each backend; `!` from 80 % on.
    """
    from kbpf.cli import pages
    from kbpf.views import nat as view
    from kbpf.views import packets, snapshot

    held = snapshot.read(pin_dir, view.NEEDS)
    found = view.translated(held)
    above = view.view(held, found)
    if output not in (Output.JSON, Output.YAML):
        print(pages.nat(above), end="\n\n")
    _stream(view.rows(held, islice(found, limit or None)), view.COLUMNS, output, above)
    _note(packets.words(held))
    _note(_more(len(found), limit, "sources"))


@app.command("sources")
def sources(output: OutputOption = Output.TABLE, pin_dir: PinDir = DEFAULT.pin_dir) -> None:
    """Who may dial the LoadBalancer VIPs that are not for everybody, and who counts as a pod of
    this node.
    """
    from kbpf.cli import pages
    from kbpf.views import packets, snapshot
    from kbpf.views import sources as view

    held = snapshot.read(pin_dir, view.NEEDS)
    found = view.view(held)
    if output in (Output.JSON, Output.YAML):
        print(render.document(found, output))
    else:
        print(pages.sources(found, output is Output.WIDE))
    _note(packets.words(held))


@app.command("devices")
def devices(output: OutputOption = Output.TABLE, pin_dir: PinDir = DEFAULT.pin_dir) -> None:
    """Network devices: to other machines or to pods, which program each runs, and why not."""
    from kbpf.views import devices as view
    from kbpf.views import packets, snapshot

    held = snapshot.read(pin_dir, view.NEEDS)
    print(render.rows(view.rows(held, view.look(held)), view.COLUMNS, output))
    _note(packets.words(held))


@app.command("maps")
def maps(output: OutputOption = Output.TABLE, pin_dir: PinDir = DEFAULT.pin_dir) -> None:
    """How full the maps are; `!` from 80 % on."""
    from kbpf.views import maps as view

    _rows(pin_dir, view.NEEDS, view.rows, view.COLUMNS, output)


@app.command("programs")
def programs(output: OutputOption = Output.TABLE, pin_dir: PinDir = DEFAULT.pin_dir) -> None:
    """What is attached to each hook."""
    from kbpf.views import programs as view

    _rows(pin_dir, view.NEEDS, view.rows, view.COLUMNS, output)


@app.command("status")
def status(
    output: OutputOption = Output.TABLE,
    again: Watch = False,
    pin_dir: PinDir = DEFAULT.pin_dir,
) -> None:
    """How the agent is doing. Ends with 1 unless it runs, has synced, all hooks are attached, all
    Service ports are programmed and the packet path, if it is switched on, is on all its devices.
    """
    from kbpf.cli import pages
    from kbpf.views import snapshot
    from kbpf.views import status as view

    well = True

    def page() -> str:
        nonlocal well
        now = view.view(snapshot.read(pin_dir, view.NEEDS))
        well = now.ok
        if output in (Output.JSON, Output.YAML):
            return render.document(now, output)
        return pages.status(now)

    _show(page, output, again)
    raise typer.Exit(0 if well else 1)
