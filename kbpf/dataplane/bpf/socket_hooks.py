# SPDX-License-Identifier: Apache-2.0
"""Attaches the socket programs, and attaches them again if another program detaches them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.hooks import TRACE_HOOKS
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.programs import compile
from kbpf.dataplane.bpf.programs.foreign import ForeignProgram
from kbpf.dataplane.bpf.programs.loader import SocketPrograms
from kbpf.errors import KernelError, LastError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import netns
from kbpf.model.config import Config, SocketLb

log = logging.getLogger("kbpf.dataplane")

HOOK_VERIFY_INTERVAL_S: Final = 30.0
"""Interval between two checks of the hooks, about three system calls each."""

HOOK_RETRY_INTERVAL_S: Final = 1.0
"""The same while a hook is missing."""


class SocketHooks:
    """The socket programs; `programs` is None if they are off. `states`: the hooks that should be
    attached, and whether each was at the last check. `foreign`: programs of other load balancers at
    our hooks, found by the same check.
    """

    def __init__(self, config: Config, pins: Pins) -> None:
        self._config, self._pins = config, pins
        self.programs: SocketPrograms | None = None
        self.compiled = False
        self.states: Mapping[str, bool] = {}
        self.foreign: tuple[ForeignProgram, ...] = ()
        self._error = LastError()
        self._verify_due = 0.0

    def compile(self, cgroup: Path, missing: frozenset[int]) -> None:
        """Loads the artifact of the socket programs from the cache, or compiles it. `missing`: see
        SocketPrograms. Changes nothing in the kernel. Raises CompileError or KernelError.
        """
        mode = self._config.socket_lb
        self.programs = None
        if mode is SocketLb.OFF:
            return
        if mode is SocketLb.HOST_NAMESPACE_ONLY and netns.read_cookie() is None:
            raise KernelError(
                "this kernel cannot distinguish the node's sockets from those of pods",
                f"--socket-lb {mode}",
                "SO_NETNS_COOKIE is missing (Linux 5.14): use --socket-lb on or off",
            )
        artifact, self.compiled = compile.find_or_compile("sock", self._config.cache_dir)
        accounting = self._config.accounting
        self.programs = SocketPrograms(self._pins, artifact, cgroup, missing, accounting)

    def load(self, maps: Mapping[str, Map]) -> None:
        """Loads the programs over the open maps, without attaching them."""
        if self.programs is not None:
            self.programs.load(maps)

    def publish(self) -> int:
        """Attaches the programs. Returns the number of attachments that changed."""
        if self.programs is not None:
            return self.programs.publish()
        # PinWatch.check() treats a missing folder as removed pins.
        self._pins.links.mkdir(mode=0o700, exist_ok=True)
        return 0

    @property
    def notice_failures(self) -> bool:
        """Whether all failures of the sockets that the hooks serve are noticed and counted."""
        if self.programs is None:
            return True  # the packet path serves them, and notices what happens to its flows
        states = self.programs.hook_states()
        return all(states.get(name) for name in TRACE_HOOKS)

    def verify(self, now: float) -> None:
        """Attaches hooks again that another program has detached, if a check is due."""
        sockets = self.programs
        if sockets is None or now < self._verify_due:
            return
        missing: list[str] = []
        try:
            self.states = sockets.hook_states()
            missing = [name for name, is_running in self.states.items() if not is_running]
            if missing:
                sockets.reattach()
                self.states = sockets.hook_states()
                log.warning("hooks were missing and are attached again hooks=%s", ",".join(missing))
            self._error.replace(None)
        except KernelError as error:
            if self._error.replace(error):
                log.error("hooks are not attached, retrying hooks=%s: %s", ",".join(missing), error)
        self.foreign = sockets.find_foreign()
        all_attached = all(self.states.values()) and not self._error.text
        self._verify_due = now + (HOOK_VERIFY_INTERVAL_S if all_attached else HOOK_RETRY_INTERVAL_S)

    def faults(self) -> tuple[str, ...]:
        """Why not all hooks are attached."""
        missing = [name for name, is_running in self.states.items() if not is_running]
        if not missing:
            return (self._error.text,) if self._error.text else ()
        reason = f": {self._error.text}" if self._error.text else ""
        return (f"hooks not attached: {', '.join(missing)}{reason}",)
