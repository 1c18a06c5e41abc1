# SPDX-License-Identifier: Apache-2.0
"""The real CNI plugin portmap with `externalSetMarkChain: KUBE-MARK-MASQ` on a node that never had kube-proxy."""

import json
from collections.abc import Iterator

import pytest

from kbpf.checks import neighbours
from tests.support.cni.plugins import Conf, Sandbox
from tests.support.lab.lab import run
from tests.support.plane import network

CHAIN = "KUBE-MARK-MASQ"
RESULT = {
    "cniVersion": "0.4.0",
    "interfaces": [{"name": "eth0", "sandbox": "/run/netns/pod"}],
    "ips": [{"version": "4", "interface": 0, "address": "10.244.1.2/24", "gateway": "10.244.1.1"}],
}


@pytest.fixture
def sandbox(cni_programs: None) -> Iterator[Sandbox]:
    port = {"hostPort": 8088, "containerPort": 8080, "protocol": "tcp"}
    with network("mcn") as node, network("mcp") as pod:
        yield Sandbox(node, pod, {"portMappings": [port]})


def configuration(**more: str) -> Conf:
    plugin = {"type": "portmap", "capabilities": {"portMappings": True}, **more}
    return {"cniVersion": "0.4.0", "name": "net", "plugins": [plugin]}


def test_check_names_what_keeps_a_pod_from_starting(sandbox: Sandbox, tmp_path):
    """And with its advice the pod starts."""
    (tmp_path / "a-folder").mkdir()
    file = tmp_path / "10-net.conflist"
    file.write_text(json.dumps(marking := configuration(externalSetMarkChain=CHAIN)))
    (row,) = neighbours.mark_chain_rows(tmp_path)
    assert (row.result, row.detail.partition(" names ")[0]) == ("no", str(file))
    with pytest.raises(RuntimeError, match=f"Chain '{CHAIN}' does not exist"):
        sandbox.call("ADD", marking, ["portmap"], RESULT)
    assert row.advice.startswith("remove externalSetMarkChain")
    file.write_text(json.dumps(configuration()))
    sandbox.call("ADD", configuration(), ["portmap"], RESULT)
    assert "dport 8088" in run("nsenter", f"--net=/run/netns/{sandbox.node}", "nft", "list", "ruleset")
    assert not [*neighbours.mark_chain_rows(tmp_path)]


def test_a_node_without_a_cni_has_no_row(tmp_path):
    assert not [*neighbours.mark_chain_rows(tmp_path / "absent")]
