# SPDX-License-Identifier: Apache-2.0
"""`--mode auto` where BPF is unavailable: the agent serves by IPVS and reports why. Each cause is
real: the kernel, the machine or its operator. Kernels without IPVS get a fake of it that serves
nothing; there only the agent's choice is tested.
"""

import contextlib
import ctypes
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import yaml

from kbpf.checks.fallback import FallbackReason
from kbpf.dataplane.bpf.hooks import HOOKS, UNITS
from kbpf.dataplane.bpf.packet_path import nat_table
from kbpf.dataplane.bpf.programs import artifact, compile
from kbpf.kernel.bpf import probe, syscalls
from kbpf.kernel.bpf.objects import Program
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, service, slice_port
from tests.support.features import lacking
from tests.support.lab.lab import V1_ONLY, Agent, Lab, Place, inside, ip, run, until

DENY = Path(__file__).parents[2] / "support" / "faults" / "deny.py"
LINK_CREATE = 28
"""From enum bpf_cmd: BPF_LINK_CREATE is new in Linux 5.7."""
VIP = "10.96.0.1"
HAS_IPVS = not lacking("ipvs")


class Bench:
    """A node with a pod, an agent, and causes that keep the agent from using BPF."""

    def __init__(self, lab: Lab, folder: Path, compiled: Path) -> None:
        self.folder, self.compiled = folder, compiled
        self.home = lab.nodes[0]
        self.pod = self.home.pod("a").serve(8080)
        self.outside = Place("outside", lab.outside, None)
        ip(f"route add {VIP}/32 via {self.home.ip}", netns=lab.outside)
        objects = folder / "objects"
        objects.mkdir()
        made = (
            node(self.home.name, self.home.ip, self.home.ip6),
            service("web", cluster_ip=VIP),
            endpoint_slice("web", endpoint(self.pod.ip), ports=[slice_port(8080)]),
        )
        (objects / "all.yaml").write_text(yaml.safe_dump_all(made))
        self.agent = Agent(self.home, "--source", str(objects), cache=compiled)
        self.agent.module = "kbpf" if HAS_IPVS else "tests.support.runtime.planeless_agent"

    def python(self, module: str, text: str) -> tuple[str, ...]:
        """A command that runs another one whose Python finds this module before the real one."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / module).parent.mkdir(exist_ok=True)
        (folder / module).write_text(text)
        return ("env", f"PYTHONPATH={folder}")

    def nothing_compiled(self) -> tuple[str, ...]:
        """Arguments that make the agent compile, because its cache is empty."""
        return ("--cache-dir", str(self.folder / "empty"))

    def spoiled(self) -> tuple[str, ...]:
        """Arguments of an agent whose connect4 every verifier refuses: it sets no return value."""
        folder = self.folder / "spoiled"
        for unit in UNITS:
            made, _ = compile.find_or_compile(unit, self.compiled)
            programs = tuple(
                msgspec.structs.replace(code, insns=b"\x95" + bytes(7), references=())
                if code.name == "connect4"
                else code
                for code in made.programs
            )
            artifact.store(msgspec.structs.replace(made, programs=programs), folder)
        return ("--cache-dir", str(folder))

    @contextlib.contextmanager
    def exclusive_program(self, name: str) -> Iterator[None]:
        """Another program is attached to this hook of the node's cgroup and does not allow a second
        one.
        """
        hook = next(hook for hook in HOOKS if hook.name == name)
        folder = os.open(self.home.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        program = Program.load("theirs", hook.prog_type, hook.attach_type, probe.RETURN_1)
        try:
            assert syscalls.lib().bpf_prog_attach(program.fd, folder, hook.attach_type, 0) == 0
            yield
            kind = ctypes.c_int(hook.attach_type)
            assert syscalls.lib().bpf_prog_detach2(program.fd, folder, kind) == 0
        finally:
            program.close()
            os.close(folder)


@dataclass(frozen=True, slots=True)
class Cause:
    """What keeps the agent from BPF, and the reason that it reports. `wrapper`: a command that runs
    the agent; `extra`: the agent's arguments; `around`: a context in which it runs.
    """

    name: str
    reason: FallbackReason
    wrapper: Callable[[Bench], tuple[str, ...]] = lambda _: ()
    extra: Callable[[Bench], tuple[str, ...]] = lambda _: ()
    around: Callable[[Bench], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()


def deny(number: int, *commands: int) -> Callable[[Bench], tuple[str, ...]]:
    """A kernel without these commands of bpf(2); without `commands`, without bpf(2)."""
    numbers = ",".join(map(str, commands))
    return lambda _: (sys.executable, str(DENY), str(number), numbers, "--")


BAD_BCC = "raise ImportError('libbcc.so.0: cannot open shared object file')\n"
NO_BCC = "import sys\nsys.modules['bcc'] = None\n"
NO_LIBBPF = """
import ctypes
class CDLL(ctypes.CDLL):
    def __init__(self, name, *more, **options):
        if name and "libbpf" in name:
            raise OSError(f"{name}: cannot open shared object file")
        super().__init__(name, *more, **options)
