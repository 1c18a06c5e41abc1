# SPDX-License-Identifier: Apache-2.0
"""A folder of Kubernetes YAML as the source, for a machine without a cluster, a demo, an edge
node.

- Files are polled every 0.15 s by their times, size and inode. A changed file is read once two
  polls agree, so that neither a half-written file nor one that an editor replaces counts as
  changed. A change takes effect within half a second.
- If a file cannot be parsed, an object is malformed, or the folder vanishes, what was emitted
  before stays in force, and `status().problems` (or `error`) says why, with file and line. Any
  exception while a file is read, even a bug of kbpf, is a problem of that file only.
- A folder without files may be a missing mount: its objects stay in force for `empty_grace`
  seconds, and `status().problems` says so. Then they are deleted.
- If an object is in two files, the first by file name wins and the other is reported.
- A Service without a creationTimestamp gets the modification time of its file, and keeps it when
  the file changes. Of two Services that claim the same address, the older one therefore keeps it.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kbpf.bounded_yaml import MANIFESTS
from kbpf.errors import ConfigError, ObjectError, SourceError
from kbpf.kernel.system import threads
from kbpf.kernel.system.polling import UNREAD_STAMP, FileStamp
from kbpf.model.events import Delete, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.objects import Service
from kbpf.source.base import EventHandler, SourceState, SourceStatus
from kbpf.source.decode.decode import ModelObject
from kbpf.source.folder.documents import FileContents, LocatedObject, parse_documents

log = logging.getLogger("kbpf.source")

POLL_INTERVAL: Final = 0.15
EMPTY_GRACE: Final = 60.0
"""In seconds: how long a mount may be missing."""
STUCK_TIMEOUT: Final = 60.0
"""Without a poll for this long the thread counts as stuck: the file system hangs."""
MAX_FILE_TIME_NS: Final = 253_402_300_799_999_999_999
"""In ns: the end of the year 9999, since a file can have any time."""
MAX_NODES_SHOWN: Final = 3
"""How many other Nodes are named when this node's is missing."""
SUFFIXES: Final = (".yaml", ".yml", ".json")


NO_CONTENTS: Final = FileContents()
EMPTY_FOLDER_PROBLEM: Final = "the folder has become empty; its objects stay in force for a minute"


@dataclass(frozen=True, slots=True)
class _ParsedFile:
    """A file as it was last read. `contents` is from the last time that it could be parsed."""

    stamp: FileStamp
    contents: FileContents = NO_CONTENTS
    problem: str = ""


