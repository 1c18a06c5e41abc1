# SPDX-License-Identifier: Apache-2.0
"""The ConfigWatcher, polled by the tests themselves; nothing here waits."""

import os
from pathlib import Path

import pytest

from kbpf.config import load
from kbpf.config.watcher import ConfigWatcher
from tests.support.cluster.kubeadm import Mount

A = b"apiVersion: kbpf.io/v1alpha1\nkind: KbpfConfiguration\nalgorithm: maglev\n"
SAME = A + b"# the same\n"
B = A.replace(b"maglev", b"random")
WRONG = A.replace(b"maglev", b"ring") + b"mode: x\n"


class Site:
    """A file, a ConfigWatcher of it, and the number of times it reported new settings."""

    def __init__(self, path: Path, data: bytes = A) -> None:
        self.path = path
        self.changes = 0
        self.follower = ConfigWatcher(path, data, lambda d: load.load({}, {}, d, "file"), self._count)
        self.look()

    def _count(self) -> None:
        self.changes += 1

    def look(self) -> int:
        """Polls twice, since a file is read once two polls find it the same; returns the number of
        reports so far.
        """
        self.follower.poll()
        self.follower.poll()
        return self.changes

    def put(self, data: bytes) -> int:
        beside = self.path.with_name("new")
        beside.write_bytes(data)
        beside.rename(self.path)
        return self.look()


@pytest.fixture
def site(tmp_path) -> Site:
    path = tmp_path / "config.conf"
    path.write_bytes(A)
    return Site(path)


def test_unchanged_file_is_no_change(site: Site, caplog):
    assert site.look() == 0
    os.utime(site.path, (1, 1))
    assert site.look() == 0
    assert site.put(A) == 0
    assert caplog.records == []


def test_new_settings_are_reported_once_and_end_the_watch(site: Site):
    assert site.put(B) == 1
    assert site.follower.is_done


def test_change_before_the_first_poll_is_reported(tmp_path):
    path = tmp_path / "config.conf"
    path.write_bytes(B)
    assert Site(path, A).changes == 1


def test_new_text_with_the_same_settings_is_no_change(site: Site, caplog):
    caplog.set_level("INFO", "kbpf.config")
    assert site.put(SAME) == 0
    assert "configuration file changed, settings did not" in caplog.text
    assert not site.follower.is_done
    assert site.put(B) == 1


def test_invalid_file_is_logged_once_with_all_mistakes(site: Site, caplog):
    assert site.put(WRONG) == 0
    assert site.look() == 0
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    for words in (
        "keeping the current settings",
        "'ring' (KbpfConfiguration.algorithm)",
        "'x' (KbpfConfiguration.mode)",
    ):
        assert words in record.getMessage()
    assert "'x' (KbpfConfiguration.mode)" in site.follower.error()
    site.path.unlink()
    site.look()
    assert "cannot read the configuration" in site.follower.error()
    site.put(WRONG)
    assert "'x' (KbpfConfiguration.mode)" in site.follower.error(), "also when it is back"
    assert site.put(A) == 0
    assert site.follower.error() == ""
    assert site.put(B) == 1


def test_missing_file_is_logged_once_and_read_when_it_is_back(site: Site, caplog):
    site.path.unlink()
    assert site.look() == 0
    assert site.look() == 0
    assert len(caplog.records) == 1
    assert "cannot read the configuration; keeping the current settings" in caplog.text
    assert site.put(A) == 0
    assert site.put(B) == 1


def test_file_being_written_is_not_read(site: Site, caplog):
    with site.path.open("wb") as file:
        file.write(WRONG[:50])
        file.flush()
        site.follower.poll()
        file.write(b"x" * 5)
        file.flush()
        site.follower.poll()
    assert caplog.records == []
    assert site.put(B) == 1


def test_config_map_update_by_a_swapped_link_is_reported(tmp_path):
    mount = Mount(tmp_path / "mount")
    mount.put(config_conf=A.decode())
    site = Site(mount.folder / "config.conf")
    mount.put(config_conf=A.decode())
    assert site.look() == 0
    mount.put(config_conf=B.decode())
    assert site.look() == 1
