# SPDX-License-Identifier: Apache-2.0
"""`kbpf check`, `cleanup` and `compile` on a real data plane."""

import json
import os
import shutil
import socket
import subprocess
from ipaddress import ip_address
from pathlib import Path

import pytest

from kbpf.cli import app
from kbpf.kernel.bpf import probe
from kbpf.kernel.bpf.objects import Link, Map
from kbpf.kernel.bpf.uapi import BPF_PROG_TYPE_SCHED_CLS
from kbpf.kernel.probe_result import Probe
from tests.programs.node.commands.world import HOOK_NAMES, UDP, WORLD
from tests.support.lab.lab import Place, cgroup2
from tests.support.plane import HOOKS, Site, desired, service

# ---- check -------------------------------------------------------------------------------------


def test_check_finds_this_machine_usable_and_leaves_nothing(site: Site, run):
    code, out, _ = run("check -o json --cgroup", str(site.cgroup))
    made = json.loads(out)
    details = {row["name"]: row["detail"] for row in made["items"]}
    assert (code, made["usable"], made["mode"], made["attached"]) == (0, True, "bpf", None)
    assert "cgroup links" in details["features of Linux 5.10"]
    lacking = {name.removeprefix("hook ") for name in details if name.startswith("hook ")}
    assert {*HOOK_NAMES} <= {*details["hooks"].split(", ")} | lacking
    # Other tests on this machine create and remove cgroups of their own meanwhile.
    assert not list(cgroup2().glob(f"kbpf-check-{os.getpid()}*"))
    assert not [path for path in site.cgroup.iterdir() if path.is_dir()]
    assert not site.pins.exists()


def test_probe_tells_a_missing_helper_from_wrong_arguments():
    """bpf_redirect_neigh takes four arguments, and the verifier checks each."""
    assert probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, 152, 1, 0, 0, 0).works
    assert probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, 152, 1) == Probe(False, "EACCES")
    assert probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, 9999, 1, 0, 0, 0) == Probe(False, "EINVAL")


def test_check_uses_the_ports_of_the_running_agent(site: Site, run):
    site.start(desired(), packet_path=True, masquerade_ports=(40_000, 40_009))
    _, out, _ = run("check -o json --cgroup", str(site.cgroup))
    (row,) = [r for r in json.loads(out)["items"] if r["name"] == "masquerade ports"]
    assert row["detail"].startswith("40000 to 40009: ")


def test_check_without_cgroup_v2_exits_with_1_and_advice(site: Site, run, tmp_path):
    code, out, _ = run("check --cgroup", str(tmp_path))
    assert code == 1
    assert "mode bpf cannot be used: cgroup v2" in out
    assert "--cgroup" in out


def test_check_attached_proves_translation_without_connecting_to_the_backend(site: Site, run):
    with socket.create_server(("127.0.0.9", 0)) as backend:
        backend.setblocking(False)
        port = backend.getsockname()[1]
        site.start(desired(service("web", "10.96.0.1:80", f"127.0.0.9:{port}")))
        code, out, _ = run("check --attached")
        assert code == 0
        assert f"arrived at 127.0.0.9 port {port}" in out
        with pytest.raises(BlockingIOError):
            backend.accept()


def test_check_attached_dials_every_family_and_protocol(written, run, site: Site):
    dns6 = service("dns6", "[fd00:96::1]:53", "[fd00:10::1]:53", UDP)
    written.apply(desired(*WORLD.services.values(), dns6), None)
    code, out, err = run("check --attached -o json")
    made = json.loads(out)
    rows = {row["name"]: row for row in made["items"]}
    assert (code, made["attached"], err) == (0, True, "")
    # The smallest set. That of `kept` is as small and comes first, but has affinity.
    assert rows["dial 10.96.0.3:80/TCP"]["detail"] == "arrived at 10.244.0.1 port 8080"
    assert rows["dial 10.96.0.1:53/UDP"]["detail"].endswith("port 5353")
    assert rows["dial [fd00:96::1]:80/TCP"]["detail"] == "arrived at fd00:10::1 port 8080"
    assert rows["dial [fd00:96::1]:53/UDP"]["result"] == "yes"
    assert not [path for path in site.cgroup.iterdir() if path.is_dir()]


def remove_a_hook(site: Site) -> None:
    (site.pins / "links" / "connect4").unlink()


def break_translation(site: Site) -> None:
    """As if the programs were broken: the slots that they read lead to no backend."""
    with site.pinned("backend_slots") as slots:
        for key, _ in list(slots.items()):
            slots.replace(key, bytes(4))


@pytest.mark.parametrize("damage", [remove_a_hook, break_translation])
def test_check_attached_fails_where_nothing_is_translated(written, run, site: Site, damage):
    damage(site)
    code, out, _ = run("check --attached -o json")
    made = json.loads(out)
    assert (code, made["usable"], made["attached"]) == (1, True, False)


def test_check_attached_without_a_service_proves_nothing(site: Site, run):
    site.start(desired())
    code, out, _ = run("check --attached")
    assert code == 1
    assert "no ClusterIP with backends" in out
    assert "not proven" in out


# ---- cleanup -----------------------------------------------------------------------------------


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_cleanup_with_a_running_agent_needs_force(written, run, site: Site):
    before = list_files(site.pins), site.dump()
    for options, shown in (((), "attachment"), (("--keep-connections",), "10 in ")):
        code, out, err = run("cleanup --dry-run", *options)
        assert (code, err.count("\n"), out.split()[0]) == (0, 1, "WOULD-REMOVE")
        assert "without --dry-run: nothing was removed: an agent is running" in err
        assert shown in out
    code, out, err = run("cleanup")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "stop the agent first, or use --force" in err
    assert (list_files(site.pins), site.dump()) == before
    code, out, err = run("cleanup --force")
    assert code == 0
    assert "attachment" in out
    assert f"pid {os.getpid()}" in err
    assert not site.pins.exists()


