# SPDX-License-Identifier: Apache-2.0
"""Connection statistics by Service and backend, of real connections through the socket hooks.

One node with a client and two backends. A row names the Service and how the connection goes; what
must be added to the counters once it has ended, to the byte; what `kbpf monitor` sees of it, and
what `kbpf inspect failures` keeps. Nothing else may be added, seen or kept.
"""

import contextlib
import errno
import logging
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf import map_metrics as metrics
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.map_metrics import (
    ALL_BACKENDS,
    NO_BACKEND,
    REMOVED_BACKENDS,
    SOCKET_STORAGE_MAPS,
    SWEEP_INTERVAL_S,
    ConnectionCount,
    MapCollector,
)
from kbpf.dataplane.bpf.maps.layout import (
    COUNTS,
    LATENCIES,
    LATENCY,
    MAPS,
    PEER,
    U32,
    U32_PAIR,
    Target,
    unpack_latencies,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.net import dial
from kbpf.model.address import format_endpoint
from kbpf.model.config import Accounting, Config, MapSizes, Serving
from kbpf.model.metrics import ConnectionStats, Latency, ServiceLatencies
from kbpf.model.objects import Protocol
from kbpf.model.reasons import EventVerdict
from kbpf.serve.kbpf_metrics import format_traffic
from kbpf.views import top
from kbpf.views.monitor import EventRow
from kbpf.views.top import By
from tests.programs.sockets.account import (
    FAIR,
    NOBODY,
    REPLY,
    REQUEST,
    Bench,
    fair,
    opened,
    recorded,
    refused,
    start,
)
from tests.support.features import needs
from tests.support.lab.events import read, watched
from tests.support.lab.lab import PATIENCE, until
from tests.support.plane import Site, desired, flush, service, within
from tests.support.table import table

SOCK_OPS = 3
"""The attach type of a sock_ops link."""


@pytest.fixture
def served(bench: Bench) -> Bench:
    start(bench)
    return bench


def read_counts(site: Site) -> dict[tuple[str, str], ConnectionStats]:
    """The counters by Service name and backend."""
    names = {number: port.name for number, port in site.service_ports().items()}
    addresses = {NO_BACKEND: "none", REMOVED_BACKENDS: "gone", ALL_BACKENDS: "all"}
    for key, raw in site.entries("backends").items():
        target = Target.unpack(raw)
        addresses[U32.unpack(key)[0]] = format_endpoint(target.address, target.port)
    found = {}
    for key, raw in site.entries("counts").items():
        service_id, backend = U32_PAIR.unpack(key)
        found[names.get(service_id, "?"), addresses.get(backend, "?")] = ConnectionStats(*COUNTS.unpack(raw))
    return found


def added(before: dict, after: dict) -> dict[tuple[str, str], ConnectionStats]:
    """The differences, without the length of round trips and without retransmits."""
    found = {}
    for key, now in after.items():
        more = ConnectionStats(*(b - a for a, b in zip(before.get(key, ConnectionStats()), now, strict=True)))
        if any(more):
            found[key] = more._replace(rtt_us=0, retransmits=0)
    return found


def wait_for(look: Callable[[], object], wanted: object) -> None:
    """Waits for this value: the kernel ends a connection some time after close()."""
    with contextlib.suppress(AssertionError):
        until(f"{wanted}", lambda: look() == wanted)
    assert look() == wanted


class Connection(NamedTuple):
    """A client (see account.CLIENTS) and a frontend; the Service and the backend (none: nothing was chosen); what is
    counted, and bytes; the events, and what the client saw if the connection failed (nothing: no failure is kept).
    Round trips are counted, but their length is not compared. `needs`: features of the kernel.
    """

    does: str
    to: str
    service: str
    backend: str
    adds: str
    bytes_in: int
    bytes_out: int
    events: str
    saw: str = ""
    needs: str = ""


TWICE = "opened opened ended ended rtts rtts"
CONNECTIONS = table(
    Connection,
    f"""
fair              | 10.96.0.1:80          | fair        | one:9000  | opened ended rtts | 1234 | 56789  | new translated
fair              | [fd00:96::1]:80       | fair6       | one6:9000 | opened ended rtts | 1234 | 56789  | new translated
fair              | [::ffff:10.96.0.1]:80 | fair        | one:9000  | opened ended rtts | 1234 | 56789  | new translated
fair_twice          | 10.96.0.20:80         | shop/sticky | one:9000  | {TWICE}           | 2468 | 113578 | \
    new translated, new translated_by_affinity
listens           | 10.96.0.3:80          | first       | one:9002  | opened ended rtts | 0    | 56789  | new translated
closes_at_once      | 10.96.0.3:80        | first       | one:9002  | opened ended rtts | 0    | 56789  | new translated
datagrams          | 10.96.0.4:53          | dns         | one:9003  | opened           | 0    | 0      | new translated
connected_datagrams | 10.96.0.4:53          | dns         | one:9003  | opened          | 0    | 0      | new translated
gives_up            | 10.96.0.6:80     | silent   | 192.0.2.99:80 | opened ended            | 0    | 0 | new translated
waits               | 10.96.0.6:80     | silent   | 192.0.2.99:80 | opened ended unanswered | 0    | 0 | \
    new translated, failed backend_unanswered | ETIMEDOUT, unless a later SYN was answered | retransmissions
reset               | 10.96.0.2:80     | rude     | one:9001      | opened ended reset rtts | 1234 | 0 | \
    new translated, failed backend_reset      | ECONNRESET or ETIMEDOUT                    | tracing
refused             | 10.96.0.5:80     | refusing | one:9009      | opened ended refused    | 0    | 0 | \
    new translated, failed backend_refused    | ECONNREFUSED                               | tracing
refused             | 10.96.0.7:80     | empty     | none         | no_endpoint             | 0    | 0 | \
    refused no_endpoints                      | ECONNREFUSED                               | set_retval
refused             | 10.96.0.7:81     | empty     | none         |                         | 0    | 0 | \
    refused unknown_port                      | ECONNREFUSED                               | set_retval
refused             | 10.96.0.8:80     | elsewhere | none         | no_endpoint             | 0    | 0 | \
    dropped no_local_endpoints                | ETIMEDOUT                                  | set_retval
""",
)


@pytest.mark.parametrize("accounting", [Accounting.FULL, pytest.param(Config().accounting, marks=needs("set_retval"))])
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=needs(row.needs) if row.needs else (), id=f"{row.does} {row.to}") for row in CONNECTIONS],
)
def test_connection_is_counted_and_seen(bench: Bench, row: Connection, accounting: Accounting):
    """By default nothing is counted when a TCP connection ends."""
    start(bench, accounting)
    site, name, backend = bench.site, row.service.rpartition("/")[2], bench.fill(row.backend)
    shown = f"{row.service.rpartition('/')[0] or 'default'}/{name}"
    before: dict[tuple[str, str], ConnectionStats] = {}
    events: list[EventRow] = []

    def is_made() -> bool:
        site.clear("failures")
        site.clear("affinity")
        before.clear()
        before.update(read_counts(site))
        with watched(site) as monitor:
            made = bench.act(row.does, row.to)
            events[:] = read(monitor)
        return made

    until("the connection is made", is_made)
    counts = ConnectionStats(**Counter(row.adds.split()), bytes_in=row.bytes_in, bytes_out=row.bytes_out)
    if accounting is not Accounting.FULL:
        counts = counts._replace(ended=0, rtts=0, bytes_in=0, bytes_out=0)
    wait_for(lambda: added(before, read_counts(site)), {(name, backend): counts} if row.adds else {})
    wait_for(lambda: site.entries("sock_peers"), {})

    assert ", ".join(f"{event.verdict} {event.reason}" for event in events) == row.events
    frontend = f"{row.to.replace('[::ffff:10.96.0.1]', '10.96.0.1')}/{'UDP' if row.to.endswith(':53') else 'TCP'}"
    for event in events:
        assert (event.frontend, event.client_kind, event.seen_by) == (frontend, "cgroup", "socket")
        assert event.service == ("" if event.reason == "unknown_port" else shown)
        assert (event.backend or "none") == backend
        assert str(bench.client.cgroup).endswith(event.client)
        assert event.address.startswith(f"{bench.client.ip}:" if event.verdict is EventVerdict.FAILED else "")
    if not row.saw:
        assert site.entries("failures") == {}
        return
    (found,) = recorded(bench)
    assert (found.service, found.frontend, found.backend or "none") == (shown, frontend, backend)
    assert (found.reason, found.client_saw, found.count) == (row.events.split()[-1], row.saw, 1)
    assert (found.kind, found.address) == ("cgroup", bench.client.ip if found.backend else "")
    assert 0 <= found.last_seconds <= found.first_seconds < 60


