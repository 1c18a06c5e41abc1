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
from kbpf.dataplane.ipvs.plan import Element, Virtual
from kbpf.errors import KernelError
from kbpf.kernel.net import dummy
from kbpf.kernel.netfilter import forward_rules
from kbpf.model.config import Config

log = logging.getLogger("kbpf.dataplane")

NETWORK: Final = Path("/proc/thread-self/ns/net")


class Names(msgspec.Struct, frozen=True):
    """Tables that an agent of this device has made, the newest first, in this network namespace
    (its inode).
    """

    device: str
    tables: tuple[str, ...]
    network: int


class Former:
    """What is left under other names, by agents that have ended. Nobody else takes it meanwhile."""

    def __init__(self, config: Config) -> None:
        """Notes the own names. KernelError if the folder cannot be written."""
        self._own = Names(config.ipvs_device, (config.nft_table,), NETWORK.stat().st_ino)
        self._folder = config.state_dir / config.ipvs_device
        self._locks: dict[Names, int] = {}
        had = _read(self._folder)
        self._tables: tuple[str, ...] = ()
        if had is not None and had.network == self._own.network:
            self._tables = tuple(name for name in had.tables if name != config.nft_table)
        self._put((config.nft_table, *self._tables))
        for folder in sorted(config.state_dir.iterdir()):
            self._take(folder)

    def _put(self, tables: tuple[str, ...]) -> None:
        names = msgspec.structs.replace(self._own, tables=tables)
        try:
            statefile.put(self._folder, statefile.NAMES, msgspec.json.encode(names))
        except OSError as error:
            raise KernelError(
                "cannot write the names", str(self._folder), cleanup.ROOT, error.errno or 0
            ) from error

    def _take(self, folder: Path) -> None:
        names = _read(folder)
        if names is None or folder == self._folder or names.network != self._own.network:
            return
        with contextlib.suppress(KernelError):  # another agent is at work with it
            self._locks[names] = cleanup.lock(folder, patience=0.0)

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that are left."""
        return tuple(names.device for names in self._locks)

    def elements(self) -> Iterator[frozenset[Element]]:
        """Those of the sets of each table that is left, of this device and the newest first."""
        for table in self._left():
            yield cleanup.elements(table) or frozenset()

    def _left(self) -> tuple[str, ...]:
        """Tables of other names."""
        all_ = (*self._tables, *(table for names in self._locks for table in names.tables))
        return tuple(dict.fromkeys(name for name in all_ if name not in self._own.tables))

    def retire(self, wanted: Container[Virtual]) -> None:
        """Removes it all, but for virtual services that are wanted."""
        if not (self._tables or self._locks):
            return
        for table in self._left():
            _remove_table(table, wanted)
        self._put(self._own.tables)
        self._tables = ()
        for names, fd in list(self._locks.items()):
            if dummy.is_ours(names.device):
                dummy.remove(names.device)
            folder = self._folder.with_name(names.device)
            statefile.remove(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()
            log.info("what is left under another name is removed device=%s", names.device)
            del self._locks[names]
            os.close(fd)

    def close(self) -> None:
        """The next agent finds what is left."""
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()


def _read(folder: Path) -> Names | None:
    """None where no agent, or none of this version, has been."""
    try:
        return msgspec.json.decode((folder / statefile.NAMES).read_bytes(), type=Names)
    except (OSError, msgspec.DecodeError):
        return None


def _remove_table(table: str, wanted: Container[Virtual]) -> None:
    if (services := cleanup.own_services(table)) is None:
        return
    cleanup.end_services([one for one in services if cleanup.virtual_of(one) not in wanted])
    forward_rules.transaction(*ruleset.no_table(ruleset.Style(table)), hint=cleanup.ROOT)
    log.info("what is left under another name is removed table=%s", table)