class FolderSource:
    """Reads Services, EndpointSlices, exempt Pods and this node's Node from the files of one
    folder.
    """

    def __init__(
        self,
        path: Path,
        emit: EventHandler,
        node_name: str = "",
        *,
        empty_grace: float = EMPTY_GRACE,
        poll_interval: float = POLL_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stop = threading.Event()
        self._thread: threads.SupervisedThread | None = None
        self._status = SourceStatus("folder", self.kinds)
        self._path, self._emit, self._node_name = path, emit, node_name
        self._empty_grace, self._poll_interval, self._clock = empty_grace, poll_interval, clock
        self._empty_since: float | None = None
        self._last_stamps: dict[str, FileStamp] = {}
        self._files: dict[str, _ParsedFile] = {}
        self._emitted: dict[ObjectKey, ModelObject] = {}
        self._creation_times: dict[ObjectKey, str] = {}  # of Services without a creationTimestamp
        self._rejected: dict[ObjectKey, str] = {}
        self._logged_kinds: set[str] = set()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """All kinds: a kind without objects is synced and empty."""
        return tuple(Kind)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.stop()

    def status(self) -> SourceStatus:
        """The current status. Thread-safe: only the thread replaces it."""
        return self._status

    def start(self) -> None:
        """Starts the thread. Raises ConfigError if the folder does not exist."""
        check_folder(self._path)
        self._thread = threads.start("folder", partial(self.run, self._stop), STUCK_TIMEOUT)

    def run(self, stop: threading.Event) -> None:
        """Reads everything, then what changes, until `stop` is set."""
        self._stop = stop
        while not stop.is_set():
            threads.heartbeat()
            try:
                self.poll()
            except Exception:  # the thread has no other handler: a bug here must not end the watch
                log.exception("source failed with an internal error name=%s", self._status.name)
            stop.wait(self._poll_interval)
        self._status = replace(self._status, state=SourceState.STOPPED)

    def poll(self) -> None:
        """Polls the folder once and emits changes. The first poll reads every file at once."""
        try:
            stamps = dict(scan_folder(self._path))
        except OSError as error:
            self._record_failure(error)
            return
        is_first = not self._status.synced
        if self._status.error:
            failures = self._status.failures
            log.info("folder can be read again path=%s failures=%d", self._path, failures)
        if self._is_within_empty_grace(stamps):
            return
        changed = [
            name
            for name in stamps.keys() | self._files.keys()
            if (name in stamps) != (name in self._files) or (name in stamps and stamps[name] != self._files[name].stamp)
        ]
        # A file is read once two polls have seen the same stamp: before, it may be incomplete.
        stable = [n for n in changed if is_first or stamps.get(n) == self._last_stamps.get(n)]
        self._last_stamps = stamps
        for name in sorted(stable):
            self._read_file(name, stamps.get(name))
        if stable or is_first or EMPTY_FOLDER_PROBLEM in self._status.problems:
            self._emit_changes()
        self._status = replace(
            self._status,
            state=SourceState.WATCHING,
            synced=True,
            last_contact=self._clock(),
            failures=0,
            error="",
        )
        if is_first:
            log.info("source synced name=%s objects=%d", self._status.name, len(self._emitted))
            for kind in self.kinds:
                self._emit(Synced(kind))

    def _read_file(self, name: str, stamp: FileStamp | None) -> None:
        if stamp is None:
            del self._files[name]
            return
        before = self._files.get(name, _ParsedFile(stamp))
        try:
            with open(self._path / name, "rb") as file:
                data = file.read(MANIFESTS.size + 1)
                if FileStamp.of(os.fstat(file.fileno())) != stamp:
                    return  # it is still being written
            contents = parse_documents(name, data)
            objects = tuple(self._with_creation_time(located, stamp) for located in contents.objects)
            self._files[name] = _ParsedFile(stamp, contents._replace(objects=objects))
        except ObjectError as error:
            self._files[name] = replace(before, stamp=stamp, problem=str(error))
        except OSError as error:
            problem = str(SourceError(f"cannot read the file: {error.strerror}", name))
            self._files[name] = replace(before, stamp=UNREAD_STAMP, problem=problem)
        except Exception as error:
            log.exception("cannot read a file, internal error name=%r", name)
            hint = "its objects stay in force; please report this"
            problem = str(SourceError(f"cannot read the file: {error!r}", name, hint))
            self._files[name] = replace(before, stamp=stamp, problem=problem)

    def _with_creation_time(self, located: LocatedObject, stamp: FileStamp) -> LocatedObject:
        """Sets the creationTimestamp of a Service that has none."""
        service, key = located.item.object, located.item.key
        if not isinstance(service, Service) or service.creation_timestamp:
            return located
        creation_timestamp = self._creation_times.setdefault(key, format_time(stamp.mtime_ns))
        service = msgspec.structs.replace(service, creation_timestamp=creation_timestamp)
        return located._replace(item=located.item._replace(object=service))

    def _is_within_empty_grace(self, stamps: Mapping[str, FileStamp]) -> bool:
        """Whether the folder has become empty so recently that its objects stay in force."""
        if stamps or not self._files:
            self._empty_since = None
            return False
        if self._empty_since is None:
            self._empty_since = self._clock()
        if self._clock() - self._empty_since >= self._empty_grace:
            log.warning("the folder is still empty, deleting its objects path=%s", self._path)
            return False
        self._last_stamps = {}
        if EMPTY_FOLDER_PROBLEM not in self._status.problems:
            log.warning("%s path=%s seconds=%g", EMPTY_FOLDER_PROBLEM, self._path, self._empty_grace)
            problems = (*self._status.problems, EMPTY_FOLDER_PROBLEM)
            self._status = replace(self._status, problems=problems, authoritative=False)
        return True

    def _emit_changes(self) -> None:
        """Emits the difference between what the files contain and what was emitted."""
        problems: list[str] = []
        winners = self._select_winners(problems)
        now = self._clock()
        for key, located in winners.items():
            obj, error = located.item.object, located.item.error
            if error:
                if self._rejected.get(key) != error:
                    self._rejected[key] = error
                    self._emit(Rejected(key, error))
            elif obj is not None:
                if self._emitted.get(key) != obj or key in self._rejected:
                    self._emit(Upsert(key, obj, now))
                self._emitted[key] = obj
                self._rejected.pop(key, None)
        present_keys = {k for k, located in winners.items() if located.item.error or located.item.object}
        for key in sorted((self._emitted.keys() | self._rejected.keys()) - present_keys):
            self._emitted.pop(key, None)
            self._creation_times.pop(key, None)
            self._rejected.pop(key, None)
            self._emit(Delete(key, now))
        self._update_problems(problems)

    def _select_winners(self, problems: list[str]) -> dict[ObjectKey, LocatedObject]:
        """Selects one of each object, the first by file name. Appends to `problems`."""
        winners: dict[ObjectKey, LocatedObject] = {}
        nodes: set[str] = set()
        for name, file in sorted(self._files.items()):
            problems += [file.problem] if file.problem else []
            problems += file.contents.problems
            for located in file.contents.objects:
                key = located.item.key
                if key.kind is Kind.NODE:
                    nodes.add(key.name)
                    if self._node_name not in ("", key.name):
                        continue
                winner = winners.setdefault(key, located)
                if winner is not located:
                    problems.append(f"{name}: {key} is already in {winner.where}; ignored here")
        if nodes and self._node_name and self._node_name not in nodes:
            problems.append(
                f"no file has a Node {self._node_name} (--hostname-override), only "
                f"{', '.join(sorted(nodes)[:MAX_NODES_SHOWN])}: no endpoint counts as local, "
                "and this node has no zone"
            )
        return winners

    def _update_problems(self, problems: list[str]) -> None:
        for line in problems:
            if line not in self._status.problems:
                log.warning("problem in the folder of objects error=%r", line)
        for name, file in self._files.items():
            for kind in set(file.contents.ignored_kinds) - self._logged_kinds:
                self._logged_kinds.add(kind)
                log.info("ignored objects of a kind that kbpf does not use kind=%s file=%s", kind, name)
        # The agent logs what is wrong with an object; here it is only listed.
        rejected = [f"{key}: {error}" for key, error in self._rejected.items()]
        self._status = replace(
            self._status,
            problems=(*problems, *rejected),
            authoritative=not any(file.problem for file in self._files.values()),
        )

    def _record_failure(self, error: OSError) -> None:
        hint = "its objects stay in force"
        what = f"cannot read the folder: {error.strerror}"
        line = str(SourceError(what, str(self._path), hint))
        if line != self._status.error:
            log.warning("cannot read the folder error=%r", line)
        failures = self._status.failures + 1
        self._status = replace(self._status, state=SourceState.RETRYING, failures=failures, error=line)


def check_folder(path: Path) -> None:
    """Raises ConfigError if it is not a folder."""
    if not path.is_dir():
        what = "a file, not a folder of objects" if path.exists() else "no such folder of objects"
        hint = "give a folder of YAML, such as objects/ in an unpacked `kbpf sysdump`"
        raise ConfigError(what, str(path), hint)


def format_time(nanoseconds: int) -> str:
    """Formats a time in RFC 3339 with all digits, so that texts sort like times."""
    seconds, rest = divmod(min(max(nanoseconds, 0), MAX_FILE_TIME_NS), 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest:09}Z"


def scan_folder(path: Path) -> Iterator[tuple[str, FileStamp]]:
    """Yields (name, stamp) of the files with objects. Hidden files are skipped: editors create
    them.
    """
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIXES) and not entry.name.startswith("."):
                try:
                    status = entry.stat()
                except OSError:
                    continue  # a dangling link, or deleted in the meantime
                if entry.is_file():
                    yield entry.name, FileStamp.of(status)
