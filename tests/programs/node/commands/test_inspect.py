# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect` of a real data plane."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.model.config import MapSizes
from kbpf.model.status import encode
from tests.programs.node.commands.world import (
    HOOK_NAMES,
    STARTED,
    WORLD,
    Run,
    agent_status,
    boottime,
)
from tests.support.lab.lab import cgroup2, remove_cgroup, until
from tests.support.plane import CGROUP_HOOKS, HOOKS, Site, desired, service


@pytest.fixture
def show(run: Run, written: BpfPlane) -> Callable[..., Any]:
    """The output of `kbpf inspect ... -o json`, parsed; only the items of a list."""

    def call(*arguments: str) -> Any:
        code, out, err = run("inspect", *arguments, "-o", "json")
        assert (code, err) == (0, "")
        document = json.loads(out)
        return document.get("items", document)

    return call


def named(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [row for row in rows if row["name"] == name]
    return found


# ---- services ----------------------------------------------------------------------------------


def test_services_show_frontends_and_backend_counts(show):
    rows = show("services")
    assert [r["name"] for r in rows] == ["dns", "empty", "guarded", "kept", "near", "web", "web6"]
    web = named(rows, "web")
    assert [(f["kind"], f["address"], f["port"]) for f in web["frontends"]] == [
        ("ClusterIP", "10.96.0.1", 80),
        ("ExternalIP", "192.0.2.1", 80),
        ("NodePort", "0.0.0.0", 30080),
    ]
    assert (web["namespace"], web["protocol"], web["family"]) == ("default", "TCP", 4)
    assert (web["backends_cluster"], web["backends_local"]) == (3, None)
    assert named(rows, "dns")["protocol"] == "UDP"
    assert named(rows, "web6")["family"] == 6
    assert named(rows, "kept")["affinity_seconds"] == 600
    assert named(rows, "empty")["backends_cluster"] == 0
    near = named(rows, "near")
    assert (near["internal_policy"], near["external_policy"]) == ("Local", "Cluster")
    assert (near["backends_cluster"], near["backends_local"]) == (2, 1)
    assert [f["restricted"] for f in named(rows, "guarded")["frontends"]] == [False, True]


def test_services_are_filtered_by_namespace(show):
    assert show("services", "-n", "elsewhere") == []
    assert len(show("services", "-n", "default")) == 7


def test_services_table_matches_json(written, run):
    code, out, _ = run("inspect", "services")
    assert code == 0
    lines = {line.split()[1]: line for line in out.splitlines()}
    assert "10.96.0.1:80, 192.0.2.1:80 (ExternalIP), *:30080 (NodePort)" in lines["web"]
    assert "2 (1 local)" in lines["near"]
    assert "Local/Cluster" in lines["near"]
    assert "600s" in lines["kept"]
    assert "[fd00:96::1]:80" in lines["web6"]
    assert len({line.index("TCP") for name, line in lines.items() if name.startswith("web")}) == 1
    assert "CLUSTER-SET" not in out
    assert "CLUSTER-SET" in run("inspect", "services", "-o", "wide")[1]


def test_yaml_matches_json(show, run):
    _, out, _ = run("inspect", "services", "-o", "yaml")
    assert yaml.safe_load(out)["items"] == show("services")


def test_service_shows_its_sets_and_backends(show, run):
    (detail,) = show("service", "near")
    (cluster,), (local,) = detail["cluster"], detail["local"]
    assert {b["address"] for b in cluster["backends"]} == {"10.244.0.1", "10.244.0.9"}
    assert [(b["address"], b["port"]) for b in local["backends"]] == [("10.244.0.1", 8080)]
    assert cluster["id"] != local["id"]
    assert cluster["missing"] == 0
    code, out, _ = run("inspect", "service", "default/near", "-o", "wide")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    (frontend,) = (cells for cells in lines if "ClusterIP" in cells)
    assert frontend[-2:] == [str(cluster["id"]), str(local["id"])]
    shares = {cells[0]: cells[5:7] for cells in lines if cells and ":8080" in cells[0]}
    assert shares == {"10.244.0.1:8080": ["50.0%", "100.0%"], "10.244.0.9:8080": ["50.0%", "0%"]}


def test_unknown_service_error_suggests_similar_names(written, run):
    code, out, err = run("inspect", "service", "wbe")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "default/web" in err


# ---- backends, affinity ------------------------------------------------------------------------


def test_backends_list_their_services(show):
    users = {(b["address"], b["protocol"]): b["services"] for b in show("backends")}
    assert users["10.244.0.1", "TCP"] == ["default/guarded", "default/near", "default/web"]
    assert users["10.244.0.3", "TCP"] == ["default/web"]
    assert users["10.244.0.1", "UDP"] == ["default/dns"]
    assert users["fd00:10::1", "TCP"] == ["default/web6"]


def test_affinity_lists_the_host_after_a_connection(show, site: Site):
    assert show("affinity") == []
    site.place("host").tcp("10.96.0.2", 80)
    (row,) = show("affinity")
    assert (row["client"], row["kind"], row["service"]) == ("host", "netns", "default/kept")
    assert row["backend"] == "127.0.0.1:1"
    assert row["age_seconds"] < 60
    assert 540 < row["expires_seconds"] <= 600
    assert not row["expired"]


# ---- maps, programs ----------------------------------------------------------------------------


def test_maps_show_their_entries(show):
    rows = {row["name"]: row for row in show("maps")}
    assert rows["services"]["entries"] == 10
    assert rows["backend_slots"]["entries"] == 3 + 2 + 1 + 1 + 2 + 1 + 1
    assert rows["affinity"]["type"] == "lru_hash"
    assert (rows["source_ranges"]["entries"], rows["local_networks"]["entries"]) == (0, 0)
    assert {name for name, row in rows.items() if row["entries"] is None} >= {"flow_queue", "node"}
    assert rows["services"]["bytes"] > 0
    assert all(row["purpose"] for row in rows.values())
    assert not any(row["alarm"] for row in rows.values())


def test_nearly_full_map_raises_an_alarm(site: Site, run):
    # The agent may not grow past 5 frontends, of which 4 are used.
    opened = site.open(MapSizes(frontends=5))
    opened.apply(desired(*(service(f"s{i}", f"10.96.0.{i}:80", "10.244.0.1:80") for i in range(1, 5))), None)
    _, out, _ = run("inspect", "maps", "-o", "json")
    alarms = {row["name"] for row in json.loads(out)["items"] if row["alarm"]}
    assert alarms == {"services", "service_names", "cluster_ips"}
    assert "80.0% !" in run("inspect", "maps")[1]


def test_programs_show_hook_and_cgroup(show, site: Site):
    rows = show("programs")
    assert [row["hook"] for row in rows] == HOOK_NAMES
    assert {row["hook"] for row in rows if row["state"] == "attached"} == HOOKS
    assert {row["state"] for row in rows if row["hook"] not in HOOKS} <= {"off"}
    for row in (row for row in rows if row["hook"] in HOOKS):
        if row["hook"] in CGROUP_HOOKS:
            assert row["cgroup"] == str(site.cgroup)
            assert row["cgroup_id"] == site.cgroup.stat().st_ino
        else:
            assert (row["cgroup"], row["cgroup_id"]) == ("", None)
            assert row["tracepoint"]
        assert row["pinned"]
        assert row["instructions"] > 10
        assert len(row["tag"]) == 16


def test_hook_without_a_link_is_shown_as_missing(show, run, site: Site):
    (site.pins / "links" / "connect6").unlink()
    states = {row["hook"]: row["state"] for row in show("programs")}
    assert states.pop("connect6") == "missing"
    assert {hook for hook, state in states.items() if state == "attached"} == HOOKS - {"connect6"}
    code, out, _ = run("inspect", "status")
    assert code == 1
    assert f"{len(HOOKS) - 1} of {len(HOOKS)} attached; missing: connect6" in out


def test_hooks_of_a_removed_cgroup_are_shown_as_detached(site: Site, run):
    other = cgroup2() / f"{site.name}-other"
    other.mkdir()
    opened = site.plane(cgroup=other)
    opened.open()
    opened.apply(WORLD, None)
    remove_cgroup(other)

    def are_detached() -> bool:
        _, out, _ = run("inspect", "programs", "-o", "json")
        rows = json.loads(out)["items"]
        return {row["hook"] for row in rows if row["state"] == "detached"} == CGROUP_HOOKS

    until("the kernel has released the cgroup and detached them", are_detached)


# ---- status ------------------------------------------------------------------------------------


def test_status_of_a_healthy_agent_exits_with_0(written, run):
    code, out, _ = run("inspect", "status", "-o", "json")
    seen = json.loads(out)
    assert code == 0
    assert (seen["ok"], seen["running"], seen["synced"], seen["node"]) == (True, True, True, "n1")
    assert (seen["hooks_attached"], seen["hooks"]) == (len(HOOKS), len(HOOKS))
    assert seen["sources"][0]["state"] == "watching"
    assert 0 <= seen["running_seconds"] <= boottime() - STARTED + 0.1  # it is rounded
    code, out, _ = run("inspect", "status")
    assert code == 0
    assert "no good" in out
    assert f"{len(HOOKS)} of {len(HOOKS)} attached" in out


def test_status_shows_the_programs_counters(written, run, site: Site):
    site.place("host").tcp("10.96.0.4", 80)
    site.place("host").tcp("10.96.0.4", 80)
    counters = json.loads(run("inspect", "status", "-o", "json")[1])["counters"]
    assert counters["no_endpoints"] == 2
    assert counters["translated"] == 0


@pytest.mark.parametrize(
    "said",
    [
        {"heartbeat": boottime() - 11},
        {"pid": 1 << 22},  # above the highest process id
        {"synced": False},
        {"refused": 2},
        {"error": "cannot write"},
    ],
    ids=["heartbeat too old", "process gone", "not synced", "refused", "not written"],
)
def test_status_of_an_unhealthy_agent_exits_with_1(written, run, said: dict[str, Any]):
    written.write_status(encode(agent_status(**said)))
    code, out, err = run("inspect", "status")
    assert (code, err) == (1, "")
    assert "hooks" in out
    assert ("2 of them NOT PROGRAMMED" in out) == ("refused" in said)
    assert said.get("error", "") in out


def test_status_without_an_agents_status_exits_with_1(site: Site, run):
    site.open().apply(WORLD, None)
    code, out, _ = run("inspect", "status")
    assert code == 1
    assert "no status" in out


def test_missing_pins_and_pins_of_another_version_have_different_errors(site: Site, run):
    code, _, err = run("inspect", "services")
    assert code == 1
    assert "no such folder" in err
    (site.pins / "maps-0123456789ab").mkdir(parents=True)
    code, _, err = run("inspect", "services")
    assert code == 1
    assert "another version" in err
