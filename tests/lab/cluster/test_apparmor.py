# SPDX-License-Identifier: Apache-2.0
"""The shipped AppArmor profiles, enforced: runc runs the DaemonSet's container under each of them.
It can do all that it has to, and what the profiles deny is denied.

Debian's kernels have AppArmor (`python -m tests.kernels --only apparmor`).
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.support.cluster.daemonset import ROOT, PodAgent
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.cluster.scenario import put
from tests.support.features import needs
from tests.support.lab.lab import Lab, Place, until
from tests.support.runtime.folder_pod import FolderPod
from tests.support.runtime.pods import Image
from tests.support.table import table

pytestmark = needs("apparmor")

PYTHON = "/opt/kbpf/bin/python"
"""The path in the image. A console script's shebang would name the interpreter's real path."""
VENV = Path(sys.prefix)
PROFILES = ("kbpf", "kbpf-no-sys-admin")
MORE = 200
"""A number of Services with which maps of 128 entries have to grow."""


class ConfinedAgent(PodAgent):
    """A PodAgent whose image has the virtual environment at the path of kbpf's image."""

    def image(self, rootfs: Path) -> Image:
        return replace(super().image(rootfs), instead={Path("/opt/kbpf"): VENV})


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
    """The pod template with this AppArmor profile ("": unconfined) and a kbpf command. It has no
    seccomp profile, which would deny some of the same calls.
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
    """Checks that a pod and an outside client are served and that `number` Services are
    programmed.
    """
    outside = Place("outside", house.node.lab.outside, None)
    try:
        for place, to in ((outside, (house.node.ip, 30080)), (house.client, ("10.96.0.80", 80))):
            assert place.tcp(*to).get("name") == "a1", place.name
    finally:
        outside.close()
    status = house.agent.status()
    assert (status["error"], status["packets"]["problem"]) == ("", ""), house.agent.tail()
    assert status["services"] >= number, status


def denied(since: int) -> tuple[list[str], int]:
    """The kernel log's AppArmor denials from line `since` on, and the number of its lines."""
    lines = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout.split("\n")
    return [line for line in lines[since:] if 'apparmor="DENIED"' in line], len(lines)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_agent_works_under_each_profile_without_denials(house: FolderPod, profile: str):
    """Start, grow maps, adopt, check, destroy sockets, clean up, without a denial."""
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
            {"config": house.objects},
            None,
            {},
        )
        assert said
        assert not agent.pin_dir.exists()
        assert denied(before)[0] == []
    finally:
        (house.objects / "more.yaml").unlink(missing_ok=True)
        if agent.runs:
            agent.forget()


def current(agent: PodAgent) -> str:
    """The AppArmor profile of the container's process."""
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
    "write outside its folders": write("/dev/kbpf-try"),
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
    """An action of a process in the container, and its error ("": none) without a profile and under
    each of ours.
    """

    what: str
    unconfined: str
    kbpf: str
    no_sys_admin: str


ROWS = table(
    Row,
    """
mount                         |       | EACCES | EACCES
execute what it has written   |       | EACCES | EACCES
write outside its folders     |       | EACCES | EACCES
trace the agent               |       | EACCES | EACCES
enter a pod's network namespace |     |        | EPERM
write to /tmp                 |       |        |
write to its cache            |       |        |
write network sysctls         |       |        |
write to the cgroup hierarchy | EROFS | EROFS  | EROFS
make a pin                    |       |        |
""",
)


@pytest.mark.parametrize("profile", ["", *PROFILES])
def test_the_profiles_deny_and_allow_exactly_these_actions(house: FolderPod, profile: str):
    """The container has CAP_SYS_ADMIN, so that only the profile can deny these actions."""
    house.agent.use_cache(house.agent.folder / "cache")  # a guest cannot write to the shared cache
    house.launch(template(house, profile, "-c", "import time; time.sleep(3600)"))
    try:
        until("the container runs", lambda: house.agent.pid > 0)
        done = house.agent.exec(PYTHON, "-c", TRY, house.client.netns)
        assert done.returncode == 0, done
        at = ["", *PROFILES].index(profile) + 1
        assert json.loads(done.stdout) == {row.what: row[at] for row in ROWS}
    finally:
        house.agent.kill()
