"""What programs write, when it goes over to other maps while they do: to bigger or smaller ones, or
to those of another version of kbpf, laid out otherwise.

Each map is copied, the programs change over to the copy device by device and hook by hook, and what
they wrote to the old map until then comes after. A connection of the packet path is known on two
devices, and would break if one of them knew it by the old map and the other by the new one. So none
begins while the devices change over (pause()): those that are there are in both maps by then.
"""

import errno
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kbpf.dataplane.bpf.maps.flow_entries import (
    BOTH_ENDS,
    CLIENT,
    FRONTEND,
    ends,
    in_order,
    is_question,
    last_used,
    newest,
)
from kbpf.dataplane.bpf.maps.layout import MAPS, U32, U64
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Map

log = logging.getLogger("kbpf.dataplane")

TIMED: Final = frozenset(("flows", "affinity"))
"""Those of them whose values begin with the time of their last use, in ns, 8 bytes, host order."""

TICK: Final = 20_000_000
"""ns: the programs' clock is behind by a tick of the kernel at most."""

PAUSE_SECONDS: Final = 4.0
"""No flow begins for so long at most, whatever becomes of this process: a SYN comes again after one
second, and after two more (RFC 6298). It takes milliseconds, and longer where the machine has no
time for us."""

SETTLE_SECONDS: Final = 0.02
"""A program that has not seen the pause has come to its end: it needs microseconds, but the machine
may be a guest whose processor was taken away meanwhile."""

ZERO: Final = U32.pack(0)
Entries = Iterable[tuple[bytes, bytes]]


def as_it_is(value: bytes) -> bytes:
    """The layout is the same."""
    return value


@dataclass(frozen=True, slots=True)
class Left:
    """A map that programs may still write to, and what makes a value of today of one of its own."""

    name: str
    held: Map
    convert: Callable[[bytes], bytes] = as_it_is

    def items(self, since: int) -> Iterator[tuple[bytes, bytes]]:
        """Its entries, as of today; of a TIMED one those that were used since then (ns)."""
        for key, value in self.held.items():
            if self.name not in TIMED or last_used(value) > since:
                yield key, self.convert(value)

    def close(self) -> None:
        """Closes the descriptor."""
        self.held.close()


