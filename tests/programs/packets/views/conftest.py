# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the views: a node, loaded once for all files of this folder."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kbpf.cli import app
from kbpf.dataplane.bpf.maps.layout import Role
from kbpf.model.status import encode
from tests.programs.node.commands.world import agent_status
from tests.programs.packets.path.single_packets import serving_node
from tests.programs.packets.views.wire import HIGH, LOW, Run, Wire, world
from tests.support.lab.lab import until


@pytest.fixture(scope="module")
def node(artifact_cache: Path) -> Iterator[Wire]:
    devices = ("link add cni0 type bridge", "link add out0 type veth peer name port0", "link set port0 master cni0")
    with serving_node(artifact_cache, "v", world(), *devices, masquerade_ports=(LOW, HIGH)) as path:
        until("all devices have their programs", lambda: path.plane.status().ready)
        yield Wire(path)


@pytest.fixture
def wire(node: Wire) -> Iterator[Wire]:
    """No flows, and loopback is an uplink."""
    for name in ("flows", "affinity"):
        with node.site.pinned(name) as found:
            found.delete_batch(b"".join(key for key, _ in found.items()))
    node.path.set_loopback_role(Role.HOST)
    said = agent_status(packets=node.plane.status().packets)
    node.plane.write_status(encode(said))
    with node.site.telling():
        yield node


@pytest.fixture
def call(wire: Wire, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `kbpf inspect ...` in the node's namespace; returns exit code, stdout and stderr."""

    def inspect(*arguments: str) -> tuple[int, str, str]:
        line = ["inspect", *arguments, "--pin-dir", str(wire.site.pins)]
        code = wire.path.inside(lambda: app.call(line))
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
