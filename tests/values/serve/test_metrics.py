# SPDX-License-Identifier: Apache-2.0
"""/metrics: kube-proxy's series and kbpf's own, read with an independent parser. tests/lab/agent/test_observe.py
compares types, labels and buckets with a real kube-proxy's.
"""

import re
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import yaml

from kbpf.errors import KernelError
from kbpf.model.config import Config, Serving
from kbpf.model.metrics import (
    ALL_COUNTERS,
    CHOICE_COUNTERS,
    FAILURE_COUNTERS,
    IPVS_COUNTERS,
    BackendStats,
    ConnectionStats,
    DataPlaneMetrics,
    FlowCount,
    Latency,
    Pause,
    ServiceLatencies,
    TrafficStats,
    UdpCuts,
)
from kbpf.model.status import AgentStatus, ModeChoice, PacketStatus
from kbpf.serve.exposition import Histogram
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from kbpf.serve.server import AgentServer
from tests.support.faults.event_server import EventServer
from tests.support.golden import FOLDER, Golden
from tests.support.lab.lab import until
from tests.support.prometheus import Family, parse
from tests.support.table import each_case, each_pair
from tests.values.views.snapshots import agent, stats

STATUS = agent("""
version: '9.9'
pid: 1
node: n1
started: 1.0
heartbeat: 2.0
services: 7
service_ports: 9
applied: 11
last_apply_ms: 250.0
event_to_map_p50_ms: 2.0
event_to_map_p99_ms: 40.0
sources:
- {name: services, state: watching, synced: true, resource_version: '5', error: '', silent_seconds: 1.5}
- {name: nodes, state: retrying, synced: true, resource_version: '5', error: gone, failures: 3, silent_seconds: 70.0}
problem_count: 4
refused: 2
error: 'no'
config_error: ''
packets: {enabled: true, failed_count: 1, forwarding: netfilter}
without_endpoints: 5
verified:
- {name: maps, differences: 3, timestamp: 1500000000.0}
- {name: connections, differences: 1, timestamp: 1600000000.0}
failing_backends: 2
""")
MEASURES = """
tables: [[services, 10, 64, 256, 4096], [replies, null, 64, null, 9], [flows, 60, 64, 64, null]]
hooks: [[connect4, true], [connect6, false]]
reason_counts: [[translated, translate, 100], [no_route, drop, 3]]
foreign_programs: 2
bypassed_chains: 1
"""
WEB, DNS = ("a", "web", "http", "TCP"), ("a", "dns", "", "UDP")
HAD, FEW = stats("""\
1 1 opened=7 no_endpoint=5 not_allowed=8 refused=1 unanswered=2 reset=3 ended=6 bytes_in=700 bytes_out=7000 \
retransmits=4 rtt_us=1500 rtts=3
1 2 opened=20
""").values()
TRAFFIC = TrafficStats(
    connections=((WEB, 5), (DNS, 9), (("b", "web", 'od"d\\\n', "TCP"), 1)),
    totals=((WEB, HAD), (DNS, FEW)),
    counted_fields=ALL_COUNTERS,
    backends=(
        BackendStats(WEB, "10.244.1.2:8080", 4, HAD),
        BackendStats(DNS, "[fd00::1]:53", 0, ConnectionStats(opened=2)),
    ),
    latencies=((WEB, ServiceLatencies(Latency((0, 2) + (0,) * 21 + (1,), 70.5))),),
    flow_count=FlowCount(3, 32),
    kube_proxy_running=False,
    kube_proxy_rules=True,
)

DEFAULT = Serving()


def measured(text: str) -> DataPlaneMetrics:
    """What a data plane measures, from YAML."""
    return msgspec.convert(yaml.safe_load(text), DataPlaneMetrics)


class Counts(NamedTuple):
    """A data plane with these metrics."""

    measures: DataPlaneMetrics = measured(MEASURES)
    traffic: TrafficStats = TRAFFIC

    def read_metrics(self) -> DataPlaneMetrics:
        return self.measures

    def refresh_neighbours(self) -> None:
        pass

    def count_traffic(self, pause: Pause) -> TrafficStats:
        return self.traffic


COUNTS = Counts()


