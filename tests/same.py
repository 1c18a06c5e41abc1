# SPDX-License-Identifier: Apache-2.0
"""What this tree does, as digests that tools/same.py compares with those of another tree.

    python -m tests.same COMPARISON FILE [--scale S] [--show CASE ...]

A case has a name, an input and a result. Its name and both digests are one line of JSON in FILE,
with --show the names and texts of these results. Equal code gives equal digests: clocks stand
still, and the caller sets PYTHONHASHSEED, because messages have the order of sets.
"""

import argparse
import errno
import hashlib
import json
import logging
import math
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from kbpf.cli import inspect, render
from kbpf.cli.options import Output
from kbpf.config import load
from kbpf.dataplane.bpf import plane as bpf_plane
from kbpf.dataplane.bpf.hooks import UNITS
from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.programs import compile
from kbpf.errors import KbpfError, KernelError
from kbpf.kernel.bpf import objects, uapi
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.net.ipvs import encode_request
from kbpf.kernel.net.netlink import Netlink
from kbpf.kernel.netfilter import forward_rules
from kbpf.model.address import format_addr, parse_addr
from kbpf.model.config import Config, MapSizes
from kbpf.model.desired import DesiredState
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Upsert
from kbpf.model.inspection import Inspection
from kbpf.model.objects import Algorithm, Node, Protocol
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ObjectStore
from kbpf.serve import health
from kbpf.serve.server import AgentServer
from kbpf.source.decode import decode
from tests.fuzz.worlds import World, questions
from tests.support import plane as plane_support
from tests.support.cluster import scenario
from tests.support.faults import fake_ipvs
from tests.support.plane import desired, service
from tests.values.views import snapshots

MEMORY = re.compile(r" at 0x\w+")
"""In reprs of functions and some objects: their address."""


class Case(NamedTuple):
    name: str
    given: str
    result: str


# ---- bytecode ------------------------------------------------------------------------------------


def bytecode(scale: float) -> Iterator[Case]:
    """The instructions of every program, and every map: in C, and as the agent creates it."""
    with tempfile.TemporaryDirectory() as cache:  # a shared one would hide changes of compile.py
        for unit in UNITS[: math.ceil(scale * len(UNITS))]:
            compiled = compile.compile_unit(unit, Path(cache))
            for program in compiled.programs:
                maps = {reference.insn: reference.map for reference in program.references}
                code = (program.insns[at : at + 8] for at in range(0, len(program.insns), 8))
                lines = (f"{i}: {each.hex(' ')} {maps.get(i, '')}" for i, each in enumerate(code))
                yield Case(f"{unit}: program {program.name}", "", "\n".join(lines))
            for shape in compiled.maps:
                made = f"{shape}\n{layout.ALL_MAPS.get(shape.name)}"
                yield Case(f"{unit}: map {shape.name}", "", MEMORY.sub("", made))


# ---- states --------------------------------------------------------------------------------------

QUESTIONS = 20
"""Examples of Hypothesis in one case. Each has eleven Services on average, and is a cluster again
with each Service that is added."""
ADDRESSES = tuple(map(parse_addr, ("192.0.2.2", "10.0.0.7", "2001:db8::2")))
CONFIGS = (Config(), Config(algorithm=Algorithm.MAGLEV, all_node_port_addresses=True))


def scenarios(_: float) -> Iterator[Case]:
    for name in scenario.names():
        found = [each for each in scenario.documents(name) if each["kind"] in {*Kind}]
        events = [event(Kind(each["kind"]), each) for each in found]
        named = {each["metadata"]["name"] for each in found if each["kind"] == "Node"}
        for node in sorted(named.union(re.findall(r"'nodeName': '([^']+)'", repr(found)))):
            lines = grown("", node, [events], Config())
            yield Case(f"{name} on {node}", f"{node} {found}", "\n".join(lines))


