# SPDX-License-Identifier: Apache-2.0
"""The agent's health checks, metrics and Events compared with those of a real kube-proxy.

node-1 runs kbpf, node-2 runs kube-proxy, with the same objects. Both get the same requests and must
give equal answers: status, headers, bodies (except times), names of series with their types, labels
and buckets.
"""

import contextlib
import json
import re
import resource
import subprocess
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.build.prometheus import promtool
from tests.support.cluster.kube import Kube, Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.cluster.kube_proxy import KubeProxy, lab_for_proxies
from tests.support.lab.lab import Agent, Lab, Node, until
from tests.support.lab.web import Got, get
from tests.support.prometheus import Family, parse
from tests.support.runtime import docs

HEALTH, METRICS, CHECK = 10256, 10249, 31_999
TRIGGER = "endpoints.kubernetes.io/last-change-trigger-time"
AUTOSCALER = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}


class Site:
    """Two nodes with the same objects, one of kbpf and one of kube-proxy."""

    def __init__(self, lab: Lab, kube: Kube, agent: Agent, proxy: KubeProxy) -> None:
        self.kube, self.agent, self.proxy = kube, agent, proxy
        self.ours, self.theirs = lab.nodes

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.ours, self.theirs

    def ask(self, number: int, path: str, method: str = "GET") -> tuple[Got, Got]:
        """What both answer to a request of a process on their node."""
        ours, theirs = (get(each.netns, "127.0.0.1", number, path, method) for each in self.nodes)
        return ours, theirs

    def statuses(self, path: str) -> list[int]:
        """The status of both to a health check; none while one does not listen."""
        with contextlib.suppress(ConnectionRefusedError):
            return [got.status for got in self.ask(HEALTH, path)]
        return []

    def metrics(self, which: Node | None = None) -> dict[str, Family]:
        """A node's /metrics. Our page is cached for up to a second: poll until it is as
        expected.
        """
        found = get((which or self.ours).netns, "127.0.0.1", METRICS, "/metrics")
        return parse(found.body.decode())


@contextlib.contextmanager
def few_files() -> Iterator[None]:
    """Processes started now have a soft limit of 1024 open files, which they may raise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def has_synced(site: Site) -> bool:
    """Whether kube-proxy has programmed both families, each of which it does in its own thread."""
    assert site.proxy.is_running, site.proxy.tail()
    with contextlib.suppress(OSError):
        said = json.loads(get(site.theirs.netns, "127.0.0.1", HEALTH, "/livez").body)
        return said.get("status", {}).keys() == {"IPv4", "IPv6"}
    return False


def clear(kube: Kube) -> None:
    """Removes all Services and slices except the API server's."""
    for kind in ("Service", "EndpointSlice"):
        for obj in kube.list(kind)["items"]:
            meta = obj["metadata"]
            owner = meta.get("labels", {}).get("kubernetes.io/service-name", meta["name"])
            if owner != "kubernetes":
                kube.delete(kind, meta["name"], meta["namespace"])


def plain(got: Got) -> tuple[int, dict[str, str], str]:
    """Status, headers and body, without times."""
    headers = {k: v for k, v in got.headers.items() if k not in ("Date", "Content-Length")}
    return got.status, headers, re.sub(r'"\d{4}-[^"]*Z"', '"TIME"', got.body.decode())


# ---- health checks of Services -----------------------------------------------------------------


def check(which: Node, v6: bool = False) -> tuple[int, dict[str, str], str] | None:
    host = which.ip6 if v6 else which.ip
    with contextlib.suppress(OSError):
        return plain(get(which.netns, host, CHECK, "/any/path?x"))
    return None


def agree(site: Site, status: int, weight: int, v6: bool = False) -> None:
    """Waits until both answer this status and weight, with equal bodies."""

    def said() -> bool:
        both = [check(each, v6) for each in site.nodes]
        head = both[0] and (both[0][0], both[0][1]["X-Load-Balancing-Endpoint-Weight"])
        return both[0] == both[1] and head == (status, str(weight))

    until(f"both answer {status} with weight {weight}", said)


# ---- events ------------------------------------------------------------------------------------


def said_of(site: Site, kind: str, name: str) -> list[Object]:
    found = site.kube.list("Event")["items"]
    return [e for e in found if (e["regarding"]["kind"], e["regarding"]["name"]) == (kind, name)]


RECONCILER = {f"kubeproxy_conntrack_reconciler_{name}" for name in ("sync_duration_seconds", "deleted_entries_total")}


def looked(site: Site, which: Node) -> float:
    """How often a node has looked for IPv4 flows of removed backends."""
    (name,) = (each for each in RECONCILER if each.endswith("_seconds"))
    found = site.metrics(which).get(name)
    if found is None:
        return 0
    return found.samples.get((f"{name}_count", frozenset({("ip_family", "IPv4")})), 0)


def targets(job: dict, nodes: Iterable[Node], folder: Path) -> list[dict[str, str]]:
    """The targets that the job's relabelling makes of these nodes. Debian's promtool lacks
    Kubernetes discovery, so a static configuration has what that would find: kubelet's address and
    the node's name.
    """
    (sd,) = job.pop("kubernetes_sd_configs")
    assert sd == {"role": "node"}
    job["static_configs"] = [{"targets": [f"{each.ip}:10250"], "labels": {"instance": each.name}} for each in nodes]
    path = folder / "scrape.yaml"
    path.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    # promtool ends after its timeout, never before, and occupies a processor until then. On a busy
    # machine a second may be too short; the list is then empty.
    command = [promtool(), "check", "service-discovery", "--timeout=1s", path, job["job_name"]]

    def discover() -> list[dict[str, Any]]:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return [target["labels"] for target in until("promtool has computed the targets", discover)]


