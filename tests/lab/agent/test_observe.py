# SPDX-License-Identifier: Apache-2.0
"""The agent's health checks, metrics and Events compared with those of a real kube-proxy.

node-1 runs kbpf, node-2 runs kube-proxy, with the same objects. Both get the same requests and must
give equal answers: status, headers, bodies (except times), names of series with their types, labels
and buckets.
"""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from tests.lab.agent.observe import (
    CHECK,
    HEALTH,
    METRICS,
    RECONCILER,
    Site,
    agree,
    check,
    clear,
    counted,
    dial,
    few_files,
    has_synced,
    looked,
    plain,
    said_of,
    targets,
    until_metrics,
)
from tests.support import plane
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.features import lacking
from tests.support.lab.lab import PATIENCE, Agent, Lab, Node, until
from tests.support.lab.sockets import bound, connect
from tests.support.lab.web import get
from tests.support.prometheus import Family, parse
from tests.support.runtime import docs

TRIGGER = "endpoints.kubernetes.io/last-change-trigger-time"
AUTOSCALER = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}


@pytest.fixture(scope="module")
def site(programs: None, kube_proxy: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(2, "ob", apart=True))
        api = stack.enter_context(ApiServer(addresses=(lab.outside_ip,), netns=lab.outside))
        kube = stack.enter_context(api.kube())
        for each in lab.nodes:
            kube.create(node(each.name, each.ip, each.ip6))
        config = api.kubeconfig(lab.folder / "kubeconfig", "kbpf")
        # Both must answer on the same addresses; the default of kube-proxy's nftables mode differs.
        every = "0.0.0.0/0,::/0"
        proxy = KubeProxy(lab.nodes[1], "nftables", config, f"--nodeport-addresses={every}")
        stack.enter_context(proxy)
        # Some tests count the connections of kbpf's own table.
        agent = Agent(lab.nodes[0], "--kubeconfig", str(config), "--accounting", "full", "--forwarding", "stack")
        with few_files():
            agent.start()
        made = Site(lab, kube, agent, proxy)
        until("kube-proxy has synced", lambda: has_synced(made))
        # The agent stores its status in the map before its server has it.
        until("the agent is ready", lambda: get(agent.node.netns, "127.0.0.1", HEALTH, "/readyz").status == 200)
        yield made


@pytest.fixture(autouse=True)
def cleared(site: Site) -> Iterator[None]:
    """Each test leaves no Services, so that one that fails does not fail others."""
    yield
    clear(site.kube)


@pytest.fixture
def web(site: Site) -> str:
    """A Service with a health check and an endpoint on each node."""
    site.kube.create(
        service(
            "web",
            port(80),
            type="LoadBalancer",
            external_policy="Local",
            families=("IPv4", "IPv6"),
            health_check_node_port=CHECK,
        )
    )
    for family, addresses in (
        ("IPv4", ("10.244.1.2", "10.244.2.2")),
        ("IPv6", ("fd00:10:244:1::2", "fd00:10:244:2::2")),
    ):
        ends = [endpoint(at, node=each.name) for at, each in zip(addresses, site.nodes, strict=True)]
        site.kube.create(endpoint_slice("web", *ends, family=family))
    return "web"


# ---- equal answers -----------------------------------------------------------------------------

ASKED = [
    (HEALTH, "/healthz", "GET"),
    (HEALTH, "/livez", "GET"),
    (HEALTH, "/healthz", "POST"),
    (HEALTH, "/healthz", "HEAD"),
    (HEALTH, "/", "GET"),
    (HEALTH, "/ready", "GET"),
    (METRICS, "/healthz", "GET"),
    (METRICS, "/healthz?verbose", "GET"),
    (METRICS, "/livez", "GET"),
    (METRICS, "/", "GET"),
]


@pytest.mark.parametrize("number", [HEALTH, METRICS])
def test_readyz_exists_in_kbpf_only(site: Site, number: int):
    ours, theirs = (get(n.netns, "127.0.0.1", number, "/readyz") for n in site.nodes)
    assert (ours.status, ours.body, theirs.status) == (200, b"kbpf serves\n", 404)


