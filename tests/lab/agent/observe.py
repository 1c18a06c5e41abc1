# SPDX-License-Identifier: Apache-2.0
"""Two nodes, one with kbpf and one with kube-proxy, and what they answer."""

import contextlib
import json
import re
import resource
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.build.prometheus import promtool
from tests.support.cluster.kube import Kube, Object
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.lab.lab import Agent, Lab, Node, until
from tests.support.lab.sockets import connect
from tests.support.lab.web import Got, get
from tests.support.prometheus import Family, parse

HEALTH, METRICS, CHECK = 10256, 10249, 31_999


class Site:
    """Two nodes with the same objects, one of kbpf and one of kube-proxy."""

    def __init__(self, lab: Lab, kube: Kube, agent: Agent, proxy: KubeProxy) -> None:
        self.kube, self.agent, self.proxy = kube, agent, proxy
        self.ours, self.theirs = lab.nodes

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.ours, self.theirs

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


def check(site: Site, which: Node, v6: bool = False) -> tuple[int, dict[str, str], str] | None:
    host = which.ip6 if v6 else which.ip
    with contextlib.suppress(OSError):
        return plain(get(which.netns, host, CHECK, "/any/path?x"))
    return None


def agree(site: Site, status: int, weight: int, v6: bool = False) -> None:
    """Waits until both answer this status and weight, with equal bodies."""

    def said() -> bool:
        both = [check(site, each, v6) for each in site.nodes]
        head = both[0] and (both[0][0], both[0][1]["X-Load-Balancing-Endpoint-Weight"])
        return both[0] == both[1] and head == (status, str(weight))

    until(f"both answer {status} with weight {weight}", said)


def until_metrics(site: Site, name: str, value: float, **labels: str) -> dict[str, Family]:
    def page() -> dict[str, Family] | None:
        found = site.metrics()
        return found if found[name].value(**labels) == value else None

    return until(f"{name} {labels} is {value}", page)


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


def counted(site: Site, name: str, of: str = "counted", **labels: str) -> float:
    """The value of a Service's series; 0 if it does not exist."""
    found = site.metrics().get(name)
    wanted = {*labels.items(), ("service", of)}
    return sum(v for (_, own), v in found.samples.items() if own >= wanted) if found else 0


def dial(site: Site, number: int) -> dict:
    """Makes a connection from outside; returns the answer, {} if there is none."""
    with contextlib.suppress(OSError), connect(site.ours.lab.outside, site.ours.ip, number, 1) as s:
        s.sendall(b"x\n")
        return {"name": s.recv(100)}
    return {}