def test_round_trip_time_is_measured(served: Bench):
    site = served.site
    served.act("fair", "10.96.0.1:80")

    def long_enough() -> bool:
        totals = read_counts(site)["fair", served.fill("one:9000")]
        return bool(totals.rtts) and 0 < totals.rtt_us < totals.rtts * PATIENCE * 1e6

    until("a round trip has a length", long_enough)


def test_connection_to_a_plain_address_adds_nothing(served: Bench):
    wait_for(lambda: served.site.entries("sock_peers"), {})  # of earlier tests
    before = read_counts(served.site)
    served.site.clear("failures")
    with watched(served.site) as monitor:
        within(served.client, lambda: (fair(served.one.ip, FAIR), refused(served.one.ip, NOBODY)))
        assert read(monitor) == []
    assert added(before, read_counts(served.site)) == {}
    assert served.site.entries("sock_peers") == served.site.entries("failures") == {}


def test_bytes_sent_after_close_are_counted(served: Bench):
    """close() returns before everything is sent; the entry is kept until then."""
    site = served.site
    before = read_counts(site)

    def leaves() -> None:
        with opened("10.96.0.1", 80) as s:
            s.sendall(REQUEST)

    within(served.client, leaves)
    key = "fair", served.fill("one:9000")
    wait_for(lambda: added(before, read_counts(site)).get(key, ConnectionStats()).bytes_in, len(REQUEST))


