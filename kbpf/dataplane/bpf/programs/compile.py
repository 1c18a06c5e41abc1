# SPDX-License-Identifier: Apache-2.0
"""Compiles a unit with BCC in a child process (`python -m kbpf.dataplane.bpf.programs.compile UNIT
FILE`), which alone imports bcc.

A child, because LLVM never releases its 130 MB, two concurrent compilations crash, and BCC changes
the working directory and prints errors to stderr.
"""

import importlib.util
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.hooks import program_names
from kbpf.dataplane.bpf.programs import artifact
from kbpf.errors import CompileError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import children

COMPILE_TIMEOUT_S: Final = 300
_ERROR = re.compile(r"^(?P<where>[^\s:]+:\d+)(?::\d+)?: (?:fatal )?error: (?P<what>.*)$", re.M)
_BPF_LD_IMM64: Final = 0x18
_BPF_PSEUDO_MAPS: Final = (1, 2)


def find_toolchain() -> str | None:
    """The versions of BCC and LLVM on this machine, by file name and size; None without BCC. Does
    not import bcc, which would map LLVM into the agent.
    """
    spec = importlib.util.find_spec("bcc")
    if spec is None or not spec.submodule_search_locations:
        return None
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    parts = [version.read_text().strip()] if version.exists() else []
    for pattern in ("libbcc.so*", "libLLVM*.so*", "libclang-cpp.so*"):
        for path in Path("/usr/lib").glob(f"*/{pattern}"):
            target = path.resolve()
            parts.append(f"{target.name}:{target.stat().st_size}")
    return " ".join(sorted(set(parts)))


def find_or_compile(unit: str, cache: Path) -> tuple[artifact.Artifact, bool]:
    """Finds a unit's artifact in the cache, or compiles and stores it. Returns the artifact and
    whether it was compiled. A read-only cache costs a compilation at each start.
    """
    toolchain = find_toolchain()
    cached = artifact.find(unit, cache, toolchain)
    if cached is not None:
        return cached, False
    if toolchain is None:
        raise CompileError(
            "BCC is not installed and the cache has no compiled programs",
            f"unit {unit}, cache {cache}",
            "install python3-bpfcc, or run `kbpf compile --cache-dir` on a machine with BCC",
        )
    return compile_unit(unit, cache), True


def compile_unit(unit: str, cache: Path) -> artifact.Artifact:
    """Runs the child and stores its artifact. CompileError names the C file and line."""
    with tempfile.TemporaryDirectory(prefix="kbpf-compile-") as folder:
        out = Path(folder) / "artifact"
        command = children.python_command(__spec__.name, unit, str(out))
        try:
            child = subprocess.run(
                command,
                cwd=children.WORKING_DIRECTORY,
                env=children.child_environment(),
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(
                f"BCC did not finish in {COMPILE_TIMEOUT_S} s",
                f"unit {unit}",
                "retry when the machine is less busy",
            ) from error
        compiled = artifact.read(out) if child.returncode == 0 else None
        if compiled is None:
            raise _explain(unit, child.stderr, child.returncode)
    artifact.try_store(compiled, cache)
    return compiled


def _explain(unit: str, stderr: str, code: int) -> CompileError:
    error_match = _ERROR.search(stderr)
    if error_match:
        return CompileError(
            f"cannot compile the BPF programs: {error_match['what']}",
            error_match["where"],
            "the programs of the last start keep serving; reinstall kbpf or report this",
        )
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    reason = lines[-1].strip() if lines else f"the compiler exited with status {code}"
    if "Operation not permitted" in stderr or "could not open bpf map" in stderr:
        return CompileError(
            f"BCC is not allowed to create BPF maps: {reason}",
            f"unit {unit}",
            "run as root or with CAP_BPF",
        )
    return CompileError(f"BCC failed: {reason}", f"unit {unit}", "run `kbpf check`")


def _compile_in_child(unit: str, out: Path) -> None:
    source, text, toolchain = artifact.source_key(unit), artifact.flatten(unit), find_toolchain()
    os.environ["BCC_KERNEL_SOURCE"] = str(artifact.SOURCES)
    from bcc import BPF, lib

    module = BPF(text=text, cflags=list(artifact.CFLAGS))
    shapes = {}
    by_fd = {}
    for name in _map_names(text):
        # module[name] does not support all map types
        fd = lib.bpf_table_fd(module.module, name.encode())
        by_fd[fd] = name
        shape = Map(os.dup(fd), name)  # BCC's own Leaf is an array for per-CPU maps
        shapes[name] = artifact.MapShape(name, shape.key_size, shape.value_size)
        shape.close()
    programs = tuple(_bytecode(name, module.dump_func(name), by_fd) for name in program_names(unit))
    compiled = artifact.Artifact(artifact.FORMAT, unit, source, toolchain or "", programs, tuple(shapes.values()))
    artifact.store(compiled, out.parent).rename(out)


def _map_names(text: str) -> list[str]:
    # BPF_TABLE(type, key, value, name, size), BPF_F_TABLE(the same, flags)
    tables = re.findall(r"^BPF_(?:F_)?TABLE\(([^;]*?)\);", text, re.M | re.S)
    names = [[part.strip() for part in arguments.split(",")][3] for arguments in tables]
    return names + re.findall(r"^BPF_(?:QUEUE|SK_STORAGE|ARRAY_OF_MAPS|RINGBUF_OUTPUT)\((\w+),", text, re.M)


def _bytecode(name: str, raw: bytes, by_fd: dict[int, str]) -> artifact.Bytecode:
    """Replaces this process's map descriptors in the bytecode by references."""
    code = bytearray(raw)
    references = []
    for index in range(len(code) // 8):
        op, registers, _, imm = struct.unpack_from("=BBhi", code, index * 8)
        if op == _BPF_LD_IMM64 and registers >> 4 in _BPF_PSEUDO_MAPS:
            references.append(artifact.Reference(index, by_fd[imm]))
            struct.pack_into("=i", code, index * 8 + 4, 0)
    return artifact.Bytecode(name, bytes(code), tuple(references))


if __name__ == "__main__":
    _compile_in_child(sys.argv[1], Path(sys.argv[2]))
