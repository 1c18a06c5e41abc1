"""What the agent leaves in its state folder for `kbpf inspect`: its status, and which Service ports
it has programmed, without their endpoints, which the kernel knows.

Each file is written beside and renamed: who reads it has a whole one.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from kbpf.errors import KernelError
from kbpf.model.desired import ServicePortKey, ServiceState

STATUS: Final = "status"
SERVICES: Final = "services"
NAMES: Final = "names"
FILES: Final = tuple(f"{name}{end}" for name in (STATUS, SERVICES, NAMES) for end in ("", ".new"))


class Notes:
    """Of one agent. A change costs the change; writing costs all, and happens with the status."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: dict[ServicePortKey, bytes] = {}
        self._written = False

    def note(self, key: ServicePortKey, state: ServiceState | None) -> None:
        """This Service port is programmed like this now, or not at all."""
        if state is None:
            self._written = self._services.pop(key, None) is None and self._written
            return
        bare = replace(
            state, cluster=(), local=(), serving=(), source_ranges=(), lost=(), on_node=()
        )
        raw = msgspec.json.encode(bare)
        self._written = self._services.get(key) == raw and self._written
        self._services[key] = raw

    def write(self, status: bytes) -> None:
        """Leaves both. KernelError if the folder cannot be written."""
        try:
            if not self._written:
                put(self._folder, SERVICES, b"[" + b",".join(self._services.values()) + b"]")
                self._written = True
            put(self._folder, STATUS, status)
        except OSError as error:
            raise KernelError(
                "cannot write the status", str(self._folder), "", error.errno or 0
            ) from error


def put(folder: Path, name: str, text: bytes) -> None:
    """A file, at once."""
    new = folder / f"{name}.new"
    new.write_bytes(text)
    new.rename(folder / name)


def read(folder: Path) -> tuple[ServiceState, ...]:
    """The Service ports; none where nothing, or nothing that this version understands, stands."""
    try:
        raw = (folder / SERVICES).read_bytes()
        return msgspec.json.decode(raw, type=tuple[ServiceState, ...])
    except (OSError, msgspec.DecodeError):
        return ()


def remove(folder: Path, files: Iterable[str] = FILES) -> None:
    """Takes them away."""
    for name in files:
        (folder / name).unlink(missing_ok=True)
