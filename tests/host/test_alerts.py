# SPDX-License-Identifier: Apache-2.0
"""Each alert of manifests/monitoring/rules.yaml, tested with promtool: on a healthy node none
fires; on its condition exactly that one fires, with the summary of the row.

The series are those of the page that an agent makes. A row says which of them change ten minutes
after the start; the others stay constant.
"""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from kbpf.model.metrics import DataPlaneMetrics, FlowCount, ReasonCount, TableUsage, TrafficStats
from kbpf.model.status import AgentStatus, ModeChoice, PacketStatus, SourceView, ThreadView, VerifiedPart
from kbpf.serve.exposition import format_labels
from kbpf.serve.kbpf_metrics import FAILURES
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from tests.support.build.prometheus import promtool
from tests.support.prometheus import Family
from tests.values.serve.test_metrics import ALL_COUNTERS, CHOICE_COUNTERS, HAD, PROGRAMMING, STATUS, WEB, Counts
from tests.values.serve.test_metrics import page as page_of

RULES = Path(__file__).parents[2] / "manifests" / "monitoring" / "rules.yaml"
NODE = {"job": "kube-proxy", "instance": "node-1:10249"}
BEGINS, ENDS = 10, 60
"""Minutes: when the change of a row begins, and when it is evaluated for the last time."""

WELL = msgspec.structs.replace(
    STATUS,
    problems=(),
    problem_count=0,
    refused=0,
    error="",
    without_endpoints=0,
    config_error="",
    packets=PacketStatus(True),
    sources=tuple(
        SourceView(name, "watching", True, "5", "", 0, 1.5) for name in ("services", "endpointslices", "nodes", "pods")
    ),
    threads=(ThreadView("http", True, 0.1), ThreadView("devices", True, 4.0)),
    verified=(VerifiedPart("maps", 0, 1.5e9), VerifiedPart("connections", 0, 1.6e9)),
    failing_backends=0,
)
PLANE = Counts(
    DataPlaneMetrics(
        tables=(
            TableUsage("services", 1000, 16_384, 262_144, 4096),
            TableUsage("flows", 2640, 3000, None, 4096),  # closed connections
            TableUsage("affinity", 65_536, 65_536, None, 4096),
        ),
        reason_counts=(
            ReasonCount("no_route", "drop", 0),
            ReasonCount("not_tracked", "drop", 0),
            ReasonCount("invalid", "drop", 0),
            ReasonCount("evicted", "note", 0),
        ),
        hooks=(("connect4", True), ("connect6", True)),
        foreign_programs=0,
        bypassed_chains=0,
    ),
    TrafficStats(
        connections=((WEB, 0),),
        totals=((WEB, HAD._replace(refused=0, unanswered=0)),),
        counted_fields=ALL_COUNTERS,
        flow_count=FlowCount(0, 1000),
    ),
)


def programmed() -> KubeProxyMetrics:
    """The metrics of an agent that has synced."""
    record = KubeProxyMetrics(lambda: 1000.0)
    record.record_sync(0.001, full=True)
    for _ in range(100):
        record.record_programming(4, 999.9)
    record.record_comparison(0)
    return record


def healthy(plane: Counts = PLANE, status: AgentStatus = WELL) -> dict[str, Family]:
    return page_of(plane=plane, proxy_metrics=programmed(), status=status)


class Row(NamedTuple):
    """`change`: series, by name and some labels, and their values in promtool's notation: `a+bxn`
    starts at a and grows by b in each of n minutes. `fires`: the alert; `says`: its summary without
    the node's name; `labels`: its labels in addition to the node's. `status`: the agent's, from the
    start. `more`: series of other nodes. `also`: alerts that fire as well. `of_job`: the alert is
    about all nodes of the job. `ends`: the minute of the last evaluation.
    """

    name: str
    change: Mapping[str, str]
    fires: str = ""
    says: str = ""
    labels: Mapping[str, str] = {}
    status: AgentStatus = WELL
    more: Mapping[str, str] = {}
    also: tuple[str, ...] = ()
    of_job: bool = False
    ends: int = ENDS


def of_node(number: int, name: str, **labels: str) -> str:
    """A series of another node."""
    all_labels = {"job": NODE["job"], "instance": f"node-{number}:10249", **labels}
    return name + format_labels(**all_labels)