def format_page(
    serving: Serving = DEFAULT, plane: Counts | None = COUNTS, status: AgentStatus | None = STATUS, **given: object
) -> str:
    server = AgentServer(
        Config(serving=serving),
        "bpf",
        plane and (lambda: plane),
        **given,  # type: ignore[arg-type]
    )
    if status is not None:
        server.set_status(status)
    server.collect()
    return server.format_metrics().decode()


def page(*given: Serving, **more: Any) -> dict[str, Family]:
    return parse(format_page(*given, **more))


# ---- golden transcripts ------------------------------------------------------------------------

BUSY = r"""
last_apply_ms: 250.25
event_to_map_p99_ms: 40.5
config_error: bad
refused_namespaces: {b: 1, "a\"\\\n": 2}
choice: {requested: auto, mode: bpf, reason: a reason, detail: more}
sources:
- {name: services, state: watching, synced: true, resource_version: '5', error: '', silent_seconds: 1.5, drift: 3}
- {name: nodes, state: retrying, synced: false, resource_version: '5', error: gone, failures: 3, silent_seconds: 70.0}
threads:
- {name: addresses, alive: true, idle_seconds: 1.0}
- {name: http, alive: false, idle_seconds: 1.0, restarts: 2, problem: down}
"""
BUSY_STATUS = agent(BUSY, STATUS)
IPVS = Counts(
    DataPlaneMetrics(), TrafficStats(connections=((WEB, 5),), totals=((WEB, HAD),), counted_fields=IPVS_COUNTERS)
)
VARYING = re.compile(
    r"^(process_\w+|kbpf_scrape_duration_seconds|kbpf_source_last_event_timestamp_seconds\S*) .*$", re.MULTILINE
)
BUCKET = re.compile(r'le="([^"]+)"')


def transcript(text: str) -> str:
    """The page without values that no test can set. Of adjacent buckets with the same count only
    the first one is shown.
    """
    lines: list[str] = []
    same_count = groupby(VARYING.sub(r"\1 (varies)", text).splitlines(), lambda line: BUCKET.sub("", line))
    for _, group in same_count:
        first, *rest = group
        lines.append(first)
        if rest:
            (bound,) = BUCKET.findall(rest[-1])
            lines.append(f"  and {len(rest)} buckets up to {bound}")
    return "".join(f"{line}\n" for line in lines)


def own_series(text: str) -> str:
    """kbpf's series, without HELP lines, which are those of mode bpf."""
    own = [line for line in transcript(text).splitlines() if re.match(r"(# \w+ )?kbpf_", line)]
    helps = {line for line in own if line.startswith("# HELP ")}
    assert helps <= set((FOLDER / "metrics/bpf").read_text().splitlines())
    return "".join(f"{line}\n" for line in own if line not in helps)


def test_page_in_mode_bpf(golden: Golden):
    text = format_page(status=BUSY_STATUS, proxy_metrics=busy())
    parse(text)
    golden("metrics/bpf", transcript(text))


def test_page_in_mode_ipvs(golden: Golden):
    status = replace_status(mode="ipvs", packets=None, config_error=None, choice=None)
    golden("metrics/ipvs", own_series(format_page(plane=IPVS, status=status)))


def test_page_before_the_first_status_and_with_the_packet_path_off(golden: Golden):
    golden("metrics/start", own_series(format_page(plane=None, status=None)))
    status = replace_status(packets=PacketStatus(False, ""), sources=(), threads=())
    without_flows = Counts(DataPlaneMetrics(), TrafficStats())
    golden("metrics/packet-path-off", own_series(format_page(plane=without_flows, status=status)))


def replace_status(**change: object) -> AgentStatus:
    return msgspec.structs.replace(BUSY_STATUS, **({"config_error": ""} | change))


@each_pair(
    "given, shown",
    """\
2 of a/x=5 a/y=7 a/z=6 → a/y a/z
2 of a/x=5! a/y=7 a/z=6 → a/x a/y
2 of a/x=500 a/y=700 a/z=600 b/x=1 → a/y b/x
3 of a/x=500 a/y=700 a/z=600! b/x=1! b/y=2 → a/y a/z b/x
1 of a/x=500 b/x=1! c/x=2 → b/x
0 of a/x=500 →
""",
)
def test_which_services_have_series(given, shown):
    """A limit, and Services with their connections, `!`: with a failure → those with series: those with failures, the
    busiest, and a share for each namespace.
    """
    limit, _, words = given.partition(" of ")
    opened = [word.partition("=")[::2] for word in words.split()]
    totals = tuple(
        ((*name.split("/"), "", "TCP"), ConnectionStats(int(count.rstrip("!")), refused=count.endswith("!")))
        for name, count in opened
    )
    traffic = TrafficStats(connections=(), totals=totals, counted_fields=CHOICE_COUNTERS)
    families = page(Serving(service_series=int(limit)), plane=Counts(traffic=traffic))
    series = [dict(labels) for _, labels in families["kbpf_service_connections_total"].samples]
    assert sorted(f"{s['namespace']}/{s['service']}" for s in series) == shown.split()
    assert families["kbpf_service_series_left_out"].value() == len(opened) - len(shown.split())
    assert len(families["kbpf_service_connections"].samples) == len(shown.split())


