# SPDX-License-Identifier: Apache-2.0
"""Selection of the data plane: the flag --mode, the reasons for a fallback to IPVS, and the drain
of a previous data plane. The planes are fakes that fail as a row says.
"""

import dataclasses
import logging
from collections.abc import Collection, Sequence
from itertools import product
from typing import NamedTuple

import pytest

from kbpf.checks.fallback import REASON_BY_CHECK, FallbackReason, fallback_reason
from kbpf.checks.row import Check, CheckRow
from kbpf.dataplane.base import PlaneStatus, Report, TickResult
from kbpf.dataplane.select import Factories, SelectedDataPlane
from kbpf.errors import AttachError, CompileError, KbpfError, KernelError, PinsRemovedError, ProgramLoadError
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.status import ModeChoice
from kbpf.takeover.previous import DRAIN_RETRY_INTERVAL_S
from tests.support.table import each_cells, table

NOTHING = DesiredState({})


def rows(text: str) -> Sequence[CheckRow]:
    """Rows of `kbpf check`: ``CGROUP`` says no, ``CGROUP=unknown`` something else, ``HOOK:connect4`` is about that one,
    ``good`` stands for checks that do not matter.
    """
    made = []
    for word in text.replace("good", "BPF_SYSCALL=yes TCX=no,unneeded").split():
        name, _, result = word.partition("=")
        name, _, subject = name.partition(":")
        result, _, unneeded = (result or "no").partition(",")
        made.append(CheckRow(Check[name].of(subject) if subject else Check[name], result, "", "", not unneeded))
    return made


KERNEL = KernelError("the map cannot be made", "", "", 1)
ERRORS = {
    "map": KERNEL,
    "compile": CompileError("syntax"),
    "load": ProgramLoadError("connect4"),
    "attach": AttachError("connect4"),
    "lock": KernelError("lock", "", "", 11),
    "gone": PinsRemovedError("gone"),
}


class Failure(NamedTuple):
    """An error of mode bpf, the rows of `kbpf check`, and the expected reason for the fallback, "" for none."""

    name: str
    raised: str
    checks: str
    expected: str = ""

    @property
    def error(self) -> KbpfError:
        return ERRORS[self.raised]

    @property
    def reason(self) -> FallbackReason | None:
        return FallbackReason[self.expected] if self.expected else None


FAILURES = table(
    Failure,
    """\
no bpf(2) | map | BPF_SYSCALL | NO_BPF
no bpffs | map | BPFFS | NO_BPF
no libbpf | map | LIBBPF | NO_LIBRARY
no privileges | map | PRIVILEGES BPF_SYSCALL=unknown | NO_PRIVILEGES
no cgroup v2 | map | good CGROUP | NO_CGROUP
BCC missing, nothing cached | compile | good COMPILER | NO_COMPILER
damaged sources | compile | good SOURCES | COMPILE_FAILED
compile failure | compile | good | COMPILE_FAILED
verifier refusal | load | good | PROGRAM_REFUSED
attach failure | attach | good | ATTACH_FAILED
a hook missing | load | good HOOK:connect4 | NO_FEATURE
a feature missing | load | good FEATURES | NO_FEATURE
an unknown result counts as missing | map | CGROUP=unknown | NO_CGROUP
another error | map | good |
another agent is running | lock | good |
the pins were removed | gone | BPF_SYSCALL |
""",
)


def test_every_reason_has_a_row():
    assert {why.reason for why in FAILURES} == {*FallbackReason, None}
    assert set(REASON_BY_CHECK.values()) <= set(FallbackReason)


# ---- planes --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Fake:
    """A fake data plane. `does` lists all calls in order, `fails` the errors to raise by verb."""

    name: str
    does: list[str]
    fails: dict[str, list[KbpfError]] = dataclasses.field(default_factory=dict)
    ready_result: bool = True
    follows: bool = False

    def _do(self, verb: str) -> None:
        self.does.append(f"{self.name} {verb}")
        if self.fails.get(verb):
            raise self.fails[verb].pop(0)

    def _coexist(self, coexisting: bool) -> None:
        if coexisting != self.follows:
            self._do("follows" if coexisting else "is alone")
        self.follows = coexisting

    def open(self, coexisting: bool = False) -> None:
        self._coexist(coexisting)
        self._do("open")

    def apply(
        self, desired: DesiredState, touched: Collection[ServicePortKey] | None, authoritative: bool = True
    ) -> Report:
        self._do("apply" if touched is None else "change")
        return Report()

    def invalidate(self) -> None:
        self._do("doubt")

    def tick(self, now: float, coexisting: bool = False) -> TickResult:
        self._coexist(coexisting)
        return TickResult()

    def maintain_host(self, now: float) -> None:
        pass

    def status(self) -> PlaneStatus:
        return PlaneStatus(ModeChoice("", self.name), ready=self.ready_result)

    @property
    def shared(self) -> str:  # type: ignore[override]
        return self.name

    def write_status(self, text: bytes) -> None:
        self._do("status")

    def close(self) -> None:
        self._do("close")


