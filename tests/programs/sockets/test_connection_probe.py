# SPDX-License-Identifier: Apache-2.0
"""Connections that the agent makes itself show whether Services are translated."""

from kbpf.dataplane.bpf.connection_probe import ConnectionProber
from kbpf.dataplane.bpf.maps.layout import U32, U64
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.model.config import SocketLb
from kbpf.model.metrics import ConnectionProbe
from tests.support.lab.lab import Node
from tests.support.plane import LOCAL, Site, desired, services, within

WORLD = desired(
    *services(
        """
web  10.96.1.1:80 -> A B
kept 10.96.1.2:81 -> A affinity=60
far  10.96.1.3:82 NodePort=0.0.0.0:30082 -> internal=Local
""",
        {"A": f"{LOCAL[0]}:1", "B": f"{LOCAL[1]}:1"},
    )
)


def flip(site: Site, port: int) -> None:
    key = U32.pack(port // 64)
    with site.pinned("frontend_ports") as map_:
        (word,) = U64.unpack(map_.lookup(key))
        map_.update(key, U64.pack(word ^ 1 << port % 64))


def test_a_connection_of_the_agent_shows_whether_services_are_translated(node_site: Site, local_node: Node):
    plane = node_site.open()
    plane.apply(WORLD, None)
    config = plane._config

    def story() -> list[ConnectionProbe | None]:
        prober = ConnectionProber(Pins(node_site.pins), config)
        results = [prober.probe()]
        flip(node_site, 80)
        results.append(prober.probe())
        # one that has never succeeded proves nothing
        results.append(ConnectionProber(Pins(node_site.pins), config).probe())
        flip(node_site, 80)
        results.append(prober.probe())
        return results

    before, broken, new, after = within(local_node.host, story)
    assert before == after == ConnectionProbe(1, ())
    assert broken is not None
    assert broken.tried == 1
    (line,) = broken.failures
    assert line.startswith("10.96.1.1:80/TCP from the agent: connect() failed")
    assert new is None
    # neither the backend nor affinity has noticed anything
    assert not node_site.entries("affinity")


def test_nothing_is_tried_without_hooks(node_site: Site, local_node: Node):
    plane = node_site.open(socket_lb=SocketLb.OFF, packet_path=False)
    plane.apply(WORLD, None)
    prober = ConnectionProber(Pins(node_site.pins), plane._config)
    assert within(local_node.host, prober.probe) is None
