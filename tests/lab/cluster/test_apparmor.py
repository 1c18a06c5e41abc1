"""The AppArmor profiles that are shipped, enforced: the DaemonSet's container runs under each of
them, by runc, and does all that it has to; what the profiles deny is denied.

Debian's kernels have AppArmor (`python -m tests.kernels --only apparmor`).
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.support.cluster.daemonset import ROOT, PodAgent
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.features import needs
from tests.support.lab.lab import Lab, Place, until
from tests.support.runtime.folder_pod import FolderPod
from tests.support.runtime.pods import Image
from tests.support.scenario import put

pytestmark = needs("apparmor")

PYTHON = "/opt/kbpf/bin/python"
"""As in the image. A shebang would name the interpreter where it really is."""
VENV = Path(sys.prefix)
PROFILES = ("kbpf", "kbpf-no-sys-admin")
MORE = 200
"""Services, with which maps have to grow that have room for 128 entries."""


class ConfinedAgent(PodAgent):
    """Its image has the virtual environment where kbpf's has it."""

    def image(self, rootfs: Path) -> Image:
        usual = super().image(rootfs)
        env = {**usual.env, "PYTHONPATH": str(ROOT)}
        return Image(usual.root, usual.shown, usual.path, env, {Path("/opt/kbpf"): VENV})


@pytest.fixture(scope="module")
def house() -> Iterator[FolderPod]:
    for name in PROFILES:
        path = ROOT / "manifests" / "security" / f"{name}.apparmor"
        subprocess.run(["apparmor_parser", "--replace", "--skip-cache", str(path)], check=True)
    with Lab(1, "aa", apart=True) as lab:
        made = FolderPod(lab, ConfinedAgent)
        try:
            yield made
        finally:
            made.agent.close()


def template(house: FolderPod, profile: str, *command: str) -> Object:
    """The pod with this profile and a command of kbpf; "" for no profile. No seccomp profile, which
    would deny some of it as well.
    """
    made = house.template()
    (container,) = made["spec"]["containers"]
    run = command or ("-m", "tests.support.runtime.small_maps_agent", *container["command"][1:])
    container["command"] = [PYTHON, *run]
    rights = container["securityContext"]
    rights["seccompProfile"] = {"type": "Unconfined"}
    confined = {"type": "Localhost", "localhostProfile": profile}
    rights["appArmorProfile"] = confined if profile else {"type": "Unconfined"}
    return made


def served(house: FolderPod, number: int) -> None:
    """From a pod and from outside, and `number` Services are programmed."""
    outside = Place("outside", house.node.lab.outside, None)
    try:
        for place, to in ((outside, (house.node.ip, 30080)), (house.client, ("10.96.0.80", 80))):
            assert place.tcp(*to).get("name") == "a1", place.name
    finally:
        outside.close()
    status = house.agent.status()
    assert status is not None
    assert (status["error"], status["packets"]["problem"]) == ("", ""), house.agent.tail()
    assert status["services"] >= number, status


def denied(since: int) -> tuple[list[str], int]:
    """What the kernel says that AppArmor denied, and how many lines its log has."""
    lines = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout.split("\n")
    return [line for line in lines[since:] if 'apparmor="DENIED"' in line], len(lines)


@pytest.mark.parametrize("profile", PROFILES)
def test_it_does_all_that_it_has_to(house: FolderPod, profile: str) -> None:
    """Start, grow, adopt, check, end sockets, clean up; and nothing of it is denied."""
    agent, (_, before) = house.agent, denied(0)
    agent.remove_pins()
    house.launch(template(house, profile))
    try:
        agent.wait_synced()
        assert current(agent) == f"{profile} (enforce)"
        served(house, 1)
        objects = [
            obj
            for number in range(MORE)
            for obj in (
                service(f"s{number}", port(80), cluster_ip=f"10.96.1.{number + 1}"),
                endpoint_slice(f"s{number}", endpoint(house.server.ip), ports=[slice_port(8080)]),
            )
        ]
        put(house.objects, "more.yaml", yaml.safe_dump_all(objects))
        last = (f"10.96.1.{MORE}", 80)
        until("maps have grown", lambda: house.client.tcp(*last).get("name") == "a1")
        served(house, MORE)
        assert agent.stop() == 0
        house.launch(template(house, profile))
        agent.wait_synced()
        served(house, MORE)
        done = agent.exec(PYTHON, "-m", "kbpf", "inspect", "status")
        assert done.returncode == 0, done
        assert agent.stop() == 0
        said = agent.try_out(
            template(house, profile, "-m", "kbpf", "cleanup")["spec"],
            {"config": house.objects}, None, {},
        )  # fmt: skip
        assert said
        assert not agent.pin_dir.exists()
        assert denied(before)[0] == []
    finally:
        (house.objects / "more.yaml").unlink(missing_ok=True)
        if agent.runs:
            agent.forget()


