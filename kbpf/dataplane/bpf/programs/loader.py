"""Programs of one artifact: loaded over maps, adopted, attached in the place of those before.

Everything is built in a folder whose name begins with `new-` and published by one rename (load.py).
Programs of an earlier agent serve until the new ones are loaded *and* the maps behind them are
filled; a refusal on the way changes nothing.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.hooks import (
    HOOKS,
    OPTIONAL_HELPERS,
    OPTIONAL_PACKET_HELPERS,
    PROG_CGROUP_SOCK_ADDR,
    PROG_SCHED_CLS,
    TAILS_MAP,
    Hook,
    programs_of,
    type_of,
)
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.dataplane.bpf.maps.pinning import NEW, NEW_LINK, Pins, close_all, detach, read_by_attached
from kbpf.dataplane.bpf.programs.artifact import Artifact, Bytecode
from kbpf.dataplane.bpf.programs.foreign import Foreign, at_sockets
from kbpf.errors import AttachRefused, KernelError, ProgramRefused
from kbpf.kernel.bpf import probe
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.system import threads

log = logging.getLogger("kbpf.dataplane")

PSEUDO_MAP_FD: Final = 1
RETURN_0: Final = b"\xb7\x00\x00\x00\x00\x00\x00\x00"  # r0 = 0


def check_artifact(artifact: Artifact) -> None:
    """The C and layout.py must mean the same bytes."""
    for shape in artifact.maps:
        if shape.name == TAILS_MAP:
            continue
        spec = MAPS.get(shape.name)
        if spec is None or (spec.key_size, spec.value_size) != (shape.key_size, shape.value_size):
            raise KernelError(
                f"the compiled programs and this agent disagree on the map {shape.name}",
                f"unit {artifact.unit}",
                "run kbpf compile --force",
            )


def missing_helpers() -> frozenset[int]:
    """Those of OPTIONAL_HELPERS that this kernel's socket hooks may not call."""
    connect4 = next(hook for hook in HOOKS if hook.name == "connect4").attach_type
    return frozenset(
        number
        for number, (_, _, argument) in OPTIONAL_HELPERS.items()
        if not probe.helper(PROG_CGROUP_SOCK_ADDR, connect4, number, argument).works
    )


def missing_packet_helpers() -> frozenset[int]:
    """Those of OPTIONAL_PACKET_HELPERS that this kernel's packet programs may not call."""
    return frozenset(
        number
        for number in OPTIONAL_PACKET_HELPERS
        if not probe.helper(PROG_SCHED_CLS, 0, number).works
    )


def link_code(
    code: Bytecode, maps: Mapping[str, Map], lacks: frozenset[int] = frozenset()
) -> bytes:
    """Bytecode for this kernel: map descriptors put in, calls that it lacks taken out."""
    insns = bytearray(code.insns)
    for reference in code.references:
        at = reference.insn * 8
        insns[at + 1] = (insns[at + 1] & 0x0F) | PSEUDO_MAP_FD << 4
        insns[at + 4 : at + 8] = maps[reference.map].fd.to_bytes(4, "little")
    calls = [probe.call(number) for number in sorted(lacks)]
    for at in range(0, len(insns) if calls else 0, 8):
        if insns[at : at + 8] in calls:
            insns[at : at + 8] = RETURN_0
    return bytes(insns)


@dataclass(frozen=True, slots=True)
class Ready:
    """Programs that are loaded and not attached, and maps that belong to them alone."""

    programs: dict[str, Program] = field(default_factory=dict)
    own: dict[str, Map] = field(default_factory=dict)

    def close(self) -> None:
        """Closes the descriptors."""
        close_all((*self.programs.values(), *self.own.values()))


