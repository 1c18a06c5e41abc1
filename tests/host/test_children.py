# SPDX-License-Identifier: Apache-2.0
"""Child processes never execute anything from the caller's working directory.

The attacker owns the working directory. It has a module for each name of the standard library that
a child could import, and a program for each that a child could run; each leaves a mark if executed.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.kernel.system import children
from tests.support.table import table

ROOT = Path(__file__).parents[2]
NOBODY = 65534
NOT_LOADED_YET = sorted(sys.stdlib_module_names - {"__main__", "__future__", "sys", "builtins"})
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users:
- name: u
  user:
    exec: {apiVersion: client.authentication.k8s.io/v1, command: sh, interactiveMode: Never,
           args: ["-c", "echo no credentials here >&2; exit 1"]}
"""


class Trap(NamedTuple):
    """The attacker's folder, and the marks of what was executed in it."""

    folder: Path
    marks: Path

    def sprung(self) -> list[str]:
        return sorted(path.name for path in self.marks.iterdir())


@pytest.fixture
def trap(tmp_path) -> Trap:
    folder, marks = tmp_path / "of-nobody", tmp_path / "marks"
    folder.mkdir()
    marks.mkdir(mode=0o777)
    for name in NOT_LOADED_YET:
        code = f"import sys\nopen({str(marks)!r} + '/{name}', 'w').close()\nsys.exit(66)\n"
        (folder / f"{name}.py").write_text(code)
    for name in ("modprobe", "iptables-legacy-save", "sh", "python3"):
        (folder / name).write_text(f"#!/bin/sh\n: >{marks}/{name}\nexit 66\n")
        (folder / name).chmod(0o755)
    for path in (folder, *folder.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    return Trap(folder, marks)


def run(trap: Trap, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs our Python interpreter in the attacker's folder."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=trap.folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_module_in_the_working_directory_leaves_a_mark(trap: Trap):
    done = run(trap, "-m", "smtplib")
    assert done.returncode == 66
    assert trap.sprung() != []


HOSTILE = {"PYTHONSTARTUP": "subprocess.py", "PATH": ":.:" + os.environ["PATH"]}


def test_compile_executes_nothing_of_the_working_directory(trap: Trap, tmp_path):
    """Python itself looks for modules there, unlike for the console script."""
    cache = tmp_path / "cache"
    done = run(trap, "-m", "kbpf", "compile", "--cache-dir", str(cache), **HOSTILE)
    assert trap.sprung() == []
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name.partition("-")[0] for path in cache.iterdir()} == {"sock", "tc"}


@pytest.mark.parametrize("is_relative", [False, True])
def test_credential_plugins_execute_nothing_of_the_working_directory(trap: Trap, tmp_path, is_relative: bool):
    """The kubeconfig's plugin is run by the library in a child process. Library and plugin are found by the absolute
    entries of Python's path and of PATH only, and the kubeconfig by a relative path, too.
    """
    kubeconfig = (trap.folder if is_relative else tmp_path) / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG)
    code = (
        "from pathlib import Path\nfrom kbpf.source.api import credentials\n"
        "from kbpf.errors import SourceError\n"
        f"try: credentials._run_plugin(Path({kubeconfig.name if is_relative else str(kubeconfig)!r}), lambda: False)\n"
        "except SourceError as error: print(error)"
    )
    done = run(trap, "-P", "-c", code, PATH=f":{os.environ['PATH']}")
    assert trap.sprung() == []
    assert "no credentials here" in done.stdout, done.stderr


@pytest.mark.parametrize("path", ["", ".", "::", "bin"])
def test_modprobe_and_iptables_are_not_run_from_relative_paths(trap: Trap, path: str):
    """They are found by PATH, without its relative entries; the machine need not have them."""
    code = (
        "from kbpf.errors import KernelError\nfrom kbpf.kernel.netfilter import iptables_legacy\n"
        "from kbpf.kernel.system import modules\n"
        "modules.load(['kbpf_no_such_module'])\n"
        "try: iptables_legacy.save('ip', 'filter')\n"
        "except KernelError: pass\nprint('done')"
    )
    done = run(trap, "-P", "-c", code, PATH=path)
    assert done.stdout == "done\n", done.stderr
    assert trap.sprung() == []


