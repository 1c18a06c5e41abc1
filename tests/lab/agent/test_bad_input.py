# SPDX-License-Identifier: Apache-2.0
"""Bad input gives one line that says what, where and what to do; everything else stays served."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kbpf
from kbpf.cli import app
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube import Object
from tests.support.cluster.scenario import FolderNode
from tests.support.faults.fault_wire import Request
from tests.support.features import lacking
from tests.support.lab.dial import UNSERVED, Dial, check
from tests.support.lab.lab import Lab, until

HOST, NAME = "10.96.0.20", "web-20"


@pytest.fixture(scope="module")
def faulty(programs: None) -> Iterator[Cluster]:
    """One node; the fault proxy can corrupt the API server's responses."""
    with Cluster(1, "x", faulty=True, arguments=("--socket-lb-label", "true")) as made:
        yield made


@pytest.fixture
def web(faulty: Cluster) -> Iterator[Cluster]:
    """The cluster with a Service that must stay served."""
    faulty.proxy.heal()
    faulty.agent.code = None
    if faulty.agent.is_running:
        faulty.agent.stop()
    faulty.start(faulty.agent)
    with faulty.given(*faulty.web(20, "a1")):
        yield faulty


def expect(cluster: Cluster, to: str, outcome: str) -> None:
    check(cluster, Dial("current state", "a3", to, outcome))


def complaints(cluster: Cluster) -> list[str]:
    """The log lines above INFO, without those about a feature that this kernel lacks."""
    lacks = "iterator of socket storage" if lacking("socket_iterator") else " INFO "
    return [line for line in cluster.agent.lines() if " INFO " not in line and lacks not in line]


def ends_with_one_line(cluster: Cluster, *pattern: str) -> None:
    """The started agent exits with status 1 and one line; Services stay served."""
    assert cluster.agent.wait_ended() == 1
    (line,) = complaints(cluster)
    assert re.search(".*".join(pattern), line), line
    expect(cluster, f"{HOST}:80", "a1")


# ---- kubeconfig and permissions -----------------------------------------------------------------

GOOD_FIELDS = {"apiVersion": "v1", "kind": "Config", "current-context": "c"}
KUBECONFIGS = {
    "does not exist": (None, ("cannot read the kubeconfig: No such file", "give the kubeconfig's path")),
    "is not YAML": ("clusters: {", ("not a kubeconfig", "")),
    "has no context": ("{}", ("has no current-context", "use-context NAME")),
    "has no such context": (json.dumps(GOOD_FIELDS), ("has no context 'c'", "it has: none")),
    "has no URL": (
        json.dumps(
            GOOD_FIELDS
            | {
                "clusters": [{"name": "c", "cluster": {"server": "10.0.0.1:6443"}}],
                "contexts": [{"name": "c", "context": {"cluster": "c"}}],
            }
        ),
        ("not the URL of an API server: '10.0.0.1:6443'", "write https://HOST:PORT"),
    ),
}


@pytest.mark.parametrize("name", KUBECONFIGS)
def test_a_bad_kubeconfig_is_one_error(web: Cluster, tmp_path: Path, name: str) -> None:
    text, (what, hint) = KUBECONFIGS[name]
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    web.agent.stop()
    web.agent.start(wait=False, extra=("--kubeconfig", str(path)))
    ends_with_one_line(web, " ERROR kbpf ", what, re.escape(str(path)), hint)


