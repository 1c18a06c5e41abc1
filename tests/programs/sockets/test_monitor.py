# SPDX-License-Identifier: Apache-2.0
"""Events of sockets, as they happen: `kbpf monitor`.

The same servers and clients as in test_account.py, which has the events of each kind of connection.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from kbpf.cli import app
from kbpf.dataplane.bpf.inspect.monitor import Monitor
from kbpf.dataplane.bpf.maps.layout import MONITORS, U32, U64, pack_endpoint_key, pack_endpoint_name
from kbpf.errors import CapacityError, NotFoundError
from kbpf.model.address import parse_addr
from kbpf.model.config import Accounting
from kbpf.model.inspection import EventFilter
from kbpf.model.objects import Protocol
from kbpf.views.monitor import EventRow
from kbpf.views.top import ClientCounts
from tests.programs.sockets.account import FAIR, FLOOD, Bench, fair, refused, start
from tests.support.features import needs
from tests.support.lab.events import RATE, left_behind, patient, read, watched
from tests.support.lab.lab import PATIENCE, until
from tests.support.plane import desired, service, sites, within
from tests.support.table import each_line


@pytest.fixture(scope="module", autouse=True)
def _world(bench: Bench) -> None:
    start(bench, Accounting.CONNECTIONS)


@pytest.fixture(autouse=True)
def _nothing_is_left(bench: Bench) -> Iterator[None]:
    yield
    assert left_behind(bench.site) == []


def test_nothing_is_written_while_no_command_watches(bench: Bench):
    with watched(bench.site) as monitor:
        bench.act("fair", "10.96.0.1:80")
        assert len(read(monitor)) == 1
    bench.act("fair", "10.96.0.1:80")
    assert left_behind(bench.site) == []
    with watched(bench.site) as monitor:
        assert read(monitor) == []


def service_id(bench: Bench, name: str) -> int:
    """The id of this Service's port."""
    (found,) = (number for number, port in bench.site.service_ports().items() if port.name == name)
    return found


def only(bench: Bench, name: str) -> EventFilter:
    """Events of this Service."""
    return EventFilter(services=frozenset({service_id(bench, name)}))


def test_filter_applies_before_the_rate(bench: Bench):
    """Events that the filter leaves out do not count against the rate."""
    with watched(bench.site, rate=1, admitted=only(bench, "fair")) as monitor:
        bench.act("flood", "10.96.0.4:53")
        bench.act("fair", "10.96.0.1:80")
        assert [event.service for event in read(monitor)] == ["default/fair"]
        assert monitor.left_out == 0


def test_full_ring_buffer_is_counted(bench: Bench, monkeypatch):
    monkeypatch.setattr("kbpf.dataplane.bpf.inspect.monitor.RING_BYTES", 4096)
    with watched(bench.site, rate=100_000) as monitor:
        bench.act("flood", "10.96.0.4:53")
        left_out = monitor.left_out
        assert left_out > 0
        assert len(read(monitor)) + left_out == FLOOD
        bench.act("fair", "10.96.0.1:80")
        assert [event.service for event in read(monitor)] == ["default/fair"]


def test_filter_may_change(bench: Bench):
    with watched(bench.site, admitted=only(bench, "fair")) as monitor:
        bench.act("connects", "10.96.0.4:53")
        assert read(monitor) == []
        monitor.set_filter(only(bench, "dns"))
        bench.act("connects", "10.96.0.4:53")
        bench.act("fair", "10.96.0.1:80")
        assert [event.service for event in read(monitor)] == ["default/dns"]


# ---- several, and killed ones --------------------------------------------------------------------


def test_one_too_many_is_refused(bench: Bench):
    with patient():
        monitors = [Monitor(bench.site.pins, RATE, EventFilter()) for _ in range(MONITORS)]
    try:
        with pytest.raises(CapacityError, match=f"{MONITORS} commands watch"):
            Monitor(bench.site.pins, RATE, EventFilter())
        bench.act("fair", "10.96.0.1:80")
        assert [len(read(monitor)) for monitor in monitors] == [1] * MONITORS
        monitors.pop().close()
        bench.act("fair", "10.96.0.1:80")
        assert [len(read(monitor)) for monitor in monitors] == [1] * (MONITORS - 1)
    finally:
        for monitor in monitors:
            monitor.close()


def expire(bench: Bench) -> None:
    """Lets the time pass after which all commands are ignored."""
    with bench.site.pinned("monitored_until") as until_:
        for index in range(MONITORS + 1):
            if U64.unpack(until_.lookup(U32.pack(index)) or b"")[0]:
                until_.update(U32.pack(index), U64.pack(1))


