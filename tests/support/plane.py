# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: a separate BPF data plane for a test, and short notations for its desired state.

A `Site` is what one agent works on: a cgroup and a pin folder, both removed afterwards. `open()` is
a start of the agent, a second call a restart. `dump()` reads the pinned maps without the plane's
memory and removes ids, so that two dumps are equal if the same is served.
"""

import contextlib
import ctypes
import errno
import itertools
import math
import os
import pickle
import shutil
import socket
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import MAPS, U32, Reason, ServiceFlag, schema_hash, unpack_service_name
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import packet_path
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.kernel.bpf import objects, syscalls
from kbpf.kernel.bpf.objects import Link, Map
from kbpf.kernel.bpf.uapi import BPF_MAP_TYPE_ARRAY_OF_MAPS
from kbpf.kernel.net import links
from kbpf.kernel.system import netns
from kbpf.model.address import Addr, family_of, format_addr, format_endpoint, parse_addr
from kbpf.model.config import Config, MapSizes
from kbpf.model.desired import (
    Backend,
    BackendSet,
    DesiredState,
    Frontend,
    FrontendAddress,
    FrontendKind,
    ServicePortKey,
    ServiceState,
)
from kbpf.model.objects import Algorithm, Protocol
from kbpf.source.decode.fields import parse_cidr
from tests.support.build import artifacts
from tests.support.features import lacking, require_listing
from tests.support.lab.agent_state import read_reasons
from tests.support.lab.lab import Place, cgroup2, ip, remove_cgroup, settled

BPFFS = Path("/sys/fs/bpf")
CGROUP_HOOKS = frozenset(
    ("connect4", "connect6", "sendmsg4", "sendmsg6", "recvmsg4", "recvmsg6", "getpeername4", "getpeername6")
)
HOOKS = CGROUP_HOOKS.union(
    () if lacking("tracing") else ("trace_reset", "trace_retransmit"),
    () if lacking("socket_errors") else ("trace_error",),
)
"""The hooks that an agent attaches by default; those at tracepoints are attached to no cgroup."""
SIZES = MapSizes(connections=4096, affinity=4096)
"""LRU maps are preallocated: the default sizes cost a tenth of a second and 40 MB each time."""
OURS = ("default",)
"""The tests' default of system_namespaces: these may use a whole map, and tests' maps are small."""
_numbers = itertools.count(1)
T = TypeVar("T")


# ---- notations for a desired state -------------------------------------------------------------


def split(text: str) -> tuple[Addr, int]:
    """Address and port of ``10.0.0.1:80`` or ``[fd00::1]:80``."""
    host, _, port = text.rpartition(":")
    return parse_addr(host.strip("[]")), int(port)


def backends(text: str, protocol: Protocol = Protocol.TCP) -> BackendSet:
    """A backend set from endpoints separated by blanks."""
    return tuple(sorted({Backend(*split(one), protocol) for one in text.split()}))


def at(text: str, protocol: Protocol = Protocol.TCP) -> FrontendAddress:
    """A frontend's address; for a NodePort it is ``0.0.0.0`` or ``[::]``."""
    return FrontendAddress(*split(text), protocol)


def service(
    name: str,
    frontends: str,
    to: str = "",
    protocol: Protocol = Protocol.TCP,
    local: str = "",
    serving: str | None = None,
    restricted: bool = False,
    ranges: str = "",
    **more: Any,
) -> ServiceState:
    """A Service port; `name` may be ``namespace/name``. `frontends` are ``address:port``, preceded
    by ``kind=`` unless they are ClusterIPs: ``10.96.0.1:80 NodePort=0.0.0.0:30080
    LoadBalancer=192.0.2.1:80``.

    By default the serving backends are those of the sets, and they are on this node. Clients in
    `ranges` may dial the LoadBalancer addresses.
    """
    namespace, _, name = name.rpartition("/")
    limited = restricted or bool(ranges)
    frontend_values = []
    for word in frontends.split():
        kind, _, where = word.rpartition("=")
        is_limited = limited and kind == "LoadBalancer"
        frontend_values.append(Frontend(at(where, protocol), FrontendKind(kind or "ClusterIP"), is_limited))
    cluster, here = backends(to, protocol), backends(local, protocol)
    still = tuple(sorted({*cluster, *here})) if serving is None else backends(serving, protocol)
    family = family_of(frontend_values[0].at.address) if frontend_values else 4
    return ServiceState(
        key=ServicePortKey(namespace or "default", name, "", protocol, family),
        frontends=tuple(sorted(frontend_values, key=lambda f: f.at)),
        cluster=cluster,
        local=here,
        serving=still,
        source_ranges=tuple(sorted(parse_cidr(text, "") for text in ranges.split())),
        **{"any_endpoints": bool(still), "on_node": tuple(sorted({one.address for one in still})), **more},
    )