def test_missing_permissions_are_one_line_each_and_granting_them_helps(web: Cluster) -> None:
    """One line for each resource, once. Granting what it says helps without a restart."""
    web.agent.stop()
    web.proxy.forget()
    web.start(web.agent, wait=False, user="nobody")
    for resource in ("services", "endpointslices", "nodes"):
        web.proxy.wait_for_requests(3, None, resource)
        line = refusal(web, resource)
        assert web.proxy.url in line
        hint = f"grant list and watch on {resource} to nobody (ClusterRole system:node-proxier)"
        assert hint in line
    expect(web, f"{HOST}:80", "a1")
    grant(web)
    try:
        web.agent.wait_synced()
        web.change(web.slice(NAME, "a2"))
        expect(web, f"{HOST}:80", "a2")
        # Kubernetes' own role does not include Pods; Services are served without them.
        until(
            "the only problem is about Pods",
            lambda: [s["name"] for s in web.agent.status()["sources"] if s["error"]] == ["pods"],
        )
        line = refusal(web, "pods")
        assert "grant list and watch on pods to nobody (manifests/components/socket-lb-label)" in line
        assert line.partition("error=")[2].strip("'\"").startswith("cannot list pods: 403")
        said = web.agent.status()
        assert (said["synced"], said["error"]) == (True, "")
        assert not {s["name"]: s["synced"] for s in said["sources"]}["pods"]
        command = ["inspect", "status", "--pin-dir", str(web.agent.pin_dir)]
        # It fails while the last heartbeat of the agent is old.
        until("the status is good", lambda: app.call(command) == 0)
    finally:
        web.kube.request("DELETE", f"{BINDINGS}/nobody")


def refusal(cluster: Cluster, resource: str) -> str:
    """The line about a resource that may not be listed. It is repeated after a minute."""
    first, *repeats = [line for line in complaints(cluster) if f"list {resource}: 403" in line]
    assert all(int(seconds) >= 60 for line in repeats for seconds in AFTER.findall(line)), repeats
    return first


AFTER = re.compile(r" for=(\d+)s ")


BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"


def grant(cluster: Cluster) -> None:
    group = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "nobody"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "system:node-proxier"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "nobody"}],
    }
    kind = {"Content-Type": "application/json"}
    status, body = cluster.kube.request("POST", BINDINGS, json.dumps(binding).encode(), kind)
    assert status == 201, body


# ---- objects ------------------------------------------------------------------------------------


def spoil(cluster: Cluster, kind: str, name: str, how: Callable[[Object], None]) -> None:
    """Makes the proxy change this object with `how` in all responses from now on."""

    def hook(_: Request, obj: Object) -> Object:
        if obj["metadata"]["name"] == name and ("endpoints" in obj) == (kind == "EndpointSlice"):
            how(obj)
        return obj

    cluster.proxy.rewrite_objects(hook)


def no_number(obj: Object) -> None:
    obj["spec"]["ports"][0]["port"] = "eighty"


def no_address(obj: Object) -> None:
    obj["spec"]["clusterIPs"] = ["10.96.0.300"]


def null_address(obj: Object) -> None:
    obj["spec"]["ports"] = {"port": 80}


MALFORMED = (
    (no_number, "spec.ports[0].port: expected an integer, got a string"),
    (no_address, "spec.clusterIPs[0]: '10.96.0.300' is not an IP address"),
    (null_address, "spec.ports: expected a list, got an object"),
)


def one_line(cluster: Cluster, text: str) -> None:
    """The text is in the log once, and in the status."""
    assert len([line for line in complaints(cluster) if text in line]) == 1, complaints(cluster)
    until(
        "the problem is in the status", lambda: any(text in problem for problem in cluster.agent.status()["problems"])
    )


@pytest.mark.parametrize(("how", "line"), MALFORMED, ids=["type", "address", "shape"])
def test_a_malformed_service(web: Cluster, how: Callable[[Object], None], line: str) -> None:
    """A new Service is not served, a known one keeps its last state; once repaired it is used."""
    more = web.web(21, "a2")
    spoil(web, "Service", "web-21", how)
    with web.given(*more):
        one_line(web, f"Service default/web-21: {line}")
        expect(web, "10.96.0.21:80", UNSERVED)
        web.change(web.slice(NAME, "a1 a2"))
        expect(web, f"{HOST}:80", "a1 a2")
        web.proxy.heal()
        web.change(web.web(21, "a2", labels={"repaired": "yes"})[0])
        expect(web, "10.96.0.21:80", "a2")
        until("no problem is reported", lambda: not web.agent.status()["problems"])
        spoil(web, "Service", "web-21", how)
        web.change(web.web(21, "a2", labels={"repaired": "no"})[0])
        expect(web, "10.96.0.21:80", "a2")
        web.proxy.heal()


