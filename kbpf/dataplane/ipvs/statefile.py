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

STATUS_FILE: Final = "status"
SERVICES_FILE: Final = "services"
NAMES_FILE: Final = "names"
FILES: Final = tuple(
    f"{name}{end}" for name in (STATUS_FILE, SERVICES_FILE, NAMES_FILE) for end in ("", ".new")
)


class StateFile:
    """Of one agent. A change costs the change; writing costs all, and happens with the status."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: dict[ServicePortKey, bytes] = {}
        self._is_written = False

    def set_service(self, key: ServicePortKey, state: ServiceState | None) -> None:
        """This Service port is programmed like this now, or not at all."""
        if state is None:
            self._is_written = self._services.pop(key, None) is None and self._is_written
            return
        summary = replace(
            state, cluster=(), local=(), serving=(), source_ranges=(), lost=(), on_node=()
        )
        raw = msgspec.json.encode(summary)
        self._is_written = self._services.get(key) == raw and self._is_written
        self._services[key] = raw

    def write(self, status: bytes) -> None:
        """Leaves both. KernelError if the folder cannot be written."""
        try:
            if not self._is_written:
                write_file(
                    self._folder, SERVICES_FILE, b"[" + b",".join(self._services.values()) + b"]"
                )
                self._is_written = True
            write_file(self._folder, STATUS_FILE, status)
        except OSError as error:
            raise KernelError(
                "cannot write the status", str(self._folder), "", error.errno or 0
            ) from error


def write_file(folder: Path, name: str, content: bytes) -> None:
    """A file, at once."""
    new = folder / f"{name}.new"
    new.write_bytes(content)
    new.rename(folder / name)


def read_services(folder: Path) -> tuple[ServiceState, ...]:
    """The Service ports; none where nothing, or nothing that this version understands, stands."""
    try:
        raw = (folder / SERVICES_FILE).read_bytes()
        return msgspec.json.decode(raw, type=tuple[ServiceState, ...])
    except (OSError, msgspec.DecodeError):
        return ()


def remove_files(folder: Path, files: Iterable[str] = FILES) -> None:
    """Takes them away."""
    for name in files:
        (folder / name).unlink(missing_ok=True)
