"""Views out of snapshots made by hand: what no kernel shows on request."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from kbpf.cli.attached import MOST_BACKENDS, targets
from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.layout import ClientKind, Reason, ServiceFlag, ServiceValue
from kbpf.errors import NotFoundError
from kbpf.kernel import libbpf
from kbpf.kernel.libbpf import LinkInfo
from kbpf.model.address import Addr, parse_addr
from kbpf.model.desired import Backend, FrontendAddress, ServicePortKey
from kbpf.model.objects import Protocol
from kbpf.model.status import AgentStatus
from kbpf.views import affinity, maps, programs, service, services, status
from kbpf.views.hooks import HookFacts
from kbpf.views.snapshot import MapFacts, Remembered, Snapshot

PINS = Path("/pins")
TCP, UDP = Protocol.TCP, Protocol.UDP
CLUSTER_IP = int(ServiceFlag.CLUSTER_IP)


def at(address: str, port: int = 80, protocol: Protocol = TCP) -> FrontendAddress:
    return FrontendAddress(parse_addr(address), port, protocol)


def backend(index: int, protocol: Protocol = TCP) -> Backend:
    return Backend(parse_addr(f"10.244.0.{index}"), 8080, protocol)


def value(
    service_id: int, size: int = 1, flags: int = CLUSTER_IP, timeout: int = 0
) -> ServiceValue:
    return ServiceValue(service_id, flags, timeout, service_id if size else 0, size, 0, 0)


def key(name: str, namespace: str = "default") -> ServicePortKey:
    return ServicePortKey(namespace, name, "http", TCP, 4)


def snapshot(**parts: Any) -> Snapshot:
    return Snapshot(PINS, **{"monotonic": 1000.0, "boottime": 5000.0, **parts})


# ---- services ----------------------------------------------------------------------------------


def test_a_frontend_without_a_name_is_shown_last():
    found = services.rows(
        snapshot(frontends={at("10.96.0.9"): value(9), at("10.96.0.1"): value(1)},
                 names={1: key("web")})
    )  # fmt: skip
    assert [(row.name, row.id) for row in found] == [("web", 1), ("", 9)]


def test_a_name_without_a_frontend_is_shown_without():
    (row,) = services.rows(snapshot(names={1: key("web")}))
    assert (row.name, row.frontends, row.backends_cluster) == ("web", (), 0)


def test_a_place_that_leads_nowhere_is_missing():
    one = snapshot(
        frontends={at("10.96.0.1"): value(1, size=3)},
        names={1: key("web")},
        sets={1: {0: 5, 1: 6}},
        backends={5: backend(1)},
    )
    (detail,) = service.details(one, "web")
    assert [(p.id, p.address) for p in detail.cluster[0].backends] == [
        (5, "10.244.0.1"), (6, ""), (0, ""),
    ]  # fmt: skip
    assert detail.cluster[0].missing == 2


NAMES = {1: key("web"), 2: key("web", "shop"), 3: key("dns", "kube-system")}


class Asked(NamedTuple):
    """What is asked for, and which Services are shown, or words of the hint."""

    name: str
    namespace: str
    found: tuple[str, ...]
    hint: str = ""


ASKED = [
    Asked("web", "", ("default/web", "shop/web")),
    Asked("web", "shop", ("shop/web",)),
    Asked("shop/web", "", ("shop/web",)),
    Asked("dns", "default", (), "kube-system/dns"),
    Asked("wbe", "", (), "default/web or shop/web"),
    Asked("zzzzzz", "", (), "kbpf inspect services"),
]


@pytest.mark.parametrize("asked", ASKED)
def test_which_service_is_meant(asked: Asked):
    held = snapshot(names=NAMES)
    if asked.found:
        shown = service.details(held, asked.name, asked.namespace)
        assert tuple(d.service.full_name for d in shown) == asked.found
    else:
        with pytest.raises(NotFoundError) as caught:
            service.details(held, asked.name, asked.namespace)
        assert asked.hint in caught.value.hint


# ---- affinity ----------------------------------------------------------------------------------


def netns(cookie: int) -> Addr:
    return Addr(cookie.to_bytes(8, "little") + bytes(8))


class Kept(NamedTuple):
    """An entry, and the row: (client, kind, expires, expired)."""

    entry: Remembered
    row: tuple[str, str, float | None, bool]


HOST = 17
NETNS, ADDRESS = int(ClientKind.NETNS), int(ClientKind.ADDRESS)
KEPT = [
    Kept(Remembered(netns(HOST), NETNS, 1, 5, 990.0), ("host", "netns", 20.0, False)),
    Kept(Remembered(netns(18), NETNS, 1, 5, 990.0), ("18", "netns", 20.0, False)),
    Kept(Remembered(parse_addr("192.0.2.7"), ADDRESS, 1, 5, 990.0),
         ("192.0.2.7", "address", 20.0, False)),
    Kept(Remembered(netns(18), NETNS, 1, 5, 900.0), ("18", "netns", -70.0, True)),
    Kept(Remembered(netns(18), NETNS, 2, 5, 990.0), ("18", "netns", None, True)),
]  # fmt: skip


@pytest.mark.parametrize("kept", KEPT)
def test_who_is_kept_and_for_how_long(kept: Kept):
    held = snapshot(
        frontends={at("10.96.0.1"): value(1, timeout=30)},
        names={1: key("web")},
        backends={5: backend(1)},
        host_netns=HOST,
        affinity=(kept.entry,),
    )
    (row,) = affinity.rows(held)
    assert (row.client, row.kind, row.expires_seconds, row.expired) == kept.row
    assert row.backend == "10.244.0.1:8080"


# ---- maps, programs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "entries", "fill", "alarm"),
    [
        (libbpf.MAP_HASH, 79, 79.0, False),
        (libbpf.MAP_HASH, 80, 80.0, True),
        (libbpf.MAP_LRU_HASH, 100, 100.0, True),
        (libbpf.MAP_ARRAY, 100, None, False),
    ],
)
def test_the_alarm_is_at_80_percent(kind: int, entries: int, fill: float | None, alarm: bool):
    (row,) = maps.rows(snapshot(maps=(MapFacts("services", kind, entries, 100, None),)))
    assert (row.fill_percent, row.alarm) == (fill, alarm)
    assert ("!" in next(c.text(row) for c in maps.COLUMNS if c.title == "FILL")) == alarm


def test_hooks_are_missing_detached_or_attached():
    gone, here = LinkInfo(1, 10, 0, 10), LinkInfo(2, 11, 77, 11)
    facts = (HookFacts(HOOKS[0]), HookFacts(HOOKS[1], gone), HookFacts(HOOKS[2], here))
    found = programs.rows(snapshot(hooks=facts))
    assert [row.state for row in found] == ["missing", "detached", "attached"]


# ---- status ------------------------------------------------------------------------------------

AGENT = AgentStatus("1", 42, "bpf", "n", 4000.0, 4999.0, True, 3, 4, 7, 1.5, 2.5, 9.5, (), (), 0)
ATTACHED = tuple(HookFacts(hook, LinkInfo(1, 2, 3, hook.attach_type)) for hook in HOOKS)


class Doing(NamedTuple):
    """What is so, and what the view says: (ok, running)."""

    name: str
    agent: AgentStatus | None
    alive: bool
    hooks: tuple[HookFacts, ...]
    says: tuple[bool, bool]


DOING = [
    Doing("all is well", AGENT, True, ATTACHED, (True, True)),
    Doing("its process is gone", AGENT, False, ATTACHED, (False, False)),
    Doing("silent for 10 s", replace(AGENT, heartbeat=4990.0), True, ATTACHED, (False, False)),
    Doing("silent for 9 s", replace(AGENT, heartbeat=4991.0), True, ATTACHED, (True, True)),
    Doing("not synced yet", replace(AGENT, synced=False), True, ATTACHED, (False, True)),
    Doing("a hook is missing", AGENT, True, (HookFacts(HOOKS[0]), *ATTACHED[1:]), (False, True)),
    Doing("a Service port is refused", replace(AGENT, refused=1), True, ATTACHED, (False, True)),
    Doing("a change was not written", replace(AGENT, error="no"), True, ATTACHED, (False, True)),
    Doing("left out is not refused", replace(AGENT, problem_count=3), True, ATTACHED,
          (True, True)),
    Doing("nobody was ever here", None, False, ATTACHED, (False, False)),
]  # fmt: skip


@pytest.mark.parametrize("doing", DOING, ids=lambda doing: doing.name)
def test_how_the_agent_is_doing(doing: Doing):
    held = snapshot(status=doing.agent, agent_alive=doing.alive, hooks=doing.hooks)
    seen = status.view(held)
    assert (seen.ok, seen.running) == doing.says
    assert set(seen.counters) == {reason.name.lower() for reason in Reason}
    assert seen.hooks_attached + len(seen.hooks_missing) == seen.hooks == len(HOOKS)


# ---- what check --attached dials ---------------------------------------------------------------


def many(count: int) -> dict[int, int]:
    return {i: i + 1 for i in range(count)}


def dialled(**frontends: ServiceValue) -> list[str]:
    held = snapshot(
        frontends={at(f"10.96.0.{name[1:]}"): one for name, one in frontends.items()},
        sets={i: many(i) for i in range(1, 10)} | {100: many(MOST_BACKENDS + 1)},
        backends={i: backend(i) for i in range(1, MOST_BACKENDS + 2)},
    )
    return [str(at) for at, _ in targets(held)]


def test_the_smallest_set_is_dialled():
    assert dialled(_1=value(3), _2=value(2), _3=value(4)) == ["10.96.0.2:80/TCP"]


def test_affinity_is_dialled_only_when_nothing_else_is_there():
    assert dialled(_1=value(1, timeout=5), _2=value(4)) == ["10.96.0.2:80/TCP"]
    assert dialled(_1=value(1, timeout=5)) == ["10.96.0.1:80/TCP"]


@pytest.mark.parametrize(
    "never",
    [
        value(1, size=0),
        value(100),
        value(1, flags=int(ServiceFlag.NODE_PORT)),
        value(1, flags=int(ServiceFlag.LOAD_BALANCER | ServiceFlag.RESTRICTED)),
        value(1, flags=int(ServiceFlag.CLUSTER_IP | ServiceFlag.INTERNAL_LOCAL)),
        value(11),  # its set is not there
    ],
    ids=["no backends", "too many", "NodePort", "restricted", "no local backend", "set is gone"],
)
def test_what_is_never_dialled(never: ServiceValue):
    assert dialled(_1=never) == []
