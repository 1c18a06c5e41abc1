# SPDX-License-Identifier: Apache-2.0
"""What an agent finds in the maps is adopted, repaired or replaced: after a restart, damages, another
build of the programs, and a kill at any step.

Results are compared by site.dump(): what the pinned maps lead to, without ids, read without the
plane's memory. The expected dump of a state is that of a plane to which it was applied first.
tests/programs/conformance has the changes that are not interrupted.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kbpf.cli import app
from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.programs import artifact, compile
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects, syscalls, uapi
from kbpf.kernel.bpf.objects import Link, Map
from kbpf.model.config import MapSizes
from kbpf.model.desired import DesiredState
from tests.support import plane as plane_support
from tests.support.plane import (
    CGROUP_HOOKS,
    HOOKS,
    Site,
    desired,
    dump,
    flush,
    map_ids_read_by,
    services,
    sites,
    size_maps,
)
from tests.support.stub_programs import change_programs
from tests.support.table import table

pytestmark = pytest.mark.usefixtures("stub_programs")
A, B, C, D = (f"10.244.0.{i}:8080" for i in range(1, 5))
NAMES = {
    **{"A": A, "B": B, "C": C, "D": D, "A6": "[fd00::1]:8080", "B6": "[fd00::2]:8080"},
    **{"WEB": "10.96.0.1:80", "PORT": "NodePort=0.0.0.0:30080", "VIP": "LoadBalancer=192.0.2.1:80"},
}
EMPTY = desired()


def state(text: str, nodes: str = "") -> DesiredState:
    return desired(*services(text, NAMES), nodes=nodes)


@pytest.fixture(scope="module", autouse=True)
def quick_starts() -> Iterator[None]:
    """There are hundreds of starts, so the compiler is looked up once and maps are small. They are
    read in small batches, which must not matter.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "find_toolchain", functools.cache(compile.find_toolchain))
        patch.setattr(objects, "BATCH_SIZE", 4)
        sizes = MapSizes(frontends=256, slots=8192, backends=256, connections=64, affinity=64)
        patch.setattr(plane_support, "SIZES", sizes)
        yield


def dump_first(site: Site, state: DesiredState) -> dict[str, Any]:
    """The dump of a state that is the first one applied."""
    site.start(state)
    return site.dump()


def contents(site: Site) -> dict[str, int]:
    """Entries of all maps that hold objects; not of udp_cuts, which keeps ended ones."""
    kinds = (uapi.BPF_MAP_TYPE_HASH, uapi.BPF_MAP_TYPE_LRU_HASH, uapi.BPF_MAP_TYPE_LPM_TRIE)
    names = [n for n, spec in layout.MAPS.items() if spec.map_type in kinds and n != "udp_cuts"]
    return {name: n for name in names if (n := len(site.entries(name)))}


def test_ids_are_never_used_twice(site: Site):
    """Neither after restarts, nor after everything was deleted in between."""
    seen: set[tuple[str, bytes]] = set()
    for number in range(4):
        plane = site.start(OLD)
        ids = {("name", k) for k in site.entries("service_names")}
        ids |= {("backend", k) for k in site.entries("backends")}
        ids |= {("set", k[:4]) for k in site.entries("backend_slots")}
        assert not seen & ids, number
        seen |= ids
        plane.apply(EMPTY, None)
        flush(plane)
        assert contents(site) == {}


# ---- restart -----------------------------------------------------------------------------------

OLD = state(
    """web WEB PORT -> A B affinity=60
    dns:UDP 10.96.0.2:53 -> A B
    gone 10.96.0.3:80 -> D
    gives 10.96.0.4:80 10.96.0.5:80 -> C
    kept LoadBalancer=192.0.2.3:80 -> A ranges=10.1.0.0/16,10.2.0.0/16""",
    nodes="192.0.2.9",
)
NEW = state(
    """web WEB VIP -> B C affinity=60
    dns:UDP 10.96.0.2:53 -> B serving=B,C
    came 10.96.0.6:80 -> A D
    gives 10.96.0.4:80 -> C
    takes 10.96.0.5:80 -> D
    kept LoadBalancer=192.0.2.3:80 -> A ranges=10.2.0.0/16,10.3.0.0/16
    safe LoadBalancer=192.0.2.4:80 -> D ranges=10.9.0.0/16""",
    nodes="192.0.2.8",
)


TABLES = state(
    """web WEB PORT -> A B C algorithm=MAGLEV cluster_weights=1,3,2 affinity=60
    one VIP -> A B C local=A,B external=Local cluster_weights=2,3,2 local_weights=5,1"""
)


