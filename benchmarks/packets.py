"""What a packet costs in the packet path's programs: nanoseconds, by BPF_PROG_TEST_RUN.

Each row is one packet that goes through one program many times. The program's own cost only: no
device, no stack. A known flow is one whose translation says what the packet says already (its
frontend is its backend), because a packet that was changed would not be the same the next time;
so this is the cost of finding it and of keeping its state, without the few tens of nanoseconds
that rewriting takes.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kbpf.dataplane.bpf.layout import DEVICE, U32, DeviceFlag, Role
from kbpf.kernel import netns
from kbpf.kernel.libbpf import Program
from kbpf.kernel.testrun import run as test_run
from kbpf.model.address import parse_addr
from kbpf.model.objects import Protocol
from tests.support.lab import ip
from tests.support.lab import run as command
from tests.support.packets import frame, tcp, udp
from tests.support.plane import desired, service, sites

CLIENT, NODE, POD = "198.51.100.7", "198.18.0.1", "10.244.1.2:8080"
SERVICES, REPEAT, ROUNDS = 1000, 200_000, 7
ROWS = {
    "tcp of no Service": tcp(f"{CLIENT}:4000", f"{NODE}:22", flags="A"),
    "udp of no Service": udp(f"{CLIENT}:4000", f"{NODE}:8472", b"data"),
    "syn to no Service": tcp(f"{CLIENT}:4000", f"{NODE}:22", flags="S"),
    "known tcp flow": tcp(f"{CLIENT}:4001", POD, flags="A"),
    "known tcp flow, back": tcp(POD, f"{CLIENT}:4001", flags="A"),
}


def run() -> dict[str, Any]:
    """Medians of nanoseconds by program and packet."""
    found: dict[str, dict[str, float]] = {"tc_ingress": {}, "tc_egress": {}}
    with _programs() as programs:
        for _ in range(ROUNDS):
            for name, program in programs.items():
                for row, packet in ROWS.items():
                    took = test_run(program, frame(packet), REPEAT).nanoseconds
                    found[name].setdefault(row, []).append(took)  # type: ignore[arg-type, attr-defined]
    return {
        name: {row: statistics.median(took) for row, took in rows.items()}  # type: ignore[type-var]
        for name, rows in found.items()
    }


@contextmanager
def _programs() -> Iterator[dict[str, Program]]:
    """The two programs, loopback an outside device, among many Services."""
    where = f"kbpb{os.getpid()}"
    command("ip", "netns", "add", where)
    try:
        ip("link set lo up", netns=where)
        with tempfile.TemporaryDirectory() as cache, sites(Path(cache)) as make:
            site = make(node=where)
            plane = site.open(packet_path=True)
            many = (
                service(f"s{i}", f"LoadBalancer=192.0.{i // 250}.{i % 250}:80", POD, Protocol.TCP)
                for i in range(SERVICES)
            )
            one = service("same", f"LoadBalancer={POD}", POD, local=POD, external_local=True)
            state = msgspec.structs.replace(desired(*many, one), masquerade_as=(parse_addr(NODE),))
            netns.inside(Path("/run/netns") / where, lambda: plane.apply(state, None))
            with site.pinned("devices") as devices:
                value = DEVICE.pack(Role.HOST, 14, DeviceFlag(0), bytes(6), bytes(16), bytes(16))
                devices.update(U32.pack(1), value)
            folder = next(site.pins.glob("programs-tc-*"))
            made = {name: Program.open(folder / name) for name in ("tc_ingress", "tc_egress")}
            test_run(made["tc_ingress"], frame(tcp(f"{CLIENT}:4001", POD, flags="S")))
            test_run(made["tc_ingress"], frame(tcp(f"{CLIENT}:4001", POD, flags="A")))
            yield made
            for program in made.values():
                program.close()
    finally:
        command("ip", "netns", "del", where)