def with_mode(requested: str, mode: str, reason: str = "") -> AgentStatus:
    choice = ModeChoice(requested, mode, reason, reason)
    return msgspec.structs.replace(WELL, mode=mode, choice=choice)


GROWS = "0+60x60"
"""A counter that grows by one per second."""
SERVICE = {"namespace": "a", "service": "web", "port": "http"}
ROWS = [
    Row(
        "the agent of one node in eleven does not answer",
        {"up": "0x60"},
        "KbpfDown",
        "the agent does not answer",
        more={of_node(n, "up"): "1x70" for n in range(2, 12)},
    ),
    Row(
        "the agents of two nodes in ten do not answer",
        {"up": "0x60"},
        "KbpfDownOnManyNodes",
        "the agent answers on 80% of the nodes only",
        more={of_node(n, "up"): "0x70" if n == 2 else "1x70" for n in range(2, 11)},
        also=("KbpfDown",),
        of_job=True,
    ),
    Row(
        "two versions run for hours",
        {},
        "KbpfVersionSkew",
        "agents of 2 versions run",
        more={of_node(2, "kbpf_build_info", version="10.0"): "1x200"},
        of_job=True,
        ends=180,
    ),
    Row("two versions run during a rollout", {}, more={of_node(2, "kbpf_build_info", version="10.0"): "1x60"}),
    Row(
        "addresses are refused",
        {"kbpf_service_ports_with_refused_addresses": "2x60"},
        "KbpfAddressesRefused",
        "addresses of 2 Service ports are not served",
        of_job=True,
    ),
    Row(
        "changes are not programmed",
        {"kbpf_healthy": "0x60"},
        "KbpfNotProgramming",
        "changes have not been programmed for more than a minute",
    ),
    Row("the kernel rejects changes", {"kbpf_sync_failing": "1x60"}, "KbpfKernelRefuses", "the kernel rejects changes"),
    Row(
        "nothing is programmed", {"kbpf_synced": "0x60"}, "KbpfNotSynced", "nothing has been programmed since the start"
    ),
    Row(
        "a hook is missing",
        {'kbpf_hooks_attached{hook="connect4"}': "0x60"},
        "KbpfHooksMissing",
        "the socket hook connect4 is not attached",
        {"hook": "connect4"},
    ),
    Row(
        "a thread is stuck",
        {'kbpf_thread_up{thread="devices"}': "0x60"},
        "KbpfThreadDown",
        "the agent's thread devices is down",
        {"thread": "devices"},
    ),
    Row(
        "a limit is reached",
        {"kbpf_service_ports_refused": "3x60"},
        "KbpfServicesRefused",
        "3 Service ports are not programmed",
    ),
    Row(
        "the packet path has failed",
        {'kbpf_packet_path{state="failed"}': "1x60", 'kbpf_packet_path{state="on"}': "0x60"},
        "KbpfPacketPathFailed",
        "traffic from outside the node is not load-balanced",
        {"state": "failed"},
    ),
    Row(
        "the packet path is switched off",
        {'kbpf_packet_path{state="off"}': "1x60", 'kbpf_packet_path{state="on"}': "0x60"},
    ),
    Row(
        "devices have no programs",
        {"kbpf_packet_path_failed_devices": "2x60"},
        "KbpfDevicesFailed",
        "2 devices have no programs",
    ),
    Row(
        "a watch is broken",
        {'kbpf_source_watching{source="nodes"}': "0x60"},
        "KbpfWatchBroken",
        "nodes cannot be watched",
        {"source": "nodes"},
    ),
    Row(
        "mode auto uses ipvs",
        {},
        "KbpfFellBackToIpvs",
        "mode auto uses IPVS: kernel",
        {"reason": "kernel"},
        with_mode("auto", "ipvs", "kernel"),
    ),
    Row("mode auto uses bpf", {}, status=with_mode("auto", "bpf")),
    Row(
        "another load balancer",
        {"kbpf_foreign_programs": "2x60"},
        "KbpfForeignPrograms",
        "2 programs of another load balancer, or of another kbpf, are attached",
    ),
    Row(
        "rules of the host are bypassed",
        {"kbpf_bypassed_firewall_chains": "3x60"},
        "KbpfFirewallBypassed",
        "3 chains of the host do not guard NodePorts",
    ),
    Row("problems that last", {"kbpf_problems": "2x60"}, "KbpfProblems", "`kbpf inspect status` lists 2 problems"),
    Row(
        "the configuration is refused",
        {"kbpf_config_last_reload_successful": "0x60"},
        "KbpfConfigurationRefused",
        "the configuration file is rejected",
    ),
    Row("problems that end soon", {"kbpf_problems": "2x20 0x40"}),
    Row("Pods may not be watched", {'kbpf_source_watching{source="pods"}': "0x60"}),
    Row(
        "Services fill their map",
        {'kbpf_map_entries{map="services"}': "220000x60"},
        "KbpfMapNearlyFull",
        "the map services is 83.92% full",
        {"map": "services"},
    ),
    Row("Services fill the current size of a map that can grow", {'kbpf_map_entries{map="services"}': "16384x60"}),
    Row("closed connections fill their map", {'kbpf_map_entries{map="flows"}': "3000x60"}),
    Row("clients with affinity fill their map", {'kbpf_map_entries{map="affinity"}': "65536x60"}),
    Row(
        "open connections near their limit",
        {"kbpf_tracked_connections": "900x60"},
        "KbpfConnectionsNearlyFull",
        "tracked connections are at 90% of their limit",
    ),
    Row("open connections at half of their limit", {"kbpf_tracked_connections": "500x60"}),
    Row(
        "open flows are evicted",
        {'kbpf_decisions_total{reason="evicted"}': GROWS},
        "KbpfConnectionsEvicted",
        "1 UDP flows per second are evicted while in use",
        {"reason": "evicted", "verdict": "note"},
    ),
    Row(
        "packets are dropped",
        {'kbpf_decisions_total{reason="no_route"}': "0+120x60"},
        "KbpfDropsPackets",
        "2 packets per second are dropped: no_route",
        {"reason": "no_route"},
    ),
    Row("packets are of no connection", {'kbpf_decisions_total{reason="invalid"}': "0+120x60"}),
    Row(
        "connections cannot be tracked",
        {'kbpf_decisions_total{reason="not_tracked"}': "0+120x60"},
        "KbpfDropsPackets",
        "2 packets per second are dropped: not_tracked",
        {"reason": "not_tracked"},
    ),
    Row("few packets are dropped", {'kbpf_decisions_total{reason="no_route"}': "0+6x60"}),
    Row(
        "backends refuse",
        {
            'kbpf_service_failures_total{service="web",reason="refused"}': GROWS,
            'kbpf_service_connections_total{service="web"}': "0+300x60",
        },
        "KbpfServiceFails",
        "a/web: at least one in ten connections is not accepted",
        SERVICE,
    ),
    Row(
        "backends do not answer",
        {
            'kbpf_service_failures_total{service="web",reason="unanswered"}': GROWS,
            'kbpf_service_connections_total{service="web"}': "0+300x60",
        },
        "KbpfServiceFails",
        "a/web: at least one in ten connections is not accepted",
        SERVICE,
    ),
    Row(
        "one connection in twenty fails",
        {
            'kbpf_service_failures_total{service="web",reason="unanswered"}': GROWS,
            'kbpf_service_connections_total{service="web"}': "0+1200x60",
        },
    ),
    Row(
        "a backend keeps failing",
        {"kbpf_failing_backends": "2x60"},
        "KbpfBackendFailing",
        "2 backends accept hardly a connection",
    ),
    Row("a backend fails for a while", {"kbpf_failing_backends": "2x5 0x55"}),
    Row(
        "connections are not translated",
        {'kbpf_verify_differences{part="connections"}': "1x60"},
        "KbpfNotTranslating",
        "connections to Services are not translated as programmed",
        {"part": "connections"},
    ),
    Row("a comparison found a difference", {'kbpf_verify_differences{part="maps"}': "1x60"}),
    Row(
        "a health check's port is in use",
        {"kbpf_service_health_checks_failed": "1x60"},
        "KbpfHealthCheckPortTaken",
        "1 Services have no health check",
    ),
    Row(
        "another program changes entries",
        {"kbpf_drift_entries_total": "5x60"},
        "KbpfChangedByOthers",
        "another program has changed what kbpf programmed",
    ),
    Row(
        "endpoints arrive late",
        {
            f'kubeproxy_network_programming_duration_seconds_bucket{{ip_family="IPv4",le="{le}"}}': "100+60x60"
            for le in (*(le for le in PROGRAMMING[:-1] if le >= 30), "+Inf")
        },
        "KbpfProgramsSlowly",
        "endpoint changes take 29.99s to be programmed",
    ),
]


