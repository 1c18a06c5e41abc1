# SPDX-License-Identifier: Apache-2.0
"""/metrics: kube-proxy's series exactly as in kube-proxy, and kbpf's own, read with an independent
parser.
"""

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import pytest

from kbpf.config.write import format_configz
from kbpf.errors import KernelError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, Serving
from kbpf.model.metrics import (
    ALL_COUNTERS,
    CONNECTION_COUNTERS,
    IPVS_COUNTERS,
    BackendStats,
    ConnectionStats,
    DataPlaneMetrics,
    FlowCount,
    Pause,
    ReasonCount,
    TableUsage,
    TrafficStats,
    UdpCuts,
)
from kbpf.model.objects import Cidr
from kbpf.model.status import AgentStatus, ModeChoice, PacketStatus, SourceView
from kbpf.serve.exposition import Histogram, format_labels, format_number
from kbpf.serve.kbpf_metrics import FAILURES
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from kbpf.serve.server import AgentServer
from tests.support.prometheus import Family, parse

SYNC = [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096,
        8.192, 16.384, math.inf]  # fmt: skip
PROGRAMMING = [0, 0.25, 0.5, *range(1, 60), 60, 65, 70, 75, 80, 85, 90, 95, 100, 105, 110, 115, 120,
               150, 180, 210, 240, 270, 300, math.inf]  # fmt: skip
REQUESTS = [0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, math.inf]

STATUS = AgentStatus(
    version="9.9", pid=1, mode="bpf", node="n1", started=1.0, heartbeat=2.0, synced=True,
    services=7, service_ports=9, applied=11, last_apply_ms=250.0, event_to_map_p50_ms=2.0,
    event_to_map_p99_ms=40.0,
    sources=(SourceView("services", "watching", True, "5", "", 0, 1.5),
             SourceView("nodes", "retrying", True, "5", "gone", 3, 70.0)),
    problems=(), problem_count=4, refused=2, error="no", config_error="",
    packets=PacketStatus(True, "", failed_count=1),
    without_endpoints=5,
)  # fmt: skip
MEASURES = DataPlaneMetrics(
    tables=(
        TableUsage("services", 10, 64, 256, 4096),
        TableUsage("replies", None, 64, 64, None),
        TableUsage("flows", 60, 64, None, 9),
    ),
    reason_counts=(ReasonCount("translated", "translate", 100), ReasonCount("no_route", "drop", 3)),
    foreign_programs=2,
)
WEB = ("a", "web", "http", "TCP")
HAD = ConnectionStats(
    opened=7, refused=1, unanswered=2, broken=3, ended=6, bytes_in=700, bytes_out=7000,
    retransmits=4, rtt_us=1_500, rtts=3,
)  # fmt: skip
TRAFFIC = TrafficStats(
    connections=(
        (WEB, 5),
        (("a", "dns", "", "UDP"), 9),
        (("b", "web", 'od"d\\\n', "TCP"), 1),
    ),
    totals=((WEB, HAD), (("a", "dns", "", "UDP"), ConnectionStats(opened=20))),
    counted_fields=ALL_COUNTERS,
    backends=(BackendStats(WEB, "10.244.1.2:8080", 4, HAD),),
    flow_count=FlowCount(3, 32),
)


DEFAULT = Serving()


class Counts(NamedTuple):
    """A data plane with these metrics."""

    measures: DataPlaneMetrics = MEASURES
    traffic: TrafficStats = TRAFFIC

    def read_metrics(self) -> DataPlaneMetrics:
        return self.measures

    def count_traffic(self, pause: Pause) -> TrafficStats:
        return self.traffic


COUNTS = Counts()


def page(
    serving: Serving = DEFAULT,
    plane: Counts = COUNTS,
    status: AgentStatus = STATUS,
    **given: object,
) -> dict[str, Family]:
    desk = AgentServer(Config(serving=serving), "bpf", lambda: plane, **given)  # type: ignore[arg-type]
    desk.set_status(status)
    desk.collect()
    return parse(desk.format_metrics().decode())


class Value(NamedTuple):
    """A series and its value."""

    name: str
    labels: dict[str, str]
    value: float


