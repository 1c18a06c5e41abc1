# SPDX-License-Identifier: Apache-2.0
"""The sysctls of the kernel's conntrack: their values, and what happens if one cannot be set."""

from pathlib import Path

import pytest

from kbpf.agent import host_thread
from kbpf.agent.host_thread import ConntrackSysctls, compute_settings
from kbpf.cli import app
from kbpf.errors import KernelError
from kbpf.kernel.system import sysctl
from kbpf.model.config import Conntrack
from tests.support.table import each_line, each_named_pair

TIMES = "tcp_timeout_established=86400 tcp_timeout_close_wait=3600"


@each_named_pair(
    "machine, expected",
    f"""\
kube-proxy's defaults on a small machine: 2 CPUs → max=131072 {TIMES}
16 CPUs: 16 CPUs → max=524288 {TIMES}
over the limit: 64 CPUs → max=1048576 {TIMES}
at the limit: 32 CPUs → max=1048576 {TIMES}
the minimum may exceed the limit: 2 CPUs least=2000000 → max=2000000 {TIMES}
0 entries per CPU, the number is left alone despite the minimum: 16 CPUs max_per_core=0 → {TIMES}
no minimum: 3 CPUs max_per_core=10 least=0 → max=30 {TIMES}
nothing: 8 CPUs max_per_core=0 tcp_established=0 tcp_close_wait=0 →
all: 1 CPUs max_per_core=1 least=1 tcp_established=2 tcp_close_wait=3 tcp_be_liberal=1 udp=4 udp_stream=5 → \
max=1 tcp_timeout_established=2 tcp_timeout_close_wait=3 tcp_be_liberal=1 udp_timeout=4 udp_timeout_stream=5
""",
)
def test_settings_for_a_machine(machine, expected):
    """A machine and settings → the sysctls in order, without their prefix."""
    cpus, _, *words = machine.split()
    given = {name: int(value) for name, value in (word.split("=") for word in words)}
    found = compute_settings(Conntrack(**given), int(cpus))
    assert " ".join(f"{name.removeprefix('net.netfilter.nf_conntrack_')}={value}" for name, value in found) == expected


class Machine:
    """A directory in place of /proc/sys, and a file in place of the module parameter `hashsize`."""

    def __init__(self, folder: Path) -> None:
        self.hashsize = folder / "hashsize"
        self.sysctls = folder / "net/netfilter"
        self.root = folder

    def load(self, **values: int) -> None:
        """Creates the sysctls that the module nf_conntrack creates when it is loaded."""
        self.sysctls.mkdir(parents=True)
        self.hashsize.write_text("65536\n")
        defaults = {
            "max": 65_536,
            "tcp_timeout_established": 432_000,
            "tcp_timeout_close_wait": 60,
            "tcp_be_liberal": 0,
        }
        for name, value in {**defaults, **values, "buckets": 65_536}.items():
            (self.sysctls / f"nf_conntrack_{name}").write_text(f"{value}\n")

    def values(self) -> dict[str, int]:
        """All values without the size of the hash table."""
        found = self.sysctls.glob("nf_conntrack_*")
        names = {path.name.removeprefix("nf_conntrack_"): path for path in found}
        return {name: int(p.read_text()) for name, p in names.items() if name != "buckets"}

    @property
    def buckets(self) -> Path:
        """The sysctl of the hash table's size."""
        return self.sysctls / "nf_conntrack_buckets"


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(sysctl, "path_of", lambda name: tmp_path / name.replace(".", "/"))
    monkeypatch.setattr(host_thread, "HASHSIZE_PARAMETER", made.hashsize)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return made


def test_sysctls_are_set_once(machine: Machine):
    machine.load()
    keeper = ConntrackSysctls(Conntrack(tcp_be_liberal=True))
    keeper.apply(1.0)
    expected = {"max": 131_072, "tcp_timeout_established": 86_400, "tcp_timeout_close_wait": 3_600, "tcp_be_liberal": 1}
    assert machine.values() == expected
    (machine.sysctls / "nf_conntrack_max").write_text("7\n")
    keeper.apply(1e9)
    assert machine.values()["max"] == 7, "an operator's own value stays until the next start"


