# SPDX-License-Identifier: Apache-2.0
"""Compiling happens in a child process, without kernel headers, once; errors name file and line.

Tests that change sources run a separate Python on a copy of the tree, so their artifacts never mix
with those of other tests.
"""

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.hooks import UNITS, program_names
from kbpf.dataplane.bpf.programs import compile

ROOT = Path(__file__).parents[3]
OBTAIN = """
import os, sys
from pathlib import Path
from kbpf.dataplane.bpf.programs import compile
from kbpf.errors import CompileError
before = os.getcwd()
try:
    made, compiled = compile.find_or_compile(sys.argv[2], Path(sys.argv[1]))
except CompileError as error:
    print("CompileError:", error)
else:
    print("compiled" if compiled else "found", len(made.programs))
assert os.getcwd() == before
assert not any(name.partition(".")[0] == "bcc" for name in sys.modules), "bcc was imported"
maps = Path("/proc/self/maps").read_text()
assert "libLLVM" not in maps and "libclang" not in maps and "libbcc" not in maps
"""


@dataclass
class Tree:
    """A copy of kbpf, and a cache folder."""

    root: Path

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def edit(self, name: str, old: str, new: str) -> None:
        """Changes one of its C files."""
        path = self.root / "kbpf" / "bpf" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    def obtain(self, *before: str, cache: Path | None = None, path: Path | None = None, unit: str = "sock") -> str:
        """What a new process prints for the unit. `path` comes first on its PYTHONPATH."""
        done = subprocess.run(
            [*before, sys.executable, "-c", OBTAIN, str(cache or self.cache), unit],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (path or "", self.root)))},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", "the compiler's output is not passed on"
        assert done.stdout.count("\n") == 1
        return done.stdout.strip()


@pytest.fixture
def tree(tmp_path) -> Tree:
    shutil.copytree(ROOT / "kbpf", tmp_path / "kbpf", ignore=shutil.ignore_patterns("__pycache__"))
    return Tree(tmp_path)


# ---- the cache -----------------------------------------------------------------------------------


def test_the_same_sources_give_the_same_bytes(artifact_cache: Path, tmp_path):
    assert compile.find_or_compile("sock", artifact_cache) == (compile.compile_unit("sock", tmp_path), False)


PROGRAMS = len(program_names("sock"))
COMPILED, FOUND = f"compiled {PROGRAMS}", f"found {PROGRAMS}"


def test_changed_sources_are_compiled_again(tree: Tree):
    assert tree.obtain() == COMPILED
    assert tree.obtain() == FOUND
    tree.edit("lookup.h", "#define TRIES 3", "#define TRIES 2")
    assert tree.obtain() == COMPILED
    tree.edit("lookup.h", "#define TRIES 2", "#define TRIES 3")
    assert tree.obtain() == FOUND, "the earlier artifact is still cached"


# ---- what is installed ---------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
def test_compiles_without_kernel_and_libc_headers(tree: Tree, unit: str):
    """All the folders where they could be are empty, kheaders included."""
    hide = (
        "mount --make-rprivate /;"
        "for d in /lib/modules /usr/src /usr/include /usr/local/include; do"
        ' test ! -d $d || mount -t tmpfs none $d; test -z "$(ls -A $d 2>/dev/null)"; done;'
        "k=/sys/kernel/kheaders.tar.xz; test ! -e $k || mount --bind /dev/null $k;"
        'exec "$@"'
    )
    said = tree.obtain("unshare", "-m", "sh", "-ec", hide, "sh", unit=unit)
    assert said == f"compiled {len(program_names(unit))}"


# ---- errors ------------------------------------------------------------------------------------

PREFIX = "CompileError: cannot compile the BPF programs: "


@pytest.mark.parametrize(
    ("name", "old", "new", "what"),
    [
        ("types.h", "\tu32 set;\n", "\tu32 set\n", "expected ';'"),
        ("sock.c", "int recvmsg6(", "int recvmsg6(nothing *x, ", "unknown type name 'nothing'"),
        ("maps.h", "struct slot, u32,", "struct slod, u32,", "slod"),
    ],
)
def test_compile_error_names_file_and_line(tree: Tree, name: str, old: str, new: str, what: str):
    text = (tree.root / "kbpf" / "bpf" / name).read_text()
    line = text[: text.index(old)].count("\n") + 1
    tree.edit(name, old, new)
    said = tree.obtain()
    assert said.startswith(PREFIX)
    assert what in said
    assert f"(kbpf/bpf/{name}:{line})" in said


BROKEN_BCC = {
    "raise ImportError('libbcc.so.0: cannot open shared object file')": "libbcc.so.0: cannot open",
    "import os; os.kill(os.getpid(), 9)": "the compiler exited with status -9",
    "import sys; sys.exit('LLVM ERROR: out of memory')": "LLVM ERROR: out of memory",
    "lib = None\nclass BPF:\n"
    " def __init__(self, **_): raise Exception('Failed to compile BPF module <text>')": "Failed to compile BPF module",
}


@pytest.mark.parametrize("code", BROKEN_BCC)
def test_broken_bcc_is_a_one_line_error(tree: Tree, code: str):
    (tree.root / "broken" / "bcc").mkdir(parents=True)
    (tree.root / "broken" / "bcc" / "__init__.py").write_text(code)
    said = tree.obtain(path=tree.root / "broken")
    assert said.startswith("CompileError: BCC failed: ")
    assert BROKEN_BCC[code] in said
    assert "(unit sock)" in said


def test_compiling_unprivileged_is_an_error(tree: Tree):
    """BCC creates the maps of what it compiles, which an unprivileged user may not."""
    os.chmod(tree.root, 0o755)
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    said = tree.obtain(*drop, cache=Path("/nowhere"))
    assert said.startswith("CompileError: BCC is not allowed to create BPF maps: ")
    assert said.endswith("(unit sock); run as root or with CAP_BPF")


STORE_BYTE, STORE_LONG = 0x73, 0x7B
TIMES, FREE_MARK = (0, 8, 16), 42  # offsets in struct udp_flow: the times; frontend.protocol


@pytest.mark.parametrize("program", ["sendmsg4", "sendmsg6"])
def test_flow_is_marked_free_before_it_is_written(artifact_cache: Path, program: str):
    """The compiler keeps the order of create_flow(): other threads use the socket meanwhile."""
    made, _ = compile.find_or_compile("sock", artifact_cache)
    (insns,) = (code.insns for code in made.programs if code.name == program)
    stores = [
        (opcode, registers & 15, offset)
        for opcode, registers, offset, _ in struct.iter_unpack("=BBhi", insns)
        if opcode in (STORE_BYTE, STORE_LONG)
    ]
    ((_, flow, mark),) = {store for store in stores if store[0] == STORE_BYTE and stores.count(store) == 2}
    times = {(STORE_LONG, flow, mark - FREE_MARK + offset) for offset in TIMES}
    first = stores.index((STORE_BYTE, flow, mark))
    last = stores.index((STORE_BYTE, flow, mark), first + 1)
    assert times <= set(stores[first:last])
