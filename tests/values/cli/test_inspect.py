# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect` as text, on fakes of the pinned maps, the kernel's devices and IPVS: the files of
tests/golden/inspect.
"""

import errno
import json
import re
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from kbpf.checks import connection
from kbpf.checks.connection import Result
from kbpf.cli import app, trace
from kbpf.cli.schema import build_schema, list_kinds
from kbpf.dataplane.bpf import map_metrics as metrics
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps import layout, pinning
from kbpf.dataplane.bpf.maps.layout import (
    MAPS,
    U32,
    ConfigFlag,
    schema_hash,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.ipvs import ipvs_inspect as ipvs
from kbpf.dataplane.ipvs import statefile
from kbpf.dataplane.ipvs.statefile import StateFile
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import mounts, pods
from kbpf.kernel.system.mounts import Cgroup
from kbpf.model.address import parse_addr
from kbpf.model.status import ModeChoice, encode
from tests.support.faults.fake_maps import Entries, FakeMap, target
from tests.support.golden import Golden
from tests.support.json_schema import validate
from tests.support.table import each_case, each_cells, each_pair
from tests.values.cli.inspected_node import (
    BOOT,
    CGROUP_PATHS,
    CGROUPS,
    CONTENTS,
    DEVICES,
    FACTS,
    FACTS_OF_NODE,
    NOW,
    NS,
    STATUS,
    UIDS,
)
from tests.values.views.ipvs_node import CONNECTIONS, HELD, PORTS


@pytest.fixture
def node(tmp_path, monkeypatch) -> Path:
    """A node with an agent of mode bpf, in the current folder."""
    monkeypatch.chdir(tmp_path)
    pins = Pins(Path("pins"))
    pins.maps.mkdir(parents=True)
    (pins.root / "programs-tc-x").mkdir()
    for name in MAPS:
        (pins.maps / name).touch()
    monkeypatch.setattr(
        snapshot.pinning, "open_map", lambda path, spec: FakeMap(spec.name, CONTENTS.get(spec.name, {}))
    )
    clock = SimpleNamespace(
        monotonic=lambda: NOW, monotonic_ns=lambda: int(NOW * NS), clock_gettime=lambda _: BOOT, CLOCK_BOOTTIME=0
    )
    for module in (snapshot, ipvs, metrics):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(snapshot.attached, "read_hooks", lambda _: FACTS)
    cgroups = {i: Cgroup(Path(f"/sys/fs/cgroup{path}"), path) for i, path in CGROUP_PATHS.items()}
    monkeypatch.setattr(mounts, "find_cgroups", lambda ids, mask=0: cgroups)
    monkeypatch.setattr(pods, "list_pod_names", lambda: {UIDS["pod"]: "shop/cart-5d6f"})
    monkeypatch.setattr(pods, "find_cgroup_ids", lambda uid: frozenset((CGROUPS["pod"], 77)))
    monkeypatch.setattr(pods, "find_process", lambda uid: pods.PodProcess(7, Path("/pod")))
    monkeypatch.setattr(trace, "_read_netns", lambda _: (99, (parse_addr("10.244.0.9"),), True))
    monkeypatch.setattr(trace, "read_facts", lambda *_: FACTS_OF_NODE)
    for module in (snapshot, ipvs):
        monkeypatch.setattr(module, "is_alive", lambda *_: True)
    monkeypatch.setattr(snapshot.attached, "read_devices", lambda *_: DEVICES)
    monkeypatch.setattr(ipvs, "_read_servers", lambda: HELD)
    monkeypatch.setattr(ipvs, "list_connections", lambda: CONNECTIONS)
    return tmp_path


@pytest.fixture
def ipvs_node(node: Path) -> Path:
    """The same node after a change to mode ipvs."""
    folder = node / "state" / "kbpf-ipvs0"
    folder.mkdir(parents=True)
    file = StateFile(folder)
    for port in PORTS:
        file.set_service(port.state.key, port.state, fwmark=port.fwmark)
    file.write(b"")
    choice = ModeChoice("auto", "ipvs", "no cgroup v2", "no cgroup v2 hierarchy is mounted")
    status = replace(STATUS, mode="ipvs", choice=choice, packets=None, refused=0)
    (folder / statefile.STATUS_FILE).write_bytes(encode(status))
    return node


def transcript(capsys, *commands: str, command_name: str = "inspect") -> str:
    """What a shell would show of these commands; of JSON each row in one line."""
    pages = []
    for line in commands:
        command, _, word = line.partition(" | grep ")
        code, out, err = run(capsys, command, command_name)
        if command.endswith("json"):
            value = json.loads(out)
            assert out == json.dumps(value, indent=2, ensure_ascii=False) + "\n"
            yaml_code, yaml_out, yaml_err = run(capsys, f"{command[:-4]}yaml", command_name)
            assert (yaml_code, yaml.safe_load(yaml_out), yaml_err) == (code, value, err)
            assert validate(value, build_schema(list_kinds())) == []
            rows = [{k: v} for k, v in value.items() if k != "items"] + value.get("items", [])
            texts = [json.dumps(row, ensure_ascii=False) for row in rows]
            out = "".join(f"{text}\n" for text in texts if word in text)
        end = f"exit code {code}\n" if code else ""
        pages.append(f"$ kbpf {command_name} {line}\n{out}{err}{end}")
    return "\n".join(pages)


def run(capsys, command: str, name: str = "inspect") -> tuple[int, str, str]:
    line = [name, *command.split(), "--pin-dir", "pins", "--state-dir", "state"]
    return app.call(line), *capsys.readouterr()


COMMANDS = """\
services
services -o wide
services -o json
services -n kube-system
services -n none
service local -o wide
service local -o json
service web
service dns -n kube-system
service wbe
service :30053 -o wide
service 10.9.9.9
service web-7f9c-new1
service default/web-7f9c-x2v8
service kube-system/dns -n default
backends
backends -o wide
backends -o json
backends web
backends 10.244.0.6
backends 10.96.0.2:443
backends :30053
backends default/web-7f9c-x2v8k
backends wbe
backends --no-headers
backends --sort-by services
backends --sort-by nothing
affinity
affinity -o wide
affinity -o json
failures
failures -o wide
failures -o json
failures --service web
failures --service 192.0.2.9
failures --pod shop/cart-5d6f
failures --since 5m --limit 1
failures --since soon
failures --service wbe
failures --pod shop/none
failures --pod web-7f9c-7qzkd
connections
connections -o wide
connections -o json
connections --expired --limit 2
connections --service web --state closed
connections --client 198.18.0.1
connections --backend fd00:10::7
connections --service no
nat
nat -o wide
nat -o json
nat --limit 1
sources
sources -o wide
sources -o json
devices
devices -o wide
devices -o json
maps
maps -o json | grep queue
programs
programs -o json
status
status -o json
""".splitlines()
VIEWS = {view: list(lines) for view, lines in groupby(COMMANDS, lambda line: line.split()[0])}
"""What is asked about each view."""


@pytest.mark.parametrize("view", VIEWS)
def test_view(view, node: Path, golden: Golden, capsys):
    golden(f"inspect/{view}.txt", transcript(capsys, *VIEWS[view]))


FORMATS = """\
services -o name
services -A -o name
services -n kube-system -o name
services -n none -o json
devices -o name --limit 3
backends -o name
maps -o wide --limit 1
failures -o name
services -o xml
status -o name
connections -n kube-system
connections -n default --limit 1 --sort-by idle
connections -n none
affinity -n none
failures -n kube-system
sources -n default
backends -n kube-system -o name
nat -n kube-system
service web -n none -A
services --limit 2 --sort-by name -A
""".splitlines()


def test_formats_and_selections(node: Path, golden: Golden, capsys):
    golden("inspect/formats.txt", transcript(capsys, *FORMATS))


TRACES = """\
host default/web
host default/web:http
host default/local:443
shop/cart-5d6f 10.96.0.1:80
shop/cart-5d6f https://local.default
shop/cart-5d6f 10.96.0.1:81
outside 198.18.0.1:30080
outside 198.18.0.9:30080
198.51.100.7 192.0.2.5:443
203.0.113.9 192.0.2.5:443
outside kube-system/dns
host [fd00:96::1]:53/udp
host 10.1.2.3:80
outside default/web -o json
shop/none default/web
host default/none
host default/web:ftp
host 10.96.0.1
host http://web.default:81
host default/wbe
outside default/local:8443
""".splitlines()


def test_what_is_not_counted(node: Path, golden: Golden, monkeypatch, capsys):
    """Even if the maps hold numbers from an earlier --accounting. Open connections are not known if the kernel lists no
    sockets, as one without BTF.
    """
    asked = ("service web -o json", "service web", "service dns -n kube-system")
    texts = []
    for flags in (ConfigFlag.ACCOUNTING | ConfigFlag.TRACING, ConfigFlag.ACCOUNTING, ConfigFlag(0)):
        monkeypatch.setitem(CONTENTS, "config", {bytes(4): layout.CONFIG.pack(0, flags, 0)})
        texts.append(f"# {flags.name or 'off'}\n\n{transcript(capsys, *asked)}")
    batches = FakeMap.batches
    monkeypatch.setattr(FakeMap, "batches", lambda self: refuse(1)() if self.name == "sock_peers" else batches(self))
    texts.append(f"# no sockets\n\n{transcript(capsys, *asked)}")
    golden("inspect/not-counted.txt", "\n".join(texts))


def test_traces(node: Path, golden: Golden, capsys):
    golden("trace.txt", transcript(capsys, *TRACES, command_name="trace"))


IPVS_COMMANDS = """\
services -o wide
services -o json
service web
service web -o json
service local
service sticky
service none
backends
backends -o json
connections -o wide
connections -o json
connections --client 198.18.0.254 --limit 1
connections --service web
connections --service default/sticky
connections --service other
connections --service web --state closed
connections --backend 10.244.1.2
connections --state closed
status
status -o json
maps
""".splitlines()


def test_view_of_mode_ipvs(ipvs_node: Path, golden: Golden, capsys):
    golden("inspect/ipvs.txt", transcript(capsys, *IPVS_COMMANDS))


def refuse(code: int) -> Callable[..., Any]:
    """An open_map() that fails like this."""

    def open_map(*_: object) -> Any:
        raise KernelError("cannot open the map", "pins", "run as root", code)

    return open_map


REAL_OPEN_MAP = pinning.open_map
OTHER_LAYOUT = SimpleNamespace(type=1, key_size=8, value_size=96, close=lambda: None)
RUNNING = "is `kbpf run` running on this node, and with this --pin-dir?"
UNREADABLE: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "nothing was ever pinned": (
        lambda pins, _: shutil.rmtree(pins),
        f"nothing is pinned: there is no such folder (pins); {RUNNING}",
    ),
    "no maps are pinned": (lambda pins, _: shutil.rmtree(Pins(pins).maps), f"no maps are pinned (pins); {RUNNING}"),
    "another version, older or newer": (
        lambda pins, _: Pins(pins).maps.rename(pins / "maps-0123456789ab"),
        "another version of kbpf has pinned its maps (pins); use the kbpf that runs as the agent, "
        "or restart the agent with this one",
    ),
    "the pin folder is a file": (
        lambda pins, _: (shutil.rmtree(pins), pins.write_text("")),
        "not a folder (pins); give the folder that `kbpf run` was given with --pin-dir",
    ),
    "a map was removed": (
        lambda _, patch: patch.setattr(snapshot.pinning, "open_map", refuse(errno.ENOENT)),
        "the map MAP is missing (pins/maps-SCHEMA); its pin was removed: the agent restores "
        "it within seconds, or when it starts",
    ),
    "no rights": (
        lambda _, patch: patch.setattr(snapshot.pinning, "open_map", refuse(errno.EPERM)),
        "cannot open the map (pins): EPERM; run as root",
    ),
    "a map of another layout": (
        lambda _, patch: (
            patch.setattr(snapshot.pinning, "open_map", REAL_OPEN_MAP),
            patch.setattr(Map, "open", lambda path: OTHER_LAYOUT),
        ),
        "the pinned map has an incompatible layout: type 1, key size 8, value size 96 "
        "(pins/maps-SCHEMA/MAP); run kbpf cleanup",
    ),
}


@each_case("break_it, line", UNREADABLE)
def test_what_cannot_be_read_is_one_clear_line(break_it, line, node: Path, monkeypatch, capsys):
    break_it(node / "pins", monkeypatch)
    code, out, err = run(capsys, "service web")
    err = re.sub(r"(the map |SCHEMA/)\w+", r"\1MAP", err.replace(schema_hash(), "SCHEMA"))
    assert (code, out, err) == (1, "", f"kbpf: {line}\n")


def test_corrupt_entries_are_left_out(node: Path, monkeypatch, capsys):
    """Those that no agent or program of this version can have written."""
    whole = [run(capsys, command) for command in CORRUPT]
    for name, entries in CORRUPT_ENTRIES.items():
        monkeypatch.setitem(CONTENTS, name, {**CONTENTS[name], **entries})
    assert [run(capsys, command) for command in CORRUPT] == whole


CORRUPT = ("service web", "backends", "failures", "failures --service web")
BAD = bytes([9] * 20)
CORRUPT_ENTRIES: dict[str, Entries] = {
    "services": {BAD: bytes(layout.SERVICE.size)},
    "backends": {U32.pack(9): BAD},
    "endpoint_names": {layout.ENDPOINT_KEY.pack(1, BAD): bytes(layout.ENDPOINT_NAME.size)},
    "failures": {
        bytes(20): layout.FAILURE.pack(0, 1, layout.EVENT.pack(0, 0, *3 * [target("10.0.0.1:1")], 1, 0, 1 << 20)),
        bytes(19) + b"x": layout.FAILURE.pack(0, 1, layout.EVENT.pack(0, 0, *3 * [BAD], 1, 0, 1)),
    },
}


@each_pair(
    "tried, line",
    """\
