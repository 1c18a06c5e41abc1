# SPDX-License-Identifier: Apache-2.0
"""Loads the packet programs in a thread, while the socket hooks already serve.

Verifying them takes most of a second, and compiling them takes several. At a first start there are
no packet programs of an earlier agent to replace, so the main thread attaches the socket hooks
first. The loader thread uses the maps' descriptors only to load programs: it writes to none of
these maps, and attaches nothing. The main thread takes its result and publishes it.
"""

from collections.abc import Callable
from typing import Final

from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.errors import KbpfError
from kbpf.kernel.system import threads

LOAD_TIMEOUT_S: Final = 360.0
"""If compiling and loading take longer than this, the thread counts as stuck."""

LOAD_POLL_INTERVAL_S: Final = 0.02
"""Interval between two checks whether the thread is done."""


class PacketPathLoader:
    """One load in the background. The caller has to end it with result() or close()."""

    def __init__(self, load: Callable[[], PacketPath]) -> None:
        """Starts a thread that calls `load`. Raises KernelError if no thread can be started."""
        self._load = load
        self._outcome: PacketPath | KbpfError | None = None
        self._thread = threads.start("packet-programs", self._run, LOAD_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._outcome = self._load()
        except KbpfError as error:
            self._outcome = error

    @property
    def is_done(self) -> bool:
        """Whether result() would return at once."""
        return self._outcome is not None

    def result(self) -> PacketPath:
        """Waits for the packet path, and returns it. Raises the KbpfError that `load` raised."""
        self._thread.stop(LOAD_TIMEOUT_S)
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, KbpfError):
            raise outcome
        assert outcome is not None
        return outcome

    def close(self) -> None:
        """Waits until the thread no longer uses the maps, and closes what it has loaded."""
        self._thread.stop(LOAD_TIMEOUT_S)
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, PacketPath):
            outcome.close()
