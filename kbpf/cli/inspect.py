"""`kbpf inspect ...`: what the kernel holds, out of the pinned maps. The agent may be down."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, Output, OutputOption, PinDir, Watch
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
    """How the agent is doing. Ends with 1 unless it runs, has synced, all hooks are attached and
    all Service ports are programmed.
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
