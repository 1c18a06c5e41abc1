# SPDX-License-Identifier: Apache-2.0
"""Selects the data plane and manages the switch from one to the other.

With `--mode bpf` or `--mode ipvs` the agent uses that data plane or exits with what is missing.
With `auto` it uses BPF if possible, else IPVS: a failure to open BPF, or to attach it at the first
apply, decides, and the checks of `kbpf check` give the reason. The decision holds until the agent
restarts.

What an agent of the other mode has left in the kernel serves until the first complete apply of
this one; then it is drained (takeover.previous). An agent of the other mode cannot start
meanwhile.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kbpf.dataplane.base import DataPlane, PlaneStatus, Report, SharedAccess, TickResult
from kbpf.errors import KbpfError, KernelError
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.status import ModeChoice
from kbpf.takeover.previous import PreviousDataPlane, Takeover

log = logging.getLogger("kbpf.agent")


class Factories(NamedTuple):
    """Constructors, by mode, of the data planes and of what others may have left in the kernel for
    this mode to take over. `find_reason`: why BPF is unavailable, from its error; None if it is
    available and the error has another cause.
    """

    planes: Mapping[str, Callable[[], DataPlane]]
    previous: Mapping[str, Sequence[Callable[[], PreviousDataPlane]]]
    find_reason: Callable[[KbpfError], str | None]


class SelectedDataPlane:
    """The data plane chosen by `--mode`, itself a DataPlane (see base), which also drains what the
    other mode left. `choice`: the active mode, and why it was chosen; any thread may read it.
    """

    def __init__(self, requested_mode: str, factories: Factories) -> None:
        self._factories = factories
        self.choice = ModeChoice(requested_mode, "ipvs" if requested_mode == "ipvs" else "bpf")
        self._plane = factories.planes[self.choice.mode]()
        self._takeover = Takeover()
        self._has_applied = False  # whether any apply has succeeded
        self._fully_applied = False  # whether an authoritative apply has succeeded
        self._may_drain = False  # whether this mode serves, so that the other one may be drained
        # error of BPF → its hint, with the error of IPVS added
        self._failed_fallbacks: dict[str, str] = {}

    def open(self, coexisting: bool = False) -> None:
        """In mode auto, falls back to IPVS if BPF cannot be opened. If neither can, raises the
        error of BPF. `coexisting` is ignored: there is no third mode.
        """
        try:
            self._open()
        except KbpfError as error:
            if not self._fall_back_to_ipvs(error):
                raise

    def _open(self) -> None:
        mode = self.choice.mode
        self._takeover.claim(self._factories.previous[mode], mode)
        try:
            self._plane.open(coexisting=not self._takeover.is_complete)
        except KbpfError:
            self._takeover.release()
            raise

    def _fall_back_to_ipvs(self, error: KbpfError) -> bool:
        """Tries to replace BPF by IPVS; returns whether IPVS is now open.
        If IPVS fails too, its error is added to the hint of `error`, now and whenever the same
        error occurs again. BPF's data plane is then a new one, not opened yet, and IPVS is not
        tried again.
        """
        before = self.choice
        if before.requested != "auto" or before.mode != "bpf":
            return False
        if self._failed_fallbacks:
            error.hint = self._failed_fallbacks.get(str(error), error.hint)
            return False
        reason = self._factories.find_reason(error)
        if reason is None:
            return False
        # Releases the lock of the pins: mode ipvs claims what BPF has left there.
        self._plane.close()
        self._takeover.release()
        self._plane = self._factories.planes["ipvs"]()
        self.choice = ModeChoice("auto", "ipvs", reason, str(error))
        try:
            self._open()
        except KbpfError as ipvs_error:
            message, note = str(error), f"mode ipvs is not possible either: {ipvs_error}"
            error.hint = f"{error.hint}; {note}" if error.hint else note
            self._failed_fallbacks[message] = error.hint
            self._plane, self.choice = self._factories.planes["bpf"](), before
            return False
        log.warning("mode=ipvs: BPF is unavailable on this node: %s: %s", reason, error)
        return True

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        """In mode auto, falls back to IPVS if BPF fails at the first apply."""
        try:
            report = self._plane.apply(desired, touched, authoritative)
        except KernelError as error:
            already_tried = bool(self._failed_fallbacks)
            if self._has_applied or not self._fall_back_to_ipvs(error):
                # The attempt that just failed has closed BPF's data plane and made a new one.
                if self._failed_fallbacks and not already_tried:
                    self._open()
                raise
            # None: the new data plane has programmed nothing yet.
            report = self._plane.apply(desired, None, authoritative)
        self._has_applied = True
        self._fully_applied = self._fully_applied or authoritative
        return report

    def invalidate(self) -> None:
        self._plane.invalidate()

    def tick(self, now: float, coexisting: bool = False) -> TickResult:
        is_draining = not self._takeover.is_complete
        self._may_drain = is_draining and self._fully_applied and self._plane.status().ready
        return self._plane.tick(now, coexisting=is_draining)

    def maintain_host(self, now: float) -> None:
        """Also drains the other mode, as soon as this one is ready."""
        if not self._has_applied:
            return  # a failure may still replace this data plane
        if self._may_drain:
            self._takeover.drain(now)
        self._plane.maintain_host(now)

    def status(self) -> PlaneStatus:
        status = self._plane.status()
        # Before that the other mode is meant to serve, so its connections are no problem.
        drain_problems = self._takeover.problems() if self._fully_applied else ()
        return replace(status, choice=self.choice, problems=(*status.problems, *drain_problems))

    @property
    def shared(self) -> SharedAccess:
        return self._plane.shared

    def write_status(self, text: bytes) -> None:
        self._plane.write_status(text)

    def close(self) -> None:
        """What the other mode left stays; the next agent takes it over."""
        self._takeover.release()
        self._plane.close()


def select_data_plane(config: Config, find_reason: Callable[[KbpfError], str | None]) -> SelectedDataPlane:
    """Returns the data plane for these settings, not opened. Modules are imported only when
    needed: mode ipvs imports only those BPF modules that detect and drain remains of mode bpf.
    `find_reason`: see Factories.
    """

    def bpf() -> DataPlane:
        from kbpf.dataplane.bpf.plane import BpfPlane

        return BpfPlane(config, sockets_first=True)

    def ipvs() -> DataPlane:
        from kbpf.dataplane.ipvs.plane import IpvsPlane

        return IpvsPlane(config)

    def previous_bpf() -> PreviousDataPlane:
        from kbpf.dataplane.bpf.drain import PreviousBpfPlane

        return PreviousBpfPlane(config)

    def previous_ipvs() -> PreviousDataPlane:
        from kbpf.dataplane.ipvs.ipvs_cleanup import PreviousIpvsPlane

        return PreviousIpvsPlane(config)

    def previous_kube_proxy() -> PreviousDataPlane:
        from kbpf.takeover.kube_proxy_drain import KubeProxyDrain

        return KubeProxyDrain(config)

    previous = {"bpf": (previous_ipvs, previous_kube_proxy), "ipvs": (previous_bpf,)}
    return SelectedDataPlane(config.mode, Factories({"bpf": bpf, "ipvs": ipvs}, previous, find_reason))