class Programs:
    """The programs of one artifact over one set of maps. How they are attached is told by the two
    classes below.
    """

    own: tuple[str, ...] = ()
    """Maps that belong to these programs alone and live and die with them."""

    def __init__(self, pins: Pins, artifact: Artifact, lacks: frozenset[int] = frozenset()) -> None:
        check_artifact(artifact)
        self._pins = pins
        self._artifact = artifact
        self._lacks = lacks
        self._loaded: dict[str, Program] = {}
        self._own: dict[str, Map] = {}

    @property
    def key(self) -> str:
        """What decides the bytecode: sources, and what the kernel lacks."""
        lacks = "-".join(map(str, sorted(self._lacks)))
        return f"{self._artifact.unit}-{self._artifact.source}-{lacks or 'all'}"

    def load(self, maps: Mapping[str, Map]) -> bool:
        """Takes the pinned programs if they are these over these maps, else loads; whether it
        loaded. Nothing is attached yet.
        """
        self._drop()
        if adopted := self._adopt(maps):
            return not adopted
        self.take(self.prepare(maps))
        return True

    def prepare(self, maps: Mapping[str, Map]) -> Ready:
        """Loads the programs over these maps, for take(). Any thread."""
        ready = Ready()
        try:
            ready.own.update(self._make_own())
            for name in programs_of(self._artifact.unit):
                program = self._load_one(name, {**maps, **ready.own})
                if program is not None:
                    ready.programs[name] = program
                threads.beat()
        except BaseException:
            ready.close()
            raise
        return ready

    def take(self, ready: Ready) -> None:
        """Has these from now on; publish() attaches them."""
        self._drop()
        self._loaded, self._own = ready.programs, ready.own

    def _adopt(self, maps: Mapping[str, Map]) -> bool:
        """Takes the pinned programs if they are these over these maps; whether it did."""
        folder = self._pins.programs(self.key)
        if folder.is_dir():
            for pin in sorted(folder.iterdir()):
                if pin.name in self.own:
                    self._own[pin.name] = Map.open(pin)
                else:
                    self._loaded[pin.name] = Program.open(pin)
            if self._over(maps):
                return True
            self._drop()
        return False

    def _make_own(self) -> dict[str, Map]:
        """Makes the maps of `own`."""
        return {}

    def _load_one(self, name: str, maps: Mapping[str, Map]) -> Program | None:
        """Loads a program; None if it is not required and is refused."""
        code = next(code for code in self._artifact.programs if code.name == name)
        kind, attach_type, required = type_of(name)
        try:
            insns = link_code(code, maps, self._lacks)
            return Program.load(name, kind, attach_type, insns)
        except KernelError as error:
            if required:
                raise ProgramRefused(error.what, error.where, error.hint, error.errno) from error
            expected = any(hook.counts for hook in HOOKS if hook.name == name)
            log.log(logging.INFO if expected else logging.WARNING, "left out: %s", error)
            return None

    def _over(self, maps: Mapping[str, Map]) -> bool:
        ids = {m.id for m in (*maps.values(), *self._own.values())}
        needed = {n for n in programs_of(self._artifact.unit) if type_of(n)[2]}
        return (
            needed <= self._loaded.keys()
            and set(self.own) == self._own.keys()
            and all(set(program.info().map_ids) <= ids for program in self._loaded.values())
        )

    def out_of_step(self, services: int, maps: Mapping[str, Map]) -> bool:
        """Whether an attached program reads the `services` of this id, which we have written until
        now, and not the rest of these maps: it would not see what is written to them.
        """
        now = {m.id for m in maps.values()}
        return any(services in reads and not reads <= now for reads in self._read_now())

    def _read_now(self) -> Iterator[set[int]]:
        """The ids of the maps that attached programs read, but for their own ones."""
        raise NotImplementedError

    @property
    def reads(self) -> frozenset[str]:
        """The names of the maps that these programs read."""
        return frozenset(shape.name for shape in self._artifact.maps)

    def publish(self) -> int:
        """Pins the programs and attaches each in place of what its hook ran before; how many
        attachments changed. Each hook goes from the old program to the new one at once.
        """
        folder, fresh = self._pins.programs(self.key), self._pin()
        changed = self._attach_all()
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
        for other in self._pins.others(f"programs-{self._artifact.unit}", folder):
            shutil.rmtree(other, ignore_errors=True)
        return changed

    def _pin(self) -> Path:
        """Pins the programs in a folder that is not published yet."""
        fresh = self._pins.root / f"{NEW}programs-{self.key}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        for name, held in (*self._loaded.items(), *self._own.items()):
            held.pin(fresh / name)
        return fresh

    def _attach_all(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        """Closes the descriptors. Pins and attachments stay."""
        self._drop()

    def _drop(self) -> None:
        """Closes what is loaded."""
        close_all((*self._loaded.values(), *self._own.values()))
        self._loaded, self._own = {}, {}


class SocketPrograms(Programs):
    """The unit `sock`, attached to a cgroup by pinned links."""

    def __init__(
        self,
        pins: Pins,
        artifact: Artifact,
        cgroup: Path,
        lacks: frozenset[int] = frozenset(),
        counts: bool = False,
    ) -> None:
        super().__init__(pins, artifact, lacks)
        self._cgroup = cgroup
        self._counts = counts  # whether hooks that serve nobody are wanted

    def _attach_all(self) -> int:
        self._pins.links.mkdir(mode=0o700, exist_ok=True)
        changed = 0
        cgroup = open_cgroup(self._cgroup)
        try:
            cgroup_id = os.fstat(cgroup).st_ino
            for hook in HOOKS:
                program = self._loaded.get(hook.name)
                if hook.counts and not self._counts:
                    changed += self._detach(hook)
                elif program is not None:
                    changed += self._attach_or_tell(hook, program, cgroup, cgroup_id)
                elif hook.unit == self._artifact.unit and self._detach(hook):
                    log.warning(
                        "detached, since this kernel refuses its new program hook=%s", hook.name
                    )
                    changed += 1
        finally:
            os.close(cgroup)
        return changed + self._detach_former()

    def _detach_former(self) -> int:
        """Ends what an earlier version has attached to hooks that this one does not use; how many
        there were. Else its program would go on over maps that nobody reads.
        """
        known = {hook.name for hook in HOOKS}
        former = [pin for pin in sorted(self._pins.links.iterdir()) if pin.name not in known]
        for pin in former:
            detach(pin)
        return len(former)

    def state(self) -> dict[str, bool]:
        """The hooks that are wanted, and whether each runs our program, in the cgroup that has this
        name now: it may have been removed and made again.
        """
        try:
            cgroup_id = self._cgroup.stat().st_ino
        except OSError:
            cgroup_id = -1
        wanted = [hook.name for hook in HOOKS if self._counts or not hook.counts]
        return {
            name: self._runs(self._pins.links / name, program, cgroup_id)
            for name, program in self._loaded.items()
            if name in wanted
        }

    def _runs(self, pin: Path, program: Program, cgroup_id: int) -> bool:
        if not pin.exists():
            return False
        with Link.open(pin) as link:
            info = link.info()
        return info.cgroup == cgroup_id and info.program == program.info().id

    def foreign(self) -> tuple[Foreign, ...]:
        """What others have at the same hooks."""
        return at_sockets(self._cgroup)

    def attach_again(self) -> int:
        """Attaches what is missing; how many attachments changed."""
        return self._attach_all()

    def _read_now(self) -> Iterator[set[int]]:
        yield from read_by_attached(self._pins)

    def _detach(self, hook: Hook) -> bool:
        """Ends what an earlier version had there: its maps may be nobody's by now."""
        pin = self._pins.links / hook.name
        if not pin.exists():
            return False
        detach(pin)
        return True

    def _attach_or_tell(self, hook: Hook, program: Program, cgroup: int, cgroup_id: int) -> bool:
        """Nobody goes unserved for a hook that only counts: another may have it for itself."""
        try:
            return self._attach(hook, program, cgroup, cgroup_id)
        except AttachRefused as error:
            if not hook.counts:
                raise
            log.warning("connections' ends are not counted: %s", error)
            return False

    def _attach(self, hook: Hook, program: Program, cgroup: int, cgroup_id: int) -> bool:
        pin = self._pins.links / hook.name
        if pin.exists():
            with Link.open(pin) as link:
                info = link.info()
                if info.cgroup == cgroup_id:
                    if info.program == program.info().id:
                        return False
                    link.update(program)
                    return True
        # The first time, or the cgroup of the old link is another one or gone: attach first,
        # then let the old link go, so that sockets meet two programs rather than none.
        fresh = self._pins.root / f"{NEW_LINK}{hook.name}"
        fresh.unlink(missing_ok=True)
        try:
            link = Link.attach(program, cgroup, hook.attach_type)
        except KernelError as error:
            raise AttachRefused(
                f"cannot attach {hook.name}",
                f"cgroup {self._cgroup}",
                "the kernel needs cgroup BPF links (5.7), the process CAP_BPF and CAP_NET_ADMIN",
                errno=error.errno,
            ) from error
        with link:
            link.pin(fresh)
            fresh.rename(pin)
        return True


def open_cgroup(path: Path) -> int:
    """A descriptor of a cgroup v2 folder."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KernelError(
            "cannot open the cgroup",
            str(path),
            "name a folder of the cgroup v2 hierarchy with --cgroup",
            errno=error.errno or 0,
        ) from error