@pytest.mark.parametrize("state", [OLD, TABLES], ids=["", "with tables"])
def test_restart_without_changes_writes_nothing(site: Site, state: DesiredState):
    """And before the first apply an agent deletes nothing: it knows no Service yet."""
    site.start(state)
    before, attached = site.dump(), site.links()
    maps = {name: site.pinned(name).id for name in layout.MAPS}
    assert attached.keys() == HOOKS
    for _ in range(2):
        plane = site.open()
        assert plane._attachments.hooks.compiled is False
        plane.tick(1e9)
        flush(plane)
        assert site.dump() == before
        report = plane.apply(state, None)
        assert dict(report.writes) == {}
        assert report.refused == {}
        flush(plane)
        assert (site.dump(), site.links()) == (before, attached)
        assert {name: site.pinned(name).id for name in layout.MAPS} == maps


class Damage(NamedTuple):
    """Bytes (hexadecimal; *: repeated to the end) that replace others in the key or the value of an entry. With
    another key it is an entry that is added. Not all are reported: an agent could have written some, only not for such
    a set.
    """

    map: str
    part: str
    offset: int
    new: str
    is_reported: bool

    def spoil(self, raw: bytes) -> bytes:
        new = bytes.fromhex(self.new.rstrip("*"))
        new *= len(raw) - self.offset if self.new.endswith("*") else 1
        return raw[: self.offset] + new + raw[self.offset + len(new) :]


DAMAGES = table(
    Damage,
    """
services      | key   | 18 | 63       | yes
services      | key   | 19 | 01       | yes
services      | value | 0  | ff*      | yes
services      | value | 16 | ffffffff | yes
services      | value | 4  | 00000000 | yes
service_names | value | 0  | ff*      | yes
service_names | key   | 0  | ff*      | yes
backends      | value | 0  | ff*      | yes
backends      | key   | 0  | ff*      | yes
backend_slots | key   | 0  | ffffffff | no
backend_slots | value | 0  | ff*      | no
set_members   | key   | 0  | ff*      | no
meta          | value | 0  | ff*      | yes
meta          | value | 4  | 00000080 | yes
""",
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda row: f"{row.map} {row.part} {row.offset} {row.new}")
def test_corrupt_entry_is_reported_and_rewritten(site: Site, damage: Damage, caplog):
    """Everything else is served meanwhile, and `kbpf inspect` works."""
    plane = site.start(OLD)
    before = site.dump()
    with site.pinned(damage.map) as held:
        key, raw = sorted(held.items())[0]
        if damage.part == "key":
            key = damage.spoil(key)
        else:
            raw = damage.spoil(raw)
        held.update(key, raw)
    assert app.call(["inspect", "services", "--pin-dir", str(site.pins)]) == 0
    plane = site.open()
    told = [message for message in caplog.messages if "corrupt" in message]
    line = f"map={damage.map} entries=1 keys={key.hex()}"
    assert [line in one for one in told] == [True] * damage.is_reported
    plane.apply(OLD, None)
    flush(plane)
    assert site.dump() == before
    plane = site.open()
    assert dict(plane.apply(OLD, None).writes) == {}


def test_pin_folder_that_others_can_change_is_refused(site: Site):
    """A bpffs mounted without mode=700 is open to all users: one that creates the folder first
    could replace programs and maps.
    """
    site.pins.mkdir()
    site.pins.chmod(0o777)
    with pytest.raises(KernelError, match=r"cannot trust the folder: others may write to it \(mode 0777\)"):
        site.plane().open()
    assert list(site.pins.iterdir()) == []


def test_pinned_map_of_another_layout_is_an_error(site: Site):
    site.start(OLD)
    site.close_planes()
    attached = site.links()
    pin = site.maps / "services"
    pin.unlink()
    with Map.create(uapi.BPF_MAP_TYPE_HASH, "services", 20, 32, 8, uapi.BPF_F_NO_PREALLOC) as strange:
        strange.pin(pin)
    with pytest.raises(KernelError, match="an incompatible layout: type 1, key size 20, value size 32") as error:
        site.open()
    assert str(pin) in str(error.value)
    assert "kbpf cleanup" in str(error.value)
    assert site.links() == attached, "the old programs stay attached"


INVALID = b"\xff" + bytes(7)  # no such instruction


def another_build(monkeypatch: pytest.MonkeyPatch, *invalid: str) -> None:
    """From now on the sources differ; `invalid`: the programs that the kernel refuses."""

    def change(program: artifact.Bytecode) -> artifact.Bytecode:
        code = {"insns": INVALID, "references": ()} if program.name in invalid else {}
        return msgspec.structs.replace(program, **code)

    change_programs(monkeypatch, change, source="another")


