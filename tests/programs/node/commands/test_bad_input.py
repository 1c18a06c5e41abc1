# SPDX-License-Identifier: Apache-2.0
"""Commands on pins that they cannot read: one line that says what happened, where, and what to do,
for every command that reads pins.
"""

import os
import subprocess

import pytest

from kbpf.cli.inspect import VIEWS
from kbpf.errors import KbpfError
from tests.support.plane import Site
from tests.support.runtime.command import kbpf

COMMANDS = (
    *(("inspect", view.name, *(("web",) if view.name == "service" else ())) for view in VIEWS),
    ("trace", "host", "10.96.0.1:80"),
    ("check", "--attached"),
)
"""All commands that read pins; they read different maps."""
ERRORS = {cls.__name__ for cls in (KbpfError, *KbpfError.__subclasses__())}


SWAP = """
cd $PINS/maps-*
for map in *; do case $map in node|services) ;; *) rm $map; ln node $map;; esac; done
mv node other; mv services node; mv other services
"""
"""Under each name is a map with other keys and values, as of a newer layout."""
DAMAGES = {
    "rm -r $PINS": "nothing is pinned: there is no such folder",
    "rm -r $PINS/maps-*": "no maps are pinned",
    "mv $PINS/maps-* $PINS/maps-ffffffffffff": "another version of kbpf has pinned its maps",
    "rm $PINS/maps-*/*": "",
    SWAP: "",
}
"""A command, and the beginning of the line."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_pins_that_cannot_be_read_are_one_line(damage: str, written, run, site: Site):
    subprocess.run(["sh", "-ec", damage], env={**os.environ, "PINS": site.pins}, check=True)
    for command in COMMANDS:
        code, out, err = run(*command)
        assert (code, out, err.count("\n")) == (1, "", 1), (command, out, err)
        assert err.startswith(f"kbpf: {DAMAGES[damage]}"), command
        assert str(site.pins) in err, command
        assert "; " in err, f"{command} says what to do: {err}"
        assert err.split()[1].strip(":") not in ERRORS


def test_without_rights_commands_say_so_in_one_line(written, site: Site):
    for command in (*COMMANDS, ("cleanup",)):
        done = kbpf(*command, "--pin-dir", str(site.pins), nobody=True)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), command
        assert "run as root" in done.err or "it needs" in done.err, command