def test_a_service_without_open_connections_has_none():
    failed = Counts(traffic=msgspec.structs.replace(TRAFFIC, connections=((DNS, 9),)))
    samples = page(plane=failed)["kbpf_service_connections"].samples
    assert sorted(samples.values()) == [0, 9]


def test_open_connections_have_no_series_if_the_kernel_lists_no_sockets():
    backends = (BackendStats(WEB, "10.244.1.2:8080", None, HAD),)
    unknown = msgspec.structs.replace(TRAFFIC, connections=None, backends=backends)
    families = page(plane=Counts(traffic=unknown))
    kinds = {f"kbpf_{kind}connections" for kind in ("", "service_", "backend_")}
    assert not kinds & families.keys()
    assert sorted(families["kbpf_service_connections_total"].samples.values()) == [7, 20]
    assert sorted(families["kbpf_backend_connections_total"].samples.values()) == [7]


def test_the_process_has_its_usual_series():
    families = page()
    assert families["process_resident_memory_bytes"].value() > 1e6
    assert families["process_open_fds"].value() > 2
    assert families["process_cpu_seconds_total"].value() > 0
    assert 1.6e9 < families["process_start_time_seconds"].value() < 1e11


# ---- kube-proxy's series -----------------------------------------------------------------------


def busy() -> KubeProxyMetrics:
    record = KubeProxyMetrics(lambda: 1_700_000_000.25)
    record.record_queued()
    record.record_changes(3, 5)
    record.record_sync(0.0015, full=True)
    record.record_sync(0.5, full=False, families=(4,))
    record.record_sync(20.0, full=False, families=(6,))
    record.record_udp_cut(UdpCuts(0.0015, {4: 3, 6: 0}))
    record.record_udp_cut(UdpCuts(0.5, {4: 2}))
    record.record_failure()
    for repaired in (0, 2, 5):
        record.record_comparison(repaired)
    record.record_programming(6, 1_699_999_990.25)
    record.record_programming(4, 1_700_001_000.0)  # from a node whose clock is ahead of ours
    record.set_no_local_endpoints("external", 4, 2)
    for path, status in (("healthz", 503), ("healthz", 200), ("livez", 200)):
        record.record_probe(path, status)
    record.record_api_request("h:6443", "GET", "200", 0.3)
    record.record_api_request("h:6443", "GET", "<error>", 9.0)
    record.record_api_request("a:6443", "POST", "201", 0.03)
    record.record_changes(1, 4)
    return record


class TickingClock:
    """A clock that advances by one second with each reading."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def behind(record: KubeProxyMetrics) -> dict[str, float]:
    """For each IP family, the seconds from the last sync to the last queued change; at most 0 if no
    change is pending.
    """
    families = page(proxy_metrics=record)
    prefix = "kubeproxy_sync_proxy_rules_last"
    queued, synced = (families[f"{prefix}_{of}timestamp_seconds"] for of in ("queued_", ""))
    return {name: queued.value(ip_family=name) - synced.value(ip_family=name) for name in ("IPv4", "IPv6")}


def test_change_queued_during_a_pass_is_pending_after_it():
    """The agent's passes: test_queued_timestamp_is_settled_in_both_families_after_a_pass."""
    record = KubeProxyMetrics(TickingClock())
    record.record_sync(0.1, full=True)
    record.record_queued()
    record.record_changes(0, 1)
    record.record_queued()
    record.record_settled()
    assert min(behind(record).values()) > 0
    record.record_changes(0, 1)
    record.record_settled()
    assert max(behind(record).values()) <= 0


# ---- the format --------------------------------------------------------------------------------


