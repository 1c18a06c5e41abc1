# SPDX-License-Identifier: Apache-2.0
"""State under former names: an agent that is started with another --ipvs-device or --nft-table
finds what its predecessor left under the old names.

Names are written to the state folder of each device before anything is created under them. Old
state is removed once the new agent serves; virtual services that are still needed belong to the new
agent by then.
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
    """The tables that agents with this device created, newest first. `network`: the inode of their
    network namespace.
    """

    device: str
    tables: tuple[str, ...]
    network: int


class StaleNames:
    """State that agents left under other names. Locked, so that no other agent adopts it. State of
    agents that still run is not included.
    """

    def __init__(self, config: Config) -> None:
        """Records our own names. Raises KernelError if the folder cannot be written."""
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
        # Other folders are those of other devices. Locked ones belong to agents that still run.
        for folder in sorted(config.state_dir.iterdir()):
            self._lock_folder(folder)

    def _write(self, tables: tuple[str, ...]) -> None:
        record = msgspec.structs.replace(self._own_record, tables=tables)
        try:
            statefile.write_file(self._folder, statefile.NAMES_FILE, msgspec.json.encode(record))
        except OSError as error:
            raise KernelError(
                "cannot write the file of names",
                str(self._folder),
                cleanup.ROOT_HINT,
                error.errno or 0,
            ) from error

    def _lock_folder(self, folder: Path) -> None:
        record = _read_record(folder)
        if record is None or folder == self._folder or record.network != self._own_record.network:
            return
        with contextlib.suppress(KernelError):  # another agent uses it
            self._locks[record] = cleanup.lock_state_folder(folder, timeout=0.0)

    @property
    def stale_devices(self) -> tuple[str, ...]:
        """The devices under former names."""
        return tuple(record.device for record in self._locks)

    def read_elements(self) -> Iterator[frozenset[Element]]:
        """Yields the elements of each table under a former name: first those of this device, newest
        first.
        """
        for table in self._stale_tables():
            yield cleanup.read_elements(table) or frozenset()

    def _stale_tables(self) -> tuple[str, ...]:
        tables = (*self._tables, *(table for record in self._locks for table in record.tables))
        return tuple(dict.fromkeys(name for name in tables if name not in self._own_record.tables))

    def remove_unneeded(self, needed_services: Container[VirtualService]) -> None:
        """Removes everything under former names, except virtual services that are needed."""
        if not (self._tables or self._locks):
            return
        for table in self._stale_tables():
            _remove_table(table, needed_services)
        self._write(self._own_record.tables)  # only now: until here a crash must not lose the names
        self._tables = ()
        for record, fd in list(self._locks.items()):
            if dummy.is_ours(record.device):
                dummy.remove(record.device)
            folder = self._folder.with_name(record.device)
            statefile.remove_files(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()
            log.info("removed state under a former name device=%s", record.device)
            del self._locks[record]
            os.close(fd)

    def close(self) -> None:
        """Releases the locks. State that was not removed stays for the next agent."""
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()


def _read_record(folder: Path) -> NameRecord | None:
    """The names recorded in a state folder; None if there are none that this version can decode."""
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
    log.info("removed state under a former name table=%s", table)
