# SPDX-License-Identifier: Apache-2.0
"""The verifier's statistics for our programs, loaded as the agent loads them.

The verifier gives up on a program after processing LIMIT instructions, counting each path. The
number that it processes differs between kernels, which prune states by different rules.
"""

import ctypes
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kbpf.dataplane.bpf.hooks import (
    CONNTRACK_PROGRAMS,
    ENTRY_READERS,
    TAIL_CALL_SLOTS,
    program_type,
    tracepoint_of,
)
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import ALL_MAPS, TAIL_CALL_MAP
from kbpf.dataplane.bpf.programs import loader
from kbpf.dataplane.bpf.programs.artifact import Artifact
from kbpf.kernel.bpf import kernel_members, kfuncs, objects, syscalls, uapi
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import modules

LIMIT = 1_000_000
LOG_SIZE = 1 << 24
STATISTICS, INSTRUCTIONS = 4, 1
TAIL = 5
"""How many lines of the log a refusal shows."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The result for one program. `size`: its instructions; `processed`: those that the verifier
    processed; `refusal`: the last lines of its log, "" if the program loads; `seconds`: its time.
    """

    unit: str
    program: str
    size: int
    processed: int
    seconds: float
    refusal: str


def verify(artifact: Artifact) -> Iterator[Verified]:
    """Loads every program of a unit with separate maps, and unloads it again. Those that need
    functions of the kernel's conntrack, or sockets at tracepoints, are left out if the kernel has
    none.
    """
    packets = artifact.unit == "tc"
    lacks = loader.missing_packet_helpers() if packets else loader.missing_helpers()
    with ExitStack() as own:
        maps: dict[str, Map] = {}
        for name, spec in ALL_MAPS.items():
            entries = spec.entries if spec.map_type == uapi.BPF_MAP_TYPE_RINGBUF else 64
            new_map = pinning.make_map(spec, 1 if spec.inner else entries, maps.get(spec.inner))
            maps[name] = own.enter_context(new_map)
        tails = Map.create(uapi.BPF_MAP_TYPE_PROG_ARRAY, TAIL_CALL_MAP, 4, 4, TAIL_CALL_SLOTS)
        maps[TAIL_CALL_MAP] = own.enter_context(tails)
        for code in artifact.programs:
            calls = kfuncs.NO_CONNTRACK
            if code.name in ENTRY_READERS:
                modules.load(kfuncs.MODULES)
                if kfuncs.probe_conntrack().works:
                    calls = own.enter_context(kfuncs.open_conntrack())
                elif code.name in CONNTRACK_PROGRAMS:
                    continue
            replacements = calls.replacements
            if tracepoint := tracepoint_of(code.name):
                if not kernel_members.probe_tracepoint(tracepoint).works:
                    continue
                replacements = kernel_members.replacements()
            insns = loader.relocate(code, maps, lacks, replacements)
            started = time.monotonic()
            fd, log = _load(code.name, insns, STATISTICS, calls.btf_fds)
            seconds = time.monotonic() - started
            refusal = ""
            if fd >= 0:
                objects.Program(fd, code.name).close()
            else:
                _, why = _load(code.name, insns, INSTRUCTIONS, calls.btf_fds)
                refusal = "\n".join([f"errno {-fd}", *why.splitlines()[-TAIL:]])
            counts = re.findall(r"processed (\d+) insns", log)
            processed = int(counts[-1]) if counts else 0
            yield Verified(artifact.unit, code.name, len(insns) // 8, processed, seconds, refusal)


def _load(name: str, insns: bytes, level: int, btf_fds: Sequence[int]) -> tuple[int, str]:
    """bpf_prog_load() like the loader's: the descriptor or -errno, and the verifier's log."""
    kind, attach_type, _ = program_type(name)
    log = ctypes.create_string_buffer(LOG_SIZE)
    opts = syscalls.ProgLoadOpts(
        attempts=5,
        expected_attach_type=attach_type,
        log_level=level,
        log_size=LOG_SIZE,
        log_buf=ctypes.addressof(log),
    )
    if tracepoint := tracepoint_of(name):
        opts.attach_btf_id = kernel_members.find_tracepoint(tracepoint)
    fd_array = (ctypes.c_int * len(btf_fds))(*btf_fds)
    opts.fd_array = ctypes.addressof(fd_array) if btf_fds else None
    count = ctypes.c_size_t(len(insns) // 8)
    fd = syscalls.lib().bpf_prog_load(kind, name[:15].encode(), objects.LICENSE, insns, count, ctypes.byref(opts))
    return int(fd), log.value.decode("ascii", "replace")
