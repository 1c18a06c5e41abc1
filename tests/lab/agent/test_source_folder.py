# SPDX-License-Identifier: Apache-2.0
"""`kbpf run --source DIR`: a folder of YAML in place of an API server, tried with real sockets. How it is read:
tests/values/source/folder.
"""

import resource

from tests.support.cluster.kube_objects import endpoint, endpoint_slice, service, slice_port
from tests.support.cluster.scenario import FolderNode, Object
from tests.support.lab.dial import REFUSED, UNSERVED, Dial, check
from tests.support.lab.lab import ip, until
from tests.support.lab.load import under_load


def web(cluster_ip: str, *addresses: str) -> list[Object]:
    """A Service and its slice."""
    ends = [endpoint(address) for address in addresses]
    return [service("web", cluster_ip=cluster_ip), endpoint_slice("web", *ends, ports=[slice_port(8080)])]


def test_a_malformed_service(node: FolderNode):
    """A new Service is not served, a known one keeps its last state; both are once they are repaired."""
    known, piece = web("10.96.0.99", "10.244.1.2")
    new = service("new", cluster_ip="10.96.0.97")
    node.write([known, piece])
    node.settle()
    for obj in (known, new):
        obj["spec"]["ports"][0]["port"] = "eighty"
    node.write([known, new, web("", "10.244.1.3")[1]])
    node.settle()
    said = [f"Service default/{name}: spec.ports[0].port: expected an integer, got a string" for name in ("new", "web")]
    until(
        "both are reported",
        lambda: all(any(each in problem for problem in node.agent.status()["problems"]) for each in said),
        state=lambda: node.agent.status()["problems"],
    )
    check(node, Dial("new", "a3", "10.96.0.97:80", UNSERVED))
    check(node, Dial("known, with another endpoint", "a3", "10.96.0.99:80", "a2"))
    check(node, Dial("another Service", "a2", "10.96.0.20:80", "a1:8080 a3:8081"))
    for obj in (known, new):
        obj["spec"]["ports"][0]["port"] = 81
    node.write([known, new])
    node.settle()
    check(node, Dial("known", "a3", "10.96.0.99:81", "a2"))
    check(node, Dial("new", "a3", "10.96.0.97:81", REFUSED))


def test_an_agent_without_free_descriptors_goes_on(node: FolderNode):
    """It says so once for each thing that it cannot read, and recovers. (A traceback in the log
    fails the test.)
    """
    agent, where = node.agent, node.agent.node.netns
    before, start = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE), len(agent.lines())

    def said() -> list[str]:
        told = (line.partition(" ")[2] for line in agent.lines()[start:])
        return [line for line in told if "EMFILE" in line or "Too many open files" in line]

    with under_load(node, "10.96.0.20", "a2") as load:
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            ip("link add spare type bridge", "addr add 192.0.2.99/32 dev spare", netns=where)
            for what in ("the addresses of the node", "the devices", "the folder"):
                until(what, lambda what=what: f"cannot read {what}" in "".join(said()))
            load.goes_on()
        finally:
            resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, before)
            ip("link del spare", netns=where)
        load.goes_on()
    assert len(said()) == len(set(said()))
    node.write(web("10.96.0.99", "10.244.1.2"))
    node.settle()
    check(node, Dial("a change afterwards", "a3", "10.96.0.99:80", "a1"))
    until("nothing is reported", lambda: not agent.status()["packets"]["problem"])