@pytest.mark.parametrize(("number", "path", "method"), ASKED)
def test_answers_equal_those_of_kube_proxy(site: Site, number: int, path: str, method: str):
    ours, theirs = (get(n.netns, "127.0.0.1", number, path, method) for n in site.nodes)
    assert plain(ours) == plain(theirs)


def test_health_checks_answer_over_both_families(site: Site):
    for each in site.nodes:
        assert get(each.netns, each.ip6, HEALTH, "/healthz").status == 200
        assert get(each.netns, each.ip, HEALTH, "/healthz").status == 200


def test_metrics_are_served_to_this_node_only(site: Site):
    for each in site.nodes:
        with pytest.raises(ConnectionRefusedError):
            get(each.netns, each.ip, METRICS, "/metrics")


def test_proxy_mode_and_configz_equal_those_of_kube_proxy(site: Site):
    mode = get(site.ours.netns, "127.0.0.1", METRICS, "/proxyMode")
    theirs = get(site.theirs.netns, "127.0.0.1", METRICS, "/proxyMode")
    assert mode.body == b"bpf"
    assert plain(mode)[:2] == plain(theirs)[:2]
    ours, theirs = (json.loads(get(n.netns, "127.0.0.1", METRICS, "/configz").body) for n in site.nodes)
    assert theirs.keys() <= ours.keys()
    group = "kubeproxy.config.k8s.io"
    assert ours[group].keys() <= theirs[group].keys()
    assert ours[group]["kind"] == theirs[group]["kind"]
    for name in ("healthzBindAddress", "metricsBindAddress", "bindAddressHardFail"):
        assert ours[group][name] == theirs[group][name]


@pytest.mark.parametrize("path", ["/statusz", "/flagz"])
def test_statusz_and_flagz_equal_those_of_kube_proxy(site: Site, path: str):
    ours, theirs = (get(each.netns, "127.0.0.1", METRICS, path) for each in site.nodes)
    theirs.headers.setdefault("X-Content-Type-Options", "nosniff")
    assert plain(ours)[:2] == plain(theirs)[:2]
    assert ours.body.splitlines()[2] == theirs.body.splitlines()[2]


def test_service_health_checks_equal_those_of_kube_proxy(site: Site, web: str):
    here = [("10.244.1.2", site.ours), ("10.244.2.2", site.theirs)]

    def ends(**conditions: bool) -> None:
        made = [endpoint(at, node=each.name, **conditions) for at, each in here]
        site.kube.replace(endpoint_slice("web", *made))

    agree(site, 200, 1)
    agree(site, 200, 1, v6=True)
    ends(ready=False, serving=True, terminating=True)
    agree(site, 503, 0)
    agree(site, 200, 1, v6=True)  # each family has its own endpoints
    ends(ready=True)
    agree(site, 200, 1)
    two = [
        endpoint(f"10.244.{number}.{i}", node=each.name) for number, each in enumerate(site.nodes, 1) for i in (2, 3)
    ]
    site.kube.replace(endpoint_slice("web", *two))
    agree(site, 200, 2)
    site.kube.patch("Service", "web", {"spec": {"externalTrafficPolicy": "Cluster"}})
    until("neither answers any more", lambda: [check(site, n) for n in site.nodes] == [None, None])
    assert get(site.ours.netns, "127.0.0.1", METRICS, "/metrics").status == 200


def test_health_checks_answer_on_primary_addresses_only(site: Site, web: str):
    """Like kube-proxy's with `nodePortAddresses: [primary]`, which is our default."""
    agree(site, 200, 1)
    agree(site, 200, 1, v6=True)
    for host in ("127.0.0.1", "::1"):
        with pytest.raises(ConnectionRefusedError):
            get(site.ours.netns, host, CHECK)


