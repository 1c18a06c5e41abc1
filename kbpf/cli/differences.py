# SPDX-License-Identifier: Apache-2.0
"""Two states of a cluster, and what the change from one to the other does on a node: which
frontends and backends, and with which shares. Everything is decided by the code that the agent
runs: ObjectStore and DesiredStateBuilder.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Final

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.config import Config
from kbpf.model.desired import (
    EVEN_SPREAD,
    Backend,
    BackendSet,
    DesiredState,
    Frontend,
    FrontendKind,
    ServicePortKey,
    ServiceState,
    Spread,
)
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.objects import EndpointSlice, Node, Pod, Service
from kbpf.policy.compute import DesiredStateBuilder, explain_port
from kbpf.policy.endpoints import EndpointExplanation
from kbpf.policy.spread import compute_slots, fits_table
from kbpf.policy.store import ChangeSet, ObjectStore
from kbpf.views.differences import DifferenceRow, make_row

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

EMPTY: Final = "empty: "

Found = tuple[ServicePortKey | None, DifferenceRow]
"""A difference, without its nodes. None: it is about the node itself."""

Explanations = Mapping[Backend, EndpointExplanation]
"""Why the endpoint of each backend is in the sets or not."""


class WorldChange:
    """The change from one world to another."""

    def __init__(self, before: World, after: World, config: Config) -> None:
        self._config = config
        self._first = make_events({}, before)
        self._then = make_events(before, after)
        self._all_kinds = [Synced(kind) for kind in Kind]
        # Explanations need the previous objects; the node does not matter.
        self._old_store = ObjectStore("")
        self._old_store.apply(self._first)

    def compute(self, node_name: str) -> list[Found]:
        """What changes on this node."""
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
        found: list[Found] = [(None, row) for row in _compare_node_states(old_node_state, builder.node_state)]
        for key in sorted(changed):
            old, new = old_states.get(key), new_states.get(key)
            explain_old = partial(_explain, self._old_store, old_node, config, key)
            explain_new = partial(_explain, store, store.node, config, key)
            found += [(key, row) for row in _compare_port(key, old, new, explain_old, explain_new)]
        return found


def _compare_port(
    key: ServicePortKey,
    old: ServiceState | None,
    new: ServiceState | None,
    explain_old: Callable[[], Explanations],
    explain_new: Callable[[], Explanations],
) -> Iterator[DifferenceRow]:
    yield from _compare_frontends(key, old, new)
    yield from _compare_settings(key, old, new)
    for set_name in ("cluster", "local"):
        old_shares, new_shares = _shares_of(old, set_name), _shares_of(new, set_name)
        old_outcome, new_outcome = _describe_set(old, set_name), _describe_set(new, set_name)
        if _without_count(old_outcome) != _without_count(new_outcome):
            yield make_row(key, "set", "", set_name, before=old_outcome, after=new_outcome)
        if old_shares == new_shares:
            continue
        before, after = explain_old(), explain_new() if new else None
        for backend in sorted({*old_shares, *new_shares}):
            shares = old_shares.get(backend), new_shares.get(backend)
            if shares[0] != shares[1]:
                yield _compare_backend(key, set_name, backend, shares, before, after)


def _compare_backend(
    key: ServicePortKey,
    set_name: str,
    backend: Backend,
    shares: tuple[float | None, float | None],
    before: Explanations,
    after: Explanations | None,
) -> DifferenceRow:
    """`after` is None if the Service port is gone."""
    old, new = before.get(backend), (after or {}).get(backend)
    if new is None:
        reason = f"its {'Service port' if after is None else 'endpoint'} is gone"
    elif None not in shares and old and old.text == new.text:
        reason = ""  # only its share changes
    else:
        reason = new.text
    place = new or old
    share_before, share_after = (share and round(share, 4) for share in shares)
    row = make_row(
        key, "backend", str(backend), set_name, share_before=share_before, share_after=share_after, reason=reason
    )
    if place is None:
        return row
    end = place.endpoint
    return msgspec.structs.replace(row, pod=place.pod, node=end.node, zone=end.zone)


def _explain(store: ObjectStore, node: Node, config: Config, key: ServicePortKey) -> Explanations:
    service = store.service(key.service)
    by_backend: dict[Backend, EndpointExplanation] = {}
    for line in explain_port(service, store.slices(key.service), node, config, key) if service else ():
        backend = Backend(line.endpoint.address, line.port, key.protocol)
        if line.cluster or line.local or backend not in by_backend:  # several copies: the one that is used
            by_backend[backend] = line
    return by_backend


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
) -> Iterator[DifferenceRow]:
    before = {f.at: f for f in old.frontends} if old else {}
    after = {f.at: f for f in new.frontends} if new else {}
    for at in sorted({*before, *after}):
        texts = _describe_frontend(before.get(at)), _describe_frontend(after.get(at))
        if texts[0] != texts[1]:
            reason = "" if texts[1] or new is None else _why_not_frontend(new, at)
            fields = {"before": texts[0], "after": texts[1], "reason": reason}
            yield make_row(key, "frontend", str(at), **fields)


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
) -> Iterator[DifferenceRow]:
    """Settings that differ; of a Service port that is new, those that are not the default."""
    if new is None:
        return
    before, after = _settings_of(old) or _DEFAULT_SETTINGS, _settings_of(new)
    for name, value in after.items():
        if before[name] != value:
            old_value = before[name] if old else ""
            yield make_row(key, "setting", name, before=old_value, after=value)


def _settings_of_node(state: DesiredState) -> dict[str, str]:
    return {
        "NodePort addresses": _format_addresses(state.node_addresses),
        "SNAT addresses": _format_addresses(state.masquerade_addresses),
        "pod networks": ", ".join(map(str, state.local_networks)),
    }


def _compare_node_states(old: DesiredState, new: DesiredState) -> Iterator[DifferenceRow]:
    before = _settings_of_node(old)
    for name, value in _settings_of_node(new).items():
        if before[name] != value:
            yield make_row(None, "node", name, before=before[name], after=value)


def _format_addresses(addresses: Iterable[bytes]) -> str:
    return ", ".join(map(format_addr, addresses))
