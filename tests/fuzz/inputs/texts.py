# SPDX-License-Identifier: Apache-2.0
"""Random objects and bytes for the parsers of manifests, configuration, kubeconfig files and pages.

Whatever the input is, the only exceptions are KbpfErrors, time is bounded, a bad file of a folder
or a bad object of a list spoils only itself, and decoded objects can be planned.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kbpf.config import load
from kbpf.errors import KbpfError, ObjectError
from kbpf.model.config import Config
from kbpf.model.events import Delete, Event, Kind, Rejected, Synced, Upsert
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ObjectStore
from kbpf.source.api.kubeconfig import find_access
from kbpf.source.api.watch import WatchStream
from kbpf.source.decode import decode, wire
from kbpf.source.folder import documents
from kbpf.source.folder.folder import FolderSource
from tests.campaigns import deadline

TEXTS = 1_000_000
SLOW_SECONDS = 2.0
"""CPU time for one text, on a busy machine."""

VALID = (
    """\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: ns, annotations: {kbpf.io/algorithm: maglev,
  kbpf.io/weights: "*=2"}}
spec:
  type: LoadBalancer
  clusterIPs: [10.96.0.1, "fd00::1"]
  externalIPs: [192.0.2.1]
  loadBalancerSourceRanges: [10.0.0.0/8]
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 10}}
  ports: [{name: http, port: 80, nodePort: 30080, protocol: TCP},
    {name: dns, port: 53, protocol: UDP}]
status: {loadBalancer: {ingress: [{ip: 192.0.2.9}]}}
""",
    """\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: ns, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints:
- {addresses: [10.1.0.1], conditions: {ready: true}, nodeName: n, zone: a,
   hints: {forZones: [{name: a}]}}