class Moves:
    """The maps that were replaced, until no program writes to them any more. `maps` are those of
    now, by name.
    """

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._maps = maps
        self._left: list[Left] = []
        self._copied: dict[str, int] = {}  # by name: when, in ns, CLOCK_MONOTONIC

    def take_over(self, former: Iterable[Left], fresh: bool) -> None:
        """Copies what another version has laid out otherwise. `fresh`: the queue of flows is new.
        An agent may have ended in the middle of this: what is there already and younger stays.
        """
        self._left += former
        at = _now()
        if fresh:
            self._fill_queue(self._maps["order"])  # with those that came as they are
        for left in self._left:
            if MAPS[left.name].kind != objects.MAP_QUEUE:  # that follows `flows`
                self._bring(left)
        self._copied |= {left.name: at for left in self._left}
        if fresh:
            self._count_places(sum(is_question(raw) for _, raw in self._maps["flows"].items()))

    def copy(self, name: str, old: Map, new: Map) -> None:
        """Fills a map of another size, which is about to be the one of this name."""
        self._copied[name] = _now()
        if new.type == objects.MAP_QUEUE:
            self._count_places(self._fill_queue(new))
        elif pairs := _that_fit(name, old, new.max_entries):
            new.update_batch(b"".join(k for k, _ in pairs), b"".join(v for _, v in pairs))
        self._left.append(Left(name, old))

    def _fill_queue(self, order: Map) -> int:
        """Gives each flow a place in an empty queue; how many there are."""
        return sum(map(order.push, in_order(self._maps["flows"].items())))

    def _count_places(self, places: int) -> None:
        """`tracked` is never 0 where programs have served: nobody would look for a flow that they
        have begun meanwhile.
        """
        tracked = self._maps["tracked"]
        if places or tracked.lookup(ZERO) != bytes(U64.size):
            tracked.update(ZERO, U64.pack(max(places, 1)))

    def bring_flows(self) -> None:
        """Brings over the connections that began since this was done, or they were copied. To be
        called before any program has changed over; in a pause they are all then.
        """
        at = _now()
        for left in self._left:
            if left.name == "flows":
                self._bring(left)
        self._copied["flows"] = at

    def catch_up(self, still_read: Collection[str] = ()) -> None:
        """Brings over what programs wrote to old maps after these were copied: what became of
        connections, and sockets. To be called when no program reads the old ones any more, but for
        those of these names: they are brought again by the next call.
        """
        for left in self._left:
            if MAPS[left.name].kind == objects.MAP_QUEUE:  # that follows `flows`
                continue
            at = _now()
            late = self._bring(left)
            self._copied[left.name] = at
            if late:
                log.info("map caught up map=%s entries=%d", left.name, late)
        self._drop(left for left in self._left if left.name not in still_read)

    def close(self) -> None:
        """Lets go of the old maps."""
        self._drop(self._left)

    def _drop(self, over: Iterable[Left]) -> None:
        gone = list(over)
        self._left = [left for left in self._left if left not in gone]
        for left in gone:
            left.close()

    def _bring(self, left: Left) -> int:
        """How many entries came over."""
        new, late = self._maps[left.name], 0
        news: Entries = self._news(left)
        if left.name == "flows":
            news = self._with_places(list(news))
        for key, value in news:
            try:
                new.update(key, value)
            except KernelError as error:
                if error.errno != errno.E2BIG:  # it was made smaller
                    raise
                break
            late += 1
        return late

    def _news(self, left: Left) -> Iterator[tuple[bytes, bytes]]:
        """What has been written since it was copied."""
        new, timed = self._maps[left.name], left.name in TIMED
        for key, value in left.items(self._copied.get(left.name, 0)):
            have = new.lookup(key)
            if have is None or (timed and last_used(value) > last_used(have)):
                yield key, value

    def _with_places(self, news: Sequence[tuple[bytes, bytes]]) -> Entries:
        """Entries of flows, those only that are in the queue or find a place there: that comes
        before the flow, and the client's own entry last. So no flow is without a place, wherever
        this ends. Who was quiet longest comes first.
        """
        others: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)
        for key, raw in news:
            if not is_question(raw):
                others[raw[BOTH_ENDS]].append((key, raw))
        questions = [pair for pair in news if is_question(pair[1])]
        for key, raw in sorted(questions, key=lambda pair: last_used(pair[1])):
            parts = others.pop(raw[BOTH_ENDS], [])
            if self._is_there(raw) or self._maps["order"].push(key):
                yield from parts
                yield key, raw
        for parts in others.values():
            if self._is_there(parts[0][1]):
                yield from parts

    def _is_there(self, raw: bytes) -> bool:
        """Whether the client's own entry of this flow is."""
        found = self._maps["flows"].lookup(ends(raw[CLIENT], raw[FRONTEND]))
        return found is not None and is_question(found)


def _now() -> int:
    """As the programs' clock may have it, which is behind by a tick at most."""
    return time.monotonic_ns() - TICK


@contextmanager
def pause(paused: Map) -> Iterator[None]:
    """No flow begins meanwhile; those that are there go on. `paused`: the map of this name, which
    all versions share.
    """
    until = time.monotonic_ns() + int(PAUSE_SECONDS * 1e9)
    paused.update(ZERO, U64.pack(until))
    time.sleep(SETTLE_SECONDS)
    try:
        yield
    finally:
        paused.update(ZERO, bytes(U64.size))


def _that_fit(name: str, old: Map, entries: int) -> list[tuple[bytes, bytes]]:
    """What goes into a map of so many entries."""
    pairs = list(old.items())
    if name == "flows" and entries < old.max_entries:
        return newest(pairs, int(entries / MAPS[name].per))
    return pairs[-entries:]
