# SPDX-License-Identifier: Apache-2.0
"""inspect, check and cleanup of a real data plane: maps that BpfPlane wrote, hooks that it attached
and sockets that connected. All through the command line, in this process.
"""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import yaml

from kbpf.cli import app
from kbpf.dataplane.bpf.hooks import HOOKS as ALL_HOOKS
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.kernel.bpf import probe
from kbpf.kernel.bpf.objects import Link, Map
from kbpf.kernel.bpf.uapi import (
    BPF_PROG_TYPE_SCHED_CLS,
)
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import netns
from kbpf.model.config import MapSizes
from kbpf.model.objects import Protocol
from kbpf.model.status import AgentStatus, SourceView, encode
from tests.support.lab.lab import cgroup2, remove_cgroup, until
from tests.support.plane import HOOKS, Site, desired, service

UDP = Protocol.UDP
HOOK_NAMES = [hook.name for hook in ALL_HOOKS]


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def agent_status(**more: Any) -> AgentStatus:
    """The status that a healthy agent with this process' id writes, with the fields
    `more` changed.
    """
    said: dict[str, Any] = {
        "version": "9.9", "pid": os.getpid(), "mode": "bpf", "node": "n1",
        "started": boottime() - 60, "heartbeat": boottime(), "synced": True, "services": 3,
        "service_ports": 4, "applied": 5, "last_apply_ms": 1.5, "event_to_map_p50_ms": 2.0,
        "event_to_map_p99_ms": 3.0, "sources": (SourceView("Service", "watching", True, "7", ""),),
        "problems": ("Service a/b: no good",), "problem_count": 1,
    }  # fmt: skip
    return AgentStatus(**{**said, **more})


WORLD = desired(
    service("web", "10.96.0.1:80 NodePort=0.0.0.0:30080 ExternalIP=192.0.2.1:80",
            "10.244.0.1:8080 10.244.0.2:8080 10.244.0.3:8080"),
    service("dns", "10.96.0.1:53", "10.244.0.1:5353 10.244.0.2:5353", UDP),
    service("web6", "[fd00:96::1]:80", "[fd00:10::1]:8080"),
    service("kept", "10.96.0.2:80", "127.0.0.1:1", affinity_timeout=600),
    service("near", "10.96.0.3:80", "10.244.0.1:8080 10.244.0.9:8080", local="10.244.0.1:8080",
            internal_local=True),
    service("empty", "10.96.0.4:80"),
    service("guarded", "10.96.0.5:80 LoadBalancer=192.0.2.5:80", "10.244.0.1:8080",
            restricted=True),
    nodes="192.0.2.100",
)  # fmt: skip