- {addresses: [10.1.0.2], targetRef: {kind: Pod, name: web-0}}
ports: [{name: http, port: 8080}, {name: dns, port: 5353, protocol: UDP}]
""",
    "{apiVersion: v1, kind: Node, metadata: {name: n, labels: {topology.kubernetes.io/zone: a}}, "
    "spec: {podCIDRs: [10.1.0.0/24]}, "
    "status: {addresses: [{type: InternalIP, address: 192.0.2.7}]}}\n",
    "{kind: Pod, metadata: {name: p, uid: abc, labels: {kbpf.io/socket-lb: off}}, spec: {nodeName: n}}\n",
)
CONFIGURATION = """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ipvs
clusterCIDR: 10.1.0.0/16,fd00::/48
conntrack: {maxPerCore: 7, tcpEstablishedTimeout: 1h}
ipvs: {scheduler: rr, syncPeriod: 30s}
nodePortAddresses: [primary]
---
apiVersion: kbpf.io/v1alpha1
kind: KbpfConfiguration
socketLB: {mode: on, exempt: [a*]}
packetPath: {masqueradePorts: 1024-2000}
mapSizes: {connections: 5000}
"""
KUBECONFIG = """\
current-context: a
clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443", certificate-authority-data: YQ==}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: a, context: {cluster: c, user: u}}]
"""
SCALARS = "null ~ true on -1 0 1e999 .inf .nan 0x1f 010 1_000 2001:db8::1 :: 10.0.0.0/33 2026-11-22 1:30:20"
SIGNS = "'' [] {} [[]] &a *a | >- ' \" # @ ` = << \\ é name ports spec kind"
WORDS = (
    *SCALARS.split(),
    *SIGNS.split(),
    "<<: *a",
    "? ",
    "!!binary x",
    "!!int ''",
    "!!bool x",
    "!!timestamp x",
    "!!python/object:os.system x",
    "!!set {a}",
    "!!omap [a: b]",
    "!!timestamp 2001-01-01",
    "%YAML 9.9\n",
    "---\n",
    "...\n",
    "\t",
    "\x00",
    "\x1b[2J",
    "\u202e",
    "\ufeff",
    "\ud800",
    "\x85",
    "\r\n",
    "- " * 70,
    "[" * 70,
    "{a: " * 70,
    "a: " * 3,
    "0" * 300,
    "9" * 5000,
    "x" * 300,
)
STRINGS = (
    "x 80 10.0.0.1 ::1 fd00::5 0.0.0.0 10.0.0.0/0 None TCP UDP SCTP ClusterIP Local Cluster maglev *=0 a=1000,b=1001"
)
VALUES = (
    *(None, True, -1, 0, 1.5, 1e308, 1 << 40, 1 << 80, 65535, 65536, [], {}, [None], [[]], {"a": None}),
    *STRINGS.split(),
    "",
    "\x00",
    "\ud7ff",
    "\x1b[2J",
    "a" * 300,
    ["10.0.0.1", "10.0.0.1"],
    ["fd00::1", "10.0.0.1"],
)


def garbled(chance: random.Random, text: str) -> bytes:
    """The text with parts cut, doubled, replaced or moved, and sometimes with random bytes."""
    for _ in range(chance.randint(1, 6)):
        at, other = sorted(chance.randint(0, len(text)) for _ in range(2))
        match chance.randrange(5):
            case 0:
                text = text[:at] + text[other:]
            case 1:
                text = text[:other] + text[at:]
            case 2:
                text = text[:at] + chance.choice(WORDS) + text[at:]
            case 3:
                text = text[:at] + chance.choice(WORDS) + text[other:]
            case _:
                lines = text.splitlines(keepends=True)
                chance.shuffle(lines)
                text = "".join(lines)
    data = text.encode(errors="surrogatepass")
    if chance.random() < 0.1:
        at = chance.randint(0, len(data))
        data = data[:at] + chance.randbytes(chance.randint(1, 9)) + data[at:]
    return data[:100_000]


def changed(chance: random.Random, value: Any) -> Any:
    """The object with some values replaced, left out or repeated."""
    if chance.random() < 0.06:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        kept = {k: changed(chance, v) for k, v in value.items() if chance.random() > 0.03}
        return kept | ({chance.choice(("x", "name", "port")): chance.choice(VALUES)} if chance.random() < 0.03 else {})
    if isinstance(value, list):
        rows = [changed(chance, each) for each in value if chance.random() > 0.03]
        return rows * chance.choice((1, 1, 1, 2, 30)) if rows else rows
    return value


def manifest(chance: random.Random, folder: Path) -> None:
    text = "---\n".join(chance.sample(VALID, chance.randint(1, len(VALID))))
    contents = documents.parse_documents("a.yaml", garbled(chance, text))
    assert len(contents.problems) <= documents.MAX_PROBLEMS_PER_FILE + 1
    assert all(map(str.isprintable, contents.problems))


def configuration(chance: random.Random, folder: Path) -> None:
    load.load({}, {}, garbled(chance, CONFIGURATION))


def kubeconfig(chance: random.Random, folder: Path) -> None:
    path = folder / "kubeconfig"
    path.write_bytes(garbled(chance, KUBECONFIG))
    find_access(path)


def one_file_of_a_folder(chance: random.Random, folder: Path) -> None:
    """A bad file between two good ones."""
    for name in ("a", "c"):
        text = VALID[0].replace("name: web,", f"name: {name}-good,").replace("192.0.2", "198.51.100")
        (folder / f"{name}.yaml").write_text(text)
    (folder / "b.yaml").write_bytes(garbled(chance, "---\n".join(VALID)))
    said: list[Event] = []
    FolderSource(folder, said.append, "n").poll()
    names = {event.key.name for event in said if isinstance(event, Upsert)}
    assert {"a-good", "c-good"} <= names, names


def objects(chance: random.Random, folder: Path) -> None:
    """Objects as a hostile API server may send them, from decoding to the desired state."""
    world, desired, config = ObjectStore("n"), DesiredStateBuilder(), Config()
    events: list[Event] = [Synced(kind) for kind in Kind]
    for _ in range(chance.randint(1, 8)):
        kind, good = chance.choice(PLAIN)
        data = json.dumps(changed(chance, good)).encode()
        try:
            item = decode.decode_object(kind, data)
        except ObjectError:
            continue
        if item.error:
            events.append(Rejected(item.key, item.error))
        elif item.object is not None:
            events.append(Upsert(item.key, item.object, 0.0))
        else:
            events.append(Delete(item.key, 0.0))
    desired.update(world, world.apply(events), (), config)


def watch_lines(chance: random.Random, folder: Path) -> None:
    """Bytes of a watch: no exception, and the line after a bad one is read."""
    kind, good = chance.choice(PLAIN)
    stream = WatchStream(kind)
    text = json.dumps({"type": "ADDED", "object": good})
    stream.feed(garbled(chance, text).replace(b"\n", b" ") + b"\n")
    (said,) = stream.feed(text.encode() + b"\n")
    assert type(said).__name__ == "ObjectChanged"


def a_page(chance: random.Random, folder: Path) -> None:
    """A page is decoded, or msgspec refuses it."""
    _, good = chance.choice(PLAIN)
    text = json.dumps({"metadata": {"resourceVersion": "5"}, "items": [good, good]})
    data = garbled(chance, text)
    try:
        wire.check_items(data)
        msgspec.json.decode(data, type=wire.ListPage)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return


PLAIN = [(Kind(each["kind"]), each) for each in map(yaml.safe_load, VALID)]
TARGETS = (manifest, configuration, kubeconfig, one_file_of_a_folder, objects, watch_lines, a_page)


def run(target: Callable[[random.Random, Path], None], seed: int, texts: int) -> int:
    """Tries this number of texts; returns how many were refused. AssertionErrors name the seed
    and number.
    """
    refused = 0
    with tempfile.TemporaryDirectory() as name:
        for number in range(texts):
            chance, is_safe = random.Random(f"{seed} {number}"), True
            begun = time.process_time()
            try:
                target(chance, Path(name))
            except KbpfError as error:
                is_safe = str(error).isprintable()
                refused += 1
            except Exception as error:
                raise AssertionError(f"{target.__name__} {seed} {number}: {error!r}") from error
            assert is_safe, f"{target.__name__} {seed} {number}: the error has control characters"
            seconds = time.process_time() - begun
            assert seconds < SLOW_SECONDS, f"{target.__name__} {seed} {number}: {seconds:.1f} s"
    return refused


def campaign(seed: int, minutes: float | None) -> None:
    """Tries TEXTS in total, or as many as `minutes` allow, a thousand for each target in turn."""
    until = deadline(minutes)
    done = 0
    while done < TEXTS and time.monotonic() < until:
        for target in TARGETS:
            refused = run(target, seed + done, 1000)
            done += 1000
            print(f"{target.__name__}: {refused} of 1000 refused", flush=True)
