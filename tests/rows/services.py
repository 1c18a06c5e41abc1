# SPDX-License-Identifier: Apache-2.0
"""Which backends answer at ClusterIPs, for every kind of client.

The nodes and their pods are those of tests/support/cluster/cluster.py.
"""

from tests.support.cluster.kube_objects import Object, port, service, slice_port
from tests.support.lab.dial import Dial
from tests.support.lab.placed import Placed
from tests.support.table import table

TWO = ("IPv4", "IPv6")


def objects(placed: Placed) -> list[Object]:
    """Services from 10.96.0.20 on; their rows say what each is for."""
    slice_of = placed.slice
    web = service("web", port(80), cluster_ips=["10.96.0.20", "fd00:10:96::20"], families=TWO)
    dns = service("dns", port(53, "dns", "UDP"), port(53, "dns-tcp"), cluster_ip="10.96.0.21")
    dns_ports = (slice_port(8080, "dns", "UDP"), slice_port(8081, "dns-tcp"))
    prefer = service("prefer", cluster_ips=["10.96.0.28", "fd00:10:96::28"], families=TWO)
    prefer["spec"]["ipFamilyPolicy"] = "PreferDualStack"
    headless = service("headless", cluster_ip="None")
    ignored = service("ignored", cluster_ip="10.96.0.33")
    ignored["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": "other"}
    not_here = service("not-here", cluster_ip="10.96.0.34")
    not_here["metadata"]["labels"] = {"service.kubernetes.io/headless": ""}
    return [
        web,
        slice_of("web", "a1 a2 b1"),
        slice_of("web", "a1 b1", v6=True),
        dns,
        slice_of("dns", "a1 b1", *dns_ports),
        *placed.web(22, "a1", dual=True),
        *placed.web(23, "a1", "UDP", dual=True),
        service("hosted", port(80, "tcp"), port(80, "udp", "UDP"), cluster_ip="10.96.0.24"),
        slice_of("hosted", "a-net b-net", slice_port(9080, "tcp"), slice_port(9080, "udp", "UDP")),
        *placed.web(25, "", dual=True),
        *placed.web(26, "", "UDP", dual=True),
        service("no-slice", cluster_ip="10.96.0.27"),
        service("other-name", port(80, "http"), cluster_ip="10.96.0.37"),
        slice_of("other-name", "a1", slice_port(8080, "https")),
        prefer,
        slice_of("prefer", "b1"),
        service("named", port(80, "http", target="http"), cluster_ip="10.96.0.29"),
        slice_of("named", "a1", slice_port(8080, "http"), name="named-1"),
        slice_of("named", "b1", slice_port(8081, "http"), name="named-2"),
        service("halves", cluster_ip="10.96.0.30"),
        slice_of("halves", "a1 a2", name="halves-1"),
        slice_of("halves", "a2 b1", name="halves-2"),
        service("ports", port(80, "a"), port(443, "b"), cluster_ip="10.96.0.31"),
        slice_of("ports", "a1", slice_port(8080, "a"), slice_port(8081, "b")),
        headless,
        slice_of("headless", "a1"),
        service("alias", type="ExternalName", external_name="example.org"),
        slice_of("alias", "a1"),
        ignored,
        slice_of("ignored", "a1"),
        not_here,
        slice_of("not-here", "a1"),
    ]