VALUES = [
    Value("kbpf_build_info", {"version": "9.9"}, 1),
    Value("kbpf_mode_info", {"mode": "bpf", "requested": "auto", "socket_lb": "on"}, 1),
    Value("kbpf_synced", {}, 1),
    Value("kbpf_services", {}, 7),
    Value("kbpf_service_ports", {}, 9),
    Value("kbpf_service_ports_refused", {}, 2),
    Value("kbpf_service_ports_without_endpoints", {}, 5),
    Value("kbpf_problems", {}, 4),
    Value("kbpf_sync_failing", {}, 1),
    Value("kbpf_syncs_total", {}, 11),
    Value("kbpf_last_sync_seconds", {}, 0.25),
    Value("kbpf_event_to_map_seconds", {"quantile": "0.99"}, 0.04),
    Value("kbpf_source_watching", {"source": "services"}, 1),
    Value("kbpf_source_watching", {"source": "nodes"}, 0),
    Value("kbpf_source_failures", {"source": "nodes"}, 3),
    Value("kbpf_source_silent_seconds", {"source": "nodes"}, 70),
    Value("kbpf_packet_path", {"state": "on"}, 1),
    Value("kbpf_packet_path", {"state": "failed"}, 0),
    Value("kbpf_packet_path_failed_devices", {}, 1),
    Value("kbpf_map_entries", {"map": "services"}, 10),
    Value("kbpf_map_max_entries", {"map": "services"}, 64),
    Value("kbpf_map_limit_entries", {"map": "services"}, 256),
    Value("kbpf_map_bytes", {"map": "services"}, 4096),
    Value("kbpf_map_entries", {"map": "flows"}, 60),
    Value("kbpf_tracked_connections", {}, 3),
    Value("kbpf_tracked_connections_limit", {}, 32),
    Value("kbpf_decisions_total", {"reason": "no_route", "verdict": "drop"}, 3),
    Value("kbpf_foreign_programs", {}, 2),
    Value("kbpf_connections", {}, 15),
    Value("kbpf_service_connections", {"service": "dns", "protocol": "UDP"}, 9),
    Value("kbpf_service_connections", {"namespace": "b", "port": 'od"d\\\n'}, 1),
    Value("kbpf_service_series_left_out", {}, 0),
    Value("kbpf_service_connections_total", {"service": "web"}, 7),
    Value("kbpf_service_connections_total", {"service": "dns"}, 20),
    Value("kbpf_service_bytes_total", {"service": "web", "direction": "in"}, 700),
    Value("kbpf_service_bytes_total", {"service": "web", "direction": "out"}, 7000),
    Value("kbpf_service_failures_total", {"service": "web", "reason": "refused"}, 1),
    Value("kbpf_service_failures_total", {"service": "web", "reason": "unanswered"}, 2),
    Value("kbpf_service_failures_total", {"service": "web", "reason": "broken"}, 3),
    Value("kbpf_service_failures_total", {"service": "dns", "reason": "refused"}, 0),
    Value("kbpf_service_retransmits_total", {"service": "web"}, 4),
    Value("kbpf_service_round_trip_seconds_total", {"service": "web"}, 0.0015),
    Value("kbpf_service_round_trips_total", {"service": "web"}, 3),
    Value("kbpf_backend_connections", {"service": "web", "backend": "10.244.1.2:8080"}, 4),
    Value("kbpf_backend_connections_total", {"backend": "10.244.1.2:8080"}, 7),
    Value("kbpf_backend_failures_total", {"service": "web", "reason": "unanswered"}, 2),
    Value("kbpf_backend_bytes_total", {"service": "web", "direction": "out"}, 7000),
    Value("kbpf_backend_retransmits_total", {"service": "web"}, 4),
    Value("kbpf_backend_round_trip_seconds_total", {"service": "web"}, 0.0015),
    Value("kbpf_backend_round_trips_total", {"service": "web"}, 3),
    Value("kbpf_healthy", {}, 1),
    Value("kbpf_node_eligible", {}, 1),
    Value("kbpf_events_total", {"outcome": "sent"}, 0),
]


@pytest.mark.parametrize("row", VALUES, ids=lambda row: f"{row.name} {row.labels}")
def test_series_of_kbpf(row: Value):
    assert page()[row.name].value(**row.labels) == row.value


