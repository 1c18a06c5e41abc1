# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect` of a real data plane. tests/values/cli/test_inspect.py has all views, of fake maps."""

import json

import pytest

from tests.programs.node.commands.world import HOOK_NAMES, WORLD
from tests.support.lab.lab import cgroup2, remove_cgroup, until
from tests.support.plane import CGROUP_HOOKS, HOOKS, Site


@pytest.fixture
def show(run):
    """The output of `kbpf inspect ... -o json`, parsed; only the items of a list."""

    def call(*arguments: str):
        code, out, err = run("inspect", *arguments, "-o", "json")
        assert (code, err) == (0, "")
        document = json.loads(out)
        return document.get("items", document)

    return call


def test_what_was_written_is_shown(written, run, golden):
    pages = []
    for command in ("services", "backends", "affinity", "affinity -o json"):
        code, out, err = run(f"inspect {command}")
        assert code == 0
        pages.append(f"$ kbpf inspect {command}\n{out}{err}")
    golden("inspect/written.txt", "\n".join(pages))


# ---- maps, programs ----------------------------------------------------------------------------


def test_maps_show_their_entries(written, show):
    rows = {row["name"]: row for row in show("maps")}
    assert rows["services"]["entries"] == 10
    assert rows["backend_slots"]["entries"] == 3 + 2 + 1 + 1 + 2 + 1 + 1
    assert rows["affinity"]["type"] == "lru_hash"
    assert (rows["source_ranges"]["entries"], rows["local_networks"]["entries"]) == (0, 0)
    assert {name for name, row in rows.items() if row["entries"] is None} >= {"flow_queue", "node"}
    assert rows["services"]["bytes"] > 0
    assert not any(row["alarm"] for row in rows.values())


def test_programs_show_hook_and_cgroup(written, show, site: Site):
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


def test_hook_without_a_link_is_shown_as_missing(written, show, run, site: Site):
    (site.pins / "links" / "connect6").unlink()
    states = {row["hook"]: row["state"] for row in show("programs")}
    assert states.pop("connect6") == "missing"
    assert {hook for hook, state in states.items() if state == "attached"} == HOOKS - {"connect6"}
    code, out, _ = run("inspect status")
    assert code == 1
    assert f"{len(HOOKS) - 1} of {len(HOOKS)} attached; missing: connect6" in out


def test_hooks_of_a_removed_cgroup_are_shown_as_detached(site: Site, show):
    other = cgroup2() / f"{site.name}-other"
    other.mkdir()
    opened = site.plane(cgroup=other)
    opened.open()
    opened.apply(WORLD, None)
    remove_cgroup(other)

    def are_detached() -> bool:
        return {row["hook"] for row in show("programs") if row["state"] == "detached"} == CGROUP_HOOKS

    until("the kernel has released the cgroup and detached them", are_detached)
