# SPDX-License-Identifier: Apache-2.0
"""Two states of a cluster, and what the change from one to the other does on a node: which
frontends and backends, and with which shares. Everything is decided by the code that the agent
runs: ObjectStore and DesiredStateBuilder.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.config import Config
from kbpf.model.desired import (
    EVEN_SPREAD,
    Backend,
    BackendSet,
    Frontend,
    FrontendKind,
    ServicePortKey,
    ServiceState,
    Spread,
)
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.objects import EndpointSlice, Node, Pod, Service
from kbpf.policy.compute import DesiredStateBuilder, NodeState, explain_port
from kbpf.policy.endpoints import EndpointExplanation
from kbpf.policy.slots import compute_slots, fits_table
from kbpf.policy.store import ChangeSet, ObjectStore

ModelObject = Service | EndpointSlice | Node | Pod
World = Mapping[ObjectKey, ModelObject]
"""The objects of a cluster at one time."""


def collect_world(events: Iterable[Event]) -> dict[ObjectKey, ModelObject]:
    """The objects that are in force after these events."""
    world: dict[ObjectKey, ModelObject] = {}
    for event in events:
        match event:
            case Upsert():
                world[event.key] = event.object
            case Delete():
                world.pop(event.key, None)
            case Rejected() | Synced():
                pass
    return world


def make_events(before: World, after: World) -> list[Event]:
    """The events that turn one world into the other."""
    return [
        *(Delete(key) for key in before if key not in after),
        *(Upsert(key, obj) for key, obj in after.items() if before.get(key) != obj),
    ]


def list_nodes(world: World) -> dict[str, Node]:
    """The Nodes by name, sorted."""
    return {obj.name: obj for _, obj in sorted(world.items()) if isinstance(obj, Node)}


# ---- differences ---------------------------------------------------------------------------------


class Subject(StrEnum):
    """What a Difference is about."""

    FRONTEND = "frontend"
    BACKEND = "backend"
    SET = "set"
    SETTING = "setting"
    NODE = "node"


class Difference(msgspec.Struct, frozen=True):
    """One difference on one node. `port` is None if it is about the node itself.

    `name`: the frontend or backend as an address, or the name of the setting; "" for a set. `set`:
    `cluster` or `local`, for backends and sets. `before` and `after`: values as text, "" if there
    is none; of backends None, since these have shares (0 to 1; None: not in the set). `reason` is
    "" if there is nothing to say.
    """

    port: ServicePortKey | None
    subject: Subject
    name: str
    set: str = ""
    before: str | None = None
    after: str | None = None
    share_before: float | None = None
    share_after: float | None = None
    pod: str = ""
    node: str = ""
    zone: str = ""
    reason: str = ""


EMPTY: Final = "empty: "

Explanations = Mapping[Backend, EndpointExplanation]
"""Why the endpoint of each backend is in the sets or not."""


class WorldChange:
    """The change from one world to another. `causes`: address of an endpoint → why it gets no
    connections, if the change itself is the reason.
    """

    def __init__(
        self, before: World, after: World, config: Config, causes: Mapping[bytes, str] | None = None
    ) -> None:
        self._config, self._causes = config, causes or {}
        self._first = make_events({}, before)
        self._then = make_events(before, after)
        self._all_kinds = [Synced(kind) for kind in Kind]
        # Explanations need the previous objects; the node does not matter.
        self._old_store = ObjectStore("")
        self._old_store.apply(self._first)

    def compute(self, node_name: str, with_unchanged: bool = False) -> list[Difference]:
        """What changes on this node. `with_unchanged`: also backends whose share stays."""
        config = self._config
        store = ObjectStore(node_name, config.bind_address)
        store.apply((*self._first, *self._all_kinds))
        builder = DesiredStateBuilder()
        everything = ChangeSet(all_services=True)
        builder.update(store, everything, store.node.addresses, config)
        old_states, old_node_state = dict(builder.state.services), builder.node_state
        old_node = store.node
        touched = store.apply(self._then)
        changed = builder.update(store, touched, store.node.addresses, config)
        new_states = builder.state.services
        keys = {*old_states, *new_states} if with_unchanged else changed
        differences = list(_compare_node_states(old_node_state, builder.node_state))
        for key in sorted(keys):
            old, new = old_states.get(key), new_states.get(key)
            explain_old = _make_explainer(self._old_store, old_node, config, key)
            explain_new = _make_explainer(store, store.node, config, key)
            differences += self._compare_port(
                key, old, new, explain_old, explain_new, with_unchanged
            )
        return differences

    def _compare_port(
        self,
        key: ServicePortKey,
        old: ServiceState | None,
        new: ServiceState | None,
        explain_old: Callable[[], Explanations],
        explain_new: Callable[[], Explanations],
        with_unchanged: bool,
    ) -> Iterator[Difference]:
        yield from _compare_frontends(key, old, new)
        yield from _compare_settings(key, old, new)
        for set_name in ("cluster", "local"):
            old_shares, new_shares = _shares_of(old, set_name), _shares_of(new, set_name)
            old_outcome = _describe_set(old, set_name)
            new_outcome = _describe_set(new, set_name)
            is_same = _without_count(old_outcome) == _without_count(new_outcome)
            if not is_same or (with_unchanged and new_outcome.startswith(EMPTY)):
                yield Difference(key, Subject.SET, "", set_name, old_outcome, new_outcome)
            backends = sorted({*old_shares, *new_shares})
            if not with_unchanged and old_shares == new_shares:
                continue
            before, after = explain_old(), explain_new() if new else None
            for backend in backends:
                shares = old_shares.get(backend), new_shares.get(backend)
                if shares[0] == shares[1] and not with_unchanged:
                    continue
                yield self._compare_backend(key, set_name, backend, shares, before, after)

    def _compare_backend(
        self,
        key: ServicePortKey,
        set_name: str,
        backend: Backend,
        shares: tuple[float | None, float | None],
        before: Explanations,
        after: Explanations | None,
    ) -> Difference:
        """`after` is None if the Service port is gone."""
        old, new = before.get(backend), (after or {}).get(backend)
        place = new or old
        if new is None:
            reason = f"its {'Service port' if after is None else 'endpoint'} is gone"
        elif shares[1] is None and backend.address in self._causes:
            reason = self._causes[backend.address]
        elif shares[0] is not None and shares[1] is not None and old and old.text == new.text:
            reason = "" if shares[0] != shares[1] else new.text  # "": only its share changes
        else:
            reason = new.text
        return Difference(
            key, Subject.BACKEND, str(backend), set_name,
            share_before=shares[0], share_after=shares[1],
            pod=place.pod if place else "",
            node=place.endpoint.node if place else "",
            zone=place.endpoint.zone if place else "",
            reason=reason,
        )  # fmt: skip


def _make_explainer(
    store: ObjectStore, node: Node, config: Config, key: ServicePortKey
) -> Callable[[], Explanations]:
    def explain() -> Explanations:
        service = store.service(key.service)
        if service is None:
            return {}
        lines = explain_port(service, store.slices(key.service), node, config, key)
        by_backend: dict[Backend, EndpointExplanation] = {}
        for line in lines:
            backend = Backend(line.endpoint.address, line.port, key.protocol)
            is_used = line.cluster or line.local
            if is_used or backend not in by_backend:  # several copies: the one that is used
                by_backend[backend] = line
        return by_backend

    return explain


# ---- sets ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def compute_shares(backends: BackendSet, spread: Spread) -> Mapping[Backend, float]:
    """The part of new connections that each backend of a set gets: its part of the slots."""
    if not backends:
        return {}
    counts = Counter(compute_slots(backends, spread))
    total = counts.total()
    return {backends[index]: count / total for index, count in counts.items()}


def _shares_of(state: ServiceState | None, set_name: str) -> Mapping[Backend, float]:
    if state is None:
        return {}
    # As quotas.py of the data plane: a state has its spread if both sets can have it.
    fits = all(fits_table(len(backends), spread) for backends, spread in state.sets)
    backends, spread = state.sets[set_name != "cluster"]
    return compute_shares(backends, spread if fits else EVEN_SPREAD)


def _describe_set(state: ServiceState | None, set_name: str) -> str:
    """What happens to connections that this set is for; "" if there are none."""
    if state is None:
        return ""
    is_external = any(f.kind is not FrontendKind.CLUSTER_IP for f in state.frontends)
    if set_name == "cluster":
        if state.internal_local and not is_external:
            return ""
        return _count_backends(state.cluster) if state.cluster else f"{EMPTY}refused"
    if not state.internal_local and not state.external_local:
        return ""
    if state.local:
        return _count_backends(state.local)
    return EMPTY + ("dropped" if state.any_endpoints else "refused")


def _count_backends(backends: BackendSet) -> str:
    return f"{len(backends)} backend{'s' if len(backends) > 1 else ''}"


def _without_count(outcome: str) -> str:
    return outcome.lstrip("0123456789").rstrip("s")


# ---- frontends and settings ----------------------------------------------------------------------


def _compare_frontends(
    key: ServicePortKey, old: ServiceState | None, new: ServiceState | None
) -> Iterator[Difference]:
    before = {f.at: f for f in old.frontends} if old else {}
    after = {f.at: f for f in new.frontends} if new else {}
    for at in sorted({*before, *after}):
        texts = _describe_frontend(before.get(at)), _describe_frontend(after.get(at))
        if texts[0] != texts[1]:
            reason = "" if texts[1] or new is None else _why_not_frontend(new, at)
            yield Difference(key, Subject.FRONTEND, str(at), "", *texts, reason=reason)


def _describe_frontend(frontend: Frontend | None) -> str:
    if frontend is None:
        return ""
    return f"{frontend.kind}, source ranges" if frontend.restricted else str(frontend.kind)


def _why_not_frontend(state: ServiceState, at: object) -> str:
    for lost, winner in state.lost:
        if lost == at:
            return f"{winner} has it"
    for refused, reason in state.refused:
        if refused == at:
            return reason
    return "left to a process of the node" if at in state.left_to_node else ""


def _settings_of(state: ServiceState | None) -> dict[str, str]:
    if state is None:
        return {}
    return {
        "internal policy": "Local" if state.internal_local else "Cluster",
        "external policy": "Local" if state.external_local else "Cluster",
        "algorithm": str(state.algorithm),
        "affinity": f"{state.affinity_timeout} s" if state.affinity_timeout else "none",
        "source ranges": ", ".join(map(str, state.source_ranges)),
        "NodePort source ranges": ", ".join(map(str, state.node_port_ranges)),
        "lost frontends": ", ".join(f"{at} to {winner}" for at, winner in state.lost),
        "refused frontends": ", ".join(f"{at}: {reason}" for at, reason in state.refused),
    }


_DEFAULT_SETTINGS: Final = _settings_of(
    ServiceState(ServicePortKey("", "", "", 6, 4), (), ())  # type: ignore[arg-type]
)


def _compare_settings(
    key: ServicePortKey, old: ServiceState | None, new: ServiceState | None
) -> Iterator[Difference]:
    """Settings that differ; of a Service port that is new, those that are not the default."""
    if new is None:
        return
    before, after = _settings_of(old) or _DEFAULT_SETTINGS, _settings_of(new)
    for name, value in after.items():
        if before[name] != value:
            old_value = before[name] if old else ""
            yield Difference(key, Subject.SETTING, name, "", old_value, value)


def _compare_node_states(old: NodeState, new: NodeState) -> Iterator[Difference]:
    rows = (
        ("NodePort addresses", *(_format_addresses(s.node_addresses) for s in (old, new))),
        ("SNAT addresses", *(_format_addresses(s.masquerade_addresses) for s in (old, new))),
        ("pod networks", *(", ".join(map(str, s.local_networks)) for s in (old, new))),
    )
    for name, before, after in rows:
        if before != after:
            yield Difference(None, Subject.NODE, name, "", before, after)


def _format_addresses(addresses: Iterable[bytes]) -> str:
    return ", ".join(map(format_addr, addresses))