@pytest.fixture
def written(site: Site) -> BpfPlane:
    """A data plane to which WORLD was applied."""
    opened = site.open()
    opened.apply(WORLD, None)
    opened.write_status(encode(agent_status()))
    return opened


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(site: Site, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command on the site's pin folder; returns exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = app.call([*arguments, "--pin-dir", str(site.pins)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def show(run: Run, written: BpfPlane) -> Callable[..., Any]:
    """The output of `kbpf inspect ... -o json`, parsed."""

    def call(*arguments: str) -> Any:
        code, out, err = run("inspect", *arguments, "-o", "json")
        assert (code, err) == (0, "")
        return json.loads(out)

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
    assert yaml.safe_load(out) == show("services")


def test_service_shows_its_sets_and_backends(show, run):
    (detail,) = show("service", "near")
    (cluster,), (local,) = detail["cluster"], detail["local"]
    assert {b["address"] for b in cluster["backends"]} == {"10.244.0.1", "10.244.0.9"}
    assert [(b["address"], b["port"]) for b in local["backends"]] == [("10.244.0.1", 8080)]
    assert cluster["id"] != local["id"]
    assert cluster["missing"] == 0
    code, out, _ = run("inspect", "service", "default/near")
    assert code == 0
    assert f"cluster set {cluster['id']}: 2 backends" in out
    assert "10.244.0.9:8080" in out


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
    opened.apply(
        desired(*(service(f"s{i}", f"10.96.0.{i}:80", "10.244.0.1:80") for i in range(1, 5))), None
    )
    _, out, _ = run("inspect", "maps", "-o", "json")
    alarms = {row["name"] for row in json.loads(out) if row["alarm"]}
    assert alarms == {"services", "service_names", "cluster_ips"}
    assert "80.0% !" in run("inspect", "maps")[1]


def test_programs_show_hook_and_cgroup(show, site: Site):
    rows = show("programs")
    assert [row["hook"] for row in rows] == HOOK_NAMES
    assert {row["hook"] for row in rows if row["state"] == "attached"} == HOOKS
    assert {row["state"] for row in rows if row["hook"] not in HOOKS} <= {"off"}
    for row in (row for row in rows if row["hook"] in HOOKS):
        assert row["cgroup"] == str(site.cgroup)
        assert row["cgroup_id"] == site.cgroup.stat().st_ino
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
        return {r["hook"] for r in json.loads(out) if r["state"] == "detached"} == HOOKS

    until("the kernel has released the cgroup and detached them", are_detached)


# ---- status ------------------------------------------------------------------------------------


def test_status_of_a_healthy_agent_exits_with_0(written, run):
    code, out, _ = run("inspect", "status", "-o", "json")
    seen = json.loads(out)
    assert code == 0
    assert (seen["ok"], seen["running"], seen["synced"], seen["node"]) == (True, True, True, "n1")
    assert (seen["hooks_attached"], seen["hooks"]) == (len(HOOKS), len(HOOKS))
    assert seen["sources"][0]["state"] == "watching"
    assert 60 <= seen["running_seconds"] < 600
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


# ---- check -------------------------------------------------------------------------------------


def test_check_finds_this_machine_usable_and_leaves_nothing(site: Site, run):
    code, out, _ = run("check", "-o", "json", "--cgroup", str(site.cgroup))
    made = json.loads(out)
    results = {row["name"]: row["result"] for row in made["rows"]}
    assert (code, made["usable"], made["mode"], made["attached"]) == (0, True, "bpf", None)
    assert results["hook connect4"] == results["cgroup links"] == "yes"
    assert {f"hook {name}" for name in HOOK_NAMES} <= results.keys()
    assert (results["TC programs"], results["bpf_redirect_neigh"]) == ("yes", "yes")
    assert made["packet_path"]
    # Other tests on this machine create and remove cgroups of their own meanwhile.
    assert not list(cgroup2().glob(f"kbpf-check-{os.getpid()}*"))
    assert not [path for path in site.cgroup.iterdir() if path.is_dir()]
    assert not site.pins.exists()


def test_probe_tells_a_missing_helper_from_wrong_arguments():
    """bpf_redirect_neigh takes four arguments, and the verifier checks each."""
    assert probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, 152, 1, 0, 0, 0).works
    assert probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, 152, 1) == Probe(False, "EACCES")
    assert probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, 9999, 1, 0, 0, 0) == Probe(
        False, "EINVAL"
    )


def test_check_uses_the_ports_of_the_running_agent(site: Site, run):
    site.open(packet_path=True, masquerade_ports=(40_000, 40_009)).apply(desired(), None)
    _, out, _ = run("check", "-o", "json", "--cgroup", str(site.cgroup))
    (row,) = [r for r in json.loads(out)["rows"] if r["name"] == "masquerade ports"]
    assert row["detail"].startswith("40000 to 40009: ")


def test_check_without_cgroup_v2_exits_with_1_and_advice(site: Site, run, tmp_path: Path):
    code, out, _ = run("check", "--cgroup", str(tmp_path))
    assert code == 1
    assert "mode bpf cannot be used: cgroup v2" in out
    assert "--cgroup" in out


def test_check_attached_proves_translation_without_connecting_to_the_backend(site: Site, run):
    with socket.create_server(("127.0.0.9", 0)) as backend:
        backend.setblocking(False)
        port = backend.getsockname()[1]
        site.open().apply(desired(service("web", "10.96.0.1:80", f"127.0.0.9:{port}")), None)
        code, out, _ = run("check", "--attached")
        assert code == 0
        assert f"arrived at 127.0.0.9 port {port}" in out
        with pytest.raises(BlockingIOError):
            backend.accept()


def test_check_attached_dials_every_family_and_protocol(written, run, site: Site):
    written.apply(
        desired(
            *WORLD.services.values(),
            service("dns6", "[fd00:96::1]:53", "[fd00:10::1]:53", UDP),
        ),
        None,
    )
    code, out, err = run("check", "--attached", "-o", "json")
    made = json.loads(out)
    rows = {row["name"]: row for row in made["rows"]}
    assert (code, made["attached"], err) == (0, True, "")
    # The smallest set. That of `kept` is as small and comes first, but has affinity.
    assert rows["dial 10.96.0.3:80/TCP"]["detail"] == "arrived at 10.244.0.1 port 8080"
    assert rows["dial 10.96.0.1:53/UDP"]["detail"].endswith("port 5353")
    assert rows["dial [fd00:96::1]:80/TCP"]["detail"] == "arrived at fd00:10::1 port 8080"
    assert rows["dial [fd00:96::1]:53/UDP"]["result"] == "yes"
    assert not [path for path in site.cgroup.iterdir() if path.is_dir()]


