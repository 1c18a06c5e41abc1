# SPDX-License-Identifier: Apache-2.0
"""The files in the agent's state folder that `kbpf inspect` reads: the agent's status, and the
Service ports that it has programmed (without endpoints, which are read from the kernel).

Each file is written under another name and renamed, so readers always see a complete one.
"""

from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from kbpf.errors import KernelError
from kbpf.model.desired import ServicePortKey, ServiceState

STATUS_FILE: Final = "status"
SERVICES_FILE: Final = "services"
FILES: Final = tuple(
    f"{name}{end}" for name in (STATUS_FILE, SERVICES_FILE) for end in ("", ".new")
)


class StateFile:
    """The files of one agent. set_service() is cheap; write() writes all Service ports again if
    one of them has changed, and is called when the status is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: dict[ServicePortKey, bytes] = {}
        self._is_written = False

    def set_service(self, key: ServicePortKey, state: ServiceState | None) -> None:
        """Records a programmed Service port; None: it was removed."""
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
        """Writes the status, and the Service ports if they have changed. Raises KernelError if the
        folder cannot be written.
        """
        try:
            if not self._is_written:
                write_file(
                    self._folder, SERVICES_FILE, b"[" + b",".join(self._services.values()) + b"]"
                )
                self._is_written = True
            write_file(self._folder, STATUS_FILE, status)
        except OSError as error:
            raise KernelError(
                "cannot write the status", str(self._folder),
                "free space there, or choose another folder with --state-dir", error.errno or 0,
            ) from error  # fmt: skip


def write_file(folder: Path, name: str, content: bytes) -> None:
    """Replaces a file atomically."""
    new = folder / f"{name}.new"
    new.write_bytes(content)
    new.rename(folder / name)


def read_services(folder: Path) -> tuple[ServiceState, ...]:
    """The Service ports in the folder; empty if there is no file, or one that this version cannot
    decode.
    """
    try:
        raw = (folder / SERVICES_FILE).read_bytes()
        return msgspec.json.decode(raw, type=tuple[ServiceState, ...])
    except (OSError, msgspec.DecodeError):
        return ()


def remove_files(folder: Path) -> None:
    """Deletes the files; missing ones are ignored."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
