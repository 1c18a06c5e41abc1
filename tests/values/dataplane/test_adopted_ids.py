# SPDX-License-Identifier: Apache-2.0
"""Which id is adopted if a Service port has two in the maps, as after an agent was killed."""

from collections.abc import Iterator
from typing import Any

from kbpf.dataplane.bpf.maps.layout import (
    U32,
    ServiceFlag,
    ServiceValue,
    pack_service_name,
    pack_target,
)
from kbpf.dataplane.bpf.state import adopt, contents
from kbpf.model.address import parse_addr
from kbpf.model.desired import FrontendAddress, ServicePortKey
from kbpf.model.objects import Protocol
from tests.support.table import each_line

KEY = ServicePortKey("ns", "web", "http", Protocol.TCP, 4)


class Held(dict[bytes, bytes]):
    def batches(self) -> Iterator[Any]:
        """No entries: backend sets do not matter here."""
        return iter(())


def frontend(number: int) -> FrontendAddress:
    return FrontendAddress(parse_addr(f"10.96.0.{number}"), 80, Protocol.TCP)


@each_line(
    "named_text, dialled_text, programmed, unused, strays_text",
    """\
5 | 5 | 5 | 0
5 |  | 0 | 5
5 7 | 5 | 5 | 0 | 7
7 5 | 5 | 5 | 0 | 7
5 7 | 5 7 | 7 | 0 | 5
7 5 | 5 7 | 7 | 0 | 5
5 7 |  | 0 | 7 | 5
7 5 |  | 0 | 7 | 5
""",
    programmed=int,
    unused=int,
)
def test_the_newest_id_with_a_frontend_is_adopted(named_text, dialled_text, programmed, unused, strays_text):
    """The ids with the Service port's name, in map order, and those of them that a frontend uses. The id that is
    adopted as programmed (0: none), the one without a frontend that is kept for reuse (0: none), and the ids whose
    names are to be removed.
    """
    maps = {name: Held() for name in contents.MAPS_READ}
    named, dialled, strays = (list(map(int, text.split())) for text in (named_text, dialled_text, strays_text))
    for number in named:
        maps["service_names"][U32.pack(number)] = pack_service_name(KEY)
    for number in dialled:
        at = frontend(number)
        key = pack_target(at.address, at.port, at.protocol)
        value = ServiceValue(number, int(ServiceFlag.CLUSTER_IP), 0, 0, 0, 0, 0)
        maps["services"][key] = value.pack(key)
    found = adopt.adopt(contents.read(maps))
    assert found.programmed.keys() == ({KEY} if programmed else set())
    if programmed:
        assert found.programmed[KEY].id == programmed
    assert found.unused_names == ({KEY: unused} if unused else {})
    assert found.unclaimed_names == {*strays}
    assert found.unclaimed_frontends == {frontend(number) for number in dialled if number != programmed}
    assert found.highest_service == max(named)