def command(bench: Bench, *words: str) -> subprocess.Popen[str]:
    """`kbpf monitor`, once it watches; it watches until it ends, even if the machine stops it for a while."""
    words = ("-m", "tests.support.runtime.patient_monitor", "monitor", "--pin-dir", str(bench.site.pins), *words)
    process = subprocess.Popen((sys.executable, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until("the command watches", lambda: is_monitored(bench) or process.poll() is not None)
    return process


def is_monitored(bench: Bench) -> bool:
    return f"monitored_until {MONITORS}" in left_behind(bench.site)


def test_killed_command_leaves_nothing_on(bench: Bench):
    process = command(bench, "--address", "10.96.0.1")
    process.kill()
    process.communicate()
    left = left_behind(bench.site)
    assert left, "it could not clean up"
    expire(bench)
    bench.act("fair", "10.96.0.1:80")
    with watched(bench.site) as monitor:
        assert len(left_behind(bench.site)) == len(left), "its ring buffer is gone"
        bench.act("connects", "10.96.0.4:53")
        assert [event.service for event in read(monitor)] == ["default/dns"]


def test_command_that_was_stopped_for_long_continues(bench: Bench):
    """Another one has taken its place meanwhile."""
    with watched(bench.site) as stopped:
        expire(bench)
        with watched(bench.site) as other:
            stopped.renew()
            bench.act("fair", "10.96.0.1:80")
            assert [len(read(stopped)), len(read(other))] == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_command_ended_by_a_signal_leaves_nothing(bench: Bench, number: signal.Signals):
    process = command(bench)
    assert process.stdout.readline().startswith("TIME ")
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (128 + number, "", "")


def test_command_ends_with_the_reader_of_its_output(bench: Bench):
    """Even while there are no events."""
    process = command(bench)
    process.stdout.close()
    assert process.wait(PATIENCE) in (-signal.SIGPIPE, 141)


@pytest.fixture
def shown(bench: Bench, monkeypatch, capsys) -> Callable[..., list[str]]:
    """The lines of `kbpf monitor`, with another way to poll."""

    def show(poll: Callable[..., Iterator[None]], *words: str) -> list[str]:
        monkeypatch.setattr("kbpf.cli.monitor._poll", poll)
        with patient():
            assert app.call(["monitor", "--pin-dir", str(bench.site.pins), *words]) == 0
        return capsys.readouterr().out.splitlines()

    return show


@each_line(
    "words, service",
    """
--service default/fair     | default/fair
--service fair -n default  | default/fair
-n shop                    | shop/sticky
-n shop -A --service fair  | default/fair
""",
)
def test_command_ends_after_some_events(bench: Bench, words, service, shown: Callable[..., list[str]]):
    """Options of the command, and the Service whose events it shows. Also while no agent runs."""

    def poll(*_: object) -> Iterator[None]:
        yield
        bench.act("connects", "10.96.0.4:53")
        for _ in range(3):
            within(bench.client, lambda: (fair("10.96.0.1"), fair("10.96.0.20")))
        yield
        pytest.fail("it watches on")

    bench.site.close_planes()
    lines = shown(poll, "-o", "json", "--count", "2", *words.split())
    start(bench, Accounting.CONNECTIONS)
    events = [json.loads(line) for line in lines]
    assert [event["service"] for event in events] == [service] * 2
    assert set(events[0]) == {"apiVersion", "kind", *EventRow.__struct_fields__}


def test_events_after_the_last_poll_are_shown(bench: Bench, shown: Callable[..., list[str]]):
    """On a busy machine the last poll may be long before the end."""

    def poll(*_: object) -> Iterator[None]:
        yield
        bench.act("fair", "10.96.0.1:80")

    assert "default/fair" in shown(poll, "--for", "1s")[-1]


def test_command_ends_after_a_time_and_says_how_many_were_left_out(bench: Bench):
    for time in ("1500ms", "15s", "50s"):  # more if a busy machine cannot make the flood meanwhile
        process = command(bench, "--for", time, "--rate", "10", "--verdict", "new")
        bench.act("flood", "10.96.0.4:53")
        saw_all = is_monitored(bench)
        out, err = process.communicate(timeout=PATIENCE)
        if saw_all:
            break
    assert saw_all
    assert (process.returncode, err) == (0, "")
    titles, *lines = out.splitlines()
    assert titles.split() == ["TIME", "VERDICT", "CLIENT", "SERVICE", "FRONTEND", "BACKEND", "REASON"]
    notes = [line for line in lines if "more not shown: above 10 a second" in line]
    left_out = sum(int(note.split()[0].replace(",", "")) for note in notes)
    assert len(lines) - len(notes) + left_out == FLOOD


def test_maps_that_were_removed_end_it(artifact_cache: Path):
    with sites(artifact_cache) as make:
        other = make()
        other.open().apply(desired(service("web", "10.96.0.1:80", "10.0.0.1:80")), None)
        with watched(other) as monitor:
            monitor.renew()
            other.remove()
            with pytest.raises(NotFoundError, match="replaced or removed"):
                monitor.renew()


# ---- kbpf top ------------------------------------------------------------------------------------


Top = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def top(bench: Bench, capsys, monkeypatch) -> Top:
    """The rows of `kbpf top --once -o json`, by name. Between its two reads, or while it watches, the client does
    something.
    """

    def show(*words: str, does: Callable[[], object]) -> dict[str, dict[str, Any]]:
        def act(*_: object) -> None:
            within(bench.client, does)

        monkeypatch.setattr("kbpf.cli.top.time", SimpleNamespace(sleep=act, monotonic=monotonic))
        monkeypatch.setattr("kbpf.views.top.ClientCounts", lambda: act() or ClientCounts())
        with patient():
            words = ("--once", "-o", "json", "--interval", "500ms", "--pin-dir", str(bench.site.pins), *words)
            assert app.call(["top", *words]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["kind"], document["seconds"] > 0) == ("TopList", True)
        return {row["name"]: row for row in document["items"]}

    return show


@needs("set_retval")
def test_top_shows_rates(bench: Bench, top: Top):
    def both() -> None:
        fair("10.96.0.1")
        refused("10.96.0.7")

    rows = top(does=both)
    assert rows["default/fair"]["new"] > 0
    assert rows["default/fair"]["no_backend"] == 0
    assert rows["default/fair"]["bytes_in"] is None, "not counted"
    assert (rows["default/empty"]["new"], rows["default/empty"]["no_backend"] > 0) == (0, True)
    rows = top("--by", "backends", "--service", "default/fair", does=both)
    (backend,) = rows
    assert backend == f"{bench.one.ip}:{FAIR}"
    assert {*top("-n", "shop", does=lambda: (both(), fair("10.96.0.20")))} == {"shop/sticky"}
    rows = top("--by", "clients", does=both)
    (client,) = rows
    assert str(bench.client.cgroup).endswith(client)
    assert rows[client]["new"] > 0
    assert rows[client]["no_backend"] > 0
    assert rows[client]["open"] is None


def test_pod_and_zone_of_a_backend_are_named(bench: Bench, top: Top):
    """As the agent writes them from the EndpointSlices."""
    key = pack_endpoint_key(service_id(bench, "fair"), parse_addr(bench.one.ip), FAIR, Protocol.TCP)
    bench.site.put("endpoint_names", key, pack_endpoint_name("fair-0", "node-1", "zone-a", 0))
    try:
        with watched(bench.site) as monitor:
            bench.act("fair", "10.96.0.1:80")
            (event,) = read(monitor)
        assert event.backend_pod == "default/fair-0"
        rows = {
            by: top("--by", by, "--service", "default/fair", does=lambda: fair("10.96.0.1"))
            for by in ("backends", "zones", "nodes")
        }
        (backend,) = rows["backends"].values()
        assert backend["pod"] == "default/fair-0"
        assert (*rows["zones"], *rows["nodes"]) == ("zone-a", "node-1")
        assert rows["zones"]["zone-a"]["new"] > 0
    finally:
        with bench.site.pinned("endpoint_names") as names:
            names.delete(key)


def test_top_refreshes_until_it_is_ended(bench: Bench):
    process = subprocess.Popen(
        [sys.executable, "-m", "kbpf", "top", "--pin-dir", str(bench.site.pins), "--interval", "100ms"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pages = 0
    while pages < 2:
        pages += process.stdout.readline() == "\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, "")


@each_line(
    "usage, code, message",
    """
monitor --verdict refused --reason translated  | 2 | no event has both
monitor --address nonsense                     | 2 | no IP or IP:PORT
monitor --address :80                          | 2 | no IP or IP:PORT
monitor --for soon                             | 2 | not a time
monitor --for 0s                               | 2 | longer than 0
monitor -o yaml                                | 2 | requires -o table, wide or json
monitor --rate 0                               | 2 | greater than or equal to 1
monitor --service default/fiar                 | 1 | did you mean default/fair
monitor --service default/fair -n shop         | 2 | shop contradicts the namespace
monitor --service fair -n shop                 | 1 | no Service shop/fair is programmed
monitor --pod shop/nobody                      | 1 | no Pod shop/nobody is on this node
monitor --reason nonsense                      | 2 | nonsense
monitor --pin-dir /sys/fs/bpf/nothing          | 1 | nothing is pinned
top -o json                                    | 2 | requires --once
top --once --interval 1ms                      | 2 | at least 100ms
top --once --interval soon                     | 2 | not a time
top --once --service default/fiar              | 1 | did you mean default/fair
top --once --by clients --service default/fiar | 1 | did you mean default/fair
top --once --service default/fair -n shop      | 2 | shop contradicts the namespace
""",
    code=int,
)
def test_wrong_usage(bench: Bench, capsys, usage, code, message):
    name, *words = usage.split()
    assert app.call([name, "--pin-dir", str(bench.site.pins), *words]) == code
    assert message in capsys.readouterr().err