True outside 198.18.0.1:30080 →   confirmed: a packet, on a copy
False outside 198.18.0.1:30080 →   DIFFERS: a packet, on a copy
None outside 198.18.0.1:30080 →
True host [fd00:96::1]:53/udp →   confirmed: a packet, on a copy
True 198.51.100.7 192.0.2.5:443 →   confirmed: a packet, on a copy
True outside 192.0.2.5:443 →
True host default/web →
True outside 198.18.0.1:30080 --connect →
""",
)
def test_a_packet_is_tried_without_being_asked(node: Path, monkeypatch, capsys, tried, line):
    """Whether what its packet does is what is predicted (None: it cannot be tried), and a trace → the last line.
    Nothing is tried where source ranges depend on the client's address, and where a socket hook decides. A
    connect() is not: it may give the client a backend by session affinity.
    """
    word, _, trace_of = tried.partition(" ")
    matches = {"True": True, "False": False}.get(word)
    monkeypatch.setattr(connection, "try_packet", lambda *_, **__: Result(matches, "it"))
    monkeypatch.setattr(connection, "try_socket", lambda *_: pytest.fail("it connects"))
    code, out, _ = run(capsys, trace_of, "trace")
    shown = [text for text in out.splitlines() if "a packet, on a copy" in text]
    assert [text.partition(" of the programs")[0] for text in shown] == [line] * bool(line)
    assert code == ("--connect" in trace_of or matches is False)


IPVS_TRACES = """\
host default/web
outside default/web
host 127.0.0.1:30080
outside 198.18.0.1:30081
host 192.0.2.2:80
203.0.113.9 192.0.2.2:80
host 192.0.2.2:81
shop/cart-5d6f default/sticky
host default/none
host 10.1.2.3:80
host default/web --confirm
""".splitlines()


def test_traces_in_mode_ipvs(ipvs_node: Path, golden: Golden, capsys):
    golden("trace-ipvs.txt", transcript(capsys, *IPVS_TRACES, command_name="trace"))


OLD = "0a1b2c3d-0000-4000-8000-000000000009"
RUNNING = frozenset((CGROUPS["pod"], 77))


@each_cells(
    "uid, name, cgroups, text",
    f"""\