def test_only_endpoints_with_bad_addresses_are_left_out(web: Cluster) -> None:
    def how(obj: Object) -> None:
        for text in ("10.244.1.999", "fd00::1", ""):
            obj["endpoints"].insert(0, {"addresses": [text]})
        obj["endpoints"].insert(0, {"addresses": []})

    spoil(web, "EndpointSlice", f"{NAME}-ipv4", how)
    web.change(web.slice(NAME, "a1 a2"))
    expect(web, f"{HOST}:80", "a1 a2")
    where = f"EndpointSlice default/{NAME}-ipv4: endpoints"
    for number, what in enumerate(
        ("no address", "'' is not an IP address", "fd00::1 is not IPv4", "'10.244.1.999' is not an IP address")
    ):
        one_line(web, f"{where}[{number}].addresses: {what}")


def test_a_malformed_slice_keeps_its_last_state(web: Cluster) -> None:
    spoil(web, "EndpointSlice", f"{NAME}-ipv4", lambda obj: obj.update(endpoints="none"))
    web.change(web.slice(NAME, "a2"))
    expect(web, f"{HOST}:80", "a1")
    one_line(web, f"EndpointSlice default/{NAME}-ipv4: endpoints: expected a list, got a string")


def test_unknown_fields_are_accepted(web: Cluster) -> None:
    def how(obj: Object) -> None:
        obj["spec"]["tomorrow"] = {"ports": ["any"]}
        obj["spec"]["ports"][0]["tomorrow"] = None

    spoil(web, "Service", "web-22", how)
    with web.given(*web.web(22, "a2")):
        expect(web, "10.96.0.22:80", "a2")
    assert complaints(web) == []


@contextlib.contextmanager
def unseen(cluster: Cluster, *objects: Object) -> Iterator[None]:
    """As Cluster.given(), but the agent's watches may be frozen."""
    cluster.create(*objects)
    try:
        yield
    finally:
        cluster.delete(*objects)


def test_an_object_without_a_name_deletes_nothing(web: Cluster) -> None:
    """The object may be any of a kind, so a list that contains it deletes nothing that it lacks;
    its other objects are used.
    """
    more = web.web(23, "a2")
    spoil(web, "Service", NAME, lambda obj: obj["metadata"].pop("name"))
    web.proxy.freeze_watches()
    with unseen(web, *more):
        web.proxy.expire_watches()
        web.settle()
        expect(web, "10.96.0.23:80", "a2")
        expect(web, f"{HOST}:80", "a1")
        until("the unnamed object is logged", lambda: any("cannot read an object" in line for line in complaints(web)))
        expect(web, f"{HOST}:80", "a1")
    assert all("not a Service" in line for line in complaints(web))


# ---- maps, compiler, kernel ---------------------------------------------------------------------


