# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.support.build`: builds once whatever `make test` needs and the machine lacks.
With `--programs` it leaves out the image and the kernels.

Go's compiler uses all processors. Beside it, a second thread makes what is mostly downloaded: the
container image, promtool and Debian's kernels. Progress is printed on stderr: how many of the
builds are done, and what is being built, for how long.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.conformance.cluster.images import userland
from tests.kernels import debian
from tests.support.build import artifacts, debian_files, go_build, image, programs
from tests.support.build.prometheus import promtool

REPORT_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Build:
    """Something to build. `make` returns at once if it is in the cache, and takes a function that
    prints its progress.
    """

    name: str
    make: Callable[[go_build.Say], object]


COMPILED = (
    Build("the BPF programs", lambda say: artifacts.compiled()),
    *(
        Build(name, partial(go_build.build, name))
        for name in (*programs.PROGRAMS, *programs.CONFORMANCE)
        if name not in programs.RARE
    ),
)
DOWNLOADED = (
    Build("Cilium's sources", lambda say: go_build.module(*programs.CILIUM, say)),
    Build("promtool", lambda say: promtool()),
    Build("systemd-resolved", lambda say: debian_files.systemd_resolved()),
    Build("the commands of tests/conformance", lambda say: userland()),
    *(Build(f"Debian's kernel {family}", lambda say, family=family: debian.fetch(family)) for family in debian.QUICK),
    *(
        Build(f"the container image, target {target}", lambda say, target=target: _image(target))
        for target in image.TARGETS
    ),
)


def _image(target: str) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kbpf-image-") as folder,
        image.image(target, Path(folder)),
    ):
        pass  # its layers stay in the cache


class Progress:
    """Numbers the builds of both threads, and reports those that take long."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._lock = threading.Lock()
        self._begun = 0

    def run(self, build: Build) -> None:
        """Makes one thing; prints a line every REPORT_SECONDS, unless the build says more."""
        with self._lock:
            self._begun += 1
            label = f"build {self._begun} of {self._total}: {build.name}"
        started = time.monotonic()
        ended = threading.Event()
        last_line = started

        def say(line: str) -> None:
            nonlocal last_line
            last_line = time.monotonic()
            print(f"{label}: {line}", file=sys.stderr, flush=True)

        def tick() -> None:
            while not ended.wait(REPORT_SECONDS):
                if time.monotonic() > last_line + REPORT_SECONDS:
                    say(f"{time.monotonic() - started:.0f} s")

        ticker = threading.Thread(target=tick)
        ticker.start()
        try:
            build.make(say)
        finally:
            ended.set()
            ticker.join()
        if (seconds := time.monotonic() - started) > 1:
            say(f"done in {seconds:.0f} s")


def main() -> int:
    """Builds everything; the exit code."""
    parser = argparse.ArgumentParser(prog="tests.support.build", description=__doc__)
    parser.add_argument("--programs", action="store_true", help="no image and no kernels")
    downloaded = DOWNLOADED[:3] if parser.parse_args().programs else DOWNLOADED
    progress = Progress(len(COMPILED) + len(downloaded))

    def run_all(builds: Iterable[Build]) -> None:
        for build in builds:
            progress.run(build)

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run_all, builds) for builds in (COMPILED, downloaded)]
    errors = [error for each in running if (error := each.exception()) is not None]
    for error in errors:
        print(f"build: {error}", file=sys.stderr)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