def test_maps_without_a_measured_value_have_no_series():
    found = page()
    for name, maps in (
        ("kbpf_map_entries", {"services", "flows"}),
        ("kbpf_map_bytes", {"services", "flows"}),
        ("kbpf_map_max_entries", {"services", "replies", "flows"}),
        ("kbpf_map_limit_entries", {"services", "replies"}),
    ):
        assert {dict(own)["map"] for _, own in found[name].samples} == maps


def test_services_with_the_most_connections_have_series():
    found = page(Serving(service_series=2))
    assert sorted(found["kbpf_service_connections"].samples.values()) == [5, 9]
    assert sorted(found["kbpf_service_connections_total"].samples.values()) == [7, 20]
    assert found["kbpf_service_series_left_out"].value() == 1
    assert found["kbpf_connections"].value() == 15
    assert not page(Serving(service_series=0))["kbpf_service_connections"].samples


def test_the_process_has_its_usual_series():
    found = page()
    assert found["process_resident_memory_bytes"].value() > 1e6
    assert found["process_open_fds"].value() > 2
    assert found["process_cpu_seconds_total"].value() > 0
    assert 1.6e9 < found["process_start_time_seconds"].value() < 1e11


def test_names_have_a_prefix_and_counters_end_in_total():
    for name, family in page().items():
        assert name.startswith(("kbpf_", "kubeproxy_", "rest_client_", "process_")), name
        assert name.endswith("_total") is (family.kind == "counter") or (
            name == "kubeproxy_sync_proxy_rules_no_local_endpoints_total"  # kube-proxy's own slip
        ), name


# ---- kube-proxy's series -----------------------------------------------------------------------


class KubeProxyFamily(NamedTuple):
    """A family of kube-proxy 1.37 that is the same in all its modes: type, labels and buckets."""

    name: str
    kind: str
    labels: set[str]
    bounds: Sequence[float] = ()


