# SPDX-License-Identifier: Apache-2.0
"""Which backends answer at ClusterIPs, for every kind of client.

The nodes and their pods are those of tests/support/cluster/cluster.py.
"""

from tests.support.cluster.kube_objects import Object, port, service, slice_port
from tests.support.lab.dial import REFUSED, UNSERVED, Dial
from tests.support.lab.placed import Placed

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


WEB, WEB6, MAPPED = "10.96.0.20:80", "[fd00:10:96::20]:80", "[::ffff:10.96.0.20]:80"

ROWS = (
    Dial("a pod to backends on both nodes", "a3", WEB, "a1 a2 b1"),
    Dial("a pod on the other node", "b2", WEB, "a1 a2 b1"),
    Dial("a host", "host-1", WEB, "a1 a2 b1"),
    Dial("the other host", "host-2", WEB, "a1 a2 b1"),
    Dial("a pod in the host's network", "a-net", WEB, "a1 a2 b1"),
    Dial("a backend: itself and the others", "a1", WEB, "a1 a2 b1"),
    Dial("a pod over IPv6", "a3", WEB6, "a1 b1"),
    Dial("a host over IPv6", "host-2", WEB6, "a1 b1"),
    Dial("a pod in the host's network over IPv6", "b-net", WEB6, "a1 b1"),
    Dial("an IPv6 socket that dials IPv4", "a3", MAPPED, "a1 a2 b1"),
    Dial("an IPv6 socket that dials IPv4, from a host", "host-1", MAPPED, "a1 a2 b1"),
    Dial("an unknown port of a Service", "a3", "10.96.0.20:81", REFUSED),
    Dial("an address that no Service has", "host-1", "10.96.0.99:80", UNSERVED),
    Dial("TCP and UDP on one number: TCP", "a3", "10.96.0.21:53", "a1:8081 b1:8081"),
    Dial("TCP and UDP on one number: UDP", "a3", "10.96.0.21:53", "a1:8080 b1:8080", "udp"),
    Dial("TCP and UDP on one number: UDP, connected", "b2", "10.96.0.21:53", "a1:8080 b1:8080",
         "udp-connected"),
    Dial("UDP from a host", "host-1", "10.96.0.21:53", "a1:8080 b1:8080", "udp"),
    Dial("UDP from an IPv6 socket to IPv4", "a3", "[::ffff:10.96.0.21]:53", "a1 b1", "udp"),
    Dial("TCP only: not UDP", "a3", WEB, REFUSED, "udp"),
    Dial("UDP only: not TCP", "a3", "10.96.0.23:80", REFUSED),
    Dial("hairpin: a pod reaches itself", "a1", "10.96.0.22:80", "a1"),
    Dial("hairpin over IPv6", "a1", "[fd00:10:96::22]:80", "a1"),
    Dial("hairpin over UDP", "a1", "10.96.0.23:80", "a1", "udp"),
    Dial("hairpin over UDP, connected, IPv6", "a1", "[fd00:10:96::23]:80", "a1", "udp-connected"),
    Dial("a pod to backends in the hosts' network", "a1", "10.96.0.24:80", "a-net b-net"),
    Dial("a host to backends in the hosts' network", "host-2", "10.96.0.24:80", "a-net b-net"),
    Dial("a host-network backend to both", "a-net", "10.96.0.24:80", "a-net b-net"),
    Dial("backends in the hosts' network over UDP", "a1", "10.96.0.24:80", "a-net b-net", "udp"),
    Dial("no endpoints", "a1", "10.96.0.25:80", REFUSED),
    Dial("no endpoints, from a host", "host-1", "10.96.0.25:80", REFUSED),
    Dial("no endpoints, IPv6", "a1", "[fd00:10:96::25]:80", REFUSED),
    Dial("no endpoints, IPv4 from an IPv6 socket", "a1", "[::ffff:10.96.0.25]:80", REFUSED),
    Dial("no endpoints, UDP", "a1", "10.96.0.26:80", REFUSED, "udp"),
    Dial("no endpoints, UDP, connected", "a1", "10.96.0.26:80", REFUSED, "udp-connected"),
    Dial("no endpoints, UDP, IPv6", "host-1", "[fd00:10:96::26]:80", REFUSED, "udp"),
    Dial("no slice", "a1", "10.96.0.27:80", REFUSED),
    Dial("no slice has a port with the Service's port name", "a1", "10.96.0.37:80", REFUSED),
    Dial("one family has endpoints: IPv4", "a1", "10.96.0.28:80", "b1"),
    Dial("one family has endpoints: not IPv6", "a1", "[fd00:10:96::28]:80", REFUSED),
    Dial("a named target port differs per slice", "a3", "10.96.0.29:80", "a1:8080 b1:8081"),
    Dial("endpoints in two slices, one in both", "b2", "10.96.0.30:80", "a1 a2 b1"),
    Dial("each port to its own target", "a3", "10.96.0.31:80", "a1:8080"),
    Dial("each port to its own target, the other", "a3", "10.96.0.31:443", "a1:8081"),
    Dial("label service-proxy-name: not served", "a3", "10.96.0.33:80", UNSERVED),
    Dial("label headless: not served", "a3", "10.96.0.34:80", UNSERVED),
)
