# SPDX-License-Identifier: Apache-2.0
"""Netlink messages of IPVS as pyroute2 reads them, and answers that the kernel seldom gives; tests/programs/ipvs reads
its usual ones.
"""

import socket

from pyroute2.netlink.generic.ipvs import ipvsmsg

from kbpf.kernel.net import ipvs
from kbpf.kernel.net.ipvs import ConnectionTimeouts, IpvsCommand, IpvsRequest, IpvsServiceFlag, VirtualServiceSettings
from kbpf.kernel.net.netlink import pack_attribute
from kbpf.model.address import ANY6, parse_addr
from kbpf.model.desired import RealServer, VirtualService
from kbpf.model.metrics import ConnectionStats
from tests.support.table import each_case, each_pair

HEADER = bytes(16)
WEB = VirtualService(6, parse_addr("10.96.0.1"), 80)
WEB6 = VirtualService(6, parse_addr("fd00::1"), 80)


SERVER = RealServer(parse_addr("10.0.0.1"), 8080)
SERVER6 = RealServer(parse_addr("fd00::9"), 8080)
BY_PORT = IpvsServiceFlag.IP_VS_SVC_F_SCHED_SH_FALLBACK | IpvsServiceFlag.IP_VS_SVC_F_SCHED_SH_PORT


def read_by_pyroute2(body: bytes) -> str:
    """The command and the attributes as pyroute2 reads them, those of the service with "s."."""
    size = (len(HEADER) + len(body)).to_bytes(4, "little")
    message = ipvsmsg(size + HEADER[4:] + body)
    message.decode()
    assert message["version"] == 1
    words = [f"cmd={message['cmd']}"]
    for _, value in message["attrs"]:
        for inner, what in value["attrs"]:
            short = inner.removeprefix("IPVS_").replace("SVC_ATTR_", "s.").replace("DEST_ATTR_", "")
            words.append(f"{short}={what['flags']:#x}/{what['mask']:#x}" if short == "s.FLAGS" else f"{short}={what}")
    return " ".join(words)


V4 = f"s.AF={int(socket.AF_INET)} s.PROTOCOL=6 s.ADDR=10.96.0.1 s.PORT=80"
V6 = f"s.AF={int(socket.AF_INET6)} s.PROTOCOL=6 s.ADDR=fd00::1 s.PORT=80"
NEW, SET = IpvsCommand.IPVS_CMD_NEW_SERVICE, IpvsCommand.IPVS_CMD_SET_SERVICE
ROWS = {
    "new": (
        IpvsRequest(NEW, WEB, settings=VirtualServiceSettings("rr")),
        f"cmd=1 {V4} s.SCHED_NAME=rr s.FLAGS=0x0/0x19 s.TIMEOUT=0 s.NETMASK=255.255.255.255",
    ),
    "new, IPv6, persistent": (
        IpvsRequest(NEW, WEB6, settings=VirtualServiceSettings("wrr", 10800)),
        f"cmd=1 {V6} s.SCHED_NAME=wrr s.FLAGS=0x1/0x19 s.TIMEOUT=10800 s.NETMASK=128.0.0.0",
    ),  # for IPv6, a 32-bit prefix length
    "set, by a hash": (
        IpvsRequest(SET, WEB, settings=VirtualServiceSettings("mh", 0, BY_PORT)),
        f"cmd=2 {V4} s.SCHED_NAME=mh s.FLAGS=0x18/0x19 s.TIMEOUT=0 s.NETMASK=255.255.255.255",
    ),
    "by mark": (
        IpvsRequest(NEW, VirtualService(6, ANY6, 0, 0x6B620001), settings=VirtualServiceSettings("sh")),
        f"cmd=1 s.AF={int(socket.AF_INET6)} s.FWMARK={0x6B620001} s.SCHED_NAME=sh s.FLAGS=0x0/0x19 s.TIMEOUT=0 "
        "s.NETMASK=128.0.0.0",
    ),
    "delete": (IpvsRequest(IpvsCommand.IPVS_CMD_DEL_SERVICE, WEB), f"cmd=3 {V4}"),
    "a server": (
        IpvsRequest(IpvsCommand.IPVS_CMD_NEW_DEST, WEB, SERVER, 3),
        f"cmd=5 {V4} ADDR_FAMILY=2 ADDR=10.0.0.1 PORT=8080 FWD_METHOD=0 WEIGHT=3 U_THRESH=0 L_THRESH=0",
    ),
    "a server drained, IPv6": (
        IpvsRequest(IpvsCommand.IPVS_CMD_SET_DEST, WEB6, SERVER6, 0),
        f"cmd=6 {V6} ADDR_FAMILY=10 ADDR=fd00::9 PORT=8080 FWD_METHOD=0 WEIGHT=0 U_THRESH=0 L_THRESH=0",
    ),
    "a server gone": (
        IpvsRequest(IpvsCommand.IPVS_CMD_DEL_DEST, WEB, SERVER),
        f"cmd=7 {V4} ADDR_FAMILY=2 ADDR=10.0.0.1 PORT=8080 FWD_METHOD=0 WEIGHT=0 U_THRESH=0 L_THRESH=0",
    ),
}