def services(text: str, names: Mapping[str, str]) -> list[ServiceState]:
    """Service ports, one a line or after a semicolon: ``web:UDP 10.96.0.1:53 NodePort=0.0.0.0:30053 -> A B local=B
    affinity=60``. A word that is in `names` stands for an address. Options: affinity, local, serving, ranges,
    restricted, cluster_weights, local_weights, internal=Local, external=Local, algorithm; commas separate values.
    """
    lines = text.replace(";", "\n").splitlines()
    return [_parse_service(line, names) for line in lines if line.strip()]


def _parse_service(line: str, names: Mapping[str, str]) -> ServiceState:
    left, _, right = line.partition("->")
    name, *frontends = left.split()
    name, _, protocol = name.partition(":")
    options = dict(word.split("=") for word in right.split() if "=" in word)
    endpoints = [word for word in right.split() if "=" not in word]
    more: dict[str, Any] = {f"{key}_local": True for key in ("internal", "external") if options.pop(key, "")}
    for key, value in options.items():
        values = [names.get(one, one) for one in value.split(",")]
        match key:
            case "affinity":
                more["affinity_timeout"] = int(value)
            case "cluster_weights" | "local_weights":
                more[key] = tuple(map(int, values))
            case "algorithm":
                more[key] = Algorithm[value]
            case _:
                more[key] = " ".join(values)
    at, to = (" ".join(names.get(word, word) for word in words) for words in (frontends, endpoints))
    return service(name, at, to, Protocol[protocol or "TCP"], **more)


def desired(*services: ServiceState, nodes: str = "") -> DesiredState:
    """The whole desired state; `nodes` are the addresses that serve NodePorts."""
    return DesiredState({one.key: one for one in services}, tuple(parse_addr(text) for text in nodes.split()))


# ---- sites -------------------------------------------------------------------------------------