def generated(number: int) -> Case:
    """Hypothesis' clusters of one seed. All have the same addresses, so Services conflict."""
    asked: list[tuple[list[World], str, str]] = []

    def ask(question: tuple[list[World], str, str]) -> None:
        asked.append(question)

    # It also draws constants of the code in the working directory, which a refactoring may change.
    providers.is_local_module_file = lambda _: False
    few = hypothesis.settings(
        max_examples=QUESTIONS,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.seed(number)(few(hypothesis.given(questions())(ask)))()
    lines: list[str] = []
    for index, (worlds, name, zone) in enumerate(asked):
        steps = [
            [event(Kind.SERVICE, each.service), *(event(Kind.SLICE, one) for one in each.slices)] for each in worlds
        ]
        steps[0].append(Upsert(ObjectKey(Kind.NODE, "", name), Node(name, ADDRESSES, zone)))
        lines += grown(f"{index}.", name, steps, CONFIGS[index % len(CONFIGS)])
    return Case(f"seed {number}", repr(asked), "\n".join(lines))


def event(kind: Kind, value: Any) -> Event:
    item = decode.convert_object(kind, value)
    return Delete(item.key) if item.object is None else Upsert(item.key, item.object)


def grown(name: str, node: str, steps: Iterable[Sequence[Event]], config: Config) -> Iterator[str]:
    """The desired state after each step, as its differences from the one before."""
    store, builder, before = ObjectStore(node), DesiredStateBuilder(), dict[str, Any]()
    for number, events in enumerate(steps):
        builder.update(store, store.apply(events), store.node.addresses, config)
        now: dict[str, Any] = {str(key): value for key, value in builder.state.services.items()}
        now |= {each: getattr(builder.state, each) for each in DesiredState.__struct_fields__[1:]}
        now["other_node_addresses"] = sorted(now["other_node_addresses"])
        for key in sorted(now.keys() | before.keys()):
            if before.get(key) != now.get(key):
                yield f"{name}{number} {key}: {now.get(key)}"
        before = now


# ---- histories -----------------------------------------------------------------------------------

FRONTENDS = {
    family: f"{a}1{b}:80 {a}2{b}:80 {a}3{b}:80 NodePort={every}:30080 NodePort={every}:30081 "
    f"LoadBalancer={c}1{b}:80 LoadBalancer={c}2{b}:80 ExternalIP={c}3{b}:80".split()
    for family, a, b, c, every in (
        (4, "10.96.0.", "", "192.0.2.", "0.0.0.0"),
        (6, "[fd00::", "]", "[2001:db8::", "[::]"),
    )
}
BACKENDS = {4: [f"10.244.0.{i}:8080" for i in range(12)], 6: [f"[fd01::{i}]:80" for i in range(12)]}


def random_state(rng: random.Random) -> DesiredState:
    """Some Services that share no frontend, as the policy makes them."""
    free = {family: rng.sample(every, len(every)) for family, every in FRONTENDS.items()}
    services = []
    for name in rng.sample("abcdef", rng.randint(0, 5)):
        family = rng.choice((4, 4, 6))
        mine = [free[family].pop() for _ in range(min(rng.randint(1, 3), len(free[family])))]
        if not mine:
            continue
        ends = sorted(rng.sample(BACKENDS[family], rng.choice((0, 1, 2, 3, 9))))
        weights = (1, *rng.choices((1, 2, 5), k=len(ends) - 1)) if len(ends) > 1 else ()
        more = {
            "local": " ".join(each for each in ends if rng.random() < 0.4),
            "internal_local": rng.random() < 0.3,
            "external_local": rng.random() < 0.3,
            "affinity_timeout": rng.choice((0, 0, 60, 90)),
            "algorithm": rng.choice((Algorithm.RANDOM, *Algorithm)),
            "cluster_weights": weights if rng.random() < 0.3 and {*weights} != {1} else (),
            "ranges": rng.choice(("", "10.0.0.0/8 192.0.2.0/24")) if family == 4 else "",
        }
        protocol = rng.choice((Protocol.TCP, Protocol.UDP, Protocol.SCTP))
        services.append(service(name, " ".join(mine), " ".join(ends), protocol, **more))
    return desired(*services, nodes=rng.choice(("", "192.0.2.9", "192.0.2.9 2001:db8::9")))


def history(rng: random.Random) -> list[tuple[str, DesiredState]]:
    """What happens to an agent, and the state that it has to program then."""
    kinds = ("apply", "apply", "restart", "kill", "refuse")
    return [(rng.choice(kinds), random_state(rng)) for _ in range(6)]


class Killed(BaseException):
    """The agent ends here."""


class Recorder:
    """Notes writes to maps; after `left` entries the next one raises `error`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.left, self.error = math.inf, BaseException()
        for name in ("update", "add", "replace", "push", "delete", "lookup_and_delete", "update_batch", "delete_batch"):
            real = getattr(Map, name)
            patch.setattr(Map, name, lambda *data, _real=real: self.write(_real, *data))
        read = Map.lookup_batch

        def lookup_batch(map_: Map, cursor: Any, _: Any = None) -> tuple[bytes, bytes, Any]:
            """Reads all entries at once, because the kernel's order is random."""
            keys, values, cursor = read(map_, cursor)
            if keys and map_.type == uapi.BPF_MAP_TYPE_HASH:
                keys, values = map(b"".join, zip(*split(map_, keys, values), strict=True))
            return keys, values, cursor

        patch.setattr(Map, "lookup_batch", lookup_batch)

    def write(self, real: Callable[..., Any], map_: Map, *data: bytes) -> Any:
        entries = split(map_, *data)
        count = int(min(len(entries), self.left))
        self.left -= count
        for parts in entries[:count]:
            # The value for an array of maps is a descriptor.
            known = parts[:1] if map_.type == uapi.BPF_MAP_TYPE_ARRAY_OF_MAPS else parts
            self.lines.append(" ".join((map_.name, real.__name__, *map(bytes.hex, known))))
        result = real(map_, *map(b"".join, zip(*entries[:count], strict=True))) if count else None
        if count < len(entries):
            raise self.error
        return result


def split(map_: Map, *data: bytes) -> list[tuple[bytes, ...]]:
    """The entries of a batch: keys and values, or keys, or values of a queue. They are sorted,
    because their order may be that of a set.
    """
    sizes = (map_.key_size or map_.value_size, map_.value_size)
    return sorted(
        tuple(each[i * n : (i + 1) * n] for each, n in zip(data, sizes, strict=False))
        for i in range(len(data[0]) // sizes[0])
    )


def no_programs(config: Config, *_: object) -> Mock:
    """Attachments without programs, which take most of a start and write none of these maps."""
    fake = Mock(**{"choose_forwarding.return_value": config, "tick.return_value": None})
    fake.packets.publish_due = False
    return fake


def writes(number: int) -> Case:
    """A history of the BPF data plane. It has pinned maps to itself, which start small."""
    rng, now = random.Random(number), [1000.0]
    events = history(rng)
    with plane_support.sites(Path()) as make, pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        patch.setattr(time, "monotonic", lambda: now[0])
        patch.setattr(time, "monotonic_ns", lambda: int(now[0] * 1e9))
        patch.setattr(time, "perf_counter", lambda: 0.0)  # no slice of work ends early
        patch.setattr(objects, "BATCH_SIZE", 4096)  # all entries; larger buffers take time
        patch.setattr(bpf_plane, "Attachments", no_programs)
        patch.setattr(bpf_plane.BpfPlane, "_refuse_neighbours", lambda *_: None)
        for name in ("services", "backend_slots", "backends", "set_members"):
            patch.setitem(layout.MAPS, name, replace(layout.MAPS[name], entries=8))
        sizes = MapSizes(frontends=64, slots=2048, backends=64, connections=64, affinity=64)
        site, old = make(), None
        patch.setattr(os, "urandom", bytes)  # a secret of the programs
        plane = site.open(sizes, lambda: now[0])
        for how, new in events:
            recorder.lines.append(f"# {how}")
            recorder.error = Killed() if how == "kill" else KernelError("no", errno=errno.ENOMEM)
            recorder.left = rng.randint(0, 40) if how in ("kill", "refuse") else math.inf
            touched = old and {k for k, _ in old.services.items() ^ new.services.items()}
            try:
                plane.apply(new, touched, authoritative=rng.random() < 0.8)
            except (Killed, KernelError) as error:
                recorder.lines.append(repr(error))
            recorder.left, old = math.inf, new
            if how in ("kill", "restart"):
                plane = site.open(sizes, lambda: now[0])
            if how != "apply":
                plane.apply(new, None)
            now[0] += rng.choice((0.1, 0.6, 2.0))
            plane.tick(now[0])
    return Case(f"seed {number}", repr(events), "\n".join(recorder.lines))


def messages(number: int) -> Case:
    """A history of the IPVS data plane in a network namespace, with a fake of IPVS."""
    rng, lines = random.Random(number), list[str]()
    events = history(rng)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:

        def note(owner: Any, name: str, texts: Callable[..., Iterable[str]]) -> None:
            def call(*arguments: Any, **more: Any) -> Any:
                lines.extend(texts(*arguments, **more))
                return real(*arguments, **more)

            real = getattr(owner, name)
            patch.setattr(owner, name, call)

        note(Netlink, "_send", lambda socket, data: [f"{socket._name} {data.hex()}"])
        note(forward_rules, "run_transaction", lambda *all_, **_: map(json.dumps, all_))
        note(fake_ipvs.FakeIpvs, "try_", lambda _, all_: (encode_request(x).hex() for x in all_))
        with fake_ipvs._node(Path(folder), patch) as node:
            node.start()
            for how, state in events:
                lines.append(f"# {how}")
                if how in ("kill", "refuse"):
                    codes = iter([0] * rng.randint(0, 9) + [errno.ENOMEM] * rng.randint(1, 3))
                    node.ipvs.refuse = lambda _, codes=codes: next(codes, 0)
                services = state.services.values()
                nodes = " ".join(map(format_addr, state.node_addresses))
                try:
                    node.apply(*services, nodes=nodes)
                except KernelError as error:
                    lines.append(str(error))
                node.ipvs.refuse = lambda _: 0
                if how in ("kill", "restart"):
                    node.start()
                if how != "apply":
                    node.apply(*services, nodes=nodes)
                node.tick()
    return Case(f"seed {number}", repr(events), "\n".join(lines))


# ---- what tests see ------------------------------------------------------------------------------

Seam = tuple[Any, str, Callable[[Any], str]]
"""A function, as an attribute, and how its result becomes a text."""


def seen(scale: float, paths: str, *seams: Seam) -> list[Case]:
    """Runs tests below tests/values, and notes each call of these functions."""
    made: list[Case] = []
    counts = Counter[str]()

    def note(function: Callable[..., Any], describe: Callable[[Any], str]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            test = os.environ.get("PYTEST_CURRENT_TEST", "import").rpartition(" ")[0]
            name = f"{test.rpartition('/')[2]} {function.__name__}"
            counts[name] += 1
            # The environment may name the folder from which tools/same.py was started.
            given = repr((arguments, more)).replace(repr(os.environ), "")
            text = "an unexpected error"
            try:
                result = function(*arguments, **more)
                text = describe(result)
            except KbpfError as error:
                parts = (error, *getattr(error, "errors", ()), *getattr(error, "warnings", ()))
                text = "\n".join(map(str, parts))
                raise
            finally:
                made.append(Case(*map(plain, (f"{name} {counts[name]}", given, text))))
            return result

        return call

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:

        def plain(text: str) -> str:
            text = text.replace(folder, "TEMPORARY").replace(str(Path.cwd()), "TREE")
            return re.sub(r'"time": "[^"]+"', "", MEMORY.sub("", text))

        for owner, name, describe in (*seams, (pytest.CaptureFixture, "readouterr", "\n".join)):
            patch.setattr(owner, name, note(getattr(owner, name), describe))
        files = [f"tests/values/{each}" for each in paths.split()]
        # Without those whose input is random or the real time.
        options = ["-q", "-pno:cacheprovider", "-mnot hypothesis", "-knot in_use"]
        options.append(f"--basetemp={folder}/t")
        code = pytest.main([*options, *files[: math.ceil(scale * len(files))]])
        assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), code
    return made


def shown(scale: float) -> list[Case]:
    """Output of commands, pages of the agent, and all views of the tests' snapshots."""
    varying = re.compile(r"^(process_|kbpf_scrape_duration|kbpf_source_last_event).*$", re.M)
    return seen(
        scale,
        "serve/test_metrics.py serve/test_health.py serve/test_zpages.py views cli/test_inspect.py",
        *((health, name, str) for name in ("healthz", "livez", "readyz")),
        (AgentServer, "format_metrics", lambda page: varying.sub(r"\1", page.decode())),
        (snapshots, "snapshot", views),
    )


def views(inspection: Inspection) -> str:
    """Every view of it, as a table and in JSON."""
    names = sorted({f"{p.key.namespace}/{p.key.name}" for p in inspection.services if p.key})
    texts = []
    for view in inspect.VIEWS:
        filters = {name: default for name, (_, default) in view.filters.items()}
        for name in names if view.name == "service" else [""]:
            if view.name == "service":
                filters |= {"name": name, "namespace": ""}
            for output in (Output.WIDE, Output.JSON):
                try:
                    page = view.module.build_page(inspection, **filters)
                    text = "".join(render.render_page(page, output))
                    text += f"{page.empty} {page.notes} {page.ok}"
                except Exception as error:  # not every test needs all parts of an inspection
                    text = repr(error)
                texts.append(f"# {view.name} {name}\n{text}")
    return "\n".join(texts)


def configs(scale: float) -> list[Case]:
    """The settings, or the errors, of each configuration in the tests."""

    def lines(loaded: load.LoadedConfig) -> str:
        return re.sub(r", (?=\w+=)", ",\n", repr(loaded))

    return seen(scale, "cli/test_flags.py config", (load, "load", lines))


# ---- running -------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Cases that are made together, and cases that are made for a number each."""

    together: Callable[[float], Iterable[Case]] = lambda _: ()
    numbered: Callable[[int], Case] | None = None
    count: int = 0


COMPARISONS = {
    "bytecode": Comparison(bytecode),
    "states": Comparison(scenarios, generated, 500),
    "writes": Comparison(numbered=writes, count=2_000),
    "messages": Comparison(numbered=messages, count=500),
    "shown": Comparison(shown),
    "configs": Comparison(configs),
}


def cases(comparison: Comparison, scale: float, wanted: Sequence[str]) -> Iterator[Case]:
    """All cases, or at least the wanted ones."""
    together, numbered, count = comparison
    numbers: Sequence[int] = range(math.ceil(scale * count))
    if wanted:
        numbers = [int(name[5:]) for name in wanted if name.startswith("seed ")]
    if not wanted or len(numbers) < len(wanted):
        yield from together(scale)
    if numbered and numbers:
        # More processes than processors, because histories wait for the kernel.
        workers = 4 * (os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
            yield from pool.map(numbered, numbers)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--show", nargs="+", metavar="CASE", default=())
    said = parser.parse_args()
    logging.disable()
    with said.file.open("w") as out:
        for name, given, result in cases(COMPARISONS[said.comparison], said.scale, said.show):
            if name in said.show:
                print(json.dumps((name, result)), file=out)
            elif not said.show:
                print(json.dumps((name, digest(given), digest(result))), file=out)


if __name__ == "__main__":
    main()