def service(number: int) -> list[Object]:
    meta = {"name": f"web-{number}"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {"clusterIP": f"10.96.0.{number}", "ports": [{"port": 80}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": meta | {"labels": {"kubernetes.io/service-name": f"web-{number}"}},
            "addressType": "IPv4",
            "ports": [{"port": 8080}],
            "endpoints": [{"addresses": ["10.244.1.2"]}],
        },
    ]


def test_services_beyond_a_full_map_are_reported(tmp_path: Path) -> None:
    """Services are served until the map is full, the others are reported. When one is deleted,
    another takes its room.
    """
    with Lab(1, "y", apart=True) as lab, FolderNode(lab, tmp_path / "objects", pods=3) as node:
        for number in range(20, 26):
            node.write(service(number))
        node.agent.start(extra=("--max-frontends", "5"))  # one namespace may have four of them
        full = [Dial("fits", "a3", f"10.96.0.{number}:80", "a1") for number in range(20, 24)]
        left = [Dial("does not fit", "a3", f"10.96.0.{number}:80", UNSERVED) for number in (24, 25)]
        for row in (*full, *left):
            check(node, row)
        for number in (24, 25):
            said = [line for line in node.agent.lines() if f"web-{number}" in line]
            assert len(said) == 1, said
            for part in ("ERROR", "services", "has room for 5", "--max-frontends"):
                assert part in said[0]
        until("the problem is in the status", lambda: len(node.agent.status()["problems"]) == 2)
        node.remove(service(20))
        until("another is served", lambda: "10.96.0.24:80/TCP" in node.served())
        check(node, Dial("fits now", "a3", "10.96.0.24:80", "a1"))
        check(node, Dial("deleted", "a3", "10.96.0.20:80", UNSERVED))
        until("the last one is still reported", lambda: len(node.agent.status()["problems"]) == 1)
        node.agent.stop()
        node.agent.start()
        check(node, Dial("larger maps", "a3", "10.96.0.25:80", "a1"))


def another(tmp_path: Path, file: str, old: str, new: str) -> Path:
    """A copy of kbpf with one change."""
    shutil.copytree(Path(kbpf.__file__).parent, tmp_path / "kbpf")
    path = tmp_path / "kbpf" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return tmp_path


def start_other(cluster: Cluster, code: Path, wait: bool) -> None:
    if cluster.agent.is_running:
        cluster.agent.stop()
    cluster.agent.code = code
    cluster.start(cluster.agent, wait)


def test_programs_that_do_not_compile_are_one_error(web: Cluster, tmp_path: Path) -> None:
    broken = another(tmp_path, "bpf/lookup.h", "#define TRIES 3", "#define TRIES 3\nnot_a_type nonsense;")
    start_other(web, broken, wait=False)
    ends_with_one_line(web, "ERROR kbpf cannot compile", "not_a_type", r"lookup\.h:\d+")


def test_a_refused_required_program_is_one_error(web: Cluster, tmp_path: Path) -> None:
    refused = another(tmp_path, "bpf/lookup.h", "	if (!now)\n		return MISSING;\n", "")
    start_other(web, refused, wait=False)
    ends_with_one_line(web, " ERROR kbpf ", "(connect|sendmsg|recvmsg)[46]", "EACCES|EINVAL")


def test_a_refused_optional_program_is_left_out(web: Cluster, tmp_path: Path) -> None:
    """The program is left out and its attached predecessor is detached, since that may use maps
    that are no longer written. The other hooks work.
    """
    head = "int getpeername4(struct bpf_sock_addr *ctx)\n{\n"
    code = another(tmp_path, "bpf/sock.c", head, f"{head}\treturn 2;\n")
    for before in (True, False):
        start_other(web, code, wait=True)
        left_out, *more = complaints(web)
        assert re.search(r"not loaded: .*getpeername4.*E[A-Z]+", left_out)
        assert ["detached" in line and "getpeername4" in line for line in more] == [True] * before
        web.change(web.slice(NAME, "a2"))
        answer = web["a3"].tcp(HOST, 80)
        assert (answer["name"], answer["peer"]) == ("a2", [web["a2"].ip, 8080])
        web.agent.kill()
        web.agent.remove_pins()


def test_wrong_settings_are_errors(web: Cluster, tmp_path: Path) -> None:
    web.agent.stop()
    for setting, value, code, said in (
        ("--cgroup", str(tmp_path), 2, "not a cgroup v2 folder"),
        ("--cgroup", str(web.lab.nodes[0].cgroup / "typo"), 2, "no such cgroup v2 folder"),
        ("--mode", "iptables", 2, "auto"),
        ("--max-backends", "many", 2, "many"),
        ("--no-such-flag", "1", 2, "--no-such-flag"),
    ):
        config = str(web.kubeconfig())
        web.agent.start(wait=False, extra=("--kubeconfig", config, setting, value))
        assert web.agent.wait_ended() == code, setting
        *_, line = complaints(web)
        assert said in line
        expect(web, f"{HOST}:80", "a1")


def test_a_second_agent_does_not_disturb_the_first(web: Cluster) -> None:
    first = web.agent
    ports = ("--healthz-bind-address=", "--metrics-bind-address=")
    second = type(first)(first.node, "--kubeconfig", str(web.kubeconfig()), *ports)
    second.log = second.log.with_suffix(".second.log")
    try:
        second.start(wait=False)
        assert second.wait_ended() == 1
        (line,) = [line for line in second.lines() if " INFO " not in line]
        assert str(first.pin_dir) in line
    finally:
        first.node.agent = first
    web.change(web.slice(NAME, "a2"))
    expect(web, f"{HOST}:80", "a2")