class Site:
    """A cgroup and a pin folder for one agent. `node`: the network namespace that counts as the
    host (a name below /run/netns), for rules that apply to the host only.
    """

    def __init__(self, cache: Path, cgroup: Path | None = None, node: str | None = None) -> None:
        self.name = f"kbp{os.getpid()}-{next(_numbers)}"
        self.cache = cache
        self.node = node
        self.pins = BPFFS / self.name
        self._own_cgroup = cgroup is None
        self.cgroup = cgroup or cgroup2() / self.name
        self.cgroup.mkdir(exist_ok=True)
        self._planes: list[BpfPlane] = []
        self._places: list[Place] = []

    @property
    def maps(self) -> Path:
        return self.pins / f"maps-{schema_hash()}"

    def plane(
        self,
        sizes: MapSizes | None = None,
        clock: Callable[[], float] = time.monotonic,
        sockets_first: bool = False,
        **settings: Any,
    ) -> BpfPlane:
        """A data plane of this site that is not opened yet."""
        given = {"pin_dir": self.pins, "cgroup": self.cgroup, "cache_dir": self.cache}
        given |= {"packet_path": False, "forwarding": "stack", **settings}
        config = Config(sizes=sizes or SIZES, **{"system_namespaces": OURS, **given})
        made = BpfPlane(config, clock, sockets_first)
        self._planes.append(made)
        return made

    def open(self, *arguments: Any, **settings: Any) -> BpfPlane:
        """Starts the agent's plane. The previous one ends as if killed: its descriptors, the lock's
        included, are closed, and nothing is written.
        """
        self.close_planes()
        made = self.plane(*arguments, **settings)
        self.do(made.open)
        return made

    def do(self, action: Callable[[], T]) -> T:
        """Calls it in the node's network namespace."""
        return action() if self.node is None else netns.run_in(Path("/run/netns") / self.node, action)

    def start(self, state: DesiredState, **settings: Any) -> BpfPlane:
        """Starts the agent's plane, which programs this state and retires what is not part of it."""
        plane = self.open(**settings)
        plane.apply(state, None)
        flush(plane)
        return plane

    def close_planes(self) -> None:
        """Ends the agent's planes as if it were killed."""
        for plane in self._planes:
            plane.close()

    def remove(self) -> None:
        """Ends the agent's planes, and removes what they left, as `kbpf cleanup` does."""
        self.close_planes()
        packet_path.remove_programs(Pins(self.pins))
        pinning.remove(Pins(self.pins))

    def place(self, name: str, netns: str | None = None) -> Place:
        """A client in a cgroup below the hooks."""
        made = Place(name, netns, self.cgroup / f"place{len(self._places)}")
        self._places.append(made)
        return made

    def pinned(self, name: str) -> Map:
        return Map.open(self.maps / name)

    def put(self, name: str, key: bytes, value: bytes) -> None:
        """Writes an entry of a map."""
        with self.pinned(name) as found:
            found.update(key, value)

    def clear(self, *names: str) -> None:
        """Deletes all entries of these maps."""
        for name in names:
            with self.pinned(name) as found:
                found.delete_batch(b"".join(self.entries(name)))

    @contextlib.contextmanager
    def restored(self, *names: str) -> Iterator[None]:
        """Puts all entries of these maps back after the block."""
        before = {name: self.entries(name) for name in names}
        try:
            yield
        finally:
            for name, entries in before.items():
                with self.pinned(name) as found:
                    for key in dict(found.items()).keys() - entries.keys():
                        found.delete(key)
                    for key, value in entries.items():
                        found.update(key, value)

    def drain_queue(self) -> list[bytes]:
        """Empties the queue of flows; returns its keys, oldest first."""
        found = []
        with self.pinned("flow_queue") as queue:
            taken = ctypes.create_string_buffer(queue.value_size)
            while syscalls.lib().bpf_map_lookup_and_delete_elem(queue.fd, None, taken) == 0:
                found.append(taken.raw)
        return found

    def entries(self, name: str) -> dict[bytes, bytes]:
        with self.pinned(name) as found:
            require_listing(found)
            return dict(found.items())

    def service_ports(self) -> dict[int, ServicePortKey]:
        """The named Service ports, by id."""
        return {U32.unpack(k)[0]: unpack_service_name(raw) for k, raw in self.entries("service_names").items()}

    def links(self) -> dict[str, tuple[int, int]]:
        """Hook → ids of the link and of the attached program."""
        ids = {}
        for pin in sorted((self.pins / "links").iterdir()):
            with Link.open(pin) as link:
                ids[pin.name] = (link.read_info().id, link.read_info().program_id)
        return ids

    def hook_programs(self) -> dict[str, int]:
        """Hook → id of the attached program."""
        return {hook: program for hook, (_, program) in self.links().items()}

    def use_pinned_maps(self, program_ids: Iterable[int]) -> bool:
        """Whether these programs read the maps that are pinned now, and no others."""
        pinned_ids = set()
        for path in (*self.maps.iterdir(), *self.pins.glob("programs-tc-*/tails")):
            with Map.open(path) as map_:
                pinned_ids.add(map_.id)
        return all(map_ids_read_by(number) <= pinned_ids for number in program_ids)

    def reasons(self) -> Counter[Reason]:
        """How often the programs have counted each reason, over all CPUs."""
        return read_reasons(self.maps / "reasons")

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Prints the reasons counted in the block; pytest shows it if a test fails."""
        before = self.reasons()
        yield
        print("counted:", {one.name: count for one, count in (self.reasons() - before).items()})

    def dump(self) -> dict[str, Any]:
        """The served state without ids; see dump()."""
        return dump(self.entries)

    def close(self) -> None:
        for place in self._places:
            place.close()
        self.close_planes()
        if self.pins.exists():
            links = self.pins / "links"
            for pin in sorted(links.iterdir()) if links.exists() else ():
                pin.unlink()
            shutil.rmtree(self.pins)
        if self._own_cgroup and self.cgroup.exists():
            remove_cgroup(self.cgroup)


def size_maps(patch: pytest.MonkeyPatch, **entries: int) -> None:
    """These maps begin with room for so many entries."""
    for name, count in entries.items():
        patch.setitem(MAPS, name, replace(MAPS[name], entries=count))


def flush(plane: BpfPlane) -> None:
    """Retires everything now, without a grace period."""
    plane._state.grace_queue.delete_until(float("inf"))
    plane._udp_passes.advance(float("inf"))


def map_ids_read_by(program_id: int) -> set[int]:
    """The ids of the maps that a program reads. For an array of maps: those of the maps in it."""
    ids = set()
    with objects.open_program_by_id(program_id) as program:
        for map_id in program.read_info().map_ids:
            with objects.open_map_by_id(map_id) as map_:
                is_outer = map_.type == BPF_MAP_TYPE_ARRAY_OF_MAPS
                inner = (map_.lookup(U32.pack(index)) for index in range(map_.max_entries))
                ids |= {U32.unpack(raw)[0] for raw in inner if raw} if is_outer else {map_id}
    return ids


def within(place: Place, action: Callable[[], T]) -> T:
    """The result of `action`, run by a forked child in the place's network namespace and cgroup."""
    return start_within(place, action)()