def test_programs_of_another_build_replace_the_old_ones(site: Site, monkeypatch):
    site.start(OLD)
    before, attached = site.dump(), site.links()
    another_build(monkeypatch)
    plane = site.open()
    assert site.links() == attached, "not before the first apply"
    plane.apply(OLD, None)
    after = site.links()
    assert {name: after[name][0] for name in CGROUP_HOOKS} == {name: attached[name][0] for name in CGROUP_HOOKS}
    assert not {p for _, p in after.values()} & {p for _, p in attached.values()}
    assert site.dump() == before
    assert [p.name for p in site.pins.glob("programs-*")] == ["programs-sock-another-all"]


def test_refused_required_program_changes_nothing(site: Site, monkeypatch):
    site.start(OLD)
    before, attached, pins = site.dump(), site.links(), sorted(site.pins.rglob("*"))
    another_build(monkeypatch, "connect6")
    with pytest.raises(KernelError) as error:
        site.open()
    assert "\n" not in str(error.value)
    assert "refuses the program connect6" in str(error.value)
    assert "not an exit" in str(error.value), "the verifier's reason"
    assert error.value.errno
    assert (site.dump(), site.links(), sorted(site.pins.rglob("*"))) == (before, attached, pins)


def test_refused_optional_program_is_left_out(site: Site, monkeypatch):
    another_build(monkeypatch, "getpeername4", "getpeername6")
    site.start(OLD)
    attached = site.links()
    assert attached.keys() == HOOKS - {"getpeername4", "getpeername6"}
    assert dict(site.open().apply(OLD, None).writes) == {}
    assert site.links() == attached, "it stays out, without another attempt to attach"


# ---- killed at any step ------------------------------------------------------------------------


