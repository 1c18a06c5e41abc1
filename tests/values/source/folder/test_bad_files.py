# SPDX-License-Identifier: Apache-2.0
"""Bad files, a vanished or emptied folder, and the thread."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbpf.model.events import Event
from kbpf.source.base import SourceState
from kbpf.source.folder.documents import parse_documents
from kbpf.source.folder.folder import EMPTY_FOLDER_PROBLEM, POLL_INTERVAL, FolderSource
from tests.support.lab.lab import until
from tests.values.source.folder.folder import BOTH, NODE, SYNCED, WEB, Run, service

# --- bad files ---


def test_bad_object_is_rejected_until_corrected(run):
    run.place(BOTH)
    assert run.change(BOTH.replace("port: 80\n", "port: 0\n")) == ["!web"]
    rejected = run.events[0]
    assert rejected.error == "spec.ports[0].port: 0 is not a port (a.yaml:10)"
    assert run.problems == (f"Service default/web: {rejected.error}",)
    assert run.change(NODE, "b.yaml") == ["+n1"]  # and not rejected again
    assert run.change(BOTH) == ["+web"]
    assert run.problems == ()


def test_object_in_two_files_is_used_from_the_first_and_reported(run):
    run.write("b.yaml", service("web", 81))
    assert run.place(service("web", 80)) == ["+web", *SYNCED]
    first = run.events[0]
    assert first.object.ports[0].port == 80
    assert run.problems == ("b.yaml: Service default/web is already in a.yaml; ignored here",)
    (run.path / "a.yaml").unlink()
    assert run.settle() == ["+web"]
    assert run.problems == ()


def test_vanished_folder_keeps_all_objects(tmp_path, caplog):
    caplog.set_level(logging.INFO, "kbpf.source")
    (tmp_path / "objects").mkdir()
    run = Run(tmp_path / "objects")
    run.place(WEB)
    run.path.rename(tmp_path / "away")
    assert run.settle() == []
    status = run.folder.status()
    assert status.state is SourceState.RETRYING
    assert status.failures == 2
    assert "cannot read the folder: No such file or directory" in status.error
    (tmp_path / "away").rename(run.path)
    assert run.settle() == []
    status = run.folder.status()
    assert (status.state, status.error, status.failures) == (SourceState.WATCHING, "", 0)
    assert [r.getMessage().split(" error")[0] for r in caplog.records[1:]] == [
        "cannot read the folder",
        f"folder can be read again path={run.path} failures=2",
    ]


def test_unreadable_file_keeps_its_objects(run, monkeypatch):
    run.place(WEB)
    real, denied = open, [True]

    def guarded(path: Path, mode: str) -> object:
        if denied[0]:
            raise PermissionError(13, "Permission denied")
        return real(path, mode)

    monkeypatch.setattr("kbpf.source.folder.folder.open", guarded, raising=False)
    os.utime(run.path / "a.yaml")
    assert run.settle() == []
    assert run.problems == ("cannot read the file: Permission denied (a.yaml)",)
    denied[0] = False
    assert run.settle() == []
    assert run.problems == ()


def test_problems_and_ignored_kinds_are_logged_once(run, caplog):
    caplog.set_level(logging.INFO, "kbpf.source")
    run.write("a.yaml", "kind: Deployment\n---\nkind: Deployment\n")
    run.place("{", "b.yaml")
    run.change(f"kind: Deployment\n---\n{WEB}", "c.yaml")
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "kind=Deployment" in line]) == 1
    assert len([line for line in lines if "b.yaml:2" in line]) == 1


@pytest.mark.parametrize(
    "text",
    [b"spec: {ports: &a [*a]}", b"- " * 100_000, b"[" * 100_000, b"\xff\xfe\x00", b"{"],
    ids=("a cycle", "deep", "deep flow", "bytes", "half"),
)
def test_one_bad_file_spoils_only_itself(run, text):
    """The bad file sorts first, and had a valid object before."""
    run.write("aaa.yaml", service("kept"))
    run.place(WEB, "b.yaml")
    (run.path / "aaa.yaml").write_bytes(text)
    run.write("b.yaml", WEB.replace("port: 80", "port: 81"))
    assert run.change(service("new"), "c.yaml") == ["+web", "+new"]
    (problem,) = run.problems
    assert "aaa.yaml" in problem
    assert not run.folder.status().authoritative
    assert run.change(service("kept"), "aaa.yaml") == []
    assert run.problems == ()


def test_internal_error_in_one_file_does_not_affect_the_others(run, monkeypatch, caplog):
    def broken(name, data, *more):
        if name == "a.yaml":
            raise RuntimeError("on purpose")
        return parse_documents(name, data, *more)

    monkeypatch.setattr("kbpf.source.folder.folder.parse_documents", broken)
    run.write("a.yaml", WEB)
    assert run.place(service("b"), "b.yaml") == ["+b", *SYNCED]
    assert run.settle() == []
    (problem,) = run.problems
    assert problem.startswith("cannot read the file: RuntimeError('on purpose') (a.yaml)")
    assert caplog.text.count("Traceback") == 1


class Clock:
    now = 7.0


@pytest.fixture
def clocked(tmp_path) -> tuple[Run, Clock]:
    run, clock = Run(tmp_path), Clock()
    run.folder = FolderSource(tmp_path, run.put, "n1", clock=lambda: clock.now, empty_grace=60.0)
    run.place(WEB)
    (tmp_path / "a.yaml").unlink()
    return run, clock


def test_emptied_folder_keeps_its_objects_for_a_grace_period(clocked, caplog):
    run, clock = clocked
    for _ in range(5):
        assert run.settle() == []
        clock.now += 11.0
    assert run.problems == (EMPTY_FOLDER_PROBLEM,)
    assert not run.folder.status().authoritative
    assert caplog.text.count(EMPTY_FOLDER_PROBLEM) == 1
    assert "deleting its objects" not in caplog.text
    clock.now += 6.0
    assert run.settle() == ["-web"]
    assert run.settle() == []
    assert caplog.text.count("the folder is still empty, deleting its objects") == 1
    assert run.problems == ()


def test_file_that_returns_within_the_grace_period_makes_no_event(clocked):
    run, clock = clocked
    assert run.settle() == []
    assert run.change(WEB) == []
    assert run.problems == ()
    assert run.folder.status().authoritative
    (run.path / "a.yaml").unlink()
    clock.now += 59.0
    assert run.settle() == [], "the time begins again"


def test_without_grace_period_an_emptied_folder_deletes_its_objects(tmp_path):
    run = Run(tmp_path)
    run.folder = FolderSource(tmp_path, run.put, "n1", empty_grace=0.0)
    run.place(WEB)
    (tmp_path / "a.yaml").unlink()
    assert run.settle() == ["-web"]


# --- the folder's thread ---


@pytest.fixture
def running(tmp_path) -> Iterator[Callable[[], Run]]:
    run = Run(tmp_path)

    def start() -> Run:
        run.folder.start()
        return run

    yield start
    run.folder.stop()
    until("no thread is left", lambda: not any(t.name == "folder" for t in threading.enumerate()))


def test_thread_reads_a_change_within_half_a_second_and_stops(running, tmp_path):
    (tmp_path / "a.yaml").write_text(WEB)
    run = running()
    until("the file is read", lambda: len(run.events) == len(SYNCED) + 1)
    (tmp_path / "a.yaml").write_text(WEB.replace("port: 80", "port: 81"))
    until("the change is read", lambda: len(run.events) == len(SYNCED) + 2)
    run.folder.stop()
    until("the folder has stopped", lambda: run.folder.status().state is SourceState.STOPPED)
    assert 3 * POLL_INTERVAL < 0.5, "a change is read at the second look, and begins in the first"


def test_internal_error_does_not_end_the_thread(tmp_path, caplog):
    (tmp_path / "a.yaml").write_text(WEB)
    said: list[Event] = []
    faults = [RuntimeError("no room")]

    def put(event: Event) -> None:
        if faults:
            raise faults.pop()
        said.append(event)

    folder = FolderSource(tmp_path, put, poll_interval=0.01)
    folder.start()
    until("the file is read", lambda: len(said) == len(SYNCED) + 1)
    folder.stop()
    assert "no room" in caplog.text
