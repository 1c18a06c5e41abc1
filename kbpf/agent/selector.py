"""Which data plane serves, and how one follows the other.

`--mode bpf` and `--mode ipvs` are what they say, or the agent ends with what is missing. `auto` is
BPF where it can be had, else IPVS: a refusal to open it, or to attach at the first apply, decides,
and what `kbpf check` says of this machine is the reason. The decision holds until the agent is
started again.

What an agent of the other mode has left serves until this one's first complete apply; then it is
retired (base.Remains). No agent of the other mode can start meanwhile.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from kbpf.checks.row import CheckRow
from kbpf.dataplane.base import DataPlane, Remains, Report
from kbpf.errors import (
    AttachRefused,
    CompileError,
    KbpfError,
    KernelError,
    PinsGone,
    ProgramRefused,
)
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.metrics import Ended, Measures, Pause, Traffic
from kbpf.model.status import ModeChoice, PacketStatus

log = logging.getLogger("kbpf.agent")

RETRY_SECONDS: Final = 5.0


class Reason(StrEnum):
    """Why BPF is not to be had: words for logs, status, metrics and Events."""

    NO_LIBRARY = "libbpf missing"
    NO_BPF = "no bpf(2)"
    NO_PRIVILEGES = "no privileges"
    OLD_KERNEL = "kernel below the tier"
    NO_CGROUP = "no cgroup v2"
    NO_COMPILER = "BCC missing"
    NOT_COMPILED = "compile failure"
    REFUSED = "verifier refusal"
    NOT_ATTACHED = "attach failure"


BY_ROW: Final = {
    "privileges": Reason.NO_PRIVILEGES,
    "libbpf1": Reason.NO_LIBRARY,
    "bpf(2)": Reason.NO_BPF,
    "bpffs": Reason.NO_BPF,
    "BCC": Reason.NO_COMPILER,
    "LLVM": Reason.NO_COMPILER,
    "BPF sources": Reason.NOT_COMPILED,
    "cgroup v2": Reason.NO_CGROUP,
}
"""What a missing row of `kbpf check` means; any other one that is needed: OLD_KERNEL."""
BY_ERROR: Final[Sequence[tuple[type[KbpfError], Reason]]] = (
    (CompileError, Reason.NOT_COMPILED),
    (ProgramRefused, Reason.REFUSED),
    (AttachRefused, Reason.NOT_ATTACHED),
)
"""What an error means where nothing is missing; another one is no reason to do without BPF."""


def reason_of(error: KbpfError, rows: Sequence[CheckRow]) -> Reason | None:
    """Why BPF is not to be had, by this error and what `kbpf check` says; None if it is, and
    something else is the matter.
    """
    if isinstance(error, PinsGone):
        return None
    for row in rows:
        if row.needed and row.result != "yes":
            return BY_ROW.get(row.name, Reason.OLD_KERNEL)
    return next((reason for kind, reason in BY_ERROR if isinstance(error, kind)), None)


class Kit(NamedTuple):
    """How to get the data planes, what others left of them, what `kbpf check` says of BPF, and what
    a kube-proxy left that mode bpf has to heed.
    """

    bpf: Callable[[], DataPlane]
    ipvs: Callable[[], DataPlane]
    bpf_remains: Callable[[], Remains]
    ipvs_remains: Callable[[], Remains]
    rows: Callable[[], Sequence[CheckRow]]
    kube_proxy: Callable[[], Remains]


class Chosen:
    """The data plane of `--mode`, and the end of the other's remains. A DataPlane itself: see base.
    One thread calls.
    """

    def __init__(self, asked: str, kit: Kit) -> None:
        self._asked = asked
        self._kit = kit
        self._choice = ModeChoice(asked, "ipvs" if asked == "ipvs" else "bpf")
        self._plane = kit.ipvs() if asked == "ipvs" else kit.bpf()
        self._remains: list[Remains] = []
        self._applied = False  # once
        self._serves = False  # and it knew of all objects
        self._problem = ""
        self._in_vain: dict[str, str] = {}  # BPF's error: its hint since IPVS was tried, too

    @property
    def name(self) -> str:
        """Of the mode that serves."""
        return self._plane.name

    def choice(self) -> ModeChoice:
        """Which it is, and why."""
        return self._choice

    def open(self) -> None:
        """See base.DataPlane. In mode auto what keeps BPF from opening makes it IPVS; if that is
        not to be had either, the error is BPF's.
        """
        try:
            self._open()
        except KbpfError as error:
            if not self._fall_back(error):
                raise

    def _open(self) -> None:
        try:
            self._take_remains()
        except KbpfError:
            self._let_go_of_remains()
            raise
        self._plane.follow(bool(self._remains))
        try:
            self._plane.open()
        except KbpfError:
            self._let_go_of_remains()
            raise

    def _take_remains(self) -> None:
        kit, mode = self._kit, self._choice.mode
        for get in (kit.ipvs_remains, kit.kube_proxy) if mode == "bpf" else (kit.bpf_remains,):
            remains = get()
            if remains.take():
                log.info("mode=%s finds what %s left: it serves until this one does",
                         mode, remains.name)  # fmt: skip
                self._remains.append(remains)

    def _let_go_of_remains(self) -> None:
        while self._remains:
            self._remains.pop().close()

    def _fall_back(self, error: KbpfError) -> bool:
        """Whether IPVS has taken BPF's place, opened. If it cannot, the error says so too, each
        time that it comes; BPF's plane is a new one that is not opened, and IPVS is not tried
        again.
        """
        if self._asked != "auto" or self._choice.mode != "bpf":
            return False
        if self._in_vain:
            error.hint = self._in_vain.get(str(error), error.hint)
            return False
        reason = reason_of(error, self._kit.rows())
        if reason is None:
            return False
        self._plane.close()
        self._let_go_of_remains()
        before = self._choice
        self._plane = self._kit.ipvs()
        self._choice = ModeChoice(self._asked, "ipvs", str(reason), str(error))
        try:
            self._open()
        except KbpfError as second:
            said, instead = str(error), f"mode ipvs cannot take its place: {second}"
            error.hint = f"{error.hint}; {instead}" if error.hint else instead
            self._in_vain[said] = error.hint
            self._plane, self._choice = self._kit.bpf(), before
            return False
        log.warning("mode=ipvs, since BPF is not to be had here: %s: %s", reason, error)
        return True

    def follow(self, other: bool) -> None:
        """See base.DataPlane. Two modes are all there are."""

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        sound: bool = True,
    ) -> Report:
        """See base.DataPlane. A first apply that BPF cannot do is IPVS' in mode auto."""
        try:
            report = self._plane.apply(desired, touched, sound)
        except KernelError as error:
            tried = bool(self._in_vain)
            if self._applied or not self._fall_back(error):
                if self._in_vain and not tried:  # it was closed for IPVS
                    self._open()
                raise
            report = self._plane.apply(desired, None, sound)
        self._applied = True
        self._serves = self._serves or sound
        return report

    def doubt(self) -> None:
        """See base.DataPlane."""
        self._plane.doubt()

    def claim_socket(self, cookie: int) -> None:
        """See base.DataPlane."""
        self._plane.claim_socket(cookie)

    def tick(self, now: float) -> float | None:
        """See base.DataPlane. What is left of the other mode goes as soon as this one serves."""
        due = self._plane.tick(now)
        later = self._retire(now) if self._serves and self._plane.ready() else None
        return min((one for one in (due, later) if one is not None), default=None)

    def _retire(self, now: float) -> float | None:
        due = []
        for remains in tuple(self._remains):
            try:
                later = remains.retire(now)
            except KbpfError as error:
                if str(error) != self._problem:
                    log.warning("what %s left is not removed, trying again: %s",
                                remains.name, error)  # fmt: skip
                self._problem = str(error)
                return now + RETRY_SECONDS
            if later is not None:
                due.append(later)
                continue
            log.info("nothing goes on by %s any more", remains.name)
            remains.close()
            self._remains.remove(remains)
            if not self._remains:
                self._plane.follow(False)
        self._problem = ""
        return min(due, default=None)

    def ended(self) -> tuple[Ended, ...]:
        """See base.DataPlane."""
        return self._plane.ended()

    def ready(self) -> bool:
        """See base.DataPlane."""
        return self._plane.ready()

    def packet_status(self) -> PacketStatus | None:
        """See base.DataPlane."""
        return self._plane.packet_status()

    def problems(self) -> tuple[str, ...]:
        """See base.DataPlane."""
        lines = self._plane.problems()
        if self._serves:
            lines = (*lines, *(line for one in self._remains for line in one.problems()))
        return (*lines, self._problem) if self._problem else lines

    def faults(self) -> tuple[str, ...]:
        """See base.DataPlane."""
        return self._plane.faults()

    def measure(self) -> Measures:
        """See base.DataPlane."""
        return self._plane.measure()

    def count(self, pause: Pause) -> Traffic:
        """See base.DataPlane."""
        return self._plane.count(pause)

    def write_status(self, text: bytes) -> None:
        """See base.DataPlane."""
        self._plane.write_status(text)

    def close(self) -> None:
        """See base.DataPlane. Remains stay; the next agent finds them."""
        self._let_go_of_remains()
        self._plane.close()

    def remove(self) -> None:
        """See base.DataPlane."""
        self._let_go_of_remains()
        self._plane.remove()