FAMILY = {"ip_family"}
KUBE_PROXY_FAMILIES = [
    KubeProxyFamily("kubeproxy_sync_proxy_rules_duration_seconds", "histogram", FAMILY, SYNC),
    KubeProxyFamily("kubeproxy_sync_full_proxy_rules_duration_seconds", "histogram", FAMILY, SYNC),
    KubeProxyFamily("kubeproxy_sync_partial_proxy_rules_duration_seconds",
                    "histogram", FAMILY, SYNC),
    KubeProxyFamily("kubeproxy_network_programming_duration_seconds",
                    "histogram", FAMILY, PROGRAMMING),
    KubeProxyFamily("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "gauge", FAMILY),
    KubeProxyFamily("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "gauge", FAMILY),
    KubeProxyFamily("kubeproxy_sync_proxy_rules_endpoint_changes_pending", "gauge", set()),
    KubeProxyFamily("kubeproxy_sync_proxy_rules_endpoint_changes_total", "counter", set()),
    KubeProxyFamily("kubeproxy_sync_proxy_rules_service_changes_pending", "gauge", set()),
    KubeProxyFamily("kubeproxy_sync_proxy_rules_service_changes_total", "counter", set()),
    KubeProxyFamily("kubeproxy_sync_proxy_rules_no_local_endpoints_total", "gauge",
                    {"ip_family", "traffic_policy"}),
    KubeProxyFamily("kubeproxy_conntrack_reconciler_sync_duration_seconds",
                    "histogram", FAMILY, SYNC),
    KubeProxyFamily("kubeproxy_conntrack_reconciler_deleted_entries_total", "counter", FAMILY),
    KubeProxyFamily("kubeproxy_proxy_healthz_total", "counter", {"code"}),
    KubeProxyFamily("kubeproxy_proxy_livez_total", "counter", {"code"}),
    KubeProxyFamily("rest_client_requests_total", "counter", {"code", "method", "host"}),
    KubeProxyFamily("rest_client_request_duration_seconds",
                    "histogram", {"verb", "host"}, REQUESTS),
]  # fmt: skip


def busy() -> KubeProxyMetrics:
    record = KubeProxyMetrics(lambda: 1000.0)
    record.record_queued()
    record.record_changes(3, 5)
    record.record_sync(0.0015, full=True)
    record.record_sync(0.5, full=False, families=(4,))
    record.record_udp_cut(UdpCuts(0.0015, {4: 3, 6: 0}))
    record.record_udp_cut(UdpCuts(0.5, {4: 2}))
    record.record_failure()
    for repaired in (0, 2, 5):
        record.record_comparison(repaired)
    record.record_programming(6, 990.0)
    record.record_programming(4, 2000.0)  # from a node whose clock is ahead of ours
    record.set_no_local_endpoints("external", 4, 2)
    record.record_probe("healthz", 503)
    record.record_probe("livez", 200)
    record.record_api_request("h:6443", "GET", "200", 0.3)
    record.record_api_request("h:6443", "GET", "<error>", 9.0)
    record.record_changes(1, 0)
    return record


@pytest.mark.parametrize("row", KUBE_PROXY_FAMILIES, ids=lambda row: row.name)
def test_families_of_kube_proxy(row: KubeProxyFamily):
    family = page(proxy_metrics=busy())[row.name]
    assert (family.kind, family.label_names - {"le"}) == (row.kind, row.labels)
    assert family.bounds == list(row.bounds)
    assert family.help.startswith("[ALPHA] ")


COUNTED = [
    Value("kubeproxy_sync_proxy_rules_service_changes_total", {}, 4),
    Value("kubeproxy_sync_proxy_rules_service_changes_pending", {}, 1),
    Value("kubeproxy_sync_proxy_rules_endpoint_changes_total", {}, 5),
    Value("kubeproxy_sync_proxy_rules_endpoint_changes_pending", {}, 0),
    Value("kubeproxy_sync_proxy_rules_last_timestamp_seconds", {"ip_family": "IPv6"}, 1000),
    Value("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", {"ip_family": "IPv4"}, 1000),
    Value("kubeproxy_sync_proxy_rules_no_local_endpoints_total",
          {"ip_family": "IPv4", "traffic_policy": "external"}, 2),
    Value("kubeproxy_conntrack_reconciler_deleted_entries_total", {"ip_family": "IPv4"}, 5),
    Value("kubeproxy_conntrack_reconciler_deleted_entries_total", {"ip_family": "IPv6"}, 0),
    Value("kubeproxy_proxy_healthz_total", {"code": "503"}, 1),
    Value("rest_client_requests_total", {"code": "<error>", "method": "GET"}, 1),
    Value("rest_client_requests_total", {"code": "200", "host": "h:6443"}, 1),
    Value("kbpf_sync_failures_total", {}, 1),
    Value("kbpf_comparisons_total", {}, 3),
    Value("kbpf_drift_entries_total", {}, 7),
]  # fmt: skip


@pytest.mark.parametrize("row", COUNTED, ids=lambda row: f"{row.name} {row.labels}")
def test_values_recorded_by_kubeproxy_metrics(row: Value):
    assert page(proxy_metrics=busy())[row.name].value(**row.labels) == row.value


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
    found = page(proxy_metrics=record)
    prefix = "kubeproxy_sync_proxy_rules_last"
    asked, done = found[f"{prefix}_queued_timestamp_seconds"], found[f"{prefix}_timestamp_seconds"]
    return {
        name: asked.value(ip_family=name) - done.value(ip_family=name) for name in ("IPv4", "IPv6")
    }


def test_sync_timestamp_is_not_older_than_the_queued_one_after_a_pass():
    """In kube-proxy each family queues its own changes. Here an event counts for both families
    until the policy knows which one it affects.
    """
    record = KubeProxyMetrics(TickingClock())
    record.record_queued()
    assert not page(proxy_metrics=record)[
        "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
    ].samples
    record.record_changes(1, 0)
    record.record_settled()
    assert not page(proxy_metrics=record)[
        "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
    ].samples
    record.record_sync(0.1, full=True)
    record.record_settled()
    assert max(behind(record).values()) <= 0
    for families in ((4,), (6,), ()):
        record.record_queued()
        assert min(behind(record).values()) > 0, "it waits"
        record.record_changes(0, 1)
        assert min(behind(record).values()) > 0, "it is not programmed"
        if families:
            record.record_sync(0.1, full=False, families=families)
        record.record_settled()
        assert max(behind(record).values()) <= 0, families
    still = behind(record)
    record.record_settled()
    assert behind(record) == still, "nobody asked"


def test_change_queued_during_a_pass_is_pending_after_it():
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


def at_most(family: Family, bound: float, **own: str) -> float:
    wanted = {*own.items()}
    for (name, told), value in family.samples.items():
        le = dict(told).get("le")
        if name.endswith("_bucket") and wanted <= told and le and float(le) == bound:
            return value
    raise AssertionError(bound)


def test_histogram_buckets():
    found = page(proxy_metrics=busy())
    sync = found["kubeproxy_sync_proxy_rules_duration_seconds"]
    assert [at_most(sync, b, ip_family="IPv4") for b in (0.001, 0.002, 0.256, 0.512)] == [
        0,
        1,
        1,
        2,
    ]
    assert at_most(sync, math.inf, ip_family="IPv6") == 1
    full = found["kubeproxy_sync_full_proxy_rules_duration_seconds"]
    assert at_most(full, math.inf, ip_family="IPv4") == 1
    looks = found["kubeproxy_conntrack_reconciler_sync_duration_seconds"]
    assert [at_most(looks, b, ip_family="IPv4") for b in (0.001, 0.002, math.inf)] == [0, 1, 2]
    assert at_most(looks, math.inf, ip_family="IPv6") == 1
    took = found["kubeproxy_network_programming_duration_seconds"]
    assert [at_most(took, b, ip_family="IPv6") for b in (9, 10)] == [0, 1]
    assert at_most(took, 0.25, ip_family="IPv4") == 1
    asked = found["rest_client_request_duration_seconds"]
    assert [at_most(asked, b) for b in (0.25, 0.5, math.inf)] == [0, 1, 1]


# ---- the format --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (True, "1"), (3.0, "3"), (-2, "-2"), (0.25, "0.25"),
     (1795300289.55, "1795300289.55"), (float("inf"), "+Inf"), (1e300, "1e+300")],
)  # fmt: skip
def test_format_number(value: float, text: str):
    assert format_number(value) == text