def series(page: Mapping[str, Family], row: Row) -> Iterator[dict[str, str]]:
    """All series of the page in promtool's notation, constant except for the row's change, and
    those of other nodes.
    """
    left = dict(row.change)
    yield from ({"series": name, "values": values} for name, values in row.more.items())
    made = {"up": 1.0}
    for family in page.values():
        for (name, own), value in family.samples.items():
            inside = ",".join(f'{key}="{text}"' for key, text in sorted(own))
            made[f"{name}{{{inside}}}"] = value
    for text, value in made.items():
        name, _, inside = text.partition("{")
        own = set(inside.removesuffix("}").split(","))
        found = [key for key in left if _matches(key, name, own)]
        node = ",".join(f'{key}="{text}"' for key, text in NODE.items())
        labels = f"{{{node}{',' if own - {''} else ''}{inside.removesuffix('}')}}}"
        values = f"{number(value)}x{row.ends}"
        if found:
            values = f"{number(value)}x{BEGINS - 1} {left.pop(found[0])}"
        yield {"series": name + labels, "values": values}
    assert not left, "series that are not on the page"


def _matches(key: str, name: str, own: set[str]) -> bool:
    wanted, _, inside = key.partition("{")
    return wanted == name and set(inside.removesuffix("}").split(",")) - {""} <= own