def test_a_health_check_port_in_use_is_reported_and_retried(site: Site):
    number = 31_998
    taken = bound(site.ours.netns, "0.0.0.0", number)
    taken.listen()
    try:
        site.kube.create(
            service("late", port(80), type="LoadBalancer", external_policy="Local", health_check_node_port=number)
        )
        [event] = until("the Event is stored", lambda: said_of(site, "Service", "late"))
        assert event["reason"] == "FailedToStartServiceHealthcheck"
        assert (event["type"], event["action"]) == ("Warning", "Listen")
        assert f"on port {number}" in event["note"]
        assert 'node node-1 failed to start healthcheck "default/late"' in event["note"]
        page = until_metrics(site, "kbpf_service_health_checks_failed", 1)
        assert page["kbpf_service_health_checks"].value() == 1
        # A health check listens on both families or on none.
        with pytest.raises(ConnectionRefusedError):
            get(site.ours.netns, site.ours.ip6, number)
    finally:
        taken.close()

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return get(site.ours.netns, site.ours.ip, number).status == 503
        return False

    until("the health check has its port", answers)
    until_metrics(site, "kbpf_service_health_checks_failed", 0)


# ---- the node ----------------------------------------------------------------------------------


def test_a_node_with_the_autoscalers_taint_is_not_eligible(site: Site):
    def answers() -> list[tuple[int, dict[str, str], str]]:
        found = []
        for path in ("/healthz", "/livez"):
            found += [plain(get(n.netns, "127.0.0.1", HEALTH, path)) for n in site.nodes]
        return found

    def statuses() -> list[int]:
        return [status for status, *_ in answers()]

    for each in site.nodes:
        site.kube.patch("Node", each.name, {"spec": {"taints": [AUTOSCALER]}})
    until("both healthz fail", lambda: statuses() == [503, 503, 200, 200])
    ours, theirs, *livez = answers()
    assert ours == theirs
    assert livez[0] == livez[1]
    for each in site.nodes:
        site.kube.patch("Node", each.name, {"spec": {"taints": None, "unschedulable": True}})
    until("both are healthy", lambda: statuses() == [200] * 4)
    for each in site.nodes:
        site.kube.patch("Node", each.name, {"spec": {"unschedulable": None}})


def test_a_node_that_is_being_deleted_is_not_eligible(site: Site):
    """The Node waits for a finalizer. Its final deletion changes nothing for kbpf, which continues;
    kube-proxy 1.37 exits and is restarted by its kubelet.
    """

    def statuses() -> list[int]:
        try:
            return [get(each.netns, "127.0.0.1", HEALTH, "/healthz").status for each in site.nodes]
        except ConnectionRefusedError:
            return []  # kube-proxy does not listen yet

    for each in site.nodes:
        site.kube.patch("Node", each.name, {"metadata": {"finalizers": ["x.io/wait"]}})
        site.kube.delete("Node", each.name)
    until("both healthz fail", lambda: statuses() == [503, 503])
    for each in site.nodes:
        site.kube.patch("Node", each.name, {"metadata": {"finalizers": None}})
    until("kube-proxy has ended", lambda: not site.proxy.is_running)
    for each in site.nodes:
        site.kube.create(node(each.name, each.ip, each.ip6))
    site.proxy.start()
    until("both are healthy with the new Nodes", lambda: statuses() == [200, 200])


def test_both_send_an_event_at_start(site: Site):
    events = [
        until(f"{each.name} has sent one", lambda each=each: said_of(site, "Node", each.name))[0] for each in site.nodes
    ]

    def shape(event: Object) -> Object:
        same = ("reason", "type", "action", "reportingController")
        return {k: event[k] for k in same} | {
            "regarding": event["regarding"] | {"name": "NODE"},
            "namespace": event["metadata"]["namespace"],
            "fields": sorted(event.keys() - {"note"}),
        }

    assert shape(events[0]) == shape(events[1])
    assert "kbpf" in events[0]["note"]
    assert events[0]["metadata"]["name"].startswith("node-1.")


# ---- metrics -----------------------------------------------------------------------------------

OF_A_MODE = re.compile(r"kubeproxy_(iptables_|sync_proxy_rules_(ip|nf)tables_).*")
"""Series of kube-proxy that belong to iptables or nftables."""


