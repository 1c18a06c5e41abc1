# SPDX-License-Identifier: Apache-2.0
"""An agent without CAP_SYS_ADMIN starts, restarts and grows its maps. The kernel opens programs and
maps by id only with that capability, so nothing may depend on ids there.
"""

import errno
import sys

import pytest

from tests.support.lab.lab import run
from tests.support.plane import Site

AGENT = """
import sys
from dataclasses import replace
from pathlib import Path
from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.model.config import Config
from tests.support.plane import desired, service
pins, cgroup, cache, packet_path, services = sys.argv[1:]
status = Path("/proc/self/status").read_text()
held = int(status.partition("CapEff:")[2].split()[0], 16)
assert not held >> 21 & 1 and held >> 39 & 1, hex(held)
for name in ("services", "service_names", "backend_slots", "backends", "set_members"):
    layout.MAPS[name] = replace(layout.MAPS[name], entries=8)
plane = BpfPlane(Config(pin_dir=Path(pins), cgroup=Path(cgroup), cache_dir=Path(cache),
                        packet_path=packet_path == "True", excluded_devices=("*",)))
plane.open()
numbers = range(1, int(services) + 1)
states = [service(f"s{i}", f"10.96.0.{i}:80", f"10.0.0.{i}:80") for i in numbers]
report = plane.apply(desired(*states), None)
plane.tick(1e12)
plane.maintain_host(1e12)
print(len(report.refused), report.writes.get("services", 0))
plane.close()
"""


WITHOUT_SYS_ADMIN = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c")


def agent(site: Site, packet_path: bool, services: int) -> str:
    """Runs an agent from open to close; returns how many objects were refused and
    how many frontends were written.
    """
    words = (site.pins, site.cgroup, site.cache, packet_path, services)
    return run("unshare", "--net", *WITHOUT_SYS_ADMIN, AGENT, *map(str, words)).strip()


@pytest.mark.parametrize("packet_path", [False, True], ids=["sockets", "sockets and packets"])
def test_agent_restarts_and_grows_maps_without_sys_admin(site: Site, packet_path: bool):
    assert agent(site, packet_path, 3) == "0 3"
    assert agent(site, packet_path, 3) == "0 0", "the maps are adopted, nothing is written"
    assert agent(site, packet_path, 40) == "0 37", "the maps have grown"
    assert agent(site, packet_path, 40) == "0 0"
    assert len(site.entries("services")) == 40


ENDS = """
import socket
from kbpf.errors import KernelError
from kbpf.kernel.net import sock_diag
from kbpf.kernel.system import netns
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
    own.connect(("127.0.0.1", 9))
    cookie = int.from_bytes(own.getsockopt(socket.SOL_SOCKET, 57, 8), "little")  # SO_COOKIE
    ended = refused = 0
    for path in netns.list_namespaces():
        try:
            ended += len(netns.run_in(
                path, lambda: sock_diag.destroy_connected_udp(lambda one: one.cookie == cookie)
            ))
        except KernelError:
            refused += 1
    try:
        own.recv(1, socket.MSG_DONTWAIT)
    except OSError as error:
        print(ended, refused > 0, error.errno)
"""


def test_socket_of_the_host_namespace_is_destroyed_without_sys_admin():
    """Sockets of other namespaces are not, because entering them needs CAP_SYS_ADMIN."""
    lo_up = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
    assert run(*lo_up, *WITHOUT_SYS_ADMIN, ENDS).strip() == f"1 True {errno.ECONNABORTED}"
