# SPDX-License-Identifier: Apache-2.0
"""Watches the configuration file while the agent runs.

- The contents matter, however they change: a ConfigMap mount swaps a symbolic link, editors
  rename, others write in place. The file's times, size and inode are polled every 0.5 s, and the
  file is read once two polls agree.
- The same text, or a different text with the same settings, changes nothing.
- An invalid text changes nothing either; it is reported once, with all its errors.
- For any other text `on_change` is called, once, and the watch ends: the agent restarts with it.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from kbpf.config.load import LoadedConfig, read_file
from kbpf.errors import ConfigError, ConfigErrors
from kbpf.kernel.system import threads
from kbpf.kernel.system.polling import UNREAD_STAMP, FileStamp, read_stamp

log = logging.getLogger("kbpf.config")

POLL_INTERVAL: Final = 0.5
STUCK_TIMEOUT: Final = 60.0
"""Without a poll for this long the thread counts as stuck: the file system hangs."""


class ConfigWatcher:
    """Watches one file for an agent that runs with the settings in `data`. `parse` turns a text
    into settings and raises ConfigError if it is invalid.
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
        # of the text that was evaluated last, and of the last poll; None: the file was missing
        self._evaluated_stamp: FileStamp | None = UNREAD_STAMP
        self._last_stamp: FileStamp | None = UNREAD_STAMP
        self._error = ""  # of the file as it is now
        self._parse_error = ""  # of the text that was evaluated last
        self.is_done = False

    def error(self) -> str:
        """What is wrong with the file as it is now, "" if nothing. This agent does not use it, and
        the next one could not start with it.
        """
        return self._error

    def start(self, stop: threading.Event) -> None:
        """Watches in a separate thread until `stop` is set."""
        threads.start("config", partial(self._run, stop), STUCK_TIMEOUT)

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set() and not self.is_done:
            threads.heartbeat()
            try:
                self.poll()
            except Exception:  # the thread has no other handler: a bug here must not end the watch
                log.exception("cannot watch the configuration path=%s", self._path)
            stop.wait(POLL_INTERVAL)

    def poll(self) -> None:
        """Polls the file once."""
        stamp = read_stamp(self._path)
        before, self._last_stamp = self._last_stamp, stamp
        if stamp == self._evaluated_stamp or stamp != before:
            return
        self._evaluated_stamp = stamp
        try:
            data = read_file(self._path)
        except ConfigError as error:
            log.error("cannot read the configuration; keeping the current settings: %s", error)
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
            log.error("invalid configuration; keeping the current settings: %s", error)
            for warning in error.warnings if isinstance(error, ConfigErrors) else ():
                log.warning("%s", warning)
            return
        if loaded.config == self._config:
            log.info("configuration file changed, settings did not path=%s", self._path)
            return
        log.info("configuration changed, restarting with it path=%s", self._path)
        self.is_done = True
        self._on_change()