def test_all_mode_independent_series_of_kube_proxy_exist(site: Site, web: str):
    agree(site, 200, 1)
    for each in site.nodes:
        for path in ("/healthz", "/livez"):
            get(each.netns, "127.0.0.1", HEALTH, path)
    now = datetime.fromtimestamp(time.time() + 1, UTC).isoformat().replace("+00:00", "Z")
    change = {"metadata": {"annotations": {TRIGGER: now}}, "endpoints": []}
    site.kube.patch("EndpointSlice", "web-ipv4", change)
    agree(site, 503, 0)
    name = "kubeproxy_network_programming_duration_seconds"

    def timed(which: Node) -> float:
        found = site.metrics(which).get(name)
        values = found.samples.items() if found else ()
        return sum(v for (sample, _), v in values if sample == f"{name}_count")

    for each in site.nodes:
        until(f"{each.name} has timed the change", lambda each=each: timed(each) >= 1)
    dns = endpoint_slice("dns", endpoint("10.244.1.2"), ports=[slice_port(53, protocol="UDP")])
    for kind, obj in (("service", service("dns", port(53, protocol="UDP"))), ("endpoint", dns)):
        prefix = f"kubeproxy_sync_proxy_rules_{kind}_changes"
        before = {each.name: site.metrics(each)[f"{prefix}_total"].value() for each in site.nodes}
        site.kube.create(obj)

        def knows(which: Node) -> bool:
            found = site.metrics(which)
            is_told = found[f"{prefix}_total"].value() > before[which.name]  # noqa: B023
            return is_told and not found[f"{prefix}_pending"].value()  # noqa: B023

        for each in site.nodes:
            until(f"{each.name} knows the {kind}", lambda each=each: knows(each))
    site.kube.patch("EndpointSlice", "dns-ipv4", {"endpoints": []})
    for each in site.nodes:
        until(f"{each.name} has looked for UDP", lambda each=each: looked(site, each) >= 1)
    theirs, ours = site.metrics(site.theirs), site.metrics()
    wanted = [n for n in theirs if n.startswith("kubeproxy_") and not OF_A_MODE.fullmatch(n)]
    wanted += ["rest_client_requests_total", "rest_client_request_duration_seconds"]
    wanted += [n for n in theirs if n.startswith("process_") and "network" not in n]
    wanted.remove("process_virtual_memory_max_bytes")
    assert len(wanted) >= 20
    assert set(wanted) >= RECONCILER
    for each in wanted:
        assert (ours[each].kind, ours[each].help) == (theirs[each].kind, theirs[each].help)
        assert ours[each].label_names == theirs[each].label_names, each
        assert ours[each].bounds == theirs[each].bounds, each


def test_changes_and_syncs_are_counted(site: Site, web: str):
    agree(site, 200, 1)
    before = site.metrics()
    total = "kubeproxy_sync_proxy_rules_endpoint_changes_total"
    was = before[total].value()
    syncs = before["kbpf_syncs_total"].value()
    site.kube.replace(endpoint_slice("web", endpoint("10.244.2.9", node=site.theirs.name)))
    until("the change is counted", lambda: site.metrics()[total].value() > was)
    after = until_metrics(
        site, "kubeproxy_sync_proxy_rules_no_local_endpoints_total", 1, ip_family="IPv4", traffic_policy="external"
    )
    assert after["kubeproxy_sync_proxy_rules_endpoint_changes_pending"].value() == 0
    # It is a part of the status, which is written later.
    until("the sync is counted", lambda: site.metrics()["kbpf_syncs_total"].value() > syncs)
    at = after["kubeproxy_sync_proxy_rules_last_timestamp_seconds"].value(ip_family="IPv4")
    assert at >= before["kubeproxy_sync_proxy_rules_last_timestamp_seconds"].value(ip_family="IPv4")


def test_data_plane_metrics_are_counted(site: Site, web: str):
    agree(site, 200, 1)
    site.ours.host.tcp(site.kube.get("Service", "web")["spec"]["clusterIP"], 80, timeout=0.1)

    def counts() -> dict[str, Family] | None:
        page = site.metrics()
        is_counted = page["kbpf_decisions_total"].value(reason="translated") > 0
        return page if is_counted and page["kbpf_map_entries"].value(map="services") >= 3 else None

    page = until("the connection and the Service are counted", counts)
    assert page["kbpf_map_limit_entries"].value(map="services") == 262_144
    assert page["kbpf_map_bytes"].value(map="services") > 4096
    assert page["kbpf_synced"].value() == page["kbpf_healthy"].value() == 1
    assert page["kbpf_source_watching"].value(source="services") == 1
    assert page["kbpf_mode_info"].value(mode="bpf") == 1


