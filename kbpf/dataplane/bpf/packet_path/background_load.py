"""The packet programs are loaded by a thread while sockets are served already.

The verifier needs most of a second for them, and compiling them many more. At a first start nothing
is attached that would miss them meanwhile, so the writer attaches the socket hooks first. The
thread reads the maps' descriptors and changes nothing; what it has made is the writer's to take.
"""

from collections.abc import Callable
from typing import Final

from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.errors import KbpfError
from kbpf.kernel.system import threads

LOAD_TIMEOUT_S: Final = 360.0
"""Compiling and loading take longer only if they are stuck."""

LOAD_POLL_INTERVAL_S: Final = 0.02
"""The thread is asked this often whether it is done."""


class PacketPathLoader:
    """One load. Ends by take() or close()."""

    def __init__(self, load: Callable[[], PacketPath]) -> None:
        """Begins. `make` is called by the thread. KernelError if there is none to be had."""
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
        """Whether take() returns at once."""
        return self._outcome is not None

    def result(self) -> PacketPath:
        """What was loaded; raises the KbpfError that it failed by."""
        self._thread.stop(LOAD_TIMEOUT_S)
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, KbpfError):
            raise outcome
        assert outcome is not None
        return outcome

    def close(self) -> None:
        """Waits until the thread is done with the maps, and closes what it has loaded."""
        self._thread.stop(LOAD_TIMEOUT_S)
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, PacketPath):
            outcome.close()