# ---- switched off ------------------------------------------------------------------------------


def hooks_of(site: Site) -> set[str]:
    return {pin.name for pin in (site.pins / "links").iterdir()}


@needs("set_retval")
def test_accounting_off_counts_and_keeps_nothing(bench: Bench):
    start(bench, Accounting.OFF)
    assert "sock_ops" not in hooks_of(bench.site)
    bench.site.clear("failures")
    before = read_counts(bench.site)
    bench.act("fair", "10.96.0.1:80")
    bench.act("refused", "10.96.0.7:80")
    bench.act("refused", "10.96.0.5:80")
    assert added(before, read_counts(bench.site)) == {}
    assert bench.site.entries("failures") == {}
    wait_for(lambda: bench.site.entries("sock_peers"), {})


@pytest.mark.parametrize(("before", "then"), [(before, then) for before in Accounting for then in Accounting])
def test_connection_across_a_changed_setting_leaves_no_entry(bench: Bench, before: Accounting, then: Accounting):
    """The connection begins with one setting and is closed with the other."""
    start(bench, before)
    site = bench.site
    bench.client.tcp("10.96.0.9", 80, keep="kept")
    assert len(site.entries("sock_peers")) == 1
    start(bench, then)
    assert ("sock_ops" in hooks_of(site)) is (then is Accounting.FULL)
    bench.client.ask("drop", keep="kept")
    wait_for(lambda: site.entries("sock_peers"), {})


def test_agent_without_the_sock_ops_hook_serves(bench: Bench, monkeypatch, caplog):
    """Another program may have the hook exclusively."""
    start(bench, Accounting.OFF)
    attach = Link.attach.__func__

    def refuses(cls: type[Link], program: Program, cgroup: int, kind: int) -> Link:
        if kind == SOCK_OPS:
            raise KernelError("EPERM", errno=errno.EPERM)
        return attach(cls, program, cgroup, kind)

    monkeypatch.setattr(Link, "attach", classmethod(refuses))
    logging.getLogger("kbpf").propagate = True
    start(bench)
    assert "sock_ops" not in hooks_of(bench.site)
    assert "counting the ends of TCP connections is not possible" in caplog.text
    bench.act("fair", "10.96.0.1:80")
    wait_for(lambda: bench.site.entries("sock_peers"), {})


# ---- what the agent computes from it -----------------------------------------------------------


