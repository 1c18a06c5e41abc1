# SPDX-License-Identifier: Apache-2.0
"""Services as Cilium serves them: its script tests, run with kbpf's policy. Each has objects, changes of them, and what
is served after each: a table of frontends, and a dump of its BPF maps. They are read from Cilium's Go module.
"""

import re
import shlex
from collections.abc import Iterable, Iterator

import yaml

from kbpf.model.address import family_of, format_endpoint, parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import FrontendKind
from kbpf.model.events import Delete, Kind, Upsert
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ObjectStore
from kbpf.source.decode import decode
from tests.support.build import go_build
from tests.support.build.programs import CILIUM
from tests.support.table import pairs

NODE = "testnode"

Served = dict[str, str]
"""`ADDRESS KIND` of a frontend → its backends; in dumps also the seconds of session affinity."""


def run(script: str) -> Iterator[str]:
    """A line for each comparison: "" or the difference, `TABLE, FRONTEND: kbpf's BACKENDS`."""
    commands, *rest = re.split(r"^-- (.+) --\n", script, flags=re.MULTILINE)
    files = dict(zip(rest[::2], rest[1::2], strict=True))
    node = PolicyNode()
    for line in commands.splitlines():
        match shlex.split(line.removeprefix("* ").removeprefix("! "), comments=True):
            case ["cp", old, new]:
                files[new] = files[old]
            case ["replace", old, new, name]:
                files[name] = files[name].replace(old, new)
            case ["sed", old, new, name]:  # also on output that no other command here reads
                files[name] = re.sub(old, new, files.get(name, ""), flags=re.MULTILINE)
            case ["k8s/add" | "k8s/update" | "k8s/delete" as verb, *names]:
                for name in names:
                    yield from node.write(name, files[name], verb == "k8s/delete")
            case ["db/insert" | "db/delete" as verb, "node-addresses", *names]:
                node.set_addresses([yaml.safe_load(files[name]) for name in names], verb == "db/insert")
            case ["test/set-node-labels", label]:
                node.set_label(*label.split("="))
            case ["db/cmp", "frontends", name]:
                yield from compare(name, *as_listed(files[name], node.frontends()))
            case ["db/empty", *tables] if "frontends" in tables:
                yield from compare("empty", node.frontends(), {})
            case ["cmp", *names] if dumps := [name for name in names if "SVC:" in files.get(name, "")]:
                yield from compare(dumps[0], node.maps(), parse_dump(files[dumps[0]]))
            case [command, *_] if command not in OTHER_COMMANDS.split():
                raise ValueError(f"unknown: {line}")


OTHER_COMMANDS = """
[privileged] cmp db db/cmp db/empty db/list db/prefix db/show grep hive hive/start lb/maps-dump lb/maps-empty
lb/maps-restore lb/maps-snapshot lb/prune sleep stdout test/bpfops-reset test/bpfops-summary test/init-wait
"""
"""They start Cilium, read its other tables and their formats, or count its writes."""


class PolicyNode:
    """A node's objects, and what is served with them."""

    def __init__(self) -> None:
        self._world, self._desired = ObjectStore(NODE), DesiredStateBuilder()
        self._addresses: set[str] = set()
        self._labels: dict[str, str] = {}

    def write(self, name: str, text: str, gone: bool = False) -> Iterator[str]:
        """An endpoint with several addresses becomes one for each: so Cilium reads it. To kube-proxy and kbpf they are
        the same backend, whose first address is used.
        """
        for value in yaml.safe_load_all(text):
            ends = value.get("endpoints") or ()
            value["endpoints"] = [end | {"addresses": [one]} for end in ends for one in end["addresses"]]
            item = decode.convert_object(Kind(value["kind"]), value)
            if item.error:
                yield f"{name}: {item.error}"
            else:
                self._update(Upsert(item.key, item.object) if item.object and not gone else Delete(item.key))

    def _update(self, *events: Upsert | Delete) -> None:
        local = tuple(map(parse_addr, sorted(self._addresses)))
        self._desired.update(self._world, self._world.apply(events), local, Config())

    def set_addresses(self, rows: Iterable[dict[str, object]], inserted: bool) -> None:
        listed = {str(row["addr"]) for row in rows if row["nodeport"]}
        self._addresses = self._addresses | listed if inserted else self._addresses - listed
        self._update()

    def set_label(self, name: str, value: str) -> None:
        self._labels[name] = value
        metadata = {"name": NODE, "labels": self._labels}
        assert list(self.write("Node", yaml.safe_dump({"kind": "Node", "metadata": metadata}))) == []

    def frontends(self) -> Served:
        return {f"{at} {kind}": backends for at, kind, _, backends in self._each()}

    def maps(self) -> Served:
        """NodePorts at each address of the node too, as in Cilium's maps."""
        made = {}
        for at, kind, affinity, backends in self._each():
            hosts = [at]
            if kind is FrontendKind.NODE_PORT:
                family = 6 if at.startswith("[") else 4
                own = [each for each in self._desired.state.node_addresses if family_of(each) == family]
                port, protocol = at.rpartition(":")[2].split("/")
                hosts += [f"{format_endpoint(each, int(port))}/{protocol}" for each in own]
            made |= {f"{host} {kind}": f"{backends} ({affinity} s)" for host in hosts}
        return made

    def _each(self) -> Iterator[tuple[str, FrontendKind, int, str]]:
        for service in self._desired.state.services.values():
            for frontend in service.frontends:
                inner = frontend.kind is FrontendKind.CLUSTER_IP
                local = service.internal_local if inner else service.external_local
                backends = service.local if local else service.cluster
                shown = sorted(f"{one}/{one.protocol.name}" for one in backends)
                yield str(frontend.at), frontend.kind, service.affinity_timeout, " ".join(shown)