UNFINISHED = """
new-maps-0123456789ab
new-programs-sock-a-all
old-programs-tc-a-all-0
layout-0123456789ab
programs-tc-b-all
"""


def test_cleanup_removes_and_lists_everything(written, site: Site, run):
    """The agent was killed while it changed programs: after the new ones took their name and before the old ones were
    removed. If the folder has pins of another tool, nothing is removed.
    """
    site.close_planes()
    (site.pins / "cilium").mkdir()
    code, out, err = run("cleanup")
    assert (code, out, "cilium" in err) == (1, "", True)
    (site.pins / "cilium").rmdir()
    for name in UNFINISHED.split():
        (site.pins / name).mkdir()
    with Map.open(next(site.pins.glob("maps-*")) / "config") as held:
        held.pin(site.pins / "new-map-config")
    with Link.open(site.pins / "links" / "connect4") as link:
        link.pin(site.pins / "new-link-connect4")
    before = list_files(site.pins)
    code, out, err = run("cleanup --dry-run -o json")
    listed = json.loads(out)
    assert (code, err, listed["dry_run"], list_files(site.pins)) == (0, "", True, before)
    code, out, err = run("cleanup -o json")
    removed = json.loads(out)["items"]
    assert (code, err, removed) == (0, "", listed["items"])
    assert [Path(r["path"]).name for r in removed if r["kind"] == "attachment"] == sorted(HOOKS)
    assert {Path(r["path"]).name for r in removed} >= {*UNFINISHED.split(), "new-map-config", "new-link-connect4"}
    assert {"maps", "programs", "folder"} <= {r["kind"] for r in removed}
    assert not site.pins.exists()
    code, out, _ = run("cleanup")
    assert code == 0
    assert "nothing to remove" in out


OWN = str(ip_address("127.64.0.0") + os.getpid())
"""The address of a Service and its backend; other runs use other addresses."""


@pytest.fixture
def host(site: Site) -> Place:
    """A client with a connection to a Service, port 18080, that leads to port 18081."""
    site.place("server").serve(18081, address=OWN)
    site.start(desired(service("web", f"{OWN}:18080", f"{OWN}:18081")))
    made = site.place("host")
    assert made.tcp(OWN, 18080, keep="held")["name"] == "server"
    return made


def test_cleanup_keep_connections_translates_only_established_ones(host: Place, site: Site, run):
    before = site.entries("sock_peers")
    code, out, err = run("cleanup --keep-connections")
    assert (code, out) == (1, ""), "a running agent would restore it"
    assert "stop the agent first" in err
    site.close_planes()
    code, out, err = run("cleanup --keep-connections -o json")
    assert (code, err) == (0, "")
    assert json.loads(out)["items"] == [{"kind": "frontends", "path": f"1 in {site.pins}"}]
    assert host.tcp(OWN, 18080)["error"] == "ECONNREFUSED", "by the host: no process listens there"
    assert host.tcp(OWN, 18081)["name"] == "server", "another port of the former ClusterIP"
    assert host.ask("talk", keep="held")["name"] == "server"
    assert site.entries("sock_peers") == before
    assert site.dump()["frontends"] == {}
    assert run("cleanup --keep-connections")[1].startswith("nothing to remove")
    assert run("cleanup")[0] == 0
    assert host.tcp(OWN, 18080)["error"] == "ECONNREFUSED"


def test_cleanup_unmounts_the_bpffs_of_the_pin_folder(run, site: Site, tmp_path):
    pins = tmp_path / "pins"
    site.pins, ours = pins, site.pins
    try:
        site.start(WORLD)
        assert {"maps.debug", "progs.debug"} <= {path.name for path in pins.iterdir()}
        site.close_planes()
        code, out, err = run("cleanup -o json")
        assert (code, err) == (0, "")
        removed = [(row["kind"], row["path"]) for row in json.loads(out)["items"]]
        assert removed[-2:] == [("bpffs", str(pins)), ("folder", str(pins))]
        assert not any("debug" in path for _, path in removed)
        assert not pins.exists()
        assert run("cleanup")[1].startswith("nothing to remove")
    finally:
        site.pins = ours
        subprocess.run(["umount", "-q", pins], check=False)


def test_cleanup_cache_leaves_other_files(site: Site, run, artifact_cache, tmp_path):
    site.open().close()
    cache = tmp_path / "cache"
    shutil.copytree(artifact_cache, cache)
    (cache / "notes.txt").write_text("mine")
    code, out, _ = run("cleanup --cache --cache-dir", str(cache))
    assert code == 0
    assert "artifact" in out
    assert [path.name for path in cache.iterdir()] == ["notes.txt"]


# ---- compile -----------------------------------------------------------------------------------


def test_compile_command_compiles_what_is_missing_or_all(artifact_cache: Path, tmp_path, capsys):
    shutil.copytree(artifact_cache, tmp_path / "cache")

    def compiled(*more: str) -> list[dict]:
        assert app.call(["compile", "--cache-dir", str(tmp_path / "cache"), "-o", "json", *more]) == 0
        return json.loads(capsys.readouterr().out)["items"]

    for options, is_compiled in (((), False), (("--force",), True)):
        found = compiled(*options)
        assert {made["unit"]: made["compiled"] for made in found} == {"sock": is_compiled, "tc": is_compiled}
        assert all(Path(made["path"]).stat().st_size == made["bytes"] for made in found)


def test_compile_into_an_impossible_folder_exits_with_1(capsys):
    assert app.call(["compile", "--cache-dir", "/proc/nowhere"]) == 1
    assert "/proc/nowhere" in capsys.readouterr().err