def test_histogram_bounds_are_inclusive():
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.1):
        histogram.observe(value)
    assert list(histogram.format_samples("x", '{f="4"}')) == [
        'x_bucket{f="4",le="1"} 1',
        'x_bucket{f="4",le="2"} 3',
        'x_bucket{f="4",le="+Inf"} 4',
        'x_sum{f="4"} 6.6',
        'x_count{f="4"} 4',
    ]


def test_page_without_status_and_with_failing_data_plane():
    class FailingPlane(Counts):
        def read_metrics(self) -> DataPlaneMetrics:
            raise KernelError("no maps")

        def count_traffic(self, pause: Pause) -> TrafficStats:
            raise KernelError("no maps")

    desk = AgentServer(Config(), "bpf", FailingPlane)
    desk.collect()
    families = parse(desk.format_metrics().decode())
    assert "kubeproxy_sync_proxy_rules_duration_seconds" in families
    assert "kbpf_healthy" in families
    assert "kbpf_map_entries" not in families


COUNTED = {
    "no counter": frozenset[str](),
    "choices": CHOICE_COUNTERS,
    "choices and failures": CHOICE_COUNTERS | FAILURE_COUNTERS,
    "counters of IPVS": IPVS_COUNTERS,
}


def test_counters_that_are_not_counted_have_no_series(golden: Golden):
    found = []
    for name, counted in COUNTED.items():
        text = format_page(plane=Counts(traffic=msgspec.structs.replace(TRAFFIC, counted_fields=counted)))
        series = re.findall(r"^kbpf_service_\w+_(?:total|trip_seconds)\w*\{.*$", transcript(text), re.MULTILINE)
        found += [f"# {name}", *series]
    golden("metrics/counted", "\n".join(found) + "\n")


def notes(server: EventServer, count: int) -> list[tuple[str, str, str]]:
    """Type, reason and note of the server's Events, once it has got so many."""
    until("the Events are sent", lambda: len(server.events) >= count)
    return [(event["type"], event["reason"], event["note"]) for event in server.events]


IPVS_CHOICE = ModeChoice("auto", "ipvs", "no cgroup v2", "no cgroup v2 hierarchy is mounted")
STARTS = {
    "mode ipvs": (IPVS_CHOICE, {}, "BpfUnavailable", "no cgroup v2 hierarchy is mounted"),
    "a setting": (
        ModeChoice("bpf", "bpf"),
        {"KubeProxyDefaultMode": "mode is unset"},
        "KubeProxyDefaultMode",
        "is unset",
    ),
}
"""The mode, warnings about settings, and the reason and words of the Event before that of the start."""


@each_case("choice, warnings, reason, words", STARTS)
def test_what_is_unusual_at_a_start_is_one_event(choice, warnings, reason, words):
    server = EventServer()
    desk = AgentServer(Config(), "bpf", post_event=server, warnings=warnings)
    desk.report_started("1", choice)
    notes(server, 2)
    desk.stop()
    (warning, found, note), start = notes(server, 0)
    assert (warning, found, start) == ("Warning", reason, ("Normal", "Starting", f"kbpf 1 mode {choice.mode}"))
    assert words in note


def test_rejected_configuration_is_one_event():
    server = EventServer()
    desk = AgentServer(Config(), "bpf", post_event=server)
    for error in (None, "", "not YAML", "not YAML", ""):
        desk.set_status(replace_status(config_error=error, choice=None))
    notes(server, 1)
    desk.stop()
    assert notes(server, 0) == [("Warning", "ConfigurationRefused", "the configuration file was rejected: not YAML")]


@each_pair(
    "given, power",
    """\
50 % of none → None
50 % of 0*1 → -16
50 % of 3*99 5*1 → -13
99 % of 3*99 5*1 → -13
99 % of 3*98 5*2 → -11
50 % of 23*1 → inf
""",
)
def test_quantile_of_a_latency(given, power):
    """A share of values, by the index of their bucket → the quantile as a power of 2."""
    share, _, values = given.partition(" % of ")
    buckets = [0] * 24
    for index, _, count in (word.partition("*") for word in values.split() if "*" in word):
        buckets[int(index)] = int(count)
    latency, quantile = Latency(tuple(buckets), 1.0), None if power == "None" else 2.0 ** float(power)
    assert latency.quantile(int(share) / 100) == latency.plus(latency).quantile(int(share) / 100) == quantile