def start_within(place: Place, action: Callable[[], T], pin_cpu: int | None = None) -> Callable[[], T]:
    """Like within(), but does not wait; calling the returned function waits for the result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer: tuple[bool, Any] = (True, _act(place, action, pin_cpu))
        except BaseException:
            answer = (False, traceback.format_exc())
        with os.fdopen(writer, "wb") as out:
            pickle.dump(answer, out)
        os._exit(0)
    os.close(writer)

    def result() -> T:
        with os.fdopen(reader, "rb") as source:
            raw = source.read()
        os.waitpid(child, 0)
        assert raw, f"the child in {place.name} died"
        good, value = pickle.loads(raw)
        assert good, value
        return value

    return result


def join_pod(parent: Path, uid: str, container: str = "c1") -> None:
    """Moves this process into a container's cgroup, made below `parent` as kubelet makes it."""
    folder = parent / "kubepods" / f"pod{uid}" / container
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def network(prefix: str) -> Iterator[str]:
    """A network namespace with a loopback device; yields its name, which begins like this."""
    name = f"{prefix}{os.getpid()}"
    links.create_namespace(name)
    try:
        ip("link set lo up", netns=name)
        yield name
    finally:
        links.remove_namespace(name)


LOCAL = tuple(f"10.99.0.{i}" for i in range(1, 61))
LOCAL6 = tuple(f"fd00:99::{i:x}" for i in range(1, 61))


def make_local(netns: str | None) -> None:
    """Adds LOCAL and LOCAL6 to this namespace's loopback, for picks()."""
    ip(
        "link set lo up",
        *(f"addr add {one}/32 dev lo" for one in LOCAL),
        *(f"addr add {one}/128 dev lo nodad" for one in LOCAL6),
        netns=netns,
    )
    settled(netns, *LOCAL6)