@each_case("change, said", ROWS)
def test_requests_encode_as_pyroute2_reads_them(change, said):
    assert read_by_pyroute2(ipvs.encode_request(change)) == said


@each_pair(
    "given, said",
    """\
tcp=3600 tcp_fin=60 udp=10 → TCP=10:0e:00:00 TCP_FIN=3c:00:00:00 UDP=0a:00:00:00
tcp=1 → TCP=01:00:00:00
udp=1 → UDP=01:00:00:00
""",
)
def test_unset_timeouts_are_not_encoded(given, said):
    """Time-outs → in the bytes that pyroute2 shows."""
    times = ConnectionTimeouts(**{name: int(value) for name, value in (word.split("=") for word in given.split())})
    body = ipvs.encode_timeouts(times)
    message = ipvsmsg((len(HEADER) + len(body)).to_bytes(4, "little") + HEADER[4:] + body)
    message.decode()
    found = [f"{name.removeprefix('IPVS_CMD_ATTR_TIMEOUT_')}={value}" for name, value in message["attrs"]]
    assert (message["cmd"], " ".join(found)) == (12, said)


def test_service_stats_use_the_64_bit_counters():
    """The 64-bit counters are a separate attribute; the 32-bit ones before it may have
    overflowed.
    """
    said = ipvs.encode_request(IpvsRequest(NEW, WEB, settings=VirtualServiceSettings("rr")))[4:]
    whole = ipvs.parse_attributes(said)[1]
    numbers = {1: 1 << 33, 2: 5, 3: 6, 4: 1 << 40, 5: (1 << 41) + 1, 6: 9}
    stats = b"".join(pack_attribute(kind, n.to_bytes(8, "little")) for kind, n in numbers.items())
    small = b"".join(pack_attribute(kind, b"\xff" * 4) for kind in numbers)
    body = whole + pack_attribute(10 | 0x8000, small) + pack_attribute(12 | 0x8000, stats)
    told = b"\1\1\0\0" + pack_attribute(1 | 0x8000, body)
    assert ipvs.decode_stats(told) == (WEB, ConnectionStats(1 << 33, bytes_in=1 << 40, bytes_out=(1 << 41) + 1))
    assert ipvs.decode_stats(b"\1\1\0\0" + pack_attribute(1 | 0x8000, whole)) == (WEB, ConnectionStats())


def test_errors_name_the_service_and_the_server():
    change = IpvsRequest(IpvsCommand.IPVS_CMD_NEW_DEST, WEB, SERVER, 1)
    assert str(change) == "create real server 10.96.0.1:80/6 -> 10.0.0.1:8080"
    gone = IpvsRequest(IpvsCommand.IPVS_CMD_DEL_SERVICE, VirtualService(6, ANY6, 0, 7))
    assert str(gone) == "delete virtual service mark 0x7 IPv6"
