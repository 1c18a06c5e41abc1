"""What IPVS counts, for metrics: connections begun and bytes, of each virtual service.

The kernel counts from the making of a virtual service on, in whatever agent's time. Any thread may
ask: it has a conversation of its own, in the network namespace of the thread.
"""

import contextlib
from collections.abc import Mapping

from kbpf.dataplane.ipvs.plan import NODE, Programmed, Virtual
from kbpf.kernel.net.ipvs import Ipvs
from kbpf.model.desired import ServicePortKey
from kbpf.model.metrics import PACKETS, Pause, PortName, Totals, Traffic
from kbpf.model.objects import Protocol


def count(programmed: Mapping[ServicePortKey, Programmed], pause: Pause) -> Traffic:
    """By Service port. KernelError where IPVS does not answer."""
    owners = {
        tuple(virtual): (key.namespace, key.name, key.port, key.protocol.name)
        for key, made in programmed.items()
        if key != NODE
        for virtual in made.pools
    }
    pause()
    found: dict[PortName, Totals] = {}
    with contextlib.closing(Ipvs()) as face:
        counted = face.counts()
    pause()
    for service, counts in counted:
        if service.protocol not in Protocol.__members__.values():
            continue
        name = owners.get(tuple(Virtual(Protocol(service.protocol), *service[1:])))
        if name is not None and counts.connections:
            before = found.get(name, Totals())
            found[name] = before._replace(
                begun=before.begun + counts.connections,
                bytes_in=before.bytes_in + counts.bytes_in,
                bytes_out=before.bytes_out + counts.bytes_out,
            )
    return Traffic(totals=tuple(found.items()), known=PACKETS)