def make_collector(
    site: Site,
    clock: Callable[[], float] = lambda: 0.0,
    accounting: Accounting = Accounting.CONNECTIONS,
    **serving: int,
) -> MapCollector:
    config = Config(serving=Serving(**serving), accounting=accounting)
    return MapCollector(Pins(site.pins), config, clock)


def put_stats(site: Site, name: str | int, backend: str | int, **total: int) -> None:
    """The counters of a Service (its name, or an id) and a backend (its port, or an id) become these."""
    services, backends = ids(site)
    service_id = services[name] if isinstance(name, str) else name
    key = U32_PAIR.pack(service_id, backends[backend] if isinstance(backend, str) else backend)
    site.put("counts", key, COUNTS.pack(*ConnectionStats(**total)))


def ids(site: Site) -> tuple[dict[str, int], dict[str, int]]:
    """Ids of Services by name, and of backends by port."""
    names = {port.name: number for number, port in site.service_ports().items()}
    return names, {f"{Target.unpack(raw).port}": U32.unpack(k)[0] for k, raw in site.entries("backends").items()}


WEB = service("web", "10.96.0.1:80", "127.0.1.1:8081 127.0.1.2:8082")


def name_of(text: str) -> tuple[str, str, str, str]:
    return ("default", text, "", "TCP")


@needs("socket_iterator")
def test_totals_sum_all_backends_and_list_the_busiest(site: Site):
    site.start(desired(WEB))
    services, backends = ids(site)
    web = services["web"]
    put_stats(site, "web", "8081", opened=5, bytes_in=10, rtts=1)
    put_stats(site, "web", "8082", opened=7, reset=2)
    put_stats(site, "web", NO_BACKEND, no_endpoint=3)
    put_stats(site, "web", REMOVED_BACKENDS, opened=100)
    with site.pinned("sock_peers") as peers, socket.socket() as own:
        key = own.fileno().to_bytes(4, "little")
        peers.update(key, PEER.pack(1, b"", b"", web, backends["8082"]))
        found = make_collector(site, backend_series=1).count(lambda: None)
    assert dict(found.totals) == {
        name_of("web"): ConnectionStats(opened=112, no_endpoint=3, reset=2, bytes_in=10, rtts=1)
    }
    assert dict(found.connections or ()) == {name_of("web"): 1}
    (busiest,) = found.backends
    assert (busiest.name, busiest.backend, busiest.open_connections) == (name_of("web"), "127.0.1.2:8082", 1)
    assert busiest.stats == ConnectionStats(opened=7, reset=2)
    assert not make_collector(site).count(lambda: None).backends


@needs("tracing")
def test_a_pod_with_many_ports_hides_no_series_of_others(site: Site):
    many = [service(f"evil/s{n}", f"10.96.1.{n}:53", "127.0.1.9:53", Protocol.UDP) for n in range(9)]
    site.start(desired(*many, service("shop/web", "10.96.0.1:80", "127.0.1.1:8081")))

    def press() -> None:
        for number in range(3 * len(many)):
            with socket.socket(type=socket.SOCK_DGRAM) as s:
                s.connect((f"10.96.1.{number % len(many)}", 53))

    within(site.place("evil"), press)
    within(site.place("shop"), lambda: refused("10.96.0.1"))
    stats = make_collector(site, backend_series=2).count(lambda: None)
    page = "\n".join(format_traffic(stats, max_series=2))
    for kind in ("service", "backend"):
        found = re.findall(rf'^kbpf_{kind}_connections_total{{namespace="(\w+)"', page, re.M)
        assert sorted(found) == ["evil", "shop"]


@pytest.mark.parametrize("silent", SOCKET_STORAGE_MAPS)
def test_open_connections_are_unknown_if_the_kernel_lists_no_sockets(site: Site, monkeypatch, silent: str):
    add = ConnectionCount.add

    def refuse(count: ConnectionCount, map_: Map, last: bool) -> Iterator[None]:
        if map_.name == silent:
            raise KernelError("cannot list sockets", errno=errno.EOPNOTSUPP)
        return add(count, map_, last)

    site.start(desired(WEB))
    put_stats(site, "web", "8081", opened=5)
    monkeypatch.setattr(ConnectionCount, "add", refuse)
    stats = make_collector(site, backend_series=1).count(lambda: None)
    assert (stats.connections, [backend.open_connections for backend in stats.backends]) == (None, [None])
    assert dict(stats.totals) == {name_of("web"): ConnectionStats(opened=5)}