# ---- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(programs: None, kube_proxy: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        lab, kube, config = stack.enter_context(lab_for_proxies(2, "ob"))
        # Both must answer on the same addresses; the default of kube-proxy's nftables mode differs.
        every = "0.0.0.0/0,::/0"
        proxy = KubeProxy(lab.nodes[1], "nftables", config, f"--nodeport-addresses={every}")
        stack.enter_context(proxy)
        agent = Agent(lab.nodes[0], "--kubeconfig", str(config))
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

ASKED = (
    (HEALTH, "GET", "/healthz /livez / /ready /readyz"),
    (HEALTH, "POST", "/healthz"),
    (HEALTH, "HEAD", "/healthz"),
    (METRICS, "GET", "/healthz /healthz?verbose /livez / /readyz /proxyMode /statusz /flagz"),
)
"""Port, method and paths."""


@pytest.mark.parametrize(("number", "method", "paths"), ASKED)
def test_answers_equal_those_of_kube_proxy(site: Site, number: int, method: str, paths: str):
    for path in paths.split():
        ours, theirs = site.ask(number, path, method)
        if path == "/readyz":
            assert (ours.status, ours.body, theirs.status) == (200, b"kbpf serves\n", 404)
        elif path == "/proxyMode":
            assert (ours.body, plain(ours)[:2]) == (b"bpf", plain(theirs)[:2])
        elif path in ("/statusz", "/flagz"):
            theirs.headers.setdefault("X-Content-Type-Options", "nosniff")
            assert plain(ours)[:2] == plain(theirs)[:2], path
            assert ours.body.splitlines()[2] == theirs.body.splitlines()[2]
        else:
            assert plain(ours) == plain(theirs), path


def test_metrics_are_served_to_this_node_only(site: Site):
    for each in site.nodes:
        with pytest.raises(ConnectionRefusedError):
            get(each.netns, each.ip, METRICS, "/metrics")


def test_configz_equals_that_of_kube_proxy(site: Site):
    ours, theirs = (json.loads(got.body) for got in site.ask(METRICS, "/configz"))
    assert theirs.keys() <= ours.keys()
    group = "kubeproxy.config.k8s.io"
    assert ours[group].keys() <= theirs[group].keys()
    for name in ("kind", "healthzBindAddress", "metricsBindAddress", "bindAddressHardFail"):
        assert ours[group][name] == theirs[group][name]


def test_service_health_checks_equal_those_of_kube_proxy(site: Site, web: str):
    here = [("10.244.1.2", site.ours), ("10.244.2.2", site.theirs)]

    def ends(**conditions: bool) -> None:
        made = [endpoint(at, node=each.name, **conditions) for at, each in here]
        site.kube.replace(endpoint_slice("web", *made))

    agree(site, 200, 1)
    agree(site, 200, 1, v6=True)
    # Like kube-proxy's with `nodePortAddresses: [primary]`, which is our default.
    for host in ("127.0.0.1", "::1"):
        with pytest.raises(ConnectionRefusedError):
            get(site.ours.netns, host, CHECK)
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
    until("neither answers any more", lambda: [*map(check, site.nodes)] == [None, None])
    assert get(site.ours.netns, "127.0.0.1", METRICS, "/metrics").status == 200


# ---- the node ----------------------------------------------------------------------------------


def test_a_node_with_the_autoscalers_taint_is_not_eligible(site: Site):
    def patch(**spec: object) -> None:
        for each in site.nodes:
            site.kube.patch("Node", each.name, {"spec": spec})

    patch(taints=[AUTOSCALER])
    until("both healthz fail", lambda: site.statuses("/healthz") == [503, 503])
    for path in ("/healthz", "/livez"):
        ours, theirs = site.ask(HEALTH, path)
        assert plain(ours) == plain(theirs)
    assert site.statuses("/livez") == [200, 200]
    patch(taints=None, unschedulable=True)
    until("both are healthy", lambda: site.statuses("/healthz") == [200, 200])
    patch(unschedulable=None)


def test_a_node_that_is_being_deleted_is_not_eligible(site: Site):
    """The Node waits for a finalizer. Its final deletion changes nothing for kbpf, which continues;
    kube-proxy 1.37 exits and is restarted by its kubelet.
    """
    for each in site.nodes:
        site.kube.patch("Node", each.name, {"metadata": {"finalizers": ["x.io/wait"]}})
        site.kube.delete("Node", each.name)
    until("both healthz fail", lambda: site.statuses("/healthz") == [503, 503])
    for each in site.nodes:
        site.kube.patch("Node", each.name, {"metadata": {"finalizers": None}})
    until("kube-proxy has ended", lambda: not site.proxy.is_running)
    for each in site.nodes:
        site.kube.create(node(each.name, each.ip, each.ip6))
    site.proxy.start()
    until("both are healthy with the new Nodes", lambda: site.statuses("/healthz") == [200, 200])


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


# ---- Prometheus ----------------------------------------------------------------------------------

SCRAPE = docs.ROOT / "manifests" / "monitoring" / "scrape.yaml"


def test_prometheus_reaches_the_metrics_with_the_documented_settings(site: Site, tmp_path):
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


def test_the_agent_raises_its_open_files_limit(site: Site):
    """Each health check needs two files. Service managers set a soft limit of 1024."""
    rows = Path(f"/proc/{site.agent.pid}/limits").read_text().splitlines()
    soft, hard = next(row for row in rows if row.startswith("Max open files")).split()[3:5]
    assert soft == hard
    assert site.metrics()["process_max_fds"].value() == int(hard)
