"""The watch of the configuration file, driven look by look; nothing here waits."""

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
    """A file, a Follower of it, and how often it said that there are new settings."""

    def __init__(self, path: Path, data: bytes = A) -> None:
        self.path = path
        self.changes = 0
        self.follower = ConfigWatcher(
            path, data, lambda d: load.load({}, {}, d, "file"), self._count
        )
        self.look()

    def _count(self) -> None:
        self.changes += 1

    def look(self) -> int:
        """Twice, as it takes to see a file that has come to rest; the changes so far."""
        self.follower.poll()
        self.follower.poll()
        return self.changes

    def put(self, data: bytes) -> int:
        beside = self.path.with_name("new")
        beside.write_bytes(data)
        beside.rename(self.path)
        return self.look()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    path = tmp_path / "config.conf"
    path.write_bytes(A)
    return Site(path)


def test_a_file_that_stays_says_nothing(site: Site, caplog: pytest.LogCaptureFixture):
    assert site.look() == 0
    os.utime(site.path, (1, 1))
    assert site.look() == 0
    assert site.put(A) == 0
    assert caplog.records == []


def test_other_settings_are_said_once_and_the_watch_is_over(site: Site):
    assert site.put(B) == 1
    assert site.follower.is_done


def test_a_file_that_changed_between_its_reading_and_the_first_look(tmp_path: Path):
    path = tmp_path / "config.conf"
    path.write_bytes(B)
    assert Site(path, A).changes == 1


def test_another_text_that_says_the_same_changes_nothing(
    site: Site, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "kbpf.config")
    assert site.put(SAME) == 0
    assert "configuration file changed, settings did not" in caplog.text
    assert not site.follower.is_done
    assert site.put(B) == 1


def test_a_wrong_text_is_told_once_with_all_that_is_wrong(
    site: Site, caplog: pytest.LogCaptureFixture
):
    assert site.put(WRONG) == 0
    assert site.look() == 0
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    for words in ("keeping the current settings", "'ring' (KbpfConfiguration.algorithm)",
                  "'x' (KbpfConfiguration.mode)"):  # fmt: skip
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


def test_a_file_that_is_gone_is_told_once_and_counts_when_it_is_back(
    site: Site, caplog: pytest.LogCaptureFixture
):
    site.path.unlink()
    assert site.look() == 0
    assert site.look() == 0
    assert len(caplog.records) == 1
    assert "cannot read the configuration; keeping the current settings" in caplog.text
    assert site.put(A) == 0
    assert site.put(B) == 1


def test_a_file_that_is_being_written_is_not_judged(site: Site, caplog: pytest.LogCaptureFixture):
    with site.path.open("wb") as file:
        file.write(WRONG[:50])
        file.flush()
        site.follower.poll()
        file.write(b"x" * 5)
        file.flush()
        site.follower.poll()
    assert caplog.records == []
    assert site.put(B) == 1


def test_a_config_map_is_changed_by_a_link_that_is_swapped(tmp_path: Path):
    mount = Mount(tmp_path / "mount")
    mount.put(config_conf=A.decode())
    site = Site(mount.folder / "config.conf")
    mount.put(config_conf=A.decode())
    assert site.look() == 0
    mount.put(config_conf=B.decode())
    assert site.look() == 1