def test_counts_of_a_deleted_backend_stay_with_its_service(site: Site):
    """No sum falls when a backend is deleted. A Service's counters are deleted with it."""
    plane = site.open()
    other = service("other", "10.96.0.2:80", "127.0.1.3:8083")
    plane.apply(desired(WEB, other), None)
    services, backends = ids(site)
    for number in ("8081", "8082"):
        put_stats(site, "web", number, opened=1, bytes_out=10)
    put_stats(site, "web", NO_BACKEND, no_endpoint=3)
    put_stats(site, "other", "8083", opened=1)
    plane.apply(desired(service("web", "10.96.0.1:80", "127.0.1.1:8081")), None)
    flush(plane)
    now = [0.0]
    reader = make_collector(site, lambda: now[0])
    wanted = {name_of("web"): ConnectionStats(opened=2, no_endpoint=3, bytes_out=20)}
    assert dict(reader.count(lambda: None).totals) == wanted
    assert len(site.entries("counts")) == 4, "counters are merged at intervals only"
    now[0] = SWEEP_INTERVAL_S
    for _ in range(2):
        assert dict(reader.count(lambda: None).totals) == wanted
        now[0] += SWEEP_INTERVAL_S
    # a connection that ended late
    put_stats(site, "web", backends["8082"], opened=4)
    wanted = {name_of("web"): ConnectionStats(opened=6, no_endpoint=3, bytes_out=20)}
    for _ in range(2):
        assert dict(reader.count(lambda: None).totals) == wanted
        now[0] += SWEEP_INTERVAL_S
    assert {U32_PAIR.unpack(key) for key in site.entries("counts")} == {
        (services["web"], backends["8081"]),
        (services["web"], NO_BACKEND),
        (services["web"], REMOVED_BACKENDS),
    }


def test_counts_of_a_service_added_during_a_count_are_kept(site: Site):
    """Its name did not exist yet when names were read, but the Service is not a deleted one."""
    site.start(desired(WEB))
    services, backends = ids(site)
    put_stats(site, "web", "8081", opened=1)
    now, calls = [0.0], [0]
    reader = make_collector(site, lambda: now[0])
    new = services["web"] + 1

    def pause() -> None:
        calls[0] += 1
        if calls[0] == last:
            put_stats(site, new, "8081", opened=1)

    last = 0
    reader.count(pause)
    last, calls[0], now[0] = calls[0], 0, SWEEP_INTERVAL_S
    reader.count(pause)
    assert calls[0] == last
    assert (new, backends["8081"]) in {U32_PAIR.unpack(key) for key in site.entries("counts")}


def test_namespace_that_fills_the_map_is_summed_up(bench: Bench):
    """Its largest Service port is counted in one entry from then on; no sum falls."""
    site, limit = bench.site, 100
    sizes = MapSizes(affinity=4096, connections=4096, counts=limit)
    start(bench, sizes=sizes)
    site.clear("counts")
    put_stats(site, "dns", 2_000_000, opened=7)
    for number in range(1, limit):
        put_stats(site, "fair", 1_000_000 + number, opened=1)
    bench.act("reset", "10.96.0.2:80")
    assert len(site.entries("counts")) == limit, "new pairs are not counted"
    config = Config(sizes=sizes, system_namespaces=())
    MapCollector(Pins(site.pins), config, lambda: 0.0).count(lambda: None)
    wanted = {("fair", "all"): limit - 1, ("dns", "?"): 7}
    assert {key: total.opened for key, total in read_counts(site).items()} == wanted
    bench.act("fair", "10.96.0.1:80")
    bench.act("reset", "10.96.0.2:80")
    found = {key: total.opened for key, total in read_counts(site).items() if key[0] != "rude"}
    assert found == wanted | {("fair", "all"): limit}
    assert [total.opened for key, total in read_counts(site).items() if key[0] == "rude"] == [1]
    totals = dict(MapCollector(Pins(site.pins), config, lambda: 0.0).count(lambda: None).totals)
    assert totals[name_of("fair")].opened == limit
    site.clear("counts")
    start(bench)