@each_line(
    "before, configured, after, hashes",
    """\
65536 | 262144 | 262144 | 65536
65536 | 262148 | 262148 | 65537
65536 | 1048576 | 1048576 | 262144
65536 | 2 | 65536 | 65536
2000000 | 262148 | 2000000 | 65537
""",
    before=int,
    configured=int,
    after=int,
    hashes=int,
)
def test_neither_the_limit_nor_the_hash_table_shrinks(machine: Machine, before, configured, after, hashes):
    """nf_conntrack_max before, the configured one, nf_conntrack_max after, and the size of the hash table. An
    operator's higher limit stays.
    """
    machine.load(max=before)
    ConntrackSysctls(Conntrack(max_per_core=1, least=configured)).apply(1.0)
    assert machine.values()["max"] == after
    assert int(machine.buckets.read_text()) == hashes
    assert int(machine.hashsize.read_text()) == 65_536, "a container cannot write it"


@pytest.mark.parametrize("kept", ["another errno", "no such setting"])
def test_hash_table_is_resized_with_the_module_parameter_if_the_sysctl_fails(
    machine: Machine, monkeypatch, caplog, kept
):
    machine.load()
    if kept == "no such setting":
        machine.buckets.unlink()
    write = sysctl.write

    def all_but_one(name: str, value: str) -> None:
        (refuse if name.endswith("_buckets") else write)(name, value)

    monkeypatch.setattr(sysctl, "write", all_but_one)
    ConntrackSysctls(Conntrack(least=1_000_000)).apply(1.0)
    assert int(machine.hashsize.read_text()) == 250_000
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def refuse(name: str, value: str) -> None:
    raise KernelError(f"cannot set {name}", "", "", 30)


def test_failed_sysctls_are_one_warning_with_all_values(machine: Machine, monkeypatch, caplog):
    machine.load()
    monkeypatch.setattr(sysctl, "write", refuse)
    keeper = ConntrackSysctls(Conntrack())
    keeper.apply(1.0)
    keeper.apply(1e9)
    (record,) = caplog.records
    line = record.getMessage()
    assert record.levelname == "WARNING"
    assert "net.netfilter.nf_conntrack_max=131072" in line
    assert "net.netfilter.nf_conntrack_tcp_timeout_close_wait=3600" in line
    assert "EROFS" in line


@pytest.mark.parametrize("before", [65_536, 131_072, 262_144], ids=str)
def test_read_only_nf_conntrack_max_in_a_network_namespace_is_left_alone(machine: Machine, caplog, before):
    caplog.set_level("INFO", "kbpf.agent")
    machine.load(max=before)
    (machine.sysctls / "nf_conntrack_max").chmod(0o444)
    ConntrackSysctls(Conntrack()).apply(1.0)
    assert machine.values()["max"] == before
    assert machine.values()["tcp_timeout_close_wait"] == 3_600
    line = "cannot set net.netfilter.nf_conntrack_max=131072 in this network namespace; set it on the host"
    assert (line in caplog.text) is (before < 131_072)
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_other_sysctls_are_set_if_the_hash_table_cannot_grow(machine: Machine, caplog):
    machine.load()
    machine.hashsize.unlink()
    machine.buckets.unlink()
    machine.buckets.mkdir()  # a directory, which not even root can write to
    ConntrackSysctls(Conntrack(least=1_000_000)).apply(1.0)
    assert machine.values()["tcp_timeout_close_wait"] == 3_600
    (record,) = caplog.records
    assert "net.netfilter.nf_conntrack_buckets=250000 (EISDIR)" in record.getMessage()
    assert "at /host/proc/sys/net" in record.getMessage()


def test_sysctls_are_set_once_the_module_is_loaded(machine: Machine, caplog):
    caplog.set_level("INFO", "kbpf.agent")
    keeper = ConntrackSysctls(Conntrack())
    keeper.apply(1.0)
    keeper.apply(20.0)
    assert len(caplog.records) == 1
    machine.load()
    keeper.apply(20.1)
    assert machine.values()["max"] == 65_536, "it looks now and then only"
    keeper.apply(40.0)
    assert machine.values()["max"] == 131_072


def test_init_only_sets_the_sysctls_and_exits(machine: Machine):
    machine.load()
    assert app.call(["run", "--init-only", "--conntrack-min", "200000", "-v=0"]) == 0
    assert machine.values()["max"] == 200_000
