"""The configuration file, watched while the agent runs.

Rules:
- What counts is the text that the path leads to: a ConfigMap's mount changes by a symbolic link
  that is swapped, an editor renames, others write in place. The file is looked at each half second,
  by time, size and inode, and read when it looks the same at two looks.
- The same text, or another one that says the same, changes nothing.
- A text that is wrong changes nothing either; each is told once, with all that is wrong in it.
- Else `changed` is called, once, and the watch is over: who serves begins anew with it.
"""

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from kbpf.config.load import Loaded, read_file
from kbpf.errors import ConfigError, ConfigErrors
from kbpf.kernel.system import threads

log = logging.getLogger("kbpf.config")

LOOK_SECONDS: Final = 0.5
LIMIT_SECONDS: Final = 60.0
"""Without a look for this long the thread counts as stuck: the file system hangs."""

Stamp = tuple[int, ...]
"""What changes when a file changes; () while there is none."""


class Follower:
    """Watches one file for an agent that runs with what `data` says. `read` makes settings of a
    text; ConfigError if it is wrong.
    """

    def __init__(
        self,
        path: Path,
        data: bytes,
        read: Callable[[bytes], Loaded],
        changed: Callable[[], None],
    ) -> None:
        self._path, self._data, self._read, self._changed = path, data, read, changed
        self._config = read(data).config
        self._stamp: Stamp | None = None  # of the text that was judged last
        self._before: Stamp | None = None  # of the last look
        self._error = ""  # of the file as it is now
        self._judged = ""  # of the text that was read last
        self.is_over = False

    def error(self) -> str:
        """What is wrong with the file as it is now, which this agent does not use and the next one
        would end with; "" if nothing is.
        """
        return self._error

    def start(self, stop: threading.Event) -> None:
        """Watches in a thread of its own until `stop` is set."""
        threads.start("config", partial(self._run, stop), LIMIT_SECONDS)

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set() and not self.is_over:
            threads.beat()
            try:
                self.look()
            except Exception:  # the thread's one: a fault of ours must not end the watch
                log.exception("the configuration is not watched path=%s", self._path)
            stop.wait(LOOK_SECONDS)

    def look(self) -> None:
        """Looks once."""
        stamp = _stamp(self._path)
        before, self._before = self._before, stamp
        if stamp == self._stamp or stamp != before:
            return
        self._stamp = stamp
        try:
            data = read_file(self._path)
        except ConfigError as error:
            log.error("configuration cannot be read, going on with what it said: %s", error)
            self._error = str(error)
            return
        self._error = self._judged
        if data != self._data:
            self._data = data
            self._judge(data)

    def _judge(self, data: bytes) -> None:
        self._error = self._judged = ""
        try:
            loaded = self._read(data)
        except ConfigError as error:
            self._error = self._judged = str(error)
            log.error("configuration is wrong, going on with what it said before: %s", error)
            for warning in error.warnings if isinstance(error, ConfigErrors) else ():
                log.warning("%s", warning)
            return
        if loaded.config == self._config:
            log.info("configuration changed and says the same path=%s", self._path)
            return
        log.info("configuration changed, beginning anew with it path=%s", self._path)
        self.is_over = True
        self._changed()


def _stamp(path: Path) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)