replaced, its logs are first | {OLD} | shop/cart-5d6f |  | (10.244.0.9)
replaced, its logs are last | last | shop/cart-5d6f |  | (10.244.0.9)
terminating, without a process | {OLD} | shop/cart-5d6f | other | (10.244.0.9)
of another namespace | {OLD} | stage/cart-5d6f | same | cart-5d6f may be shop/cart-5d6f or stage/cart-5d6f
""",
    cgroups={"": frozenset(), "other": frozenset((7,)), "same": RUNNING}.get,
)
def test_trace_takes_the_pod_that_runs(node: Path, monkeypatch, capsys, uid, name, cgroups, text):
    """The uid, name and cgroups of a second Pod with the name of the one that runs; what is printed."""
    names = {OLD: name, UIDS["pod"]: "shop/cart-5d6f"} if uid == OLD else {UIDS["pod"]: "shop/cart-5d6f", uid: name}
    process = pods.PodProcess(7, Path("/pod"))
    monkeypatch.setattr(pods, "list_pod_names", lambda: names)
    monkeypatch.setattr(pods, "find_cgroup_ids", lambda of: cgroups if of == uid else RUNNING)
    monkeypatch.setattr(pods, "find_process", lambda of: None if of == uid else process)
    code, out, err = run(capsys, "cart-5d6f default/web", "trace")
    assert text in out + err
    assert code == (2 if "may be" in text else 0)


OPENED = {
    "services": "services service_names backend_slots backends node_addresses config",
    "affinity": "services service_names backend_slots backends node_addresses config affinity endpoint_names node",
    "connections": "flows service_names endpoint_names config node devices local_networks",
    "devices": "config node devices local_networks",
    "maps": " ".join(MAPS),
    "programs": "config exempt_cgroups",
    "status": "config exempt_cgroups flows node devices local_networks",
}
"""The maps of each view; all read those of the status, too."""


@pytest.mark.parametrize("view", OPENED)
def test_only_maps_that_are_shown_are_opened(view, node: Path, monkeypatch, capsys):
    opened: list[str] = []
    open_map = snapshot.pinning.open_map

    def count(path: Path, spec: layout.MapSpec) -> Any:
        opened.append(spec.name)
        return open_map(path, spec)

    monkeypatch.setattr(snapshot.pinning, "open_map", count)
    run(capsys, view)
    of_status = {"agent_status", "reasons"}
    assert {*opened} | of_status == {*OPENED[view].split()} | of_status
    others = [name for name in opened if name not in of_status]
    assert len(others) == len(set(others))


@pytest.mark.parametrize("view", [*sorted(set(VIEWS) - {"service", "status"}), "service web", "trace"])
def test_a_view_says_how_old_it_is_if_the_agent_is_down(view, node: Path, monkeypatch, capsys):
    monkeypatch.setattr(snapshot, "is_alive", lambda *_: False)
    command = ("host default/web", "trace") if view == "trace" else (view, "inspect")
    assert "the agent is down: this is what it had programmed 1s ago" in run(capsys, *command)[2]


def test_a_view_does_not_need_the_status(node: Path, monkeypatch, capsys):
    """An agent of another version may know more reasons, and have a map of another size."""
    expected = run(capsys, "services")
    open_map = snapshot.pinning.open_map
    monkeypatch.setattr(
        snapshot.pinning, "open_map", lambda path, spec: (refuse(0) if spec.name == "reasons" else open_map)(path, spec)
    )
    assert run(capsys, "services") == expected
    assert run(capsys, "status")[0] == 1
