# SPDX-License-Identifier: Apache-2.0
"""Commands on pins that they cannot read: one line that says what happened, where, and what to do,
for every command that reads pins.
"""

from collections.abc import Callable

import pytest

from kbpf.cli.inspect import VIEWS
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KbpfError
from kbpf.kernel.bpf.objects import Map
from tests.support.plane import Site
from tests.support.runtime.command import kbpf

COMMANDS = (
    *(("inspect", view.name, *(("web",) if view.name == "service" else ())) for view in VIEWS),
    ("trace", "host", "10.96.0.1:80"),
    ("check", "--attached"),
)
"""All commands that read pins; they read different maps."""
ERRORS = {cls.__name__ for cls in (KbpfError, *KbpfError.__subclasses__())}


def remove_the_folder(pins: Pins) -> None:
    for path in sorted(pins.root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    pins.root.rmdir()


def remove_the_maps(pins: Pins) -> None:
    for path in pins.maps.iterdir():
        path.unlink()
    pins.maps.rmdir()


def rename_the_maps(pins: Pins) -> None:
    pins.maps.rename(pins.root / "maps-ffffffffffff")


def remove_each_map(pins: Pins) -> None:
    for path in pins.maps.iterdir():
        path.unlink()


def swap_each_map(pins: Pins) -> None:
    """Under each name is a map with other keys and values, as of a newer layout."""
    with Map.open(pins.maps / "services") as services, Map.open(pins.maps / "node") as node:
        for name in MAPS:
            (pins.maps / name).unlink(missing_ok=True)
            (node if name != "node" else services).pin(pins.maps / name)


DAMAGES: list[tuple[str, Callable[[Pins], None]]] = [
    ("nothing is pinned: there is no such folder", remove_the_folder),
    ("no maps are pinned", remove_the_maps),
    ("another version of kbpf has pinned its maps", rename_the_maps),
    ("", remove_each_map),
    ("", swap_each_map),
]


@pytest.mark.parametrize(("words", "damage"), DAMAGES, ids=[d[1].__name__ for d in DAMAGES])
def test_pins_that_cannot_be_read_are_one_line(words: str, damage: Callable[[Pins], None], written, run, site: Site):
    damage(Pins(site.pins))
    for command in COMMANDS:
        code, out, err = run(*command)
        assert (code, out, err.count("\n")) == (1, "", 1), (command, out, err)
        assert err.startswith(f"kbpf: {words}"), command
        assert str(site.pins) in err, command
        assert "; " in err, f"{command} says what to do: {err}"
        assert err.split()[1].strip(":") not in ERRORS


def test_without_rights_commands_say_so_in_one_line(written, site: Site):
    for command in (*COMMANDS, ("cleanup",)):
        done = kbpf(*command, "--pin-dir", str(site.pins), nobody=True)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), command
        assert "run as root" in done.err or "it needs" in done.err, command
