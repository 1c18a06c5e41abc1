# SPDX-License-Identifier: Apache-2.0
"""Loads the programs of an artifact over a set of maps, or adopts pinned ones, and pins them.

Everything is built in a folder whose name begins with `new-` and published by one rename
(maps/pinning.py). Programs of an earlier agent serve until the new ones are loaded *and* their maps
are filled; an error before that changes nothing.
"""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.hooks import (
    HOOKS,
    OPTIONAL_HELPERS,
    OPTIONAL_PACKET_HELPERS,
    program_names,
    program_type,
    tracepoint_of,
)
from kbpf.dataplane.bpf.maps.layout import ALL_MAPS, TAIL_CALL_MAP
from kbpf.dataplane.bpf.maps.pinning import (
    NEW_PREFIX,
    Pins,
    close_all,
)
from kbpf.dataplane.bpf.programs.artifact import Artifact, Bytecode
from kbpf.errors import KernelError, ProgramLoadError
from kbpf.kernel.bpf import kernel_members, probe
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.bpf.uapi import (
    BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
    BPF_PROG_TYPE_SCHED_CLS,
    BPF_PSEUDO_MAP_FD,
)
from kbpf.kernel.system import threads

log = logging.getLogger("kbpf.dataplane")

KERNEL_SOCKET_BIT_CALL: Final = 0x6B627066
"""The number that kernel_socket_bit() of lib/compat.h calls, which no helper has."""


MOV_R0_0: Final = probe.encode_r0(0)
NO_REPLACEMENTS: Final[Mapping[bytes, bytes]] = {}


def check_artifact(artifact: Artifact) -> None:
    """Raises KernelError if the artifact and layout.py differ in the key or value size of a map."""
    for shape in artifact.maps:
        if shape.name == TAIL_CALL_MAP:
            continue
        spec = ALL_MAPS.get(shape.name)
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
        if not probe.probe_helper(BPF_PROG_TYPE_CGROUP_SOCK_ADDR, connect4, number, argument).works
    )


def missing_packet_helpers() -> frozenset[int]:
    """Those of OPTIONAL_PACKET_HELPERS that this kernel's packet programs may not call."""
    return frozenset(
        number for number in OPTIONAL_PACKET_HELPERS if not probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, number).works
    )


def relocate(
    code: Bytecode,
    maps: Mapping[str, Map],
    missing: frozenset[int] = frozenset(),
    replacements: Mapping[bytes, bytes] = NO_REPLACEMENTS,
) -> bytes:
    """Adapts bytecode to these maps and this kernel: inserts the descriptors of the maps, and
    replaces calls of the helpers in `missing` by r0 = 0, those of kernel_socket_bit() and of the places
    that hooks read (lib/compat.h) by their results, and the instructions in `replacements`.
    """
    insns = bytearray(code.insns)
    # struct bpf_insn: opcode, registers (low half: dst, high half: src), s16 offset, s32 immediate
    for reference in code.references:
        offset = reference.insn * 8
        insns[offset + 1] = (insns[offset + 1] & 0x0F) | BPF_PSEUDO_MAP_FD << 4
        insns[offset + 4 : offset + 8] = maps[reference.map].fd.to_bytes(4, "little")
    # A call and its replacement are one instruction each, so all jump offsets stay valid.
    results = {**replacements, **{probe.encode_call(number): MOV_R0_0 for number in missing}}
    kernel_socket_bit = probe.encode_call(KERNEL_SOCKET_BIT_CALL)
    if kernel_socket_bit in insns:
        results[kernel_socket_bit] = probe.encode_r0(kernel_members.find_bit())
        results |= kernel_members.network_replacements()
    for offset in range(0, len(insns) if results else 0, 8):
        if (call := bytes(insns[offset : offset + 8])) in results:
            insns[offset : offset + 8] = results[call]
    return bytes(insns)


@dataclass(frozen=True, slots=True)
class LoadedPrograms:
    """Programs that are loaded but not attached, and the maps that only they use."""

    programs: dict[str, Program] = field(default_factory=dict)
    private_maps: dict[str, Map] = field(default_factory=dict)

    def close(self) -> None:
        close_all((*self.programs.values(), *self.private_maps.values()))