def test_check_attached_fails_without_a_hook(written, run, site: Site):
    (site.pins / "links" / "connect4").unlink()
    code, out, _ = run("check", "--attached", "-o", "json")
    made = json.loads(out)
    assert (code, made["usable"], made["attached"]) == (1, True, False)


def test_check_attached_fails_when_programs_do_not_translate(written, run, site: Site):
    # As if the programs were broken: the slots that they read lead to no backend.
    with site.pinned("services") as services:
        hidden = dict(services.items())
        with site.pinned("backend_slots") as slots:
            for key, _ in list(slots.items()):
                slots.replace(key, bytes(4))
    assert hidden
    code, out, _ = run("check", "--attached", "-o", "json")
    assert (code, json.loads(out)["attached"]) == (1, False)


def test_check_attached_without_a_service_proves_nothing(site: Site, run):
    site.open().apply(desired(), None)
    code, out, _ = run("check", "--attached")
    assert code == 1
    assert "no ClusterIP with backends" in out
    assert "not proven" in out


# ---- cleanup -----------------------------------------------------------------------------------


def test_cleanup_removes_and_lists_everything(site: Site, run):
    opened = site.open()
    opened.apply(WORLD, None)
    opened.close()
    code, out, err = run("cleanup", "-o", "json")
    removed = json.loads(out)
    assert (code, err) == (0, "")
    assert [Path(r["path"]).name for r in removed if r["kind"] == "attachment"] == sorted(HOOKS)
    assert {"maps", "programs", "folder"} <= {r["kind"] for r in removed}
    assert not site.pins.exists()
    code, out, _ = run("cleanup")
    assert code == 0
    assert "nothing to remove" in out


def test_after_cleanup_nothing_is_translated(site: Site, run):
    own = str(ip_address("127.64.0.0") + os.getpid())  # other runs use other addresses
    site.place("server").serve(18081, address=own)
    opened = site.open()
    opened.apply(desired(service("web", f"{own}:18080", f"{own}:18081")), None)
    host = site.place("host")
    assert host.tcp(own, 18080)["name"] == "server"
    opened.close()
    assert run("cleanup")[0] == 0
    assert host.tcp(own, 18080)["error"] == "ECONNREFUSED"


def test_cleanup_keep_connections_translates_only_established_ones(site: Site, run):
    own = str(ip_address("127.64.0.0") + os.getpid())
    site.place("server").serve(18081, address=own)
    opened = site.open()
    opened.apply(desired(service("web", f"{own}:18080", f"{own}:18081")), None)
    host = site.place("host")
    assert host.tcp(own, 18080, keep="held")["name"] == "server"
    before = site.entries("sock_peers")
    code, out, err = run("cleanup", "--keep-connections")
    assert (code, out) == (1, ""), "a running agent would restore it"
    assert "stop the agent first" in err
    opened.close()
    code, out, err = run("cleanup", "--keep-connections", "-o", "json")
    assert (code, err) == (0, "")
    assert json.loads(out) == [{"kind": "frontends", "path": f"1 in {site.pins}"}]
    assert host.tcp(own, 18080)["error"] == "ECONNREFUSED", "by the host: no process listens there"
    assert host.tcp(own, 18081)["name"] == "server", "another port of the former ClusterIP"
    assert host.ask("talk", keep="held")["name"] == "server"
    assert site.entries("sock_peers") == before
    assert site.dump()["frontends"] == {}
    assert run("cleanup", "--keep-connections")[1].startswith("nothing to remove")
    assert run("cleanup")[0] == 0


def test_cleanup_refuses_contradicting_options(run):
    code, out, err = run("cleanup", "--kube-proxy", "--keep-connections")
    assert (code, out) == (1, "")
    assert "cannot be combined" in err


def test_cleanup_refuses_foreign_pins(site: Site, run):
    opened = site.open()
    opened.apply(WORLD, None)
    opened.close()
    (site.pins / "cilium").mkdir()
    code, out, err = run("cleanup")
    assert (code, out) == (1, "")
    assert "cilium" in err
    assert (site.pins / "links" / "connect4").exists()


UNFINISHED = (
    "new-maps-0123456789ab",
    "new-programs-sock-a-all",
    "old-programs-tc-a-all-0",
    "layout-0123456789ab",
    "programs-tc-b-all",
)