# ---- Prometheus ----------------------------------------------------------------------------------

SCRAPE = docs.ROOT / "manifests" / "monitoring" / "scrape.yaml"


def test_prometheus_reaches_the_metrics_with_the_documented_settings(site: Site, tmp_path: Path):
    """The setting and the scrape job of docs/observe.md. promtool computes the targets with
    Prometheus' own code; an agent with that setting answers there from outside the node.
    """
    (setting,) = docs.blocks("docs/observe.md", "yaml")
    (job,) = yaml.safe_load(SCRAPE.read_text())["scrape_configs"]
    config = str(site.agent.log.parent / "kubeconfig")
    head = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    said = {**head, **yaml.safe_load(setting), "clientConnection": {"kubeconfig": config}}
    conf = tmp_path / "config.conf"
    conf.write_text(yaml.safe_dump(said))
    found = {one["instance"]: one for one in targets(job, site.nodes, tmp_path)}
    assert found.keys() == {each.name for each in site.nodes}
    agent = Agent(site.theirs, "--config", str(conf), "--packet-path", "false")
    site.proxy.stop()
    try:
        agent.start()
        target = found[site.theirs.name]
        assert target["job"] == "kube-proxy"
        host, _, number = target["__address__"].rpartition(":")
        path = target["__metrics_path__"]
        page = parse(get(site.ours.lab.outside, host, int(number), path).body.decode())
        assert page["kbpf_build_info"].samples
    finally:
        agent.close()
        site.proxy.start()
        until("kube-proxy has synced", lambda: has_synced(site))


# ---- addresses in use --------------------------------------------------------------------------


def test_an_address_in_use_is_retried_or_ends_the_agent(site: Site):
    taken = bound(site.theirs.netns, "127.0.0.1", 9)
    taken.listen()
    config = str(site.agent.log.parent / "kubeconfig")
    agent = Agent(
        site.theirs,
        "--kubeconfig",
        config,
        "--packet-path",
        "false",
        "--healthz-bind-address",
        "127.0.0.1:9",
        "--metrics-bind-address",
        "127.0.0.1:8",
    )
    try:
        agent.start(wait=False, extra=("--bind-address-hard-fail", "true"))
        assert agent.wait_ended() == 1
        assert "cannot listen on 127.0.0.1:9" in agent.tail()
        events = until("the Event is stored", lambda: failed(site))
        assert events[0]["type"] == "Warning"
        assert "Address already in use" in events[0]["note"]
        agent.start()
        assert get(site.theirs.netns, "127.0.0.1", 8, "/proxyMode").body == b"bpf"
        taken.close()

        def answers() -> bool:
            with contextlib.suppress(OSError):
                return get(site.theirs.netns, "127.0.0.1", 9, "/healthz").status == 200
            return False

        until("the agent has its address", answers)
    finally:
        taken.close()
        agent.close()


def failed(site: Site) -> list[Object]:
    found = said_of(site, "Node", site.theirs.name)
    return [event for event in found if event["reason"] == "FailedToStartProxierHealthcheck"]


def test_the_agent_raises_its_open_files_limit(site: Site):
    """Each health check needs two files. Service managers set a soft limit of 1024."""
    rows = Path(f"/proc/{site.agent.pid}/limits").read_text().splitlines()
    soft, hard = next(row for row in rows if row.startswith("Max open files")).split()[3:5]
    assert soft == hard
    assert site.metrics()["process_max_fds"].value() == int(hard)


def test_unfinished_requests_do_not_block_other_clients(site: Site):
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(connect(site.ours.netns, "127.0.0.1", HEALTH, PATIENCE))
            sock.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        assert get(site.ours.netns, site.ours.ip, HEALTH, "/healthz").status == 200


