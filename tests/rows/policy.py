# SPDX-License-Identifier: Apache-2.0
"""Which endpoints serve which client: conditions, traffic policies, hints, every kind of address.

The rows follow kube-proxy's own test tables (destinations, choice of endpoints). node-1 has the
pods a1, a2, a3 and is in zone-1; node-2 has b1, b2, b3 and is in zone-2. NodePorts are dialled at
the client's own node. Clients are served by the socket hooks only; the packet path is off.
"""

from tests.support.cluster.kube_objects import Object
from tests.support.lab.dial import Dial
from tests.support.lab.placed import Placed
from tests.support.table import table


def ingress(objects: list[Object], *addresses: str, mode: str | None = None) -> list[Object]:
    """Sets the load balancer addresses of the Service, the first of the objects."""
    rows = [{"ip": address} | ({"ipMode": mode} if mode else {}) for address in addresses]
    objects[0]["status"] = {"loadBalancer": {"ingress": rows}}
    return objects


def conditions(placed: Placed) -> list[Object]:
    """Services about endpoint conditions and the internal traffic policy."""
    web = placed.web
    local = {"internal_policy": "Local"}
    return [
        *web(40, "a1 a2/unready b1/dying b2/bare"),
        *web(41, "a1/unready b1/dying"),
        *web(42, "a1/draining b1/draining b2/dying"),
        *web(43, "a1/draining b1"),
        *web(44, "a1/published b1/published a2/unready"),
        *web(45, "a1 a2 b1", **local),
        *web(46, "a1 a2", dual=True, **local),
        *web(47, "a1 a2", "UDP", **local),
        *web(48, "", **local),
        *web(49, "a1/draining a2/unready b1", **local),
        *web(50, "a1/unready b1", **local),
        *web(51, "a1/unready b1/unready", **local),
        *web(52, "a1 b1", type="NodePort", node_port=30052, **local),
        *web(53, "b1", type="NodePort", node_port=30053, **local),
    ]


def hints(placed: Placed) -> list[Object]:
    """Services about hints for zones and nodes."""
    web = placed.web
    return [
        *web(60, "a1@zone-1 a2@zone-1 b1@zone-2"),
        *web(61, "a1@zone-1 a2 b1@zone-2"),
        *web(62, "a1@zone-3 b1@zone-3"),
        *web(63, "a1@node-1 a2@node-1 b1@node-2"),
        *web(64, "a1@node-1,zone-1 a2@node-2,zone-1 b1@node-2,zone-2"),
        *web(65, "a1@node-2,zone-1 a2@node-2,zone-1 b1@node-2,zone-2"),
        *web(66, "a1/unready a2@zone-1 b1@zone-2"),
        *web(67, "a1@zone-2 b1@zone-2", internal_policy="Local"),
        *web(68, "a1/draining@zone-1 b1@zone-2"),
    ]


def external(placed: Placed) -> list[Object]:
    """NodePorts, external IPs, load balancers, and the external traffic policy."""
    web, local = placed.web, {"external_policy": "Local"}
    lb = {"type": "LoadBalancer"}
    return [
        *web(70, "a1 b1", dual=True, type="NodePort", node_port=30070),
        *web(71, "a1 b1", "UDP", dual=True, type="NodePort", node_port=30071),
        *web(72, "", type="NodePort", node_port=30072),
        *web(73, "b1", type="NodePort", node_port=30073, **local),
        *web(74, "a1 b1", external_ips=["192.0.2.74", "198.51.100.74"]),
        *web(75, "b1", external_ips=["192.0.2.75"], **local),
        *ingress(web(76, "a1 b1", dual=True, **lb), "192.0.2.76", "2001:db8::76"),
        *ingress(web(77, "b1", node_port=30077, **lb, **local), "192.0.2.77"),
        *ingress(
            web(78, "a1", node_port=30078, source_ranges=["203.0.113.0/24"], **lb), "192.0.2.78"
        ),
        *ingress(web(79, "a1", source_ranges=["0.0.0.0/0"], **lb), "192.0.2.79"),
        *ingress(web(80, "a1", **lb), "192.0.2.80", mode="Proxy"),
        *ingress(web(81, "", **lb), "192.0.2.81"),
        *ingress(web(82, "a1/draining b1", node_port=30082, **lb, **local), "192.0.2.82"),
        *ingress(web(83, "b1/draining", node_port=30083, **lb, **local), "192.0.2.83"),
        *web(84, "", external_ips=["192.0.2.84"], **local),
    ]