class ProgramSet:
    """The programs of one artifact over one set of maps: loads, adopts and pins them. Subclasses
    attach them in publish(): SocketPrograms to a cgroup, PacketPath to devices.
    """

    private_map_names: tuple[str, ...] = ()
    """Names of maps that only these programs use, and that are replaced together with them."""

    def __init__(self, pins: Pins, artifact: Artifact, missing: frozenset[int] = frozenset()) -> None:
        check_artifact(artifact)
        self._pins = pins
        self._artifact = artifact
        self._missing_helpers = missing
        self._loaded: dict[str, Program] = {}
        self._private_maps: dict[str, Map] = {}

    @property
    def key(self) -> str:
        """Identifies the bytecode: unit, hash of the sources, and the helpers that the kernel
        lacks.
        """
        missing = "-".join(map(str, sorted(self._missing_helpers)))
        return f"{self._artifact.unit}-{self._artifact.source}-{missing or 'all'}"

    def load(self, maps: Mapping[str, Map]) -> bool:
        """Adopts the pinned programs if they have this bytecode and read these maps, otherwise
        loads new ones. Returns whether it loaded. Attaches nothing.
        """
        self._close_loaded()
        if adopted := self._adopt_pinned(maps):
            return not adopted
        self.use(self.prepare(maps))
        return True

    def prepare(self, maps: Mapping[str, Map]) -> LoadedPrograms:
        """Loads the programs over these maps, for use(). Any thread may call."""
        loaded = LoadedPrograms()
        try:
            loaded.private_maps.update(self._make_private_maps())
            for name in self._program_names():
                program = self._load_program(name, {**maps, **loaded.private_maps})
                if program is not None:
                    loaded.programs[name] = program
                # Verification takes a while; without this the thread could count as stuck.
                threads.heartbeat()
        except BaseException:
            loaded.close()
            raise
        return loaded

    def use(self, loaded: LoadedPrograms) -> None:
        """Replaces the loaded programs by these; publish() attaches them."""
        self._close_loaded()
        self._loaded, self._private_maps = loaded.programs, loaded.private_maps

    def _adopt_pinned(self, maps: Mapping[str, Map]) -> bool:
        """Opens the pinned programs with this bytecode. Returns False if there are none, or they
        do not fit these maps.
        """
        folder = self._pins.programs(self.key)
        if folder.is_dir():
            for pin in sorted(folder.iterdir()):
                if pin.name in self.private_map_names:
                    self._private_maps[pin.name] = Map.open(pin)
                else:
                    self._loaded[pin.name] = Program.open(pin)
            if self._use_maps(maps):
                return True
            self._close_loaded()
        return False

    def _program_names(self) -> tuple[str, ...]:
        """The programs of the unit that are loaded."""
        return program_names(self._artifact.unit)

    def _make_private_maps(self) -> dict[str, Map]:
        """Creates the maps in `private_map_names`."""
        return {}

    def _load_program(self, name: str, maps: Mapping[str, Map]) -> Program | None:
        """Loads a program. Returns None if the kernel refuses a program that is not required."""
        code = next(code for code in self._artifact.programs if code.name == name)
        kind, attach_type, required = program_type(name)
        try:
            return self._load_code(code, maps, kind, attach_type)
        except KernelError as error:
            if required:
                raise ProgramLoadError(error.what, error.where, error.hint, error.errno) from error
            is_expected = any(hook.only_counts for hook in HOOKS if hook.name == name)
            level = logging.INFO if is_expected else logging.WARNING
            log.log(level, "optional program not loaded: %s", error)
            return None

    def _load_code(self, code: Bytecode, maps: Mapping[str, Map], kind: int, attach_type: int) -> Program:
        if not (tracepoint := tracepoint_of(code.name)):
            insns = relocate(code, maps, self._missing_helpers)
            return Program.load(code.name, kind, attach_type, insns)
        insns = relocate(code, maps, self._missing_helpers, kernel_members.replacements())
        type_id = kernel_members.find_tracepoint(tracepoint)
        return Program.load(code.name, kind, attach_type, insns, attach_btf_id=type_id)

    def _use_maps(self, maps: Mapping[str, Map]) -> bool:
        """Whether all required programs are loaded, and read no maps other than these."""
        map_ids = {map_.id for map_ in (*maps.values(), *self._private_maps.values())}
        needed = {program_name for program_name in self._program_names() if program_type(program_name)[2]}
        return (
            needed <= self._loaded.keys()
            and set(self.private_map_names) == self._private_maps.keys()
            and all(set(program.read_info().map_ids) <= map_ids for program in self._loaded.values())
        )

    @property
    def map_names(self) -> frozenset[str]:
        """The names of the maps that these programs read."""
        return frozenset(shape.name for shape in self._artifact.maps)

    def _pin(self) -> Path:
        """Pins the programs in a folder that is not published yet, and returns it."""
        new_folder = self._pins.root / f"{NEW_PREFIX}programs-{self.key}"
        shutil.rmtree(new_folder, ignore_errors=True)
        new_folder.mkdir(mode=0o700)
        for name, pinnable in (*self._loaded.items(), *self._private_maps.items()):
            pinnable.pin(new_folder / name)
        return new_folder

    def close(self) -> None:
        """Closes the descriptors. Pins and attachments stay."""
        self._close_loaded()

    def _close_loaded(self) -> None:
        close_all((*self._loaded.values(), *self._private_maps.values()))
        self._loaded, self._private_maps = {}, {}
