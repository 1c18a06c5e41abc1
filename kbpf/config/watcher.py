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

from kbpf.config.load import LoadedConfig, read_file
from kbpf.errors import ConfigError, ConfigErrors
from kbpf.kernel.system import threads

log = logging.getLogger("kbpf.config")

POLL_INTERVAL: Final = 0.5
STUCK_TIMEOUT: Final = 60.0
"""Without a look for this long the thread counts as stuck: the file system hangs."""

ConfigFileStamp = tuple[int, ...]
"""What changes when a file changes; () while there is none."""


class ConfigWatcher:
    """Watches one file for an agent that runs with what `data` says. `read` makes settings of a
    text; ConfigError if it is wrong.
    """

    def __init__(
        self,
        path: Path,
        data: bytes,
        parse: Callable[[bytes], LoadedConfig],
        on_change: Callable[[], None],
    ) -> None:
        self._path, self._data, self._parse, self._on_change = path, data, parse, on_change
        self._config = parse(data).config
        self._evaluated_stamp: ConfigFileStamp | None = None  # of the text that was judged last
        self._last_stamp: ConfigFileStamp | None = None  # of the last look
        self._error = ""  # of the file as it is now
        self._parse_error = ""  # of the text that was read last
        self.is_done = False

    def error(self) -> str:
        """What is wrong with the file as it is now, which this agent does not use and the next one
        would end with; "" if nothing is.
        """
        return self._error

    def start(self, stop: threading.Event) -> None:
        """Watches in a thread of its own until `stop` is set."""
        threads.start("config", partial(self._run, stop), STUCK_TIMEOUT)

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set() and not self.is_done:
            threads.heartbeat()
            try:
                self.poll()
            except Exception:  # the thread's one: a fault of ours must not end the watch
                log.exception("the configuration is not watched path=%s", self._path)
            stop.wait(POLL_INTERVAL)

    def poll(self) -> None:
        """Looks once."""
        stamp = _make_stamp(self._path)
        before, self._last_stamp = self._last_stamp, stamp
        if stamp == self._evaluated_stamp or stamp != before:
            return
        self._evaluated_stamp = stamp
        try:
            data = read_file(self._path)
        except ConfigError as error:
            log.error("configuration cannot be read, going on with what it said: %s", error)
            self._error = str(error)
            return
        self._error = self._parse_error
        if data != self._data:
            self._data = data
            self._evaluate(data)

    def _evaluate(self, data: bytes) -> None:
        self._error = self._parse_error = ""
        try:
            loaded = self._parse(data)
        except ConfigError as error:
            self._error = self._parse_error = str(error)
            log.error("configuration is wrong, going on with what it said before: %s", error)
            for warning in error.warnings if isinstance(error, ConfigErrors) else ():
                log.warning("%s", warning)
            return
        if loaded.config == self._config:
            log.info("configuration changed and says the same path=%s", self._path)
            return
        log.info("configuration changed, beginning anew with it path=%s", self._path)
        self.is_done = True
        self._on_change()


def _make_stamp(path: Path) -> ConfigFileStamp:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)
