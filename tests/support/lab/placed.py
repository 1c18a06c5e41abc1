# SPDX-License-Identifier: Apache-2.0
"""Builders of Services and of EndpointSlices whose endpoints are places of the lab.

`Placed` needs no cluster. In the lab places are namespaces (cluster.py), in tests without a lab
just addresses (paper.py); both build the same objects.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.cluster.kube_objects import (
    Object,
    endpoint,
    endpoint_slice,
    port,
    service,
    slice_port,
)

POD_PORTS = (8080, 8081)
HOST_PORT = 9080
CONDITIONS: dict[str, dict[str, Any]] = {
    "": {},
    "bare": {"ready": None},
    "unready": {"ready": False},
    "draining": {"ready": False, "serving": True, "terminating": True},
    "dying": {"ready": False, "serving": False, "terminating": True},
    # A pod that is not ready, of a Service with publishNotReadyAddresses.
    "published": {"ready": True, "serving": False, "terminating": True},
}


class Placed:
    """Builds objects about `places`, by their `ip` and `ip6`; `home` is the node of each place, with
    a `name` and a `number`.
    """

    places: Mapping[str, Any]
    home: Mapping[str, Any]

    def endpoints(self, who: str, v6: bool = False) -> list[Object]:
        """The endpoints of an EndpointSlice. `who` lists places separated by blanks, each with an
        optional condition after "/" (CONDITIONS) and hints after "@":
        ``a1 a2/draining b1@zone-2 b2/unready@node-1,zone-1``.
        """
        made = []
        for word in who.split():
            said, _, hints = word.partition("@")
            name, _, condition = said.partition("/")
            place, home = self.places[name], self.home[name]
            made.append(
                endpoint(
                    place.ip6 if v6 else place.ip,
                    node=home.name,
                    zone=f"zone-{home.number}",
                    for_zones=[hint for hint in hints.split(",") if hint.startswith("zone")],
                    for_nodes=[hint for hint in hints.split(",") if hint.startswith("node")],
                    **CONDITIONS[condition],
                )
            )
        return made

    def slice(self, owner: str, who: str, *ports: Object, v6: bool = False, name: str | None = None) -> Object:
        """An EndpointSlice of the Service `owner`; see endpoints(). Its port is by default an
        unnamed TCP port 8080.
        """
        rows = ports or (slice_port(POD_PORTS[0]),)
        family = "IPv6" if v6 else "IPv4"
        return endpoint_slice(owner, *self.endpoints(who, v6), ports=rows, family=family, name=name)

    def web(
        self,
        number: int,
        who: str,
        protocol: str = "TCP",
        dual: bool = False,
        target: int = POD_PORTS[0],
        **options: Any,
    ) -> list[Object]:
        """The Service web-NUMBER at 10.96.0.NUMBER (and fd00:10:96::NUMBER), port 80 → `target`."""
        name = f"web-{number}"
        ips = [f"10.96.0.{number}", f"fd00:10:96::{number}"][: 1 + dual]
        families = ("IPv4", "IPv6") if dual else ()
        row = port(80, protocol=protocol, node_port=options.pop("node_port", None))
        made = [service(name, row, cluster_ips=ips, families=families, **options)]
        end = slice_port(target, protocol=protocol)
        return made + [self.slice(name, who, end, v6=v6) for v6 in (False, True)[: 1 + dual]]

    def all_ways(self, number: int, who: str, protocol: str = "TCP", **options: Any) -> list[Object]:
        """A Service with every kind of address in both families; field.at() gives the addresses."""
        made = self.web(
            number,
            who,
            protocol,
            dual=True,
            type="LoadBalancer",
            node_port=30000 + number,
            external_ips=[f"203.0.113.{number}", f"2001:db8:1::{number}"],
            **options,
        )
        rows = [{"ip": f"192.0.2.{number}"}, {"ip": f"2001:db8::{number}"}]
        made[0]["status"] = {"loadBalancer": {"ingress": rows}}
        return made

    def all_of(self, text: str) -> list[Object]:
        """The objects of all_ways(), a line for Services with the same endpoints:
        ``11 21:UDP -> a1 b1 external=Local ranges=10.0.0.0/8,fd00::/8 target=7000 affinity=60``.
        """
        made = []
        for numbers, _, rest in (line.partition(" ->") for line in text.splitlines() if line.strip()):
            said = dict(word.split("=") for word in rest.split() if "=" in word)
            options = {OPTIONS[name][0]: OPTIONS[name][1](value) for name, value in said.items()}
            who = " ".join(word for word in rest.split() if "=" not in word)
            for number, _, protocol in (word.partition(":") for word in numbers.split()):
                made += self.all_ways(int(number), who, protocol or "TCP", **options)
        return made


OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "external": ("external_policy", str),
    "ranges": ("source_ranges", lambda text: text.split(",")),
    "target": ("target", int),
    "affinity": ("affinity_seconds", int),
}
"""What may be said in all_of(), and the argument of all_ways()."""
