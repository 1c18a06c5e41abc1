# SPDX-License-Identifier: Apache-2.0
"""Each alert of manifests/monitoring/rules.yaml, tested with promtool: on a healthy node none
fires; on its condition exactly that one fires, with the summary of the row.

The series are those of the page that an agent makes. A row says which of them change ten minutes
after the start; the others stay constant.
"""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kbpf.model.metrics import FlowCount, TrafficStats
from kbpf.model.status import AgentStatus, ModeChoice
from kbpf.serve.exposition import format_labels
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from tests.support.build.prometheus import promtool
from tests.support.prometheus import Family
from tests.values.serve.test_metrics import ALL_COUNTERS, HAD, STATUS, WEB, Counts, measured
from tests.values.serve.test_metrics import page as page_of
from tests.values.views.snapshots import agent

RULES = Path(__file__).parents[2] / "manifests" / "monitoring" / "rules.yaml"
NODE = {"job": "kube-proxy", "instance": "node-1:10249"}
BEGINS, ENDS = 10, 60
"""Minutes: when the change of a row begins, and when it is evaluated for the last time."""

WELL = agent(
    """
problem_count: 0
refused: 0
error: ''
without_endpoints: 0
packets: {enabled: true}
sources:
- {name: services, state: watching, synced: true, resource_version: '5', error: '', silent_seconds: 1.5}
- {name: endpointslices, state: watching, synced: true, resource_version: '5', error: '', silent_seconds: 1.5}
- {name: nodes, state: watching, synced: true, resource_version: '5', error: '', silent_seconds: 1.5}
- {name: pods, state: watching, synced: true, resource_version: '5', error: '', silent_seconds: 1.5}
threads:
- {name: http, alive: true, idle_seconds: 0.1}
- {name: devices, alive: true, idle_seconds: 4.0}
verified:
- {name: maps, differences: 0, timestamp: 1500000000.0}
- {name: connections, differences: 0, timestamp: 1600000000.0}
failing_backends: 0
""",
    STATUS,
)
PLANE = Counts(
    measured("""
tables:
- [services, 1000, 16384, 262144, 4096]
- [flows, 2640, 3000, null, 4096]  # closed connections
- [affinity, 65536, 65536, null, 4096]
reason_counts: [[no_route, drop, 0], [not_tracked, drop, 0], [invalid, drop, 0], [evicted, note, 0]]
hooks: [[connect4, true], [connect6, true]]
foreign_programs: 0
bypassed_chains: 0
"""),
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


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """`change`: series, by name and some labels, and their values in promtool's notation: `a+bxn`
    starts at a and grows by b in each of n minutes. `fires`: the alert; `says`: its summary without
    the node's name; `labels`: its labels in addition to the node's. `mode`: the requested mode, the
    one that runs, and why. `others`: series of other nodes. `also`: alerts that fire as well. `of_job`:
    the alert is about all nodes of the job. `ends`: the minute of the last evaluation.
    """

    change: dict[str, str] = {}
    fires: str = ""
    says: str = ""
    labels: dict[str, str] = {}
    mode: str = ""
    others: dict[str, str] = {}
    also: tuple[str, ...] = ()
    of_job: bool = False
    ends: int = ENDS

    def status(self) -> AgentStatus:
        if not self.mode:
            return WELL
        requested, mode, *reason = self.mode.split()
        choice = ModeChoice(requested, mode, *(reason or [""]) * 2)
        return msgspec.structs.replace(WELL, mode=mode, choice=choice)


def of_node(number: int, name: str, **labels: str) -> str:
    """A series of another node."""
    all_labels = {"job": NODE["job"], "instance": f"node-{number}:10249", **labels}
    return name + format_labels(**all_labels)


MADE = {
    "well": Row(),
    "the agent of one node in eleven does not answer": Row(
        {"up": "0x60"},
        "KbpfDown",
        "the agent does not answer",
        others={of_node(n, "up"): "1x70" for n in range(2, 12)},
    ),
    "the agents of two nodes in ten do not answer": Row(
        {"up": "0x60"},
        "KbpfDownOnManyNodes",
        "the agent answers on 80% of the nodes only",
        others={of_node(n, "up"): "0x70" if n == 2 else "1x70" for n in range(2, 11)},
        also=("KbpfDown",),
        of_job=True,
    ),
    "endpoints arrive late": Row(
        {
            f'kubeproxy_network_programming_duration_seconds_bucket{{ip_family="IPv4",le="{le}"}}': "100+60x60"
            for le in (*range(30, 60), *range(60, 120, 5), *range(120, 301, 30), "+Inf")
        },
        "KbpfProgramsSlowly",
        "endpoint changes take 29.99s to be programmed",
    ),
}
TEXT = """
two versions run for hours:
  others: {'kbpf_build_info{job="kube-proxy",instance="node-2:10249",version="10.0"}': 1x200}
  fires: KbpfVersionSkew
  says: agents of 2 versions run
  of_job: true
  ends: 180
two versions run during a rollout:
  others: {'kbpf_build_info{job="kube-proxy",instance="node-2:10249",version="10.0"}': 1x60}
addresses are refused:
  change: {kbpf_service_ports_with_refused_addresses: 2x60}
  fires: KbpfAddressesRefused
  says: addresses of 2 Service ports are not served
  of_job: true
changes are not programmed:
  change: {kbpf_healthy: '0x60'}
  fires: KbpfNotProgramming
  says: changes have not been programmed for more than a minute
the kernel rejects changes:
  change: {kbpf_sync_failing: 1x60}
  fires: KbpfKernelRefuses
  says: the kernel rejects changes
nothing is programmed:
  change: {kbpf_synced: '0x60'}
  fires: KbpfNotSynced
  says: nothing has been programmed since the start
a hook is missing:
  change: {'kbpf_hooks_attached{hook="connect4"}': '0x60'}
  fires: KbpfHooksMissing
  says: the socket hook connect4 is not attached
  labels: {hook: connect4}
a thread is stuck:
  change: {'kbpf_thread_up{thread="devices"}': '0x60'}
  fires: KbpfThreadDown
  says: "the agent's thread devices is down"
  labels: {thread: devices}
a limit is reached:
  change: {kbpf_service_ports_refused: 3x60}
  fires: KbpfServicesRefused
  says: 3 Service ports are not programmed
the packet path has failed:
  change: {'kbpf_packet_path{state="failed"}': 1x60, 'kbpf_packet_path{state="on"}': '0x60'}
  fires: KbpfPacketPathFailed
  says: traffic from outside the node is not load-balanced
  labels: {state: failed}
the packet path is switched off:
  change: {'kbpf_packet_path{state="off"}': 1x60, 'kbpf_packet_path{state="on"}': '0x60'}
devices have no programs:
  change: {kbpf_packet_path_failed_devices: 2x60}
  fires: KbpfDevicesFailed
  says: 2 devices have no programs
a watch is broken:
  change: {'kbpf_source_watching{source="nodes"}': '0x60'}
  fires: KbpfWatchBroken
  says: nodes cannot be watched
  labels: {source: nodes}
mode auto uses ipvs:
  mode: auto ipvs kernel
  fires: KbpfFellBackToIpvs
  says: 'mode auto uses IPVS: kernel'
  labels: {reason: kernel}
mode auto uses bpf:
  mode: auto bpf
another load balancer:
  change: {kbpf_foreign_programs: 2x60}
  fires: KbpfForeignPrograms
  says: '2 programs of another load balancer, or of another kbpf, are attached'
rules of the host are bypassed:
  change: {kbpf_bypassed_firewall_chains: 3x60}
  fires: KbpfFirewallBypassed
  says: 3 chains of the host do not guard NodePorts
problems that last:
  change: {kbpf_problems: 2x60}
  fires: KbpfProblems
  says: '`kbpf inspect status` lists 2 problems'
the configuration is refused:
  change: {kbpf_config_last_reload_successful: '0x60'}
  fires: KbpfConfigurationRefused
  says: the configuration file is rejected
problems that end soon:
  change: {kbpf_problems: 2x20 0x40}
Pods may not be watched:
  change: {'kbpf_source_watching{source="pods"}': '0x60'}
Services fill their map:
  change: {'kbpf_map_entries{map="services"}': 220000x60}
  fires: KbpfMapNearlyFull
  says: 'the map services is 83.92% full'
  labels: {map: services}
Services fill the current size of a map that can grow:
  change: {'kbpf_map_entries{map="services"}': 16384x60}
closed connections fill their map:
  change: {'kbpf_map_entries{map="flows"}': 3000x60}
clients with affinity fill their map:
  change: {'kbpf_map_entries{map="affinity"}': 65536x60}
open connections near their limit:
  change: {kbpf_tracked_connections: 900x60}
  fires: KbpfConnectionsNearlyFull
  says: 'tracked connections are at 90% of their limit'
open connections at half of their limit:
  change: {kbpf_tracked_connections: 500x60}
open flows are evicted:
  change: {'kbpf_decisions_total{reason="evicted"}': 0+60x60}
  fires: KbpfConnectionsEvicted
  says: 1 UDP flows per second are evicted while in use
  labels: {reason: evicted, verdict: note}
packets are dropped:
  change: {'kbpf_decisions_total{reason="no_route"}': 0+120x60}
  fires: KbpfDropsPackets
  says: '2 packets per second are dropped: no_route'
  labels: {reason: no_route}
packets are of no connection:
  change: {'kbpf_decisions_total{reason="invalid"}': 0+120x60}
connections cannot be tracked:
  change: {'kbpf_decisions_total{reason="not_tracked"}': 0+120x60}
  fires: KbpfDropsPackets
  says: '2 packets per second are dropped: not_tracked'
  labels: {reason: not_tracked}
few packets are dropped:
  change: {'kbpf_decisions_total{reason="no_route"}': 0+6x60}
backends refuse:
  change:
    'kbpf_service_failures_total{service="web",reason="refused"}': 0+60x60
    'kbpf_service_connections_total{service="web"}': 0+300x60
  fires: KbpfServiceFails
  says: 'a/web: at least one in ten connections is not accepted'
  labels: {namespace: a, service: web, port: http}
backends do not answer:
  change:
    'kbpf_service_failures_total{service="web",reason="unanswered"}': 0+60x60
    'kbpf_service_connections_total{service="web"}': 0+300x60
  fires: KbpfServiceFails
  says: 'a/web: at least one in ten connections is not accepted'
  labels: {namespace: a, service: web, port: http}
one connection in twenty fails:
  change:
    'kbpf_service_failures_total{service="web",reason="unanswered"}': 0+60x60
    'kbpf_service_connections_total{service="web"}': 0+1200x60
a backend keeps failing:
  change: {kbpf_failing_backends: 2x60}
  fires: KbpfBackendFailing
  says: 2 backends accept hardly a connection
a backend fails for a while:
  change: {kbpf_failing_backends: 2x5 0x55}
connections are not translated:
  change: {'kbpf_verify_differences{part="connections"}': 1x60}
  fires: KbpfNotTranslating
  says: connections to Services are not translated as programmed
  labels: {part: connections}
a comparison found a difference:
  change: {'kbpf_verify_differences{part="maps"}': 1x60}
a health check's port is in use:
  change: {kbpf_service_health_checks_failed: 1x60}
  fires: KbpfHealthCheckPortTaken
  says: 1 Services have no health check
another program changes entries:
  change: {kbpf_drift_entries_total: 5x60}
  fires: KbpfChangedByOthers
  says: another program has changed what kbpf programmed
"""
ROWS = MADE | msgspec.convert(yaml.safe_load(TEXT), dict[str, Row])


def series(page: Mapping[str, Family], row: Row) -> Iterator[dict[str, str]]:
    """All series of the page in promtool's notation, constant except for the row's change, and
    those of other nodes.
    """
    left = dict(row.change)
    yield from ({"series": name, "values": values} for name, values in row.others.items())
    samples = {("up", frozenset()): 1.0}
    for family in page.values():
        samples |= family.samples
    for (name, own), value in samples.items():
        labels = {f'{key}="{text}"' for key, text in own}
        node = {f'{key}="{text}"' for key, text in NODE.items()}
        values = f"{value:.15g}x{row.ends}"
        for key in [key for key in left if _matches(key, name, labels)]:
            values = f"{value:.15g}x{BEGINS - 1} {left.pop(key)}"
        yield {"series": f"{name}{{{','.join(sorted(labels | node))}}}", "values": values}
    assert not left, "series that are not on the page"


def _matches(key: str, name: str, labels: set[str]) -> bool:
    wanted, _, inside = key.partition("{")
    return wanted == name and set(inside.removesuffix("}").split(",")) - {""} <= labels


def rules() -> list[dict[str, Any]]:
    return [one for group in yaml.safe_load(RULES.read_text())["groups"] for one in group["rules"]]


def expected(row: Row) -> dict[str, Any]:
    (made,) = (one for one in rules() if one["alert"] == row.fires)
    subject = {"job": NODE["job"]} if row.of_job else NODE
    says = f"{subject.get('instance', subject['job'])}: {row.says}"
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


@pytest.mark.parametrize("name", ROWS)
def test_exactly_the_expected_alert_fires(name: str, tmp_path):
    row = ROWS[name]
    test: dict[str, Any] = {
        "input_series": list(series(healthy(status=row.status()), row)),
        "promql_expr_test": [firing(BEGINS - 1), firing(row.ends, *filter(None, (row.fires, *row.also)))],
    }
    if row.fires:
        test["alert_rule_test"] = [{"eval_time": f"{row.ends}m", "alertname": row.fires, "exp_alerts": [expected(row)]}]
    assert tried(tmp_path, test) == ""


def test_every_alert_has_a_row():
    names = {one["alert"] for one in rules()}
    assert {row.fires for row in ROWS.values()} - {""} == names
