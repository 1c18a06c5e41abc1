# SPDX-License-Identifier: Apache-2.0
"""Builds the container image from the Containerfile with buildah, on a base image made here.

No registry is used: mmdebstrap makes an equivalent of debian:bookworm-slim from Debian's packages.
The base and buildah's store, with the layers of the last build, are kept in the tests' cache;
unused layers are removed after each build. Concurrent runs take turns.

Programs of another architecture run in an emulator during the build (emulator.py).
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.build import artifacts
from tests.support.build.go_build import cache

ROOT = Path(__file__).parents[3]
SECONDS = 900 if not os.environ.get("KBPF_TEST_ARM64") else 5400
MIRROR = "http://deb.debian.org/debian"
LEFT_OUT = ("doc", "man", "locale", "info")  # as in Debian's own slim images
DEBSTRAP = (
    "mmdebstrap",
    "--quiet",
    "--variant=apt",
    "--include=usr-is-merged",
    '--aptopt=Acquire::Retries "5"',
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT),
    # usrmerge depends on perl, which Debian's images lack.
    '--customize-hook=chroot "$1" apt-get purge -qq -y usrmerge ^perl-modules ^libperl',
)
SUITE = "bookworm"
TARGETS = ("kbpf", "slim")
PYTHON = "python"
"""The stage that both targets copy from."""
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
"""This machine's CA certificates: pip in the build has to trust the same."""


@dataclass(frozen=True, slots=True)
class Built:
    """A mounted image: its root, the environment that it sets, and its size in bytes."""

    root: Path
    env: dict[str, str]
    size: int


@contextmanager
def image(target: str, folder: Path, architecture: str = "") -> Iterator[Built]:
    """The image of a target of the Containerfile. `folder` is for the build context; `architecture`
    is Debian's name, "" for this machine's.
    """
    store = _Buildah(cache() / "image", architecture)
    with _built(store, target, folder) as name:
        container = store.run("from", *store.platform, name)
    try:
        root = Path(store.run("mount", container))
        config = json.loads(store.run("inspect", "--type=image", name))["OCIv1"]["config"]
        env = dict(line.split("=", 1) for line in config["Env"])
        yield Built(root, env, _size(root))
    finally:
        store.run("rm", container)


def archive(target: str, folder: Path, name: str, path: Path) -> None:
    """Stores the image of a target under a name, as an archive that containerd can import."""
    store = _Buildah(cache() / "image", "")
    with _built(store, target, folder) as image_name:
        store.run("push", "--quiet", image_name, f"docker-archive:{path}:{name}")


@contextmanager
def _built(store: "_Buildah", target: str, folder: Path) -> Iterator[str]:
    """The name of the image of a target, which no other run replaces during the block."""
    context = folder / "context"
    _fill(context)
    with store.alone():
        store.base()
        for stage in (PYTHON, target):  # PYTHON gets a name too, or its layers would be pruned
            name = store.build(stage, context)
        with suppress(RuntimeError):  # an image mounted by another run stays until the next time
            store.run("rmi", "--prune")
        yield name


def _fill(context: Path) -> None:
    """Makes the build context: the clone's files, and artifacts that are compiled already."""
    context.mkdir()
    (context / "tools").mkdir()
    for name in ("Containerfile", ".containerignore", "pyproject.toml", "README.md", "requirements.lock", "tools/sbom"):
        shutil.copy(ROOT / name, context / name)
    shutil.copytree(ROOT / "kbpf", context / "kbpf", ignore=shutil.ignore_patterns("__pycache__"))
    artifacts.copy_to(context / "build" / "artifacts")


def _size(root: Path) -> int:
    """The total size of its files in bytes."""
    return sum(p.lstat().st_size for p in root.rglob("*") if p.is_file() and not p.is_symlink())


class _Buildah:
    """buildah with a separate store in a folder."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self._folder, self._architecture = folder, architecture
        folder.mkdir(parents=True, exist_ok=True)
        self._debstrap = (*DEBSTRAP, *([f"--architectures={architecture}"] if architecture else []))
        self.platform = [f"--platform=linux/{architecture}"] if architecture else []
        words = " ".join([*self._debstrap, SUITE, MIRROR])
        self.base_name = f"localhost/debian-slim:{hashlib.sha256(words.encode()).hexdigest()[:12]}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Holds the lock against concurrent builds."""
        with (self._folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def run(self, *arguments: str) -> str:
        store = ("--root", str(self._folder / "store"), "--runroot", str(self._folder / "run"))
        return _run("buildah", *store, *arguments)

    def build(self, stage: str, context: Path) -> str:
        """Builds a stage of the Containerfile and returns the image's name."""
        name = f"localhost/kbpf-tests:{stage}{self._architecture}"
        self.run(
            "build",
            "--isolation=chroot",
            "--layers",
            *self.platform,
            f"--target={stage}",
            f"--tag={name}",
            f"--build-arg=BASE={self.base_name}",
            str(context),
        )
        return name

    def base(self) -> None:
        """Makes the base image if it does not exist."""
        known = json.loads(self.run("images", "--json") or "null") or []
        if any(self.base_name in (image["names"] or ()) for image in known):
            return
        tar = self._folder / "base.tar"
        _run(*self._debstrap, SUITE, str(tar), MIRROR)
        config = self._folder / "pip.conf"
        config.write_text("[global]\ncert = /etc/pip-ca.crt\n")
        container = self.run("from", *self.platform, "scratch")
        self.run("add", container, str(tar), "/")
        self.run("add", container, str(BUNDLE), "/etc/pip-ca.crt")
        self.run("add", container, str(config), "/etc/pip.conf")
        self.run("commit", "--rm", container, self.base_name)
        tar.unlink()


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{last}")
    return done.stdout.strip()