def pick(host: str, port: int, kind: int = socket.SOCK_DGRAM) -> str:
    """The backend of LOCAL that a socket is translated to, or the errno.

    A socket that connects to an address of its own machine gets that address as its source, and
    getsockname() has no hook. So three system calls reveal the backend, without a server.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind) as s:
        code = s.connect_ex((host, port))
        return errno.errorcode[code] if code else s.getsockname()[0]


def picks(place: Place, to: str, count: int = 1) -> list[str]:
    """`count` results of pick() in that place."""
    host, _, port = to.rpartition(":")
    return within(place, lambda: [pick(host.strip("[]"), int(port)) for _ in range(count)])


def is_spread(seen: Counter[str], expected: dict[str, float]) -> bool:
    """Whether picks show the expected backends, each about as often as expected. chi-square exceeds the bound with a
    probability below 1e-6 (Laurent and Massart, lemma 1).
    """
    freedom, x = len(expected) - 1, -math.log(1e-6)
    chi_square = sum((seen[one] - count) ** 2 / count for one, count in expected.items())
    return seen.keys() == expected.keys() and chi_square < freedom + 2 * math.sqrt(freedom * x) + 2 * x


def _act(place: Place, action: Callable[[], T], pin_cpu: int | None) -> T:
    if place.cgroup is not None:
        (place.cgroup / "cgroup.procs").write_text(str(os.getpid()))
    if pin_cpu is not None:
        os.sched_setaffinity(0, {pin_cpu})
    if place.netns is not None:
        with open(f"/run/netns/{place.netns}") as found:
            assert ctypes.CDLL(None).setns(found.fileno(), 0) == 0
    return action()


def dump(entries: Callable[[str], dict[bytes, bytes]]) -> dict[str, Any]:
    """`frontends`: address → its Service, flags and backends; `strays`: unreferenced entries.

    Decodes the bytes by itself: offsets are those of kbpf/bpf/types.h.
    """
    reader = _Reader(entries)
    frontends = {reader.target(k): reader.behind(v) for k, v in entries("services").items()}
    return {
        "frontends": dict(sorted(frontends.items())),
        "node_addresses": sorted(k.hex() for k in entries("node_addresses")),
        "strays": reader.strays(),
    }


class _Reader:
    def __init__(self, entries: Callable[[str], dict[bytes, bytes]]) -> None:
        self._slots = {(_u32(k), _u32(k, 4)): _u32(v) for k, v in entries("backend_slots").items()}
        self._members = {(_u32(k), _u32(k, 4)) for k in entries("set_members")}
        self._backends = {_u32(k): self.target(v) for k, v in entries("backends").items()}
        self._names = {_u32(k): self.name(v) for k, v in entries("service_names").items()}
        self._ranges: defaultdict[int, list[str]] = defaultdict(list)
        for key in entries("source_ranges"):
            self._ranges[_u32(key, 4)].append(f"{format_addr(key[8:24])}/{_u32(key) - 32}")
        self._services: set[int] = set()  # ids that a frontend refers to
        self._sets: set[int] = set()
        self._tables: set[int] = set()
        self._used_members: set[tuple[int, int]] = set()
        self._ports = {
            _u32(word) * 64 + bit
            for word, bits in entries("frontend_ports").items()
            for bit in range(64)
            if int.from_bytes(bits, "little") >> bit & 1
        }
        self._frontend_ports = {int.from_bytes(k[16:18], "big") for k in entries("services")}

    @staticmethod
    def name(raw: bytes) -> str:
        """A Service's ``namespace/name``."""
        return b"/".join(raw[i : i + 64].rstrip(b"\0") for i in (0, 64)).decode()

    @staticmethod
    def target(raw: bytes) -> str:
        """A key of `services` as ``address:port/protocol``."""
        text = format_endpoint(raw[:16], int.from_bytes(raw[16:18], "big"))
        return f"{text}/{Protocol(raw[18]).name}"

    def behind(self, raw: bytes) -> dict[str, Any]:
        """One value of `services`, with its references resolved to backends."""
        service_id, flags, timeout, cluster, cluster_size, local, local_size, table, local_table = (
            _u32(raw, i) for i in range(0, 36, 4)
        )
        self._services.add(service_id)
        return {
            "service": self._names.get(service_id, ""),
            "flags": ServiceFlag(flags).name,
            "timeout": timeout,
            "cluster": self._set(cluster, cluster_size, table, timeout > 0),
            "local": self._set(local, local_size, local_table, timeout > 0),
            "ranges": sorted(self._ranges.get(service_id, ())),
        }

    def _set(self, set_id: int, size: int, table: int, affine: bool) -> list[str]:
        """The backend of each slot, by the Maglev table if the set has one."""
        self._sets |= {set_id, table} - {0}
        found = []
        for index in range(size):
            place = self._slots.get((table, index), -1) if table else index
            backend = self._slots.get((set_id, place), 0)
            text = self._backends.get(backend, "MISSING")
            if affine and (set_id, backend) not in self._members:
                text += " NOT A MEMBER"
            if affine:
                self._used_members.add((set_id, backend))
            found.append(text)
        self._tables |= {table} - {0}
        longer = sum(number == (table or set_id) for number, _ in self._slots) - size
        return [*found, *longer * ["BEYOND THE SIZE"]] if size else found

    def strays(self) -> dict[str, list[Any]]:
        """Entries that no frontend refers to, described by content, since ids mean nothing to a
        test.
        """
        found: defaultdict[str, list[Any]] = defaultdict(list)
        for (number, _), backend in sorted(self._slots.items()):
            if number not in self._sets:
                found["slots of"].append(self._backends.get(backend, "MISSING"))
        for number, backend in sorted(self._members):
            if number not in self._sets or (number, backend) not in self._used_members:
                found["members of"].append(self._backends.get(backend, "MISSING"))
        slots = {one for (n, _), one in self._slots.items() if n not in self._tables}
        found["backends"] = [text for i, text in self._backends.items() if i not in slots]
        found["names"] = [text for i, text in self._names.items() if i not in self._services]
        found["ports without a frontend"] = list(self._ports - self._frontend_ports)
        found["ports that programs do not see"] = list(self._frontend_ports - self._ports)
        for number, texts in self._ranges.items():
            found["ranges"] += texts if number not in self._services else []
        return {kind: sorted(texts) for kind, texts in found.items() if texts}


def _u32(raw: bytes, offset: int = 0) -> int:
    return int.from_bytes(raw[offset : offset + 4], "little")


# ---- fixtures ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def artifact_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact cache of this run, with the programs compiled."""
    cache = tmp_path_factory.mktemp("artifacts")
    artifacts.copy_to(cache)
    return cache


@contextlib.contextmanager
def sites(cache: Path) -> Iterator[Callable[..., Site]]:
    """A function that makes sites; all are removed at the end."""
    made: list[Site] = []

    def make(**arguments: Any) -> Site:
        made.append(Site(cache, **arguments))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()


@pytest.fixture
def site(artifact_cache: Path) -> Iterator[Site]:
    """A site for this test on which nothing runs yet."""
    with sites(artifact_cache) as make:
        yield make()


@pytest.fixture
def plane(site: Site) -> BpfPlane:
    """An opened data plane on the test's site."""
    return site.open()
