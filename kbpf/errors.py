"""Errors that a person can act on.

Every error that leaves a room says *what* happened, *where* (object, file, map, hook, device)
and *what to do*. The class says whose fault it is. `str()` is one line:

    cannot attach connect4 (cgroup /sys/fs/cgroup): EPERM; give it CAP_BPF
"""

import contextlib
import errno as errno_names
import re
from collections.abc import Iterator
from pathlib import Path


def escape_unprintable(text: str) -> str:
    """The text with every control character, bidirectional override and the like as an escape
    (``\\x1b``): names and messages of others must not steer a terminal or forge a line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_TYPE_NAMES = {
    "str": "a string", "int": "an integer", "float": "a fraction", "bool": "true or false",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip


def describe_decode_error(message: str) -> str:
    """A complaint of msgspec's in words of YAML and JSON: ``expected an integer, got a string``."""

    def describe_types(match: re.Match[str]) -> str:
        names = [name for name in match[1].split(" | ") if name != "null"]
        return " or ".join(_TYPE_NAMES.get(name, name) for name in names) or "null"

    text = re.sub(r"`([^`]*)`", describe_types, message).replace(
        "got true or false", "got a boolean"
    )
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
    """The operator's settings or flags are wrong."""


class ConfigErrors(ConfigError):
    """All settings that are wrong; `str()` is one line for all of them. `warnings`: what was found
    beside that. `log_format`: the one that was asked for.
    """

    def __init__(
        self,
        errors: tuple[ConfigError, ...],
        warnings: tuple[str, ...] = (),
        log_format: str = "text",
    ) -> None:
        super().__init__(" | ".join(map(str, errors)))
        self.errors, self.warnings, self.log_format = errors, warnings, log_format


class ObjectError(KbpfError):
    """A Kubernetes object that cannot be used; the rest stays served."""


class SourceError(KbpfError):
    """The API server or the folder of objects cannot be read."""


class NotFoundError(KbpfError):
    """What was asked for is not there."""


class OutputError(KbpfError):
    """The standard output cannot be written to."""


class CompileError(KbpfError):
    """The BPF programs cannot be built on this machine."""


class CapacityError(KbpfError):
    """More objects than the maps hold."""


class KernelError(KbpfError):
    """The kernel said no; `errno` is kept."""

    def __init__(self, what: str, where: str = "", hint: str = "", errno: int = 0) -> None:
        super().__init__(what, where, hint)
        self.errno = errno

    @property
    def errno_name(self) -> str:
        """The errno's name, "" without one."""
        return errno_names.errorcode.get(self.errno, "")

    def __str__(self) -> str:
        name = self.errno_name
        location = f" ({self.where})" if self.where else ""
        reason = f": {name}" if name else ""
        hint = f"; {self.hint}" if self.hint else ""
        return _one_line(f"{self.what}{location}{reason}{hint}")


class ProgramLoadError(KernelError):
    """The kernel does not take a program."""


class AttachError(KernelError):
    """The kernel takes a program, but not where it belongs."""


class OutdatedDevicesError(KernelError):
    """Devices go on with older programs for now. They are looked after: nobody has to come back."""


class PinsRemovedError(KernelError):
    """Somebody removed what this agent keeps in the kernel."""


@contextlib.contextmanager
def kernel_errors(what: str, where: str = "") -> Iterator[None]:
    """An OSError of the block becomes a KernelError: `what` failed, at `where`."""
    try:
        yield
    except OSError as error:
        raise KernelError(what, where, error.strerror or "", error.errno or 0) from error


def describe_unexpected_error(error: OSError) -> str:
    """One line about a system call whose failure no code of ours expects, with the place in our
    code that made it.
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