class Killer:
    """Ends this process at its n-th step: before a map entry is written or deleted, or before
    something is pinned, attached, created, renamed or removed. Batches are written entry by entry.
    In a series of steps of the same kind only the first two count, because then the work is half
    done; entries of `services` all count.
    """

    ENTRIES = ((Map, "update"), (Map, "delete"), (Map, "replace"))
    OTHERS = (
        (syscalls.Fd, "pin"),
        (Link, "attach"),
        (Link, "update"),
        (os, "rename"),
        (os, "unlink"),
        (os, "rmdir"),
        (os, "mkdir"),
    )

    def __init__(self, number: int) -> None:
        self.left = number
        self._row = ("", 0)
        for owner, name in (*self.ENTRIES, *self.OTHERS):
            setattr(owner, name, self._counted(getattr(owner, name), f"{owner} {name}"))
        Map.update_batch, Map.delete_batch = self._update_batch, self._delete_batch

    def _counted(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        entry = str(Map) in kind

        def step(*arguments: Any, **more: Any) -> Any:
            name = arguments[0].name if entry else ""
            row = f"{kind} {name}"
            self._row = (row, self._row[1] + 1 if self._row[0] == row else 1)
            if name == "services" or self._row[1] <= 2:
                if self.left == 0:
                    os._exit(77)
                self.left -= 1
            return real(*arguments, **more)

        return step

    @staticmethod
    def _update_batch(into: Map, keys: bytes, values: bytes) -> None:
        k, v = into.key_size, into.value_size
        for i in range(len(keys) // k):
            into.update(keys[i * k : (i + 1) * k], values[i * v : (i + 1) * v])

    @staticmethod
    def _delete_batch(into: Map, keys: bytes) -> None:
        k = into.key_size
        for i in range(len(keys) // k):
            into.delete(keys[i * k : (i + 1) * k])


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Whether `work`, run in a child, was killed at that step; False: it finished before."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            Killer(number)
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 77)
    return code == 77


def live(site: Site) -> dict[str, dict[str, Any]]:
    """Hook → the frontends that its attached program serves, from the maps that it uses."""
    seen: dict[int, tuple[str, dict[bytes, bytes]]] = {}  # maps, by id
    programs: dict[tuple[int, ...], dict[str, Any]] = {}  # frontends, by the maps used
    found = {}
    attached = site.hook_programs() if (site.pins / "links").exists() else {}
    for hook, program_id in attached.items():
        ids = sorted(map_ids_read_by(program_id))
        for number in ids:
            if number not in seen:
                seen[number] = read_map(number)
        key = tuple(n for n in ids if layout.MAPS[seen[n][0]].grows)
        if key not in programs:
            programs[key] = served(dict(seen[n] for n in key))
        found[hook] = programs[key]
    return found


def read_map(number: int) -> tuple[str, dict[bytes, bytes]]:
    """Name of the map with this id, and its entries if it is a map that grows."""
    fd = syscalls.check(syscalls.lib().bpf_map_get_fd_by_id(number), "no such map")
    with Map(fd, str(number)) as opened:
        info = syscalls.RawMapInfo()
        syscalls.read_info(fd, info, "map")
        (name,) = (name for name in layout.MAPS if name[:15] == info.name.decode())
        return name, dict(opened.items()) if layout.MAPS[name].grows else {}


def served(entries: dict[str, dict[bytes, bytes]]) -> dict[str, Any]:
    """The frontends in these maps; none if `services` is not among them."""
    frontends = dump(lambda name: entries.get(name, {}))["frontends"]
    return {at: nameless(behind) for at, behind in frontends.items()}


def nameless(behind: dict[str, Any]) -> dict[str, Any]:
    """What socket hooks use: neither names nor ranges."""
    return {key: value for key, value in behind.items() if key not in ("service", "ranges")}


def check_point(site: Site, old: dict[str, Any] | None, new: dict[str, Any]) -> None:
    """Every hook serves every frontend with the complete old or the complete new backends.

    `old` None: nothing was attached before, and nothing is until everything is in place.
    """
    served_by = live(site)
    if old is not None:
        assert served_by.keys() == HOOKS, "every hook has its program"
    for hook, frontends in served_by.items():
        if hook.startswith(("connect", "sendmsg")):
            before = new if old is None else old
            for at in before.keys() | new.keys() | frontends.keys():
                assert frontends.get(at) in (before.get(at), new.get(at)), (hook, at)


CASES = {
    "the first start": "first",
    "a change, and maps grow": "grow",
    "a change, another build and another layout": "build services",
}
"""What differs, and the map that has another layout."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kill_at_any_step_is_repaired_by_the_next_agent(artifact_cache: Path, monkeypatch, case: str):
    """At no step does a frontend have half a set, or a hook no program."""
    what, _, layout_of = case.partition(" ")
    if what == "grow":
        size_maps(monkeypatch, services=6, backend_slots=8, backends=4)

    with sites(artifact_cache) as make:
        old, new = (dump_first(make(), state) for state in (OLD, NEW))
        for number in itertools.count():
            site = make()
            if what != "first":
                site.start(OLD)
                site.close_planes()
            with monkeypatch.context() as patch:
                if what == "build":
                    another_build(patch)
                if layout_of:
                    patch.setitem(layout.MAPS, layout_of, replace(layout.MAPS[layout_of], version=2))
                killed = killed_at(number, lambda site=site: site.start(NEW))
                known = None if what == "first" else frontends_of(old)
                check_point(site, known, frontends_of(new))
                if killed:
                    plane = site.open()
                    check_point(site, known, frontends_of(new))
                    plane.apply(NEW, None)
                    flush(plane)
                assert site.dump() == new, f"after step {number}"
                assert folders(site) == ["layout", "links", "maps", "programs"], number
            site.close()
            if not killed:
                break
    print(f"{number} points")
    assert number > 25, "there were many steps"


def frontends_of(found: dict[str, Any]) -> dict[str, Any]:
    return {at: nameless(behind) for at, behind in found["frontends"].items()}


def folders(site: Site) -> list[str]:
    """Kinds of entries in the pin folder."""
    return sorted(path.name.split("-")[0] for path in site.pins.iterdir())


TWO = state("web 10.96.0.1:80 -> A; db 10.96.0.2:80 -> A")
ALONE = state("web 10.96.0.1:80 -> A")


def test_unknown_services_stay_until_the_state_is_authoritative(site: Site):
    """After a restart with a broken file its Service is not in the desired state, and
    still served.
    """
    site.start(TWO)
    before = site.dump()
    plane = site.open()
    plane.apply(ALONE, None, authoritative=False)
    flush(plane)
    assert site.dump() == before
    plane.apply(ALONE, set(), authoritative=True)
    flush(plane)
    assert list(site.dump()["frontends"]) == ["10.96.0.1:80/TCP"]
    assert site.dump()["strays"] == {}


@pytest.mark.parametrize("then", [ALONE, EMPTY], ids=["a Service has it by now", "no Service has it"])
def test_unclaimed_frontend_is_found_until_the_state_is_authoritative(site: Site, then: DesiredState):
    """Its Service has lost its name, and may be one that could not be read."""
    site.start(ALONE)
    site.clear("service_names")
    maps = ("services", "cluster_ips", "frontend_ports")
    before = {name: site.entries(name).keys() for name in maps}
    plane = site.open()
    plane.apply(then, None, authoritative=False)
    assert {name: site.entries(name).keys() for name in maps} == before
    plane.apply(then, set(), authoritative=True)
    flush(plane)
    assert list(site.dump()["frontends"]) == ["10.96.0.1:80/TCP"] * len(then.services)
    assert site.dump()["strays"] == {}
    assert len(site.entries("cluster_ips")) == len(then.services)
    assert any(map(any, site.entries("frontend_ports").values())) == bool(then.services)
