# SPDX-License-Identifier: Apache-2.0
"""The socket programs: attaches them to a cgroup and to tracepoints, and again if another program
detaches them.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.hooks import HOOKS, TRACE_HOOKS, Hook
from kbpf.dataplane.bpf.maps.pinning import NEW_LINK_PREFIX, Pins, detach_link
from kbpf.dataplane.bpf.programs import compile
from kbpf.dataplane.bpf.programs.artifact import Artifact
from kbpf.dataplane.bpf.programs.foreign import ForeignProgram, find_at_sockets
from kbpf.dataplane.bpf.programs.loader import ProgramSet
from kbpf.errors import AttachError, KernelError, LastError, kernel_errors
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.system import mounts, netns
from kbpf.model.config import Accounting, Config, SocketLb

log = logging.getLogger("kbpf.dataplane")

HOOK_VERIFY_INTERVAL_S: Final = 30.0
"""Interval between two checks of the hooks, about three system calls each."""

HOOK_RETRY_INTERVAL_S: Final = 1.0
"""The same while a hook is missing."""


class SocketPrograms(ProgramSet):
    """The unit `sock`, attached to a cgroup by pinned links."""

    def __init__(
        self,
        pins: Pins,
        artifact: Artifact,
        cgroup: Path,
        missing: frozenset[int],
        accounting: Accounting,
    ) -> None:
        super().__init__(pins, artifact, missing)
        self.cgroup = cgroup
        self._accounting = accounting  # decides which hooks that only count are attached

    def publish(self) -> int:
        """Pins the programs and attaches each in place of the one that its hook ran before, which
        is atomic for each hook. Returns how many attachments changed.
        """
        # Pinned before attached: a running program has a pin even if the agent is killed meanwhile.
        # Without CAP_SYS_ADMIN, a program can only be opened by its pin.
        folder, new_folder = self._pins.programs(self.key), self._pin()
        changed = self.attach()
        # rename() cannot replace a folder that is not empty. No hook runs its programs any more.
        shutil.rmtree(folder, ignore_errors=True)
        new_folder.rename(folder)
        for old_folder in self._pins.other_folders(f"programs-{self._artifact.unit}", folder):
            shutil.rmtree(old_folder, ignore_errors=True)
        return changed

    def attach(self) -> int:
        """Attaches what is not attached yet; returns how many attachments changed."""
        self._pins.links.mkdir(mode=0o700, exist_ok=True)
        changed = 0
        cgroup = open_cgroup(self.cgroup)
        try:
            # A cgroup's id is the inode number of its folder.
            cgroup_id = os.fstat(cgroup).st_ino
            for hook in HOOKS:
                program = self._loaded.get(hook.name)
                if not hook.is_wanted(self._accounting):
                    changed += self._detach(hook)
                elif program is not None:
                    changed += self._attach_or_log(hook, program, cgroup, cgroup_id)
                elif self._detach(hook):
                    log.warning("hook detached, since the kernel refuses its new program hook=%s", hook.name)
                    changed += 1
        finally:
            os.close(cgroup)
        return changed + self._detach_unknown()

    def _detach_unknown(self) -> int:
        """Detaches the programs of an earlier version from hooks that this version does not use,
        since they would read maps that are not written any more. Returns their number.
        """
        hook_names = {hook.name for hook in HOOKS}
        unknown_pins = [pin for pin in sorted(self._pins.links.iterdir()) if pin.name not in hook_names]
        for pin in unknown_pins:
            detach_link(pin)
        return len(unknown_pins)

    def hook_states(self) -> dict[str, bool]:
        """The hooks that should be attached, and whether each runs our program in the cgroup that
        has this path now. The cgroup may have been deleted and created again.
        """
        cgroup_id = mounts.read_inode(self.cgroup)
        hook_names = [hook.name for hook in HOOKS if hook.is_wanted(self._accounting)]
        return {
            name: self._is_running(self._pins.links / name, program, cgroup_id)
            for name, program in self._loaded.items()
            if name in hook_names
        }

    def _is_running(self, pin: Path, program: Program, cgroup_id: int) -> bool:
        if not pin.exists():
            return False
        with Link.open(pin) as link:
            info = link.read_info()
        is_here = info.cgroup_id is None or info.cgroup_id == cgroup_id
        return is_here and info.program_id == program.read_info().id

    def _detach(self, hook: Hook) -> bool:
        """Detaches the program of an earlier agent, if there is one: its maps may not be written
        any more. Returns whether there was one.
        """
        pin = self._pins.links / hook.name
        if not pin.exists():
            return False
        detach_link(pin)
        return True

    def _attach_or_log(self, hook: Hook, program: Program, cgroup: int, cgroup_id: int) -> bool:
        """Like _attach(), but only logs an error at a hook that only counts. Another program may
        have that hook exclusively, and Services work without it.
        """
        try:
            return self._attach(hook, program, cgroup, cgroup_id)
        except AttachError as error:
            if not hook.only_counts:
                raise
            log.warning("%s is not possible: %s", hook.purpose, error)
            return False

    def _attach(self, hook: Hook, program: Program, cgroup: int, cgroup_id: int) -> bool:
        """Attaches a program to a hook; returns False if it is attached already."""
        pin = self._pins.links / hook.name
        if pin.exists():
            with Link.open(pin) as link:
                info = link.read_info()
                is_same = info.program_id == program.read_info().id
                if is_same and info.cgroup_id in (None, cgroup_id):
                    return False
                if info.cgroup_id == cgroup_id:
                    link.update(program)
                    return True
        # There is no link yet, or it is on a cgroup that was deleted and created again, or on
        # another one, or at a tracepoint, where a link keeps its program. Attach before the old
        # link is released, which the rename() over its pin does: sockets then meet two programs
        # rather than none.
        temporary = self._pins.root / f"{NEW_LINK_PREFIX}{hook.name}"
        temporary.unlink(missing_ok=True)
        try:
            if hook.tracepoint:
                link = Link.attach_to_tracepoint(program)
            else:
                link = Link.attach(program, cgroup, hook.attach_type)
        except KernelError as error:
            raise AttachError(
                f"cannot attach {hook.name}",
                f"tracepoint {hook.tracepoint}" if hook.tracepoint else f"cgroup {self.cgroup}",
                "the kernel needs cgroup BPF links (5.7), the process CAP_BPF and CAP_NET_ADMIN",
                errno=error.errno,
            ) from error
        with link:
            link.pin(temporary)
            temporary.rename(pin)
        return True


def open_cgroup(path: Path) -> int:
    """Returns a descriptor of a cgroup v2 folder. Raises KernelError."""
    with kernel_errors("cannot open the cgroup", str(path), "name a folder of the cgroup v2 hierarchy with --cgroup"):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


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
                sockets.attach()
                self.states = sockets.hook_states()
                log.warning("hooks were missing and are attached again hooks=%s", ",".join(missing))
            self._error.replace(None)
        except KernelError as error:
            if self._error.replace(error):
                log.error("hooks are not attached, retrying hooks=%s: %s", ",".join(missing), error)
        self.foreign = find_at_sockets(self._pins, sockets.cgroup)
        all_attached = all(self.states.values()) and not self._error.text
        self._verify_due = now + (HOOK_VERIFY_INTERVAL_S if all_attached else HOOK_RETRY_INTERVAL_S)

    def faults(self) -> tuple[str, ...]:
        """Why not all hooks are attached."""
        missing = [name for name, is_running in self.states.items() if not is_running]
        if not missing:
            return (self._error.text,) if self._error.text else ()
        reason = f": {self._error.text}" if self._error.text else ""
        return (f"hooks not attached: {', '.join(missing)}{reason}",)
