# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.screens [NAME...]` (`make screens`): records the pictures in docs/screens, and
the output of commands in README.md and docs/, from a real run on this machine.

Each row of SCREENS runs on a terminal of its own, on the node of a demo in which a backend refuses.
Values differ from run to run, so no test compares them; tests/values/project/test_screens.py
compares this table with the documents.
"""

import argparse
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import MAPS, U32, U64
from kbpf.dataplane.bpf.maps.pinning import Pins
from tests.support.runtime import docs

FOLDER = docs.ROOT / "docs" / "screens"
REQUESTS = 300
RATE = 20.0
ROWS = 60
FONTS = "ui-monospace, 'DejaVu Sans Mono', 'Liberation Mono', Menlo, Consolas, monospace"


class Screen(NamedTuple):
    """A command of kbpf. `pages` show its picture, docs/screens/NAME.svg; `blocks` are the pages
    with its output as text, below the line ``$ COMMAND``. `columns`: the width of the terminal.
    `damages`: with the damage of damage(), which the command finds, so it exits with 1.
    """

    name: str
    command: str
    pages: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    columns: int = 120
    damages: bool = False


OBSERVE, TROUBLESHOOT = "docs/observe.md", "docs/troubleshoot.md"
SCREENS = (
    Screen("demo", "kbpf demo", ("README.md",), columns=150),
    Screen("service", "kbpf inspect service 10.96.0.10:80", (OBSERVE, TROUBLESHOOT), (), 165),
    Screen("trace", "kbpf trace default/client http://demo.default --confirm", ("README.md", OBSERVE)),
    Screen("failures", "kbpf inspect failures --since 10m", (OBSERVE, TROUBLESHOOT), (), 160),
    Screen("monitor", "kbpf monitor --count 8", (), (OBSERVE,), 150),
    Screen("top", "kbpf top --once", (), (OBSERVE,)),
    Screen("top-clients", "kbpf top --once --by clients --interval 5s", (), (OBSERVE,)),
    Screen("verify", "kbpf verify", (), (OBSERVE,), 160, damages=True),
)
OTHER_SCENES = {
    "kubectl kbpf status": "tests/lab/cluster/test_kubectl_plugin.py",
    "kbpf simulate objects": "tests/values/cli/test_simulate.py",
}
"""Commands in the pages whose output shows a scene of these tests."""
BROWSER_PICTURES = {"page.png": "tests/lab/agent/test_page.py"}
"""Pictures in docs/screens that a test records with a browser."""


# ---- recording -----------------------------------------------------------------------------------


def record(arguments: list[str], columns: int, environment: Mapping[str, str], exit_code: int = 0) -> str:
    """What the command prints on a terminal, with its colours. Raises if it ends with another exit
    code.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    child = subprocess.Popen(
        arguments,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**environment, "TERM": "xterm-256color", "LANG": "C.UTF-8"},
    )
    os.close(theirs)
    output = bytearray()
    try:
        while data := os.read(ours, 1 << 16):
            output += data
    except OSError:
        pass  # EIO: the command has ended
    finally:
        os.close(ours)
    if child.wait() != exit_code:
        raise SystemExit(f"{shlex.join(arguments)} failed: {output.decode(errors='replace')}")
    return output.decode().replace("\r\n", "\n")


def draw(screen: Screen, output: str) -> str:
    """An SVG of the terminal, which refers to nothing outside of it."""
    console = Console(
        record=True,
        width=screen.columns,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console.print(Text.from_ansi(f"\x1b[1m$ {screen.command}\x1b[0m\n{output.rstrip()}"))
    svg = console.export_svg(title="kbpf", unique_id=screen.name)
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;]*;", f"font-family: {FONTS};", svg)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def block_of(screen: Screen) -> "re.Pattern[str]":
    """Matches the fenced block with the screen's command."""
    return re.compile(rf"^```\n\$ {re.escape(screen.command)}\n.*?^```$", re.MULTILINE | re.DOTALL)


def write(screen: Screen, output: str) -> None:
    """Replaces the screen's picture and blocks."""
    if screen.pages:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{screen.name}.svg").write_text(draw(screen, output))
    text = Text.from_ansi(output.rstrip()).plain
    block = f"```\n$ {screen.command}\n{text}\n```"
    for page in screen.blocks:
        path = docs.ROOT / page
        path.write_text(block_of(screen).sub(lambda _: block, path.read_text()))


def damage(pin_dir: Path) -> None:
    """Makes the programs overlook port 80."""
    path, spec = Pins(pin_dir).maps / "frontend_ports", MAPS["frontend_ports"]
    with pinning.open_map(path, spec) as ports:
        key = U32.pack(80 // 64)
        (word,) = U64.unpack(ports.lookup(key) or bytes(8))
        ports.update(key, U64.pack(word & ~(1 << 80 % 64)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    known = [screen.name for screen in SCREENS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    names = parser.parse_args().names or known
    if unknown := set(names) - set(known):
        parser.error(f"no such screens: {', '.join(sorted(unknown))}")
    from kbpf.cli.options import DEFAULT
    from kbpf.demo.phases import CLIENTS, Client, run_phases
    from kbpf.demo.scene import DemoScene

    def kbpf(screen: Screen) -> list[str]:
        return [sys.executable, "-m", *shlex.split(screen.command)]

    wanted = [screen for screen in SCREENS if screen.name in names]
    with DemoScene(DEFAULT.cache_dir, options=("--accounting", "full")) as scene:
        scene.wait_until_ready()
        run_phases(scene, REQUESTS)
        for client in CLIENTS:  # for what shows connections as they happen
            Client(scene, client, 0, RATE)
        environment = {**os.environ, "KBPF_PIN_DIR": str(scene.pin_dir)}
        for screen in wanted:
            if not screen.command.startswith("kbpf demo"):
                command = scene.enter_command("node", *kbpf(screen))
                if screen.damages:
                    damage(scene.pin_dir)
                output = record(command, screen.columns, environment, int(screen.damages))
                write(screen, output)
    for screen in wanted:
        if screen.command.startswith("kbpf demo"):
            write(screen, record(kbpf(screen), screen.columns, os.environ))


if __name__ == "__main__":
    main()
