# SPDX-License-Identifier: Apache-2.0
"""`--forwarding netfilter` and `auto` on a kernel that cannot translate by conntrack: the agent
refuses to start, and leaves nothing behind, or uses its own table. The cause is real: a kernel
before 6.1, or one whose BTF is hidden.
"""

from collections.abc import Iterator

import pytest
import yaml

from tests.support.cluster.kube_objects import node
from tests.support.features import lacking
from tests.support.lab.lab import Agent, Lab, inside, run

HIDE_BTF = 'mount --bind "$0" /sys/kernel/btf && exec "$@"'


@pytest.fixture
def agent(programs: None, tmp_path) -> Iterator[Agent]:
    with Lab(1, "cn") as lab:
        home = lab.nodes[0]
        objects, empty = tmp_path / "objects", tmp_path / "empty"
        objects.mkdir()
        empty.mkdir()
        (objects / "node.yaml").write_text(yaml.safe_dump(node(home.name, home.ip, home.ip6)))
        made = Agent(home, "--source", str(objects))
        if not lacking("conntrack_nat"):
            made.wrapper = ("unshare", "-m", "sh", "-c", HIDE_BTF, str(empty))
        yield made


def line(agent: Agent, words: str) -> str:
    """The line of its log with these words. No table of kbpf is left for conntrack."""
    (found,) = [line for line in agent.lines() if words in line]
    assert run(*inside(agent.node.netns, None, "nft", "list", "tables")) == ""
    return found


def lacks(agent: Agent) -> str:
    return "the kernel has no BTF" if agent.wrapper else "the kernel has no bpf_"


@pytest.mark.parametrize("mode", ["auto", "bpf"])
def test_agent_refuses_to_start(agent: Agent, mode: str):
    agent.start(wait=False, extra=("--mode", mode, "--forwarding", "netfilter"))
    assert agent.wait_ended() == 1
    said = line(agent, f"--forwarding netfilter is not possible: {lacks(agent)}")
    assert "use --mode ipvs, or --forwarding stack with the replacements in" in said


def test_auto_uses_the_own_table_if_it_has_all_ports(agent: Agent):
    agent.start(extra=("--forwarding", "auto", "--masquerade-ports", "30000-65535"))
    said = line(agent, "forwarding=stack: ")
    assert "--masquerade-ports leaves fewer than 1,024 ports above it to conntrack" in said


def test_auto_uses_the_own_table(agent: Agent):
    agent.start(extra=("--forwarding", "auto"))
    assert lacks(agent) in line(agent, "forwarding=stack: ")
    assert agent.status()["packets"]["forwarding"] == "stack"
    assert lacks(agent) in agent.status()["packets"]["fallback"]