def number(value: float) -> str:
    """A number in promtool's notation."""
    return f"{value:.15g}"


def rule(name: str) -> dict[str, Any]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    (found,) = [one for group in groups for one in group["rules"] if one["alert"] == name]
    return found


def expected(row: Row) -> dict[str, Any]:
    made = rule(row.fires)
    subject = {"job": NODE["job"]} if row.of_job else NODE
    says = f"{subject['job'] if row.of_job else subject['instance']}: {row.says}"
    return {
        "exp_labels": {**subject, **row.labels, **made["labels"]},
        "exp_annotations": {**made["annotations"], "summary": says},
    }


def firing(minute: int, *names: str) -> dict[str, Any]:
    """promtool's test that exactly these alerts fire at this minute."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names]
    expression = 'group by (alertname) (ALERTS{alertstate="firing"})'
    return {"expr": expression, "eval_time": f"{minute}m", "exp_samples": samples}


def tried(folder: Path, test: Mapping[str, Any]) -> str:
    """promtool's complaint about a test, "" if it passes."""
    written = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [{"interval": "1m", **test}]}
    (folder / "test.yaml").write_text(yaml.safe_dump(written))
    command = [promtool(), "test", "rules", folder / "test.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def test_promtool_accepts_the_rules():
    subprocess.run([promtool(), "check", "rules", RULES], check=True)


@pytest.mark.parametrize("row", [Row("well", {}), *ROWS], ids=lambda row: row.name)
def test_exactly_the_expected_alert_fires(row: Row, tmp_path: Path):
    test: dict[str, Any] = {
        "input_series": list(series(healthy(status=row.status), row)),
        "promql_expr_test": [firing(BEGINS - 1), firing(row.ends, *filter(None, (row.fires, *row.also)))],
    }
    if row.fires:
        test["alert_rule_test"] = [{"eval_time": f"{row.ends}m", "alertname": row.fires, "exp_alerts": [expected(row)]}]
    assert tried(tmp_path, test) == ""


def test_failures_that_the_kernel_does_not_tell_have_no_series():
    """The alert then has no series (docs/observe.md)."""
    counted = msgspec.structs.replace(PLANE.traffic, counted_fields=CHOICE_COUNTERS)
    page = healthy(PLANE._replace(traffic=counted))
    reasons = {dict(own)["reason"] for _, own in page["kbpf_service_failures_total"].samples}
    assert reasons == set(FAILURES) - {"refused", "unanswered", "reset"}


def test_every_alert_has_a_row():
    names = {one["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for one in group["rules"]}
    assert {row.fires for row in ROWS} - {""} == names