def test_cleanup_removes_partial_state_of_a_killed_agent(site: Site, run):
    """One of them: after the new programs took their name and before the old ones were removed."""
    opened = site.open()
    opened.apply(WORLD, None)
    opened.close()
    for name in UNFINISHED:
        (site.pins / name).mkdir()
    with Map.open(next(site.pins.glob("maps-*")) / "config") as held:
        held.pin(site.pins / "new-map-config")
    with Link.open(site.pins / "links" / "connect4") as link:
        link.pin(site.pins / "new-link-connect4")
    code, out, err = run("cleanup", "-o", "json")
    assert (code, err) == (0, "")
    told = {Path(row["path"]).name for row in json.loads(out)}
    assert told >= {*UNFINISHED, "new-map-config", "new-link-connect4"}
    assert not site.pins.exists()


def test_cleanup_refuses_a_folder_outside_a_bpffs(tmp_path: Path, capsys):
    (tmp_path / "links").mkdir()
    assert app.call(["cleanup", "--pin-dir", str(tmp_path)]) == 1
    assert "no bpffs" in capsys.readouterr().err
    assert (tmp_path / "links").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("services", "-n", "nope"), "No resources found in nope namespace.\n"),
        (("services", "-n", "nope", "-o", "wide"), "No resources found in nope namespace.\n"),
        (("services", "-n", "nope", "-o", "json"), ""),
        (("affinity",), "No resources found.\n"),
        (("services",), ""),
    ],
)
def test_empty_results_print_what_kubectl_prints(written, run, words, said):
    code, _, err = run("inspect", *words)
    assert (code, err) == (0, said)


def test_cleanup_with_a_running_agent_needs_force(written, run, site: Site):
    code, out, err = run("cleanup")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "stop the agent first, or use --force" in err
    assert (site.pins / "links" / "connect4").exists()
    code, out, err = run("cleanup", "--force")
    assert code == 0
    assert "attachment" in out
    assert f"pid {os.getpid()}" in err
    assert not site.pins.exists()


def test_cleanup_after_a_killed_agent_needs_no_force(written, run, site: Site):
    site.close_planes()
    code, _, err = run("cleanup")
    assert (code, err) == (0, "")
    assert not site.pins.exists()


def test_cleanup_unmounts_the_bpffs_of_the_pin_folder(run, site: Site, tmp_path: Path):
    pins = tmp_path / "pins"
    site.pins, ours = pins, site.pins
    try:
        site.open().apply(WORLD, None)
        assert {"maps.debug", "progs.debug"} <= {path.name for path in pins.iterdir()}
        site.close_planes()
        code, out, err = run("cleanup", "-o", "json")
        assert (code, err) == (0, "")
        removed = [(row["kind"], row["path"]) for row in json.loads(out)]
        assert removed[-2:] == [("bpffs", str(pins)), ("folder", str(pins))]
        assert not any("debug" in path for _, path in removed)
        assert not pins.exists()
        assert run("cleanup")[1].startswith("nothing to remove")
    finally:
        site.pins = ours
        subprocess.run(["umount", "-q", pins], check=False)


def test_cleanup_cache_leaves_other_files(site: Site, run, artifact_cache, tmp_path: Path):
    site.open().close()
    cache = tmp_path / "cache"
    shutil.copytree(artifact_cache, cache)
    (cache / "notes.txt").write_text("mine")
    code, out, _ = run("cleanup", "--cache", "--cache-dir", str(cache))
    assert code == 0
    assert "artifact" in out
    assert [path.name for path in cache.iterdir()] == ["notes.txt"]


# ---- compile -----------------------------------------------------------------------------------


def test_compile_command_compiles_once(tmp_path: Path, capsys):
    def compiled(*more: str) -> dict[str, Any]:
        assert app.call(["compile", "--cache-dir", str(tmp_path), "-o", "json", *more]) == 0
        return {made["unit"]: made for made in json.loads(capsys.readouterr().out)}

    first = compiled()
    assert first.keys() == {"sock", "tc"}
    assert all(made["compiled"] for made in first.values())
    assert first["sock"]["programs"] == len(HOOK_NAMES)
    assert all(Path(m["path"]).stat().st_size == m["bytes"] for m in first.values())
    assert not any(made["compiled"] for made in compiled().values())
    assert all(made["compiled"] for made in compiled("--force").values())


def test_compile_into_an_impossible_folder_exits_with_1(capsys):
    assert app.call(["compile", "--cache-dir", "/proc/nowhere"]) == 1
    assert "/proc/nowhere" in capsys.readouterr().err


def test_config_holds_the_netns_cookie_of_the_host(written, site: Site):
    """The views above show it as `host` because of this cookie."""
    raw = site.entries("config")[bytes(4)]
    assert int.from_bytes(raw[:8], "little") == netns.read_cookie()
