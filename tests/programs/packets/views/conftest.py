# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the views: a node, loaded once for all files of this folder."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kbpf.cli import app
from kbpf.dataplane.bpf.maps.layout import DEVICE, U32, Role
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.system import netns
from kbpf.model.status import encode
from tests.programs.node.commands.world import agent_status
from tests.programs.packets.views.wire import HIGH, LOW, Run, Wire, world
from tests.support.lab.lab import ip, until
from tests.support.lab.lab import run as command
from tests.support.plane import sites


@pytest.fixture(scope="module")
def node(artifact_cache: Path) -> Iterator[Wire]:
    where = f"kbpv{os.getpid()}"
    command("ip", "netns", "add", where)
    try:
        ip(
            "link set lo up",
            "link add cni0 type bridge",
            "link add out0 type veth peer name port0",
            "link set port0 master cni0",
            netns=where,
        )
        with sites(artifact_cache) as make:
            site = make(node=where)
            plane = site.open(packet_path=True, masquerade_ports=(LOW, HIGH))
            netns.run_in(Path("/run/netns") / where, lambda: plane.apply(world(), None))
            until("all devices have their programs", lambda: plane.status().ready)
            folder = next(site.pins.glob("programs-tc-*"))
            programs = {n: Program.open(folder / n) for n in ("tc_ingress", "tc_egress")}
            yield Wire(site, plane, programs)
            for program in programs.values():
                program.close()
    finally:
        command("ip", "netns", "del", where)


@pytest.fixture
def wire(node: Wire) -> Iterator[Wire]:
    """No flows, and loopback is an uplink."""
    for name in ("flows", "affinity"):
        with node.site.pinned(name) as found:
            found.delete_batch(b"".join(key for key, _ in found.items()))
    with node.site.pinned("devices") as devices:
        devices.update(U32.pack(1), DEVICE.pack(Role.HOST, 14, 0, bytes(6), bytes(16), bytes(16), 0))
    said = agent_status(packets=node.plane.status().packets)
    node.plane.write_status(encode(said))
    with node.site.telling():
        yield node


@pytest.fixture
def call(wire: Wire, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `kbpf inspect ...` in the node's namespace; returns exit code, stdout and stderr."""

    def inspect(*arguments: str) -> tuple[int, str, str]:
        line = ["inspect", *arguments, "--pin-dir", str(wire.site.pins)]
        code = netns.run_in(Path("/run/netns") / str(wire.site.node), lambda: app.call(line))
        return code, *capsys.readouterr()

    return inspect


@pytest.fixture
def show(call: Run) -> Callable[..., Any]:
    """The same with JSON, parsed; no message on stderr may limit it. Of a list without other fields
    only the items.
    """

    def inspect(*arguments: str) -> Any:
        code, out, err = call(*arguments, "-o", "json")
        assert (code, err) == (0, "")
        document = json.loads(out)
        only_items = document.keys() == {"apiVersion", "kind", "items"}
        return document["items"] if only_items else document

    return inspect
