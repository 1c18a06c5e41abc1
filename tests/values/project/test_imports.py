# SPDX-License-Identifier: Apache-2.0
"""Import rules: packages import in one direction only, each external library is used in one place,
and pure modules do no I/O.

The rules are tables. `problems()` reads syntax trees, so an import inside a function or under
TYPE_CHECKING counts too.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]

ROOMS = [
    ("__main__",),  # python -m kbpf: the command line
    ("cli",),
    ("agent", "views", "demo"),
    ("checks",),
    ("config", "source", "dataplane", "serve"),
    ("takeover",),
    ("policy", "kernel"),
    ("model",),
    ("errors", "bounded_yaml"),
]
"""A package may import only from rows below its own; packages of one row not from each other."""

RANK = {room: rank for rank, row in enumerate(ROOMS) for room in row}

ONLY = {"views": ("model", "errors")}
"""Packages that may import from these only: views read the values of model/inspection.py, and know
no data plane.
"""

HOMES = {
    "bcc": ("dataplane/bpf/programs/compile.py",),
    "ctypes": ("kernel/",),
    "pyroute2": ("kernel/",),
    "nftables": ("kernel/",),
    "kubernetes": ("source/api/credentials.py",),
    "h11": ("serve/message.py", "serve/http.py"),
    "prometheus_client": ("serve/",),
    "typer": ("cli/",),
    "click": ("cli/",),
    "rich": ("cli/",),
    "jinja2": ("views/html_page.py",),
    "yaml": ("bounded_yaml.py",),
    "msgspec": ("",),
}
"""The folders and files in which an external library may be imported; other libraries are errors.
"""

PURE = """
__future__ abc array bisect collections contextlib copy dataclasses difflib enum errno fractions functools hashlib heapq
ipaddress itertools json math operator re string struct types typing zlib
"""
"""The modules of the standard library that a pure module may import: no I/O, time, randomness or
logging.
"""

IMPURE_CALLS = frozenset(("open", "print", "input", "breakpoint", "exec", "eval", "__import__"))
ALLOWED = {
    "model/address.py": {"socket"},  # inet_pton and inet_ntop: text to bytes and back
    "model/config.py": {"pathlib"},  # Path as a value
}


def is_pure(path: str) -> bool:
    return path.startswith(("model/", "policy/")) or path.endswith(("/plan.py", "ipvs/diff.py"))


class Import(NamedTuple):
    """A dotted name that a module imports, and its line."""

    name: str
    line: int


def imports(path: str, tree: ast.AST) -> Iterator[Import]:
    """Every import of the module at `path` (below kbpf/), relative ones resolved."""
    package = ["kbpf", *Path(path).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}" if module == "kbpf" else module
                yield Import(name, node.lineno)


def import_problem(path: str, name: str) -> str | None:
    """The problem with this import in this module, None if there is none."""
    top, _, below = name.partition(".")
    if top == "kbpf":
        return room_problem(path, below.partition(".")[0])
    standard = top in sys.stdlib_module_names
    if standard and is_pure(path) and top not in {*PURE.split(), *ALLOWED.get(path, ())}:
        return f"{top} in a pure module"
    if top in HOMES:
        is_allowed = path.startswith(HOMES[top])
        return None if is_allowed else f"{top} belongs to {', '.join(HOMES[top])}"
    return None if standard else f"{top} has no assigned place"


def room_problem(path: str, theirs: str) -> str | None:
    """The problem with an import of another package; the root package has only __version__."""
    if not theirs or theirs == "__version__":
        return None
    ours = Path(path).parts[0].removesuffix(".py")
    if ours == theirs:
        return None
    if theirs not in RANK:
        return f"kbpf.{theirs} is not in the table of packages"
    if ours not in RANK:
        return f"{ours} is not in the table of packages and imports {theirs}"
    if theirs not in ONLY.get(ours, (theirs,)):
        return f"{ours} may import from {' and '.join(ONLY[ours])} only"
    return None if RANK[ours] < RANK[theirs] else f"{ours} must not import {theirs}"


def problems(modules: Mapping[str, str]) -> list[str]:
    """All broken rules in {path below kbpf/: source text}."""
    found = []
    for path, text in modules.items():
        tree = ast.parse(text, path)
        for name, line in imports(path, tree):
            if problem := import_problem(path, name):
                found.append(f"{path}:{line}: {problem}")
        if is_pure(path):
            found += [f"{path}:{problem}" for problem in call_problems(tree)]
    return found


def call_problems(tree: ast.AST) -> Iterator[str]:
    """Calls of builtins that do I/O."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_CALLS:
                yield f"{node.lineno}: {name}() in a pure module"


def project() -> dict[str, str]:
    package = ROOT / "kbpf"
    return {str(path.relative_to(package)): path.read_text() for path in sorted(package.rglob("*.py"))}


def test_the_project_follows_the_import_rules():
    modules = project()
    assert {"policy/endpoints.py", "model/objects.py", "errors.py"} <= modules.keys()
    assert problems(modules) == []


def test_the_oracle_imports_nothing_of_kbpf():
    tree = ast.parse((ROOT / "tests/support/oracle.py").read_text())
    names = {found.name.partition(".")[0] for found in imports("oracle.py", tree)}
    assert names
    assert not names & {"kbpf", "tests"}