def tracked(site: Site) -> float:
    """0 before the agent's first count."""
    page = site.metrics()
    name = "kbpf_tracked_connections"
    return page[name].value() if name in page else 0.0


def flows(site: Site) -> float:
    """Of an earlier count than tracked(), if the page was made during one; 0 before the first."""
    samples = site.metrics()["kbpf_map_entries"].samples
    return sum(count for (_, labels), count in samples.items() if ("map", "flows") in labels)


def test_connections_are_counted_by_service(site: Site):
    pod = site.ours.pod("backend").serve(8080)
    number = 30_080
    site.kube.create(service("counted", port(80, "http", target=8080, node_port=number), type="NodePort"))
    ends = [endpoint(pod.ip, node=site.ours.name)]
    site.kube.create(endpoint_slice("counted", *ends, ports=[slice_port(8080, "http")]))
    outside = site.ours.lab.outside
    until("the Service is served", lambda: "name" in dial(site, number))
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(outside, site.ours.ip, number, PATIENCE))

        until("they are counted as tracked", lambda: tracked(site) >= 3)
        until("so are their flows", lambda: flows(site) >= 3)
        if not lacking("socket_iterator"):  # otherwise the number of open ones is unknown
            until("they are counted", lambda: counted(site, "kbpf_service_connections") >= 3)
            assert site.metrics()["kbpf_connections"].value() >= 3
    until(
        "new connections and bytes both ways are counted",
        lambda: (
            counted(site, "kbpf_service_connections_total") >= 4
            and counted(site, "kbpf_service_bytes_total", direction="in")
            and counted(site, "kbpf_service_bytes_total", direction="out")
        ),
    )
    page = site.metrics()
    assert page["kbpf_tracked_connections_limit"].value() == 131_072
    limited = {dict(own)["map"] for _, own in page["kbpf_map_limit_entries"].samples}
    assert {"services", "backends"} <= limited
    assert not {"flows", "affinity"} & limited


def test_connection_outcomes_are_counted_by_service(site: Site):
    pod, vip = site.ours.pod("other").serve(8080), "10.96.0.77"
    numbers = {"counted": 8080, "closed": 8081}
    for at, (name, target) in enumerate(numbers.items()):
        site.kube.create(service(name, port(80, "http", target=target), cluster_ip=f"10.96.0.{77 + at}"))
        site.kube.create(
            endpoint_slice(name, endpoint(pod.ip, node=site.ours.name), ports=[slice_port(target, "http")])
        )

    def are_programmed() -> bool:
        frontends = plane.dump(site.agent.entries)["frontends"]
        return all(frontends.get(f"{at}:80/TCP", {}).get("cluster") for at in (vip, "10.96.0.78"))

    # A client that gives up early would be counted as unanswered.
    until("both Services are programmed", are_programmed)
    assert pod.tcp(vip, 80)["name"] == "other"
    reasons = {"of": "closed", "reason": "refused"}
    until(
        "refused connections are counted",
        lambda: (
            pod.tcp("10.96.0.78", 80)["error"] == "ECONNREFUSED"
            and counted(site, "kbpf_service_failures_total", **reasons)
        ),
    )
    for name, least in (("kbpf_service_connections_total", 1), ("kbpf_service_round_trip_seconds", 1)):
        until(name, lambda: counted(site, name) >= least)  # noqa: B023
    for way, least in (("in", len(b"bye\n")), ("out", len(b'{"name": "other"'))):
        until(f"bytes {way} are counted", lambda: counted(site, "kbpf_service_bytes_total", direction=way) >= least)  # noqa: B023
    assert not counted(site, "kbpf_service_failures_total", reason="unanswered")


def test_at_info_log_lines_do_not_grow_with_objects(site: Site):
    before = len(site.agent.lines())
    wanted = [service(f"many-{i}", port(80)) for i in range(200)]
    site.kube.create_many(wanted)
    site.kube.create_many([endpoint_slice(f"many-{i}", endpoint(f"10.244.9.{i}")) for i in range(200)])
    until_metrics(site, "kbpf_services", 201)
    clear(site.kube)
    until_metrics(site, "kbpf_services", 1)
    assert len(site.agent.lines()) - before < 20, site.agent.tail(40)