def choose(config: Config) -> Chosen:
    """The data plane of these settings, not opened. What it is made of is imported when it is
    needed; in mode ipvs, of BPF, what tells whether that mode has left something.
    """
    return Chosen(config.mode, _kit(config))


def _kit(config: Config) -> Kit:
    def bpf() -> DataPlane:
        from kbpf.dataplane.bpf.plane import BpfPlane

        return BpfPlane(config, sockets_first=True)

    def ipvs() -> DataPlane:
        from kbpf.dataplane.ipvs.plane import IpvsPlane

        return IpvsPlane(config)

    def bpf_remains() -> Remains:
        from kbpf.dataplane.bpf.drain import BpfRemains

        return BpfRemains(config)

    def ipvs_remains() -> Remains:
        from kbpf.dataplane.ipvs.drain import IpvsRemains

        return IpvsRemains(config)

    def rows() -> tuple[CheckRow, ...]:
        from kbpf.checks import bpf as bpf_checks

        return tuple(bpf_checks.rows(config.cgroup, config.pin_dir, config.cache_dir))

    def kube_proxy() -> Remains:
        from kbpf.takeover.drain import KubeProxyRemains

        return KubeProxyRemains(config)

    return Kit(bpf, ipvs, bpf_remains, ipvs_remains, rows, kube_proxy)