ROWS = tuple(
    table(
        Dial,
        """
a pod to backends on both nodes                  | a3     | 10.96.0.20:80          | a1 a2 b1
a pod on the other node                          | b2     | 10.96.0.20:80          | a1 a2 b1
a host                                           | host-1 | 10.96.0.20:80          | a1 a2 b1
the other host                                   | host-2 | 10.96.0.20:80          | a1 a2 b1
a pod in the host's network                      | a-net  | 10.96.0.20:80          | a1 a2 b1
a backend: itself and the others                 | a1     | 10.96.0.20:80          | a1 a2 b1
a pod over IPv6                                  | a3     | [fd00:10:96::20]:80    | a1 b1
a host over IPv6                                 | host-2 | [fd00:10:96::20]:80    | a1 b1
a pod in the host's network over IPv6            | b-net  | [fd00:10:96::20]:80    | a1 b1
an IPv6 socket that dials IPv4                   | a3     | [::ffff:10.96.0.20]:80 | a1 a2 b1
an IPv6 socket that dials IPv4, from a host      | host-1 | [::ffff:10.96.0.20]:80 | a1 a2 b1
an unknown port of a Service                     | a3     | 10.96.0.20:81          | ECONNREFUSED
an address that no Service has                   | host-1 | 10.96.0.99:80          | EHOSTUNREACH
TCP and UDP on one number: TCP                   | a3     | 10.96.0.21:53          | a1:8081 b1:8081
TCP and UDP on one number: UDP                   | a3     | 10.96.0.21:53          | a1:8080 b1:8080 | udp
TCP and UDP on one number: UDP, connected        | b2     | 10.96.0.21:53          | a1:8080 b1:8080 | udp-connected
UDP from a host                                  | host-1 | 10.96.0.21:53          | a1:8080 b1:8080 | udp
UDP from an IPv6 socket to IPv4                  | a3     | [::ffff:10.96.0.21]:53 | a1 b1           | udp
TCP only: not UDP                                | a3     | 10.96.0.20:80          | ECONNREFUSED    | udp
UDP only: not TCP                                | a3     | 10.96.0.23:80          | ECONNREFUSED
hairpin: a pod reaches itself                    | a1     | 10.96.0.22:80          | a1
hairpin over IPv6                                | a1     | [fd00:10:96::22]:80    | a1
hairpin over UDP                                 | a1     | 10.96.0.23:80          | a1              | udp
hairpin over UDP, connected, IPv6                | a1     | [fd00:10:96::23]:80    | a1              | udp-connected
a pod to backends in the hosts' network          | a1     | 10.96.0.24:80          | a-net b-net
a host to backends in the hosts' network         | host-2 | 10.96.0.24:80          | a-net b-net
a host-network backend to both                   | a-net  | 10.96.0.24:80          | a-net b-net
backends in the hosts' network over UDP          | a1     | 10.96.0.24:80          | a-net b-net     | udp
no endpoints                                     | a1     | 10.96.0.25:80          | ECONNREFUSED
no endpoints, from a host                        | host-1 | 10.96.0.25:80          | ECONNREFUSED
no endpoints, IPv6                               | a1     | [fd00:10:96::25]:80    | ECONNREFUSED
no endpoints, IPv4 from an IPv6 socket           | a1     | [::ffff:10.96.0.25]:80 | ECONNREFUSED
no endpoints, UDP                                | a1     | 10.96.0.26:80          | ECONNREFUSED    | udp
no endpoints, UDP, connected                     | a1     | 10.96.0.26:80          | ECONNREFUSED    | udp-connected
no endpoints, UDP, IPv6                          | host-1 | [fd00:10:96::26]:80    | ECONNREFUSED    | udp
no slice                                         | a1     | 10.96.0.27:80          | ECONNREFUSED
no slice has a port with the Service's port name | a1     | 10.96.0.37:80          | ECONNREFUSED
one family has endpoints: IPv4                   | a1     | 10.96.0.28:80          | b1
one family has endpoints: not IPv6               | a1     | [fd00:10:96::28]:80    | ECONNREFUSED
a named target port differs per slice            | a3     | 10.96.0.29:80          | a1:8080 b1:8081
endpoints in two slices, one in both             | b2     | 10.96.0.30:80          | a1 a2 b1
each port to its own target                      | a3     | 10.96.0.31:80          | a1:8080
each port to its own target, the other           | a3     | 10.96.0.31:443         | a1:8081
label service-proxy-name: not served             | a3     | 10.96.0.33:80          | EHOSTUNREACH
label headless: not served                       | a3     | 10.96.0.34:80          | EHOSTUNREACH
""",
    )
)
