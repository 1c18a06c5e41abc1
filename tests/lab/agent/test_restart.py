# SPDX-License-Identifier: Apache-2.0
"""The agent is killed and started again without disturbing traffic.

Changes made meanwhile: test_apiserver_faults.py, test_permutations.py and tests/chaos; upgrades:
tests/programs/maps/test_upgrade.py and tests/lab/cluster/test_daemonset.py; SIGTERM: there, too.
"""

from tests.support.cluster.cluster import Cluster
from tests.support.lab.load import under_load


def test_a_kill_disturbs_no_connection(cluster: Cluster):
    client = cluster["a3"]
    with cluster.given(
        *cluster.web(20, "a1 a2", dual=True),
        *cluster.web(21, "a1 a2", "UDP"),
        *cluster.web(22, "a1", affinity_seconds=3600),
        *cluster.web(23, "a1", "UDP"),
    ):
        client.tcp("10.96.0.20", 80, keep="tcp")
        client.udp("10.96.0.23", 80, keep="connected", connected=True)
        client.udp("10.96.0.23", 80, keep="unconnected")
        assert client.tcp("10.96.0.22", 80)["name"] == "a1"
        cluster.change(cluster.slice("web-22", "a1 a2 a3"))
        before = cluster.served()
        with (
            under_load(cluster, "10.96.0.20", "a2", "host-1") as tcp,
            under_load(cluster, "fd00:10:96::20", "a-net") as tcp6,
            under_load(cluster, "10.96.0.21", "a1", protocol="udp") as udp,
        ):
            cluster.agent.kill()
            for load in (tcp, tcp6, udp):
                load.goes_on()
            assert cluster.served() == before, "served as before, without an agent"
            cluster.start(cluster.agent)
        assert cluster.served() == before
        assert "name" in client.ask("talk", keep="tcp"), "an established connection must survive"
        answer = client.ask("talk", keep="connected")
        assert answer.get("name") == "a1", (answer, cluster.agent.lines())
        answer = client.udp("10.96.0.23", 80, keep="unconnected")
        assert (answer["name"], answer["peer"]) == ("a1", ["10.96.0.23", 80])
        assert client.many(20, "10.96.0.22", 80)["names"] == {"a1": 20}, "affinity"
        for kept in ("tcp", "connected", "unconnected"):
            client.ask("drop", keep=kept)
    said = "\n".join(cluster.agent.lines())
    assert "adopted=True" in said
    assert "hooks attached changed=0" in said, "no hook is attached again"