ctypes.CDLL = CDLL
"""
CAUSES = (
    Cause("no bpf(2)", FallbackReason.NO_BPF, wrapper=deny(errno.ENOSYS)),
    Cause(
        "CAP_NET_ADMIN alone",
        FallbackReason.NO_PRIVILEGES,
        wrapper=lambda _: ("setpriv", "--bounding-set", "-all,+net_admin", "--"),
    ),
    Cause(
        "no libbpf",
        FallbackReason.NO_LIBRARY,
        wrapper=lambda bench: bench.python("sitecustomize.py", NO_LIBBPF),
    ),
    Cause("a kernel before 5.7", FallbackReason.NO_FEATURE, wrapper=deny(errno.EINVAL, LINK_CREATE)),
    Cause(
        "only a part of cgroup v2",
        FallbackReason.NO_CGROUP,
        extra=lambda _: ("--cgroup", ""),
        wrapper=lambda _: (*V1_ONLY, "unshare", "--cgroup"),
    ),
    Cause(
        "no BCC, and nothing compiled",
        FallbackReason.NO_COMPILER,
        extra=Bench.nothing_compiled,
        wrapper=lambda bench: bench.python("sitecustomize.py", NO_BCC),
    ),
    Cause(
        "BCC fails",
        FallbackReason.COMPILE_FAILED,
        extra=Bench.nothing_compiled,
        wrapper=lambda bench: bench.python("bcc/__init__.py", BAD_BCC),
    ),
    Cause("the verifier refuses", FallbackReason.PROGRAM_REFUSED, extra=Bench.spoiled),
    Cause(
        "exclusive program at a hook",
        FallbackReason.ATTACH_FAILED,
        around=lambda bench: bench.exclusive_program("sendmsg6"),
    ),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory, artifact_cache: Path) -> Iterator[Bench]:
    for unit in UNITS:
        compile.find_or_compile(unit, artifact_cache)
    with Lab(1, "fb", apart=True) as lab:
        made = Bench(lab, tmp_path_factory.mktemp("fallback"), artifact_cache)
        yield made
        made.outside.close()


def test_every_fallback_reason_has_a_cause():
    assert {cause.reason for cause in CAUSES} == set(FallbackReason)


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_agent_falls_back_to_ipvs_and_reports_the_reason(bench: Bench, cause: Cause):
    agent = bench.agent
    agent.wrapper, agent.mode = cause.wrapper(bench), "ipvs"
    with cause.around(bench), running(agent, "--mode", "auto", *cause.extra(bench)):
        if HAS_IPVS:
            assert bench.outside.tcp(VIP, 80)["name"] == "a"
            assert agent.virtual_services() == {f"{VIP}:80/6": {f"{bench.pod.ip}:8080": 1}}
        choice = chosen(agent)
        assert (choice["requested"], choice["mode"]) == ("auto", "ipvs")
        assert (choice["reason"], bool(choice["detail"])) == (str(cause.reason), True)
        (said,) = [line for line in agent.lines() if "BPF is unavailable on this node" in line]
        assert f"{cause.reason}: {choice['detail']}" in said
        until("nothing of BPF is pinned", lambda: not any(agent.pin_dir.glob("*")))
        tables = run(*inside(bench.home.netns, None, "nft", "list", "tables"))
        assert nat_table.TABLE not in tables


def test_next_start_tries_bpf_again(bench: Bench):
    """A fallback lasts until then."""
    agent = bench.agent
    agent.wrapper, agent.mode = (), "bpf"
    with running(agent, "--mode", "auto"):
        assert chosen(agent) == {"requested": "auto", "mode": "bpf", "reason": "", "detail": ""}
        assert bench.outside.tcp(VIP, 80)["name"] == "a"


@contextlib.contextmanager
def running(agent: Agent, *arguments: str) -> Iterator[None]:
    """Starts the agent, and stops it in any case."""
    try:
        agent.start(extra=arguments)
        yield
    finally:
        agent.stop()


def chosen(agent: Agent) -> dict[str, str]:
    """The choice of a mode in the agent's status."""
    status = agent.status()
    assert status is not None
    made: dict[str, str] = status["choice"]
    return made