def objects(placed: Placed) -> list[Object]:
    """The objects of all rows."""
    return [*conditions(placed), *hints(placed), *external(placed)]


CONDITIONS = table(
    Dial,
    """
ready and unset serve, unready and dying do not            | a3     | 10.96.0.40:80       | a1 b2
no endpoint is ready or serving                            | a3     | 10.96.0.41:80       | ECONNREFUSED
all terminate: the serving ones are used                   | a3     | 10.96.0.42:80       | a1 b1
one is ready: terminating ones are not used                | a3     | 10.96.0.43:80       | b1
publishNotReadyAddresses: the slice's ready                | a3     | 10.96.0.44:80       | a1 b1
internal Local                                             | a3     | 10.96.0.45:80       | a1 a2
internal Local, from a host                                | host-1 | 10.96.0.45:80       | a1 a2
internal Local, the other node                             | b3     | 10.96.0.45:80       | b1
internal Local, from a host-network pod                    | b-net  | 10.96.0.45:80       | b1
internal Local, no local endpoint: dropped                 | b3     | 10.96.0.46:80       | ETIMEDOUT
internal Local, no local endpoint, from a host             | host-2 | 10.96.0.46:80       | ETIMEDOUT
internal Local, no local endpoint, from a host-network pod | b-net  | 10.96.0.46:80       | ETIMEDOUT
internal Local, no local endpoint, IPv6                    | b3     | [fd00:10:96::46]:80 | ETIMEDOUT
internal Local, IPv6, local endpoints                      | a3     | [fd00:10:96::46]:80 | a1 a2
internal Local, UDP, local endpoints                       | a3     | 10.96.0.47:80       | a1 a2        | udp
internal Local, UDP, no local endpoint                     | b3     | 10.96.0.47:80       | ETIMEDOUT    | udp
internal Local, UDP connected, no local endpoint           | b3     | 10.96.0.47:80       | ETIMEDOUT    | udp-connected
internal Local, none anywhere: refused                     | a3     | 10.96.0.48:80       | ECONNREFUSED
internal Local, a local one drains, a ready one is remote  | a3     | 10.96.0.49:80       | a1
internal Local, at the node of the ready one               | b3     | 10.96.0.49:80       | b1
internal Local, the local one is not ready                 | a3     | 10.96.0.50:80       | ETIMEDOUT
internal Local, none is ready anywhere                     | a3     | 10.96.0.51:80       | ECONNREFUSED
internal Local applies to the ClusterIP                    | a3     | 10.96.0.52:80       | a1
internal Local does not apply to the NodePort              | a3     | 198.18.0.1:30052    | a1 b1
internal Local, no local endpoint: not for the NodePort    | host-1 | 198.18.0.1:30053    | b1
""",
)

HINTS = table(
    Dial,
    """
hinted for zone-1                              | a3     | 10.96.0.60:80 | a1 a2
hinted for zone-2                              | b3     | 10.96.0.60:80 | b1
hinted for zone-2, from a host                 | host-2 | 10.96.0.60:80 | b1
an endpoint without a hint: hints are ignored  | b3     | 10.96.0.61:80 | a1 a2 b1
no hint for our zone: hints are ignored        | a3     | 10.96.0.62:80 | a1 b1
hinted for node-1                              | a3     | 10.96.0.63:80 | a1 a2
hinted for node-2                              | b3     | 10.96.0.63:80 | b1
hints for nodes take precedence over zones     | a3     | 10.96.0.64:80 | a1
hints for nodes take precedence, node-2        | b3     | 10.96.0.64:80 | a2 b1
no hint for our node: hints for zones          | a3     | 10.96.0.65:80 | a1 a2
only ready endpoints need hints                | a3     | 10.96.0.66:80 | a2
internal Local takes precedence over hints     | a3     | 10.96.0.67:80 | a1
the hint of a draining endpoint is ignored     | b3     | 10.96.0.68:80 | b1
only a draining endpoint for our zone: ignored | a3     | 10.96.0.68:80 | b1
""",
)