def current(agent: PodAgent) -> str:
    """Under which profile the container's process is."""
    return Path(f"/proc/{agent.pid}/attr/current").read_text().strip()


TRY = """
import ctypes, errno, json, os, shutil, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    def made():
        if getattr(libc, name)(*arguments) == -1:
            raise OSError(ctypes.get_errno(), name)
    return made
def write(path):
    return lambda: open(path, "wb").close()
def execute():
    shutil.copy("/usr/bin/true", "/tmp/true")
    subprocess.run(["/tmp/true"], check=True)
def enter():
    fd = os.open("/run/netns/" + sys.argv[1], os.O_RDONLY)
    call("setns", fd, 0x40000000)()
def sysctl():
    path = "/host/proc/sys/net/ipv4/ip_forward"
    value = open(path).read()
    open(path, "w").write(value)
attempts = {
    "mount": call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "execute what it has written": execute,
    "write beside its folders": write("/dev/kbpf-try"),
    "trace the agent": call("ptrace", 16, 1, None, None),
    "enter a pod's network namespace": enter,
    "write to /tmp": write("/tmp/kbpf-try"),
    "write to its cache": write("/var/cache/kbpf/kbpf-try"),
    "write network sysctls": sysctl,
    "write to the cgroup hierarchy": lambda: os.mkdir("/host/sys/fs/cgroup/kbpf-try"),
    "make a pin": lambda: os.mkdir("/sys/fs/bpf/kbpf-try"),
}
for path in ("/tmp/true", "/sys/fs/bpf/kbpf-try"):
    shutil.rmtree(path, ignore_errors=True)
said = {}
for name, attempt in attempts.items():
    try:
        attempt()
        said[name] = ""
    except OSError as error:
        said[name] = errno.errorcode[error.errno]
if said["mount"] == "":
    libc.umount2(b"/tmp", 2)
shutil.rmtree("/sys/fs/bpf/kbpf-try", ignore_errors=True)
print(json.dumps(said))
"""


class Row(NamedTuple):
    """What a process in the container may do without a profile, and under each of ours: "", or the
    error.
    """

    what: str
    unconfined: str
    kbpf: str
    no_sys_admin: str


ROWS = [
    Row("mount", "", "EACCES", "EACCES"),
    Row("execute what it has written", "", "EACCES", "EACCES"),
    Row("write beside its folders", "", "EACCES", "EACCES"),
    Row("trace the agent", "", "EACCES", "EACCES"),
    Row("enter a pod's network namespace", "", "", "EPERM"),
    Row("write to /tmp", "", "", ""),
    Row("write to its cache", "", "", ""),
    Row("write network sysctls", "", "", ""),
    Row("write to the cgroup hierarchy", "EROFS", "EROFS", "EROFS"),
    Row("make a pin", "", "", ""),
]


@pytest.mark.parametrize("profile", ["", *PROFILES])
def test_what_is_denied(house: FolderPod, profile: str) -> None:
    """CAP_SYS_ADMIN is granted to the container, so that it is the profile which takes it away."""
    house.agent.use_cache(house.agent.folder / "cache")  # a guest cannot write to what all share
    house.launch(template(house, profile, "-c", "import time; time.sleep(3600)"))
    try:
        until("it runs", lambda: house.agent.pid > 0)
        done = house.agent.exec(PYTHON, "-c", TRY, house.client.netns)
        assert done.returncode == 0, done
        at = ["", *PROFILES].index(profile) + 1
        assert json.loads(done.stdout) == {row.what: row[at] for row in ROWS}
    finally:
        house.agent.kill()
