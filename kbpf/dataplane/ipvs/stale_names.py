"""Former names: an agent that is started with another --ipvs-device or --nft-table finds what the
one before it has left under the old ones.

The names stand in the state folder of each device before anything is made under them. What is left
goes when the new one serves; virtual services that are wanted still have become its own by then.
"""

import contextlib
import logging
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kbpf.dataplane.ipvs import cleanup, ruleset, statefile
from kbpf.dataplane.ipvs.plan import Element, VirtualService
from kbpf.errors import KernelError
from kbpf.kernel.net import dummy
from kbpf.kernel.netfilter import forward_rules
from kbpf.model.config import Config

log = logging.getLogger("kbpf.dataplane")

NETNS_PATH: Final = Path("/proc/thread-self/ns/net")


class NameRecord(msgspec.Struct, frozen=True):
    """Tables that an agent of this device has made, the newest first, in this network namespace
    (its inode).
    """

    device: str
    tables: tuple[str, ...]
    network: int


class StaleNames:
    """What is left under other names, by agents that have ended. Nobody else takes it meanwhile."""

    def __init__(self, config: Config) -> None:
        """Notes the own names. KernelError if the folder cannot be written."""
        self._own_record = NameRecord(
            config.ipvs_device, (config.nft_table,), NETNS_PATH.stat().st_ino
        )
        self._folder = config.state_dir / config.ipvs_device
        self._locks: dict[NameRecord, int] = {}
        record = _read_record(self._folder)
        self._tables: tuple[str, ...] = ()
        if record is not None and record.network == self._own_record.network:
            self._tables = tuple(name for name in record.tables if name != config.nft_table)
        self._write((config.nft_table, *self._tables))
        for folder in sorted(config.state_dir.iterdir()):
            self._lock_folder(folder)

    def _write(self, tables: tuple[str, ...]) -> None:
        record = msgspec.structs.replace(self._own_record, tables=tables)
        try:
            statefile.write_file(self._folder, statefile.NAMES_FILE, msgspec.json.encode(record))
        except OSError as error:
            raise KernelError(
                "cannot write the names", str(self._folder), cleanup.ROOT_HINT, error.errno or 0
            ) from error

    def _lock_folder(self, folder: Path) -> None:
        record = _read_record(folder)
        if record is None or folder == self._folder or record.network != self._own_record.network:
            return
        with contextlib.suppress(KernelError):  # another agent is at work with it
            self._locks[record] = cleanup.lock_state_folder(folder, timeout=0.0)

    @property
    def stale_devices(self) -> tuple[str, ...]:
        """Those that are left."""
        return tuple(record.device for record in self._locks)

    def read_elements(self) -> Iterator[frozenset[Element]]:
        """Those of the sets of each table that is left, of this device and the newest first."""
        for table in self._stale_tables():
            yield cleanup.read_elements(table) or frozenset()

    def _stale_tables(self) -> tuple[str, ...]:
        """Tables of other names."""
        tables = (*self._tables, *(table for record in self._locks for table in record.tables))
        return tuple(dict.fromkeys(name for name in tables if name not in self._own_record.tables))

    def remove_unneeded(self, needed_services: Container[VirtualService]) -> None:
        """Removes it all, but for virtual services that are wanted."""
        if not (self._tables or self._locks):
            return
        for table in self._stale_tables():
            _remove_table(table, needed_services)
        self._write(self._own_record.tables)
        self._tables = ()
        for record, fd in list(self._locks.items()):
            if dummy.is_ours(record.device):
                dummy.remove(record.device)
            folder = self._folder.with_name(record.device)
            statefile.remove_files(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()
            log.info("what is left under another name is removed device=%s", record.device)
            del self._locks[record]
            os.close(fd)

    def close(self) -> None:
        """The next agent finds what is left."""
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()


def _read_record(folder: Path) -> NameRecord | None:
    """None where no agent, or none of this version, has been."""
    try:
        return msgspec.json.decode((folder / statefile.NAMES_FILE).read_bytes(), type=NameRecord)
    except (OSError, msgspec.DecodeError):
        return None


def _remove_table(table: str, needed_services: Container[VirtualService]) -> None:
    if (services := cleanup.read_owned_services(table)) is None:
        return
    cleanup.delete_services(
        [
            service
            for service in services
            if cleanup.virtual_service_of(service) not in needed_services
        ]
    )
    forward_rules.run_transaction(
        *ruleset.delete_table(ruleset.RulesetOptions(table)), hint=cleanup.ROOT_HINT
    )
    log.info("what is left under another name is removed table=%s", table)