NODE_PORTS = table(
    Dial,
    """
host to its node's address                                 | host-1 | 198.18.0.1:30070         | a1 b1
host to its node's address, IPv6                           | host-1 | [fd00:198:18::1]:30070   | a1 b1
the other host                                             | host-2 | 198.18.0.2:30070         | a1 b1
host to 127.0.0.1                                          | host-1 | 127.0.0.1:30070          | a1 b1
host to 127.1.2.3                                          | host-1 | 127.1.2.3:30070          | a1 b1
host to ::1                                                | host-1 | [::1]:30070              | a1 b1
a pod in the host's network to 127.0.0.1                   | a-net  | 127.0.0.1:30070          | a1 b1
an IPv6 socket to 127.0.0.1                                | host-1 | [::ffff:127.0.0.1]:30070 | a1 b1
pod to its node's address                                  | a3     | 198.18.0.1:30070         | a1 b1
pod to its node's address, IPv6                            | b3     | [fd00:198:18::2]:30070   | a1 b1
pod to its own 127.0.0.1: its own server                   | a3     | 127.0.0.1:30070 | a3:30070 | tcp | 127.0.0.1
pod to its own ::1                                         | a3     | [::1]:30070 | a3:30070 | tcp | ::1
another pod to its own 127.0.0.1: no server                | a2     | 127.0.0.1:30070          | ECONNREFUSED by a host
NodePort at a pod network address: not served              | host-1 | 10.244.1.1:30070         | ECONNREFUSED by a host
UDP, host                                                  | host-1 | 198.18.0.1:30071 | a1 b1 | udp
UDP, host, 127.0.0.1                                       | host-1 | 127.0.0.1:30071 | a1 b1 | udp
UDP, pod, IPv6, connected                                  | a3     | [fd00:198:18::1]:30071 | a1 b1 | udp-connected
no endpoints                                               | host-1 | 198.18.0.1:30072         | ECONNREFUSED
external Local, no local endpoint: the short circuit, host | host-1 | 198.18.0.1:30073         | b1
external Local, no local endpoint: the short circuit, pod  | a3     | 198.18.0.1:30073         | b1
external Local, no local endpoint: 127.0.0.1               | host-1 | 127.0.0.1:30073          | b1
external Local does not apply to the ClusterIP             | a3     | 10.96.0.73:80            | b1
""",
)

EXTERNAL = table(
    Dial,
    """
external IP, pod                                                 | a3     | 192.0.2.74:80     | a1 b1
external IP, host                                                | host-2 | 192.0.2.74:80     | a1 b1
external IP on a device of the node                              | host-1 | 198.51.100.74:80  | a1 b1
external IP, another port                                        | a3     | 192.0.2.74:81     | EHOSTUNREACH
external IP, Local, no local endpoint, pod                       | a3     | 192.0.2.75:80     | b1
external IP, Local, no local endpoint, host                      | host-1 | 192.0.2.75:80     | b1
external IP, Local, none anywhere                                | a3     | 192.0.2.84:80     | ECONNREFUSED
LB VIP, pod                                                      | a3     | 192.0.2.76:80     | a1 b1
LB VIP, host                                                     | host-1 | 192.0.2.76:80     | a1 b1
LB VIP, IPv6                                                     | a3     | [2001:db8::76]:80 | a1 b1
LB VIP, Local, no local endpoint, pod                            | a3     | 192.0.2.77:80     | b1
LB VIP, Local, no local endpoint, host                           | host-1 | 192.0.2.77:80     | b1
LB VIP, Local, its NodePort                                      | a3     | 198.18.0.1:30077  | b1
source ranges: left alone, pod                                   | a3     | 192.0.2.78:80     | EHOSTUNREACH
source ranges: left alone, host                                  | host-1 | 192.0.2.78:80     | EHOSTUNREACH
source ranges do not restrict the ClusterIP                      | a3     | 10.96.0.78:80     | a1
source ranges do not restrict the NodePort                       | host-1 | 198.18.0.1:30078  | a1
source ranges that admit every client                            | a3     | 192.0.2.79:80     | a1
ipMode Proxy: left alone                                         | a3     | 192.0.2.80:80     | EHOSTUNREACH
ipMode Proxy: the ClusterIP is served                            | a3     | 10.96.0.80:80     | a1
LB VIP without endpoints                                         | a3     | 192.0.2.81:80     | ECONNREFUSED
LB VIP, Local: a remote ready endpoint, not a local draining one | a3     | 192.0.2.82:80     | b1
LB VIP, Local, all terminate: a remote serving one               | a3     | 192.0.2.83:80     | b1
""",
)

ROWS = (*CONDITIONS, *HINTS, *NODE_PORTS, *EXTERNAL)
