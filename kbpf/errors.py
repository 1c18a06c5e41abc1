# SPDX-License-Identifier: Apache-2.0
"""The exceptions of kbpf, for errors that an operator can act on.

  KbpfError                     what happened (where); what to do
    ConfigError                 a flag, an environment variable or the configuration file
      ConfigErrors              several of them
    ObjectError                 one Kubernetes object; the others are still served
    SourceError                 the API server or the folder of objects
    NotFoundError               the object of a query does not exist
    OutputError                 the standard output
    CompileError                the compiler, BCC or the BPF sources
    CapacityError               a map is full
    KernelError                 a system call failed; has `errno`
      ProgramLoadError          the kernel rejected a program
      AttachError               a loaded program cannot be attached
      OutdatedDevicesError      some devices still run older programs
      PinsRemovedError          another process removed pins of this agent

Each says *what* happened, *where* (object, file, map, hook, device) and *what to do*; the class
says whose fault it is. `str()` is always one line:

    cannot attach connect4 (cgroup /sys/fs/cgroup): EPERM; give it CAP_BPF
"""

import contextlib
import errno as errno_names
import re
from collections.abc import Iterable, Iterator
from pathlib import Path


def escape_unprintable(text: str) -> str:
    """Returns `text` with control characters, bidirectional overrides and other unprintable
    characters escaped (``\\x1b``). Names and messages come from outside: they must not be able to
    control the terminal or forge a log line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_TYPE_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a fraction",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def closest_name(name: str, known: Iterable[str], similarity: float = 0.75) -> str:
    """Returns the known name that was probably meant, ignoring case; "" if none is similar."""
    from difflib import get_close_matches

    by_lower_name = {candidate.lower(): candidate for candidate in known}
    matches = get_close_matches(name.lower(), by_lower_name, 1, similarity)
    return by_lower_name[matches[0]] if matches else ""


def describe_decode_error(message: str) -> str:
    """Rewrites an error message of msgspec in the terms of YAML and JSON: ``expected an integer,
    got a string``.
    """

    def describe_types(match: re.Match[str]) -> str:
        names = [name for name in match[1].split(" | ") if name != "null"]
        return " or ".join(_TYPE_NAMES.get(name, name) for name in names) or "null"

    text = re.sub(r"`([^`]*)`", describe_types, message).replace("got true or false", "got a boolean")
    is_known = text.startswith(("Expected", "Object", "Invalid", "Number"))
    return text[0].lower() + text[1:] if is_known else text


class KbpfError(Exception):
    """What happened, where, and a hint at what to do about it."""

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        super().__init__(what, where, hint)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f" ({self.where})"
        if self.hint:
            text += f"; {self.hint}"
        return _one_line(text)


def _one_line(text: str) -> str:
    return escape_unprintable(" ".join(text.split()))


class ConfigError(KbpfError):
    """A flag, an environment variable or the configuration file is wrong."""


class ConfigErrors(ConfigError):
    """All the settings that are wrong. `str()` joins them in one line. `warnings` are the other
    diagnostics; `log_format` is the format that was requested, to report them in.
    """

    def __init__(
        self, errors: tuple[ConfigError, ...], warnings: tuple[str, ...] = (), log_format: str = "text"
    ) -> None:
        super().__init__(" | ".join(map(str, errors)))
        self.errors, self.warnings, self.log_format = errors, warnings, log_format


class ObjectError(KbpfError):
    """A Kubernetes object that cannot be used. Other objects are still served."""


class SourceError(KbpfError):
    """The API server or the folder of objects cannot be read."""


class NotFoundError(KbpfError):
    """The requested object does not exist."""


class OutputError(KbpfError):
    """The standard output cannot be written."""


class CompileError(KbpfError):
    """The BPF programs cannot be compiled on this machine."""


class CapacityError(KbpfError):
    """There are more objects than the maps can hold."""


class KernelError(KbpfError):
    """A system call failed with `errno` (0: not known)."""

    def __init__(self, what: str, where: str = "", hint: str = "", errno: int = 0) -> None:
        super().__init__(what, where, hint)
        self.errno = errno

    @property
    def errno_name(self) -> str:
        """The symbolic name of `errno`, such as "EPERM"; "" if it is 0."""
        return errno_names.errorcode.get(self.errno, "")

    def __str__(self) -> str:
        name = self.errno_name
        location = f" ({self.where})" if self.where else ""
        reason = f": {name}" if name else ""
        hint = f"; {self.hint}" if self.hint else ""
        return _one_line(f"{self.what}{location}{reason}{hint}")


class ProgramLoadError(KernelError):
    """The kernel rejected a program."""


class AttachError(KernelError):
    """The kernel accepted a program but refused to attach it."""


class OutdatedDevicesError(KernelError):
    """Some devices still run older programs. They are updated in the background; do not retry."""


class PinsRemovedError(KernelError):
    """Another process removed pins that this agent keeps in the kernel."""


@contextlib.contextmanager
def kernel_errors(what: str, where: str = "", hint: str | None = None) -> Iterator[None]:
    """Turns an OSError raised in the block into a KernelError: `what` failed, at `where`. Without a
    `hint`, it has the kernel's words.
    """
    try:
        yield
    except OSError as error:
        raise KernelError(what, where, error.strerror or "" if hint is None else hint, error.errno or 0) from error


class IgnoredErrnos:
    """Ends its `with` block silently if that raises a KernelError with one of these errnos."""

    def __init__(self, *errnos: int) -> None:
        self._errnos = errnos

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: object, __: object) -> bool:
        return isinstance(error, KernelError) and error.errno in self._errnos


def describe_unexpected_error(error: OSError) -> str:
    """Describes an OSError that no caller expected in one line, with the file and line of our code
    that made the system call.
    """
    location, package_dir = "", Path(__file__).parent
    traceback = error.__traceback__
    while traceback is not None:
        path = Path(traceback.tb_frame.f_code.co_filename)
        if path.is_relative_to(package_dir):
            location = f"{path.relative_to(package_dir.parent)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    what = error.strerror or str(error) or type(error).__name__
    name = errno_names.errorcode.get(error.errno or 0, "")
    file = f" {error.filename!r}" if error.filename is not None else ""
    return _one_line(f"unexpected error: {what}{file}{f': {name}' if name else ''} ({location})")


class LastError:
    """The text of the last error of something that is repeated, "" after a success. It is reported
    only when it changes.
    """

    def __init__(self) -> None:
        self.text = ""

    def replace(self, error: Exception | str | None) -> bool:
        """Returns whether this is an error with another text than before. None or "": a success."""
        before, self.text = self.text, "" if error is None else str(error)
        return self.text not in ("", before)
