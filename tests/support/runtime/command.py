# SPDX-License-Identifier: Apache-2.0
"""Runs `kbpf` as a separate process, as a shell does, and fails if it prints a traceback."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT = 600.0
"""Seconds, for what hangs: a start takes half a second, or many on a busy machine."""
EMPTY: Mapping[str, str] = {}


class Done(NamedTuple):
    code: int
    out: str
    err: str

    def last(self) -> str:
        """The last line on stderr."""
        return self.err.splitlines()[-1] if self.err else ""


@contextmanager
def pipe_without_reader() -> Iterator[int]:
    """The end of a pipe to write to, whose reader has exited."""
    read, write = os.pipe()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)


def kbpf(*words: str, **given: Any) -> Done:
    """Runs kbpf with these arguments; the others are those of python()."""
    return python("-m", "kbpf", *words, **given)


def python(
    *words: str,
    shell: str = "",
    nobody: bool = False,
    cwd: Path | None = None,
    environ: Mapping[str, str] = EMPTY,
    pass_fds: Sequence[int] = (),
) -> Done:
    """Runs Python with these arguments. `shell` is shell syntax after the command, such as `>&-` or
    `| head -1`; the exit status is the program's own.
    """
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if nobody else []
    command = [*drop, sys.executable, *words]
    script = f'"$@" {shell}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *command],
        capture_output=True,
        timeout=TIMEOUT,
        cwd=cwd,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        check=False,
        pass_fds=pass_fds,
    )
    out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    assert "Traceback" not in err + out, err
    assert "Exception ignored" not in err, err
    return Done(done.returncode, out, err)