def test_format_labels():
    assert format_labels() == ""
    assert format_labels(a="b", c='d"\\\n') == '{a="b",c="d\\"\\\\\\n"}'


def test_histogram_bounds_are_inclusive():
    made = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.1):
        made.observe(value)
    assert list(made.format_samples("x", '{f="4"}')) == [
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
    found = parse(desk.format_metrics().decode())
    assert "kubeproxy_sync_proxy_rules_duration_seconds" in found
    assert "kbpf_healthy" in found
    assert "kbpf_map_entries" not in found


def test_no_connection_series_without_accounting():
    found = page(
        plane=Counts(traffic=TrafficStats(totals=TRAFFIC.totals, counted_fields=IPVS_COUNTERS))
    )
    assert not {"kbpf_connections", "kbpf_service_connections"} & found.keys()


OUTCOMES = ("connections", "failures", "bytes", "retransmits", "round_trip_seconds", "round_trips")
COUNTER_SETS = [
    ("no counter", frozenset(), ()),
    ("connection counters", CONNECTION_COUNTERS, ("connections", "failures")),
    ("counters of IPVS", IPVS_COUNTERS, ("connections", "bytes")),
    ("all counters", ALL_COUNTERS, OUTCOMES),
]


@pytest.mark.parametrize(
    ("name", "known", "there"), COUNTER_SETS, ids=[row[0] for row in COUNTER_SETS]
)
def test_counters_that_are_not_counted_have_no_series(
    name: str, known: frozenset[str], there: Sequence[str]
):
    found = page(plane=Counts(traffic=msgspec.structs.replace(TRAFFIC, counted_fields=known)))
    assert {one for one in OUTCOMES if f"kbpf_service_{one}_total" in found} == set(there)
    reasons = {v for name, _ in found.items() if name == "kbpf_service_failures_total"
               for _, own in found[name].samples for k, v in own if k == "reason"}  # fmt: skip
    assert reasons == {reason for reason in FAILURES if reason in known}


def test_only_tcp_has_retransmits_round_trips_and_other_failures_than_refused():
    found = page()
    for name in ("retransmits", "round_trips", "round_trip_seconds"):
        told = found[f"kbpf_service_{name}_total"]
        assert {dict(own)["service"] for _, own in told.samples} == {"web"}
    failures = found["kbpf_service_failures_total"]
    assert {dict(own)["reason"] for _, own in failures.samples if ("service", "dns") in own} == {
        "refused"
    }


def test_no_backend_series_unless_enabled():
    found = page(plane=Counts(traffic=msgspec.structs.replace(TRAFFIC, backends=())))
    assert not [name for name in found if name.startswith("kbpf_backend_")]


def test_no_packet_path_series_in_mode_ipvs():
    desk = AgentServer(Config(), "ipvs")
    desk.set_status(replace_status(packets=None))
    assert "kbpf_packet_path" not in parse(desk.format_metrics().decode())


def test_reason_for_ipvs_is_a_label_and_one_event():
    made: list[dict[str, object]] = []
    said = threading.Event()

    def post(path: str, body: bytes) -> int:
        made.append(json.loads(body))
        if len(made) == 2:
            said.set()
        return 201

    desk = AgentServer(Config(), "bpf", post_event=post)
    choice = ModeChoice("auto", "ipvs", "no cgroup v2", "no cgroup v2 hierarchy is mounted")
    desk.report_started("1", choice)
    assert said.wait(30)
    desk.set_status(replace_status(mode="ipvs", choice=choice))
    found = parse(desk.format_metrics().decode())
    labels = {"mode": "ipvs", "requested": "auto", "reason": "no cgroup v2"}
    assert found["kbpf_mode_info"].value(**labels) == 1
    desk.stop()
    assert [(one["type"], one["reason"]) for one in made] == [
        ("Warning", "BpfUnavailable"),
        ("Normal", "Starting"),
    ]
    assert "no cgroup v2 hierarchy is mounted" in str(made[0]["note"])


def test_warnings_about_settings_are_events_at_start():
    made: list[dict[str, object]] = []
    said = threading.Semaphore(0)

    def post(path: str, body: bytes) -> int:
        made.append(json.loads(body))
        said.release()
        return 201

    desk = AgentServer(
        Config(), "bpf", post_event=post, warnings={"KubeProxyDefaultMode": "mode is unset"}
    )
    desk.report_started("1", ModeChoice("bpf", "bpf"))
    for _ in range(2):
        assert said.acquire(timeout=30)
    desk.stop()
    assert [(one["type"], one["reason"], one["note"]) for one in made] == [
        ("Warning", "KubeProxyDefaultMode", "mode is unset"),
        ("Normal", "Starting", "kbpf 1 mode bpf"),
    ]


@pytest.mark.parametrize(("error", "value"), [("", 1), ("not YAML", 0), (None, None)])
def test_config_last_reload_successful(error: str | None, value: int | None):
    found = page(status=replace_status(config_error=error))
    name = "kbpf_config_last_reload_successful"
    assert (found[name].value() if name in found else None) == value


def test_rejected_configuration_is_one_event():
    made: list[dict[str, object]] = []
    said = threading.Semaphore(0)

    def post(path: str, body: bytes) -> int:
        made.append(json.loads(body))
        said.release()
        return 201

    desk = AgentServer(Config(), "bpf", post_event=post)
    for error in (None, "", "not YAML", "not YAML", ""):
        desk.set_status(replace_status(config_error=error))
    assert said.acquire(timeout=30)
    desk.stop()
    assert [(one["type"], one["reason"], one["note"]) for one in made] == [
        ("Warning", "ConfigurationRefused", "the configuration file was rejected: not YAML")
    ]


def replace_status(**change: object) -> AgentStatus:
    return msgspec.structs.replace(STATUS, **change)


def test_configz_shows_the_current_configuration():
    made = replace(Config(), cluster_cidrs=(Cidr(parse_addr("10.1.0.0"), 112),), masquerade_bit=5)
    shown = json.loads(format_configz(made))
    theirs = shown["kubeproxy.config.k8s.io"]
    assert theirs["kind"] == "KubeProxyConfiguration"
    assert theirs["clusterCIDR"] == "10.1.0.0/16"
    assert theirs["iptables"]["masqueradeBit"] == 5
    assert theirs["nodePortAddresses"] == ["primary"]
    ours = shown["kbpf.io"]
    assert ours["kind"] == "KbpfConfiguration"
    assert ours["mapSizes"]["frontends"] == Config().sizes.frontends