def read_latencies(site: Site) -> dict[str, ServiceLatencies]:
    ports = site.service_ports()
    return {ports[U32.unpack(key)[0]].name: unpack_latencies(raw) for key, raw in site.entries("latencies").items()}


def values_of(latency: Latency) -> int:
    return sum(latency.counts)


def test_latencies_of_each_connection_are_measured(served: Bench):
    """A handshake within this machine takes less than a second. `kbpf top` shows it."""
    site = served.site
    first = snapshot.read(site.pins, top.needs(By.SERVICES))
    before = read_latencies(site).get("fair", ServiceLatencies())
    for _ in range(3):
        served.act("fair", "10.96.0.1:80")

    def added_values() -> tuple[int, int]:
        now = read_latencies(site).get("fair", ServiceLatencies())
        return tuple(values_of(b) - values_of(a) for a, b in zip(before, now, strict=True))

    wait_for(added_values, (3, 3))
    after = read_latencies(site)["fair"]
    for latency, earlier in zip(after, before, strict=True):
        assert 0 < latency.sum_seconds - earlier.sum_seconds < 3
        assert latency.quantile(1.0) is not None
        assert latency.quantile(1.0) <= 1.0
    last = snapshot.read(site.pins, top.needs(By.SERVICES))
    (shown,) = top.build_rows(first, last, By.SERVICES, "default/fair")
    assert shown.latency is not None
    assert 0 < shown.latency.connect_p50_ms <= shown.latency.connect_p99_ms <= 1000


def test_connections_without_packets_and_refused_ones_have_no_latency(served: Bench):
    """As the agent, `kbpf verify` and `kbpf trace --confirm` make them."""
    before = read_latencies(served.site)
    within(served.client, lambda: dial.try_connect(("10.96.0.1", 80), socket.SOCK_STREAM, sends=False))
    served.act("refused", "10.96.0.5:80")
    assert read_latencies(served.site) == before


def test_full_map_measures_no_new_services(served: Bench):
    site = served.site
    size = MAPS["latencies"].entries
    site.clear("latencies")
    with site.pinned("latencies") as latencies:
        keys = struct.pack(f"={size}I", *range(1 << 30, (1 << 30) + size))
        latencies.update_batch(keys, bytes(LATENCIES.size * size))
    before = read_counts(site)
    served.act("fair", "10.96.0.1:80")
    counts = ConnectionStats(opened=1, ended=1, rtts=1, bytes_in=len(REQUEST), bytes_out=len(REPLY))
    wait_for(lambda: added(before, read_counts(site)), {("fair", served.fill("one:9000")): counts})
    assert len(site.entries("latencies")) == size
    now = [0.0]
    reader = make_collector(site, lambda: now[0], Accounting.FULL)
    now[0] = SWEEP_INTERVAL_S
    assert reader.count(lambda: None).latencies == ()
    assert site.entries("latencies") == {}, "those of removed Services are deleted"


def test_latencies_of_the_busiest_services_are_collected(site: Site, monkeypatch):
    other = service("other", "10.96.0.2:80", "127.0.1.3:8083")
    tenant = service("tenant/third", "10.96.0.3:80", "127.0.1.4:8084")
    site.start(desired(WEB, other, tenant))
    services, _ = ids(site)
    counts = (0, 2) + (0,) * 21 + (1,)
    with site.pinned("latencies") as latencies:
        raw = LATENCIES.pack(LATENCY.pack(struct.pack("=24Q", *counts), 70_500_000_000), bytes(LATENCY.size))
        for name in ("web", "other", "third"):
            latencies.update(U32.pack(services[name]), raw)
    put_stats(site, "web", "8081", opened=5)
    put_stats(site, "other", "8083", opened=4)
    put_stats(site, "third", "8084", opened=1)
    third = ("tenant", "third", "", "TCP")
    expected = ServiceLatencies(Latency(counts, 70.5))
    for series, names in enumerate([set(), {name_of("web")}, {name_of("web"), third}]):
        monkeypatch.setattr(metrics, "LATENCY_SERIES", series)
        found = make_collector(site, accounting=Accounting.FULL).count(lambda: None)
        assert dict(found.latencies) == dict.fromkeys(names, expected)
    assert make_collector(site).count(lambda: None).latencies == ()