class FakePrevious(Fake):
    """A fake PreviousDataPlane that is drained after two calls of drain()."""

    there = True
    looks = 2

    def claim(self) -> bool:
        if self.there:
            self._do("take")
        return self.there

    def drain(self, now: float) -> float | None:
        self._do("retire")
        self.looks -= 1
        return now + 7 if self.looks else None

    def problems(self) -> tuple[str, ...]:
        return ("some go on",) if self.looks else ()


class Harness:
    """A SelectedDataPlane over fakes. `there` names the previous data planes on the node."""

    def __init__(self, asked: str, checks: str = "good", there: str = "") -> None:
        self.does: list[str] = []
        self.bpf, self.ipvs = Fake("bpf", self.does), Fake("ipvs", self.does)
        self.rest = {name: FakePrevious(f"old {name}", self.does) for name in ("bpf", "ipvs", "kube-proxy")}
        for name, rest in self.rest.items():
            rest.there = name in there.split()
        factories = Factories(
            {"bpf": lambda: self.bpf, "ipvs": lambda: self.ipvs},
            {"bpf": (lambda: self.rest["ipvs"], lambda: self.rest["kube-proxy"]), "ipvs": (lambda: self.rest["bpf"],)},
            lambda error: fallback_reason(error, rows(checks)),
        )
        self.chosen = SelectedDataPlane(asked, factories)

    def start(self, sound: bool = True) -> None:
        self.chosen.open()
        self.chosen.apply(NOTHING, None, sound)
        self.look(0.0)

    def look(self, now: float) -> None:
        """The agent's thread, then the thread `host`, then the first one again."""
        self.chosen.tick(now)
        self.chosen.maintain_host(now)
        self.chosen.tick(now)


@pytest.mark.parametrize("mode", ["auto", "bpf"])
@pytest.mark.parametrize(
    ("verb", "why"),
    [
        pytest.param(verb, why, id=f"{verb}: {why.name}")
        for verb, why in product(("open", "apply"), FAILURES)
        # Programs are compiled by open(), so apply() cannot raise CompileError.
        if verb == "open" or isinstance(why.error, KernelError)
    ],
)
def test_only_mode_auto_falls_back_to_ipvs_and_only_for_a_reason(why: Failure, verb, mode, caplog):
    house = Harness(mode, why.checks)
    house.bpf.fails[verb] = [why.error]
    if mode == "bpf" or why.reason is None:
        with pytest.raises(type(why.error)) as raised:
            house.start()
        assert raised.value is why.error
        assert not [line for line in house.does if "ipvs" in line]
        return
    with caplog.at_level(logging.INFO):
        house.start()
    assert house.does[-3:] == ["bpf close", "ipvs open", "ipvs apply"]
    assert house.chosen.status().choice == ModeChoice("auto", "ipvs", str(why.reason), str(why.error))
    assert house.chosen.choice.mode == house.chosen.shared == "ipvs"
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 1
    assert str(why.reason) in said[0]
    house.does.clear()
    house.chosen.apply(NOTHING, set())
    house.chosen.tick(0.0)
    house.chosen.close()
    assert house.does == ["ipvs change", "ipvs close"]  # BPF is not tried again


def test_later_error_does_not_fall_back():
    house = Harness("auto", "FEATURES")
    house.start()
    house.bpf.fails["change"] = [AttachError("connect4")]
    with pytest.raises(AttachError):
        house.chosen.apply(NOTHING, set())
    assert house.chosen.choice.mode == "bpf"


def test_ipvs_is_tried_once_if_the_first_apply_fails_then_bpf_is_retried():
    """The BPF plane was closed to try IPVS, so it is opened again for the next attempt. The error
    has the same words each time, so that it is logged once.
    """
    house = Harness("auto", "CGROUP")
    house.bpf.fails["apply"] = [KernelError("no cgroup", "", "look") for _ in range(2)]
    house.ipvs.fails["open"] = [KernelError("no IPVS")]
    house.chosen.open()
    for _ in range(2):
        with pytest.raises(KernelError) as raised:
            house.chosen.apply(NOTHING, None)
        assert str(raised.value) == "no cgroup; look; mode ipvs is not possible either: no IPVS"
    house.chosen.apply(NOTHING, None)
    assert house.does.count("bpf open") == 2
    assert house.does.count("ipvs open") == 1
    assert house.does[-1].startswith("bpf apply")
    assert house.chosen.status().choice == ModeChoice("auto", "bpf")