def as_listed(text: str, ours: Served) -> tuple[Served, Served]:
    """Ours with the columns of a table, and its rows. Columns are in any order, a space or more between them."""
    header, *rows = text.strip().splitlines()
    theirs = {}
    for row in rows:
        at, *cells = row.replace(",", "").split()
        kind = "".join(KINDS.get(cell, "") for cell in cells)
        theirs[f"{at} {kind}".strip()] = " ".join(sorted(filter(ENDPOINT.fullmatch, cells)))
        if "more" in cells:  # the rest of the list is not shown
            ours = {key: " ".join(backends.split()[:5]) for key, backends in ours.items()}
    keys = [at if "Type" in header else at.split()[0] for at in ours]
    return dict(zip(keys, ours.values() if "Backends" in header else [""] * len(keys), strict=True)), theirs


def parse_dump(text: str) -> Served:
    """The services of a dump of maps, whose first COUNT slots get new connections; without ANY protocol: entries for
    all other ports of an address, which refuse or drop, and entries of an older Cilium.
    """
    backends = dict(re.findall(r"^BE: ID=(\d+) ADDR=(\S+)", text, re.MULTILINE))
    made: dict[str, tuple[int, str, list[str]]] = {}
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if line.startswith("SVC:") and not fields["ADDR"].endswith("/ANY"):
            at = f"{fields['ADDR']} {KINDS[fields['FLAGS'].partition('+')[0]]}"
            if fields["SLOT"] == "0":
                made[at] = (int(fields["COUNT"]), fields["AFFTimeout"], [])
            elif len(made[at][2]) < made[at][0]:
                made[at][2].append(backends[fields["BEID"]])
    return {at: f"{' '.join(sorted(slots))} ({affinity} s)" for at, (_, affinity, slots) in made.items()}


KINDS = {"ClusterIP": "ClusterIP", "NodePort": "NodePort", "LoadBalancer": "LoadBalancer", "ExternalIPs": "ExternalIP"}
ENDPOINT = re.compile(r"\S+:\d+/(TCP|UDP|SCTP)")


def compare(name: str, ours: Served, theirs: Served) -> Iterator[str]:
    """A line for each frontend."""
    for at in sorted(ours.keys() | theirs.keys()):
        mine, wanted = ours.get(at, "absent"), theirs.get(at, "absent")
        shown = mine.replace("10.244.1.1:80/TCP", "A").replace("10.244.2.1:80/TCP", "B").strip()
        yield "" if mine == wanted else f"{name}, {at}: {shown or 'none'}"


SKIPPED = pairs("""\
file → a file of frontends in Cilium's format
hostport → HostPorts: the CNI plugin portmap provides them
hostport-lb-collision → HostPorts
kpr-transition-to-disabled → Cilium beside a kube-proxy
kpr-transition-to-enabled → Cilium beside a kube-proxy
proxy-delegation → service.cilium.io/proxy-delegation: a proxy of Cilium's answers
prune-deleted-on-restart → maps after a restart: tests/programs/maps/test_adopt.py
pruning → two ClusterIPs of one family, which API servers refuse
quarantined → service.cilium.io/health-checked: Cilium tries backends
resync → repeated lists: tests/values/source/reflector
svc-node-exposure → service.cilium.io/node: only some nodes serve
svc-type-annotation → service.cilium.io/type: only some frontends are served
""")

DIFFERENCES = pairs("""\
endpointslice-weight: lbmaps-maintenance.expected, 10.96.116.33:8081/TCP ClusterIP: (0 s) → the slice's port has a name
endpointslice-weight: lbmaps-weighted.expected, 10.96.116.33:8081/TCP ClusterIP: (0 s) → that the Service's port lacks
graceful-termination: frontends.table, 10.96.116.33:8081/TCP ClusterIP: 10.244.0.112:8081/TCP → draining ones are listed
graceful-termination: frontends.table, 10.96.116.33:8081/TCP ClusterIP: 10.244.0.113:8081/TCP → but not in Cilium's maps
headless: service_clusterip_none.yaml: spec.clusterIP: 'none' is not an IP address → API servers accept only None
prefer-same-node: frontends-local.table, 10.96.50.104:80/TCP ClusterIP: A B → hints alone decide, and there are none
topology-aware-starting: frontends-local.table, 10.96.50.104:80/TCP ClusterIP: A B → as above
topology-aware-starting: lbmaps-local.expected, 10.96.50.104:80/TCP ClusterIP: A B (0 s) → as above
topology-aware-starting: frontends-both.table, 10.96.50.104:80/TCP ClusterIP: B → draining ones are listed
topology-aware: frontends-all.table, 10.96.50.104:80/TCP ClusterIP: A → hints apply whatever the Service says
trafficpolicy: lbmaps_tp_mixed.expected, 1.1.1.1:80/TCP/i LoadBalancer: absent → internalTrafficPolicy is of ClusterIPs
""")
"""With the reasons: kbpf does as kube-proxy. A is the endpoint 10.244.1.1:80/TCP, B 10.244.2.1:80/TCP."""


def test_frontends_and_backends_are_those_of_cilium():
    folder = go_build.module(*CILIUM) / "pkg/loadbalancer/tests/testdata"
    scripts = {path.stem: path.read_text() for path in sorted(folder.glob("*.txtar"))}
    skipped, expected = dict(SKIPPED), dict(DIFFERENCES)
    assert skipped.keys() < scripts.keys()
    lines = [f"{name}: {line}" for name in scripts.keys() - skipped for line in run(scripts[name])]
    different = {line for line in lines if not line.endswith(": ")}
    assert different == expected.keys()
    assert len(lines) == 618
