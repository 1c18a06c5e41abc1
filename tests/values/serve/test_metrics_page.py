# SPDX-License-Identifier: Apache-2.0
"""The page /metrics, byte for byte, except for values that no test can set."""

import re

from msgspec.structs import replace

from kbpf.model.config import Config
from kbpf.model.metrics import (
    ALL_COUNTERS,
    IPVS_COUNTERS,
    BackendStats,
    ConnectionStats,
    DataPlaneMetrics,
    FlowCount,
    ReasonCount,
    TableUsage,
    TrafficStats,
    UdpCuts,
)
from kbpf.model.status import AgentStatus, ModeChoice, PacketStatus, SourceView, ThreadView
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from kbpf.serve.server import AgentServer
from tests.support.golden import Golden
from tests.values.serve.test_metrics import Counts

VARYING = re.compile(r"^((?:process_\w+|kbpf_scrape_seconds)) .*$", re.MULTILINE)
OWN = re.compile(r"(# \w+ )?kbpf_")
STATUS = AgentStatus(
    version="9.9", pid=1, mode="bpf", node="n1", started=1.0, heartbeat=2.0, synced=True,
    services=7, service_ports=9, applied=11, last_apply_ms=250.25, event_to_map_p50_ms=2.0,
    event_to_map_p99_ms=40.5,
    sources=(SourceView("services", "watching", True, "5", "", 0, 1.5, 3),
             SourceView("nodes", "retrying", False, "5", "gone", 3, 70.0)),
    problems=(), problem_count=4, refused=2, error="no", config_error="bad",
    refused_namespaces={"b": 1, 'a"\\\n': 2}, without_endpoints=5,
    packets=PacketStatus(True, "", failed_count=1),
    threads=(ThreadView("addresses", True, 1.0, 0, ""), ThreadView("http", False, 1.0, 2, "down")),
    choice=ModeChoice("auto", "bpf", "a reason", "more"),
)  # fmt: skip
WEB, DNS = ("a", "web", 'ht"tp', "TCP"), ("a", "dns", "", "UDP")
STATS = ConnectionStats(
    opened=7, refused=1, unanswered=2, broken=3, ended=6, bytes_in=700, bytes_out=7 << 60,
    retransmits=4, rtt_us=1_500, rtts=3,
)  # fmt: skip
BPF = Counts(
    DataPlaneMetrics(
        tables=(TableUsage("services", 10, 64, 256, 4096), TableUsage("replies", None, 64, None, 9),
                TableUsage("flows", 60, 64, 64, None)),
        hooks=(("connect4", True), ("connect6", False)),
        reason_counts=(ReasonCount("translated", "translate", 100),
                       ReasonCount("no_route", "drop", 3)),
        foreign_programs=2,
    ),
    TrafficStats(
        connections=((WEB, 5), (DNS, 9), (("b", "web", "", "TCP"), 1)),
        totals=((WEB, STATS), (DNS, ConnectionStats(opened=20))),
        counted_fields=ALL_COUNTERS,
        backends=(BackendStats(WEB, "10.244.1.2:8080", 4, STATS),
                  BackendStats(DNS, "[fd00::1]:53", 0, ConnectionStats(opened=2))),
        flow_count=FlowCount(3, 32),
    ),
)  # fmt: skip
IPVS = Counts(
    DataPlaneMetrics(),
    TrafficStats(connections=((WEB, 5),), totals=((WEB, STATS),), counted_fields=IPVS_COUNTERS),
)


def proxy_metrics() -> KubeProxyMetrics:
    metrics = KubeProxyMetrics(lambda: 1_700_000_000.25)
    metrics.record_queued()
    metrics.record_changes(2, 3)
    metrics.record_sync(0.003, True)
    metrics.record_sync(20.0, False, {6})
    metrics.record_changes(1, 4)
    metrics.record_udp_cut(UdpCuts(0.5, {4: 3, 6: 2}))
    metrics.record_failure()
    metrics.record_comparison(5)
    metrics.record_programming(4, 1_699_999_999.0)
    metrics.set_no_local_endpoints("external", 4, 8)
    for path, status in (("healthz", 503), ("healthz", 200), ("livez", 200)):
        metrics.record_probe(path, status)
    for host, method, code in (
        ("b:6443", "GET", "200"), ("a:6443", "GET", "<error>"), ("a:6443", "POST", "201"),
    ):  # fmt: skip
        metrics.record_api_request(host, method, code, 0.03)
    return metrics


def page(
    status: AgentStatus | None, plane: Counts | None, metrics: KubeProxyMetrics | None = None
) -> str:
    """The page, without the series of kube-proxy if there are no `metrics` of these."""
    server = AgentServer(Config(), "bpf", plane and (lambda: plane), proxy_metrics=metrics)
    if status is not None:
        server.set_status(status)
    server.collect()
    text = VARYING.sub(r"\1 (varies)", server.format_metrics().decode())
    lines = text.splitlines(keepends=True)
    return text if metrics else "".join(line for line in lines if OWN.match(line))


def test_page_in_mode_bpf(golden: Golden):
    golden("metrics/bpf", page(STATUS, BPF, proxy_metrics()))


def test_page_in_mode_ipvs(golden: Golden):
    status = replace(STATUS, mode="ipvs", packets=None, config_error=None, choice=None)
    golden("metrics/ipvs", page(status, IPVS))


def test_page_before_the_first_status_and_with_the_packet_path_off(golden: Golden):
    golden("metrics/start", page(None, None))
    status = replace(STATUS, packets=PacketStatus(False, ""), sources=(), threads=())
    without_flows = Counts(DataPlaneMetrics(), TrafficStats())
    golden("metrics/packet-path-off", page(status, without_flows))