# ---- previous data planes ------------------------------------------------------------------------


@each_cells(
    "mode, there, fails, steps, does",
    """\
ipvs is drained once bpf serves | bpf | ipvs |  | open; look 0; apply; look 5; look 12; look 20 | old ipvs take, \
bpf follows, bpf open, bpf apply, old ipvs retire, old ipvs retire, old ipvs close, bpf is alone
so is a kube-proxy | bpf | kube-proxy |  | open; look 0; apply; look 5; look 12; look 20 | old kube-proxy take, \
bpf follows, bpf open, bpf apply, old kube-proxy retire, old kube-proxy retire, old kube-proxy close, bpf is alone
so is bpf | ipvs | bpf |  | open; look 0; apply; look 5; look 12; look 20 | old bpf take, \
ipvs follows, ipvs open, ipvs apply, old bpf retire, old bpf retire, old bpf close, ipvs is alone
mode ipvs drains no kube-proxy | ipvs | kube-proxy |  | open; apply; look 0 | ipvs open, ipvs apply
a failed claim releases earlier ones | bpf | ipvs kube-proxy | kube-proxy take | open! \
| old ipvs take, old kube-proxy take, old ipvs close
nothing is opened while an agent of the other mode runs | ipvs | bpf | bpf take | open! | old bpf take
nothing is drained before the state is authoritative and bpf ready | bpf | ipvs |  \
| open; apply?; look 0; unready; apply; look 0; ready; look 1 \
| old ipvs take, bpf follows, bpf open, bpf apply, bpf apply, old ipvs retire
nor before ipvs is ready | ipvs | bpf |  | open; apply?; look 0; unready; apply; look 0; ready; look 1 \
| old bpf take, ipvs follows, ipvs open, ipvs apply, ipvs apply, old bpf retire
a drain is left to the next agent | ipvs | bpf |  | open; apply; look 0; close \
| old bpf take, ipvs follows, ipvs open, ipvs apply, old bpf retire, old bpf close, ipvs close
""",
)
def test_the_order_of_calls(mode, there, fails, steps, does):
    """The requested mode, the previous data planes on the node, the call that fails (PLANE VERB), the steps, and all
    calls of the planes. Steps: ``apply?`` is not authoritative, ``unready``: the plane does not serve, ``open!``: it
    fails.
    """
    house = Harness(mode, there=there)
    if fails:
        name, verb = fails.split()
        house.rest[name].fails[verb] = [KernelError("no")]
    for step in steps.split("; "):
        match step.split():
            case ["open"]:
                house.chosen.open()
            case ["open!"]:
                with pytest.raises(KernelError):
                    house.chosen.open()
            case ["apply" | "apply?" as kind]:
                house.chosen.apply(NOTHING, None, kind == "apply")
            case ["look", now]:
                house.look(float(now))
            case ["close"]:
                house.chosen.close()
            case [kind]:
                house.bpf.ready_result = house.ipvs.ready_result = kind == "ready"
    assert ", ".join(house.does) == does


def test_fallback_releases_the_previous_ipvs_plane_before_it_opens():
    """Otherwise IPVS would wait for its own lock."""
    house = Harness("auto", there="ipvs")
    house.bpf.fails["open"] = [ProgramLoadError("connect4")]
    house.start()
    assert ", ".join(house.does) == (
        "old ipvs take, bpf follows, bpf open, old ipvs close, bpf close, ipvs open, ipvs apply"
    )


def test_bpf_coexists_until_both_previous_data_planes_are_drained():
    house = Harness("bpf", there="ipvs kube-proxy")
    house.rest["kube-proxy"].looks = 3
    house.start()
    assert house.chosen.status().problems == ("some go on", "some go on")
    house.look(7.0)
    assert house.does[-2:] == ["old ipvs close", "old kube-proxy retire"]
    assert house.chosen.status().problems == ("some go on",)
    house.look(14.0)
    assert house.does[-2:] == ["old kube-proxy close", "bpf is alone"]


def test_failed_drain_is_a_problem_and_retried():
    house = Harness("ipvs", there="bpf")
    house.rest["bpf"].fails["retire"] = [KernelError("busy")]
    house.start()
    assert house.chosen.status().problems == ("some go on", "busy")
    house.look(DRAIN_RETRY_INTERVAL_S - 1)
    assert house.does.count("old bpf retire") == 1, "not due yet"
    house.look(DRAIN_RETRY_INTERVAL_S)
    assert house.chosen.status().problems == ("some go on",)
