# SPDX-License-Identifier: Apache-2.0
"""The standard streams. One that is closed, full, or cannot encode a character leads to one clear
line, never to a traceback. A reader that has gone ends the command by SIGPIPE.
"""

import io
import os
import signal
import sys
from typing import Any, NoReturn

from kbpf.errors import OutputError


class StandardOutput(io.FileIO):
    """The raw file of sys.stdout."""

    def write(self, data: Any) -> int:
        """Writes as FileIO.write(). After an error, buffered data goes to /dev/null, so that the
        interpreter does not report the error again when it exits.
        """
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            exit_by_sigpipe()
        except OSError as error:
            _open_null(self.fileno(), os.O_WRONLY)
            raise OutputError(f"cannot write to the standard output: {error.strerror}") from error


def set_up() -> None:
    """Prepares the streams of this process. A closed stream becomes /dev/null, so that no file that
    is opened later gets its descriptor. Closed standard output is opened read-only: the first write
    fails, as it does in other programs.
    """
    stdout = sys.stdout
    original = stdout if isinstance(stdout, io.TextIOWrapper) else None
    if sys.stdin is None:
        _open_null(0, os.O_RDONLY)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    if stdout is None:
        _open_null(1, os.O_RDONLY)
    if sys.stderr is None:
        _open_null(2, os.O_WRONLY)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(StandardOutput(1, "w", closefd=False)),
        encoding=original.encoding if original else "utf-8",
        errors="replace",  # a `?` is as wide as the character it replaces: tables stay aligned
        line_buffering=original is not None and original.line_buffering,
        write_through=original is not None and original.write_through,
    )


def _open_null(number: int, flags: int) -> None:
    fd = os.open(os.devnull, flags | os.O_CLOEXEC)
    if fd == number:
        os.set_inheritable(fd, True)
    else:
        os.dup2(fd, number)
        os.close(fd)


def exit_by_sigpipe() -> NoReturn:
    """Ends this process as SIGPIPE ends `yes | head`: a shell sees the status 141."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPIPE})
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)


def print_error(text: str) -> None:
    """Prints a line to stderr, if that is possible."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        _open_null(2, os.O_WRONLY)