def test_an_agent_that_executes_itself_keeps_its_arguments(trap: Trap, tmp_path):
    """After a configuration change the agent executes itself: same arguments, same directory."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom kbpf.cli import run\n"
        "if 'again' in sys.orig_argv: print(sys.argv[1:], sys.flags.safe_path); sys.exit()\n"
        "sys.orig_argv.append('again')\n"
        "os.environ['PYTHONPATH'] = ':' + os.environ['PYTHONPATH']\nrun.restart_process()\n"
    )
    done = run(trap, str(script), "--config", "relative.yaml", PYTHONPATH=str(ROOT))
    assert trap.sprung() == []
    assert done.stdout == "['--config', 'relative.yaml', 'again'] True\n", done.stderr


OTHERS = str(children.PACKAGE_ROOT)


class Variable(NamedTuple):
    """The caller's environment, and the value of a variable in the child's; "-": it has none."""

    inherited: str
    name: str
    value: str


CLEAN = table(
    Variable,
    f"""
PATH=/usr/bin:/bin             | PATH          | /usr/bin:/bin
PATH=:/usr/bin:.:bin:../x:/bin: | PATH          | /usr/bin:/bin
PATH=.                         | PATH          | {os.defpath}
                               | PATH          | -
PYTHONPATH={OTHERS}:.::x:/srv/lib | PYTHONPATH    | {OTHERS}:/srv/lib
PYTHONPATH=.                   | PYTHONPATH    | {OTHERS}
PYTHONSTARTUP=x                | PYTHONSTARTUP | -
PYTHONHOME=x                   | PYTHONHOME    | -
PYTHONINSPECT=1                | PYTHONINSPECT | -
HOME=/root AWS_PROFILE=x       | AWS_PROFILE   | x
""",
)


@pytest.mark.parametrize("row", CLEAN, ids=lambda row: row.inherited)
def test_the_childs_environment_has_no_relative_paths(row: Variable):
    inherited = dict(word.split("=") for word in row.inherited.split())
    assert children.child_environment(inherited).get(row.name, "-") == row.value


def test_an_installed_kbpf_needs_no_python_path(monkeypatch):
    monkeypatch.setattr(children.site, "getsitepackages", lambda: [OTHERS])
    assert "PYTHONPATH" not in children.child_environment({})


# ---- all child processes of kbpf -----------------------------------------------------------------

STARTS = {"run", "Popen", "call", "check_call", "check_output"}
FORBIDDEN = {"system", "popen", "spawnv", "spawnvp", "execvp", "execlp", "execvpe", "posix_spawnp"}


def starts(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls that start a program."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="subprocess"), attr=name)):
                if name in STARTS:
                    yield node
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr=name)):
                if name in FORBIDDEN:
                    yield node


def problems(text: str) -> list[str]:
    tree = ast.parse(text)
    found = []
    for call in starts(tree):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if given.get("cwd") != "children.WORKING_DIRECTORY":
            found.append(f"{call.lineno}: cwd")
        if given.get("env") not in {"children.child_environment()", "environment"}:
            found.append(f"{call.lineno}: env")
    if "sys.executable" in text and '"-m"' in text:
        found.append("a command line of its own")
    return found


def test_every_program_is_started_by_children():
    texts = {path: path.read_text() for path in (ROOT / "kbpf").rglob("*.py")}
    seen = {str(path): problems(text) for path, text in texts.items() if path.stem != "children"}
    assert {path: found for path, found in seen.items() if found} == {}
    assert sum(len(list(starts(ast.parse(text)))) for text in texts.values()) >= 5
