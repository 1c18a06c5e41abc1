"""Whether the agent keeps up, and whether the node should get traffic: /healthz, /livez and the
health checks of Services.

kube-proxy's rules and bodies (1.37, healthcheck/proxy_health.go, service_health.go):
- The agent is healthy unless a change has waited for `late` seconds to be programmed. Before the
  first complete pass it is healthy too.
- /livez says that, and whether a thread of the agent is down or stuck: such an agent is better
  started again. /healthz says that and whether the node is eligible: not being deleted, and not
  about to be by the cluster autoscaler.
- /readyz is ours, kube-proxy has none: whether the agent has programmed everything once, keeps up
  since, and has room for the Services of system namespaces. Its text begins with kbpf's name, by
  which we tell ourselves from a kube-proxy.
- A Service's health check says whether this node has ready endpoints of it, and the former.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kbpf.errors import printable
from kbpf.model.objects import ServiceName
from kbpf.model.status import AgentStatus
from kbpf.serve.message import JSON, Answer

FAMILIES: Final = ("IPv4", "IPv6")
NOT_NEEDED: Final = "pods"
"""The watch without which Services are served all the same."""
MOST_NAMED: Final = 3
"""Services that could not be programmed, in the answer of /readyz."""
NEVER: Final = "0001-01-01T00:00:00Z"
"""Go's zero time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the agent is doing. Times are ns since the epoch; `updated` is None before the first
    complete pass.
    """

    healthy: bool
    updated: int | None
    now: int


class Health:
    """What is waiting to be programmed, and since when. Any thread may call.

    A change is queued(), then taken() by the writer, and settled() when it is programmed or turned
    out to say nothing. What comes in between is counted from its own time.
    """

    def __init__(
        self,
        late_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self._late, self._clock, self._now = late_seconds, clock, now
        self._lock = threading.Lock()
        self._waiting: float | None = None  # since when, what nobody has taken
        self._taken: float | None = None
        self._updated: int | None = None

    def queued(self) -> None:
        """Something came that may have to be programmed."""
        if self._waiting is None:
            with self._lock:
                self._waiting = self._clock() if self._waiting is None else self._waiting

    def taken(self) -> None:
        """Everything that was queued is in the writer's hands. To be called before it is taken, so
        that nothing that comes meanwhile counts as done with it.
        """
        with self._lock:
            if self._taken is None:
                self._taken = self._waiting
            self._waiting = None

    def waiting(self, since: float) -> None:
        """Of all that was taken, what waits longest has waited since then (time.monotonic)."""
        with self._lock:
            self._taken = since

    def settled(self, programmed: bool) -> None:
        """All that was taken is done with; `programmed`: the data plane was written just now."""
        with self._lock:
            self._taken = None
            if programmed:
                self._updated = self._now()

    def verdict(self) -> Verdict:
        """How it is now."""
        with self._lock:
            since = self._waiting if self._taken is None else self._taken
            late = since is not None and self._clock() - since >= self._late
            return Verdict(not late or self._updated is None, self._updated, self._now())


def healthz(verdict: Verdict, eligible: bool) -> Answer:
    """The answer of /healthz."""
    return _answer(verdict, verdict.healthy and eligible, {"nodeEligible": eligible})


def livez(verdict: Verdict, threads: Sequence[str] = ()) -> Answer:
    """The answer of /livez. `threads`: those that are down or stuck, a line each."""
    more = {"threads": list(threads)} if threads else {}
    return _answer(verdict, verdict.healthy and not threads, more)


def readyz(verdict: Verdict, status: AgentStatus | None) -> Answer:
    """The answer of /readyz, one line. `status` None: nothing is known of the agent yet."""
    why = _why_not(verdict, status)
    if why:
        return Answer(503, f"kbpf does not serve: {printable(why)}\n".encode())
    error = status.config_error if status is not None else ""
    beside = f", but its configuration file is refused: {printable(error)}" if error else ""
    return Answer(200, f"kbpf serves{beside}\n".encode())


def _why_not(verdict: Verdict, status: AgentStatus | None) -> str:
    if status is None:
        return "the data plane is being opened"
    if not status.synced:
        missing = [
            source for source in status.sources if not source.synced and source.name != NOT_NEEDED
        ]
        if status.error:
            return f"not programmed: {status.error}"
        if missing:
            first = next((source for source in missing if source.error), missing[0])
            return f"no list of {first.name} yet" + (first.error and f": {first.error}")
        return "its first pass is not done"
    late = "changes wait to be programmed" + (status.error and f": {status.error}")
    fault = next(iter(status.faults), "" if verdict.healthy else late)
    return fault or _not_programmed(status.refused_system)


def _not_programmed(services: Sequence[str]) -> str:
    if not services:
        return ""
    more = f" and {len(services) - MOST_NAMED} more" if len(services) > MOST_NAMED else ""
    names = ", ".join(services[:MOST_NAMED]) + more
    return f"not programmed: {names}; `kbpf inspect status` says why"


def _answer(verdict: Verdict, good: bool, more: Mapping[str, object]) -> Answer:
    updated = go_time(verdict.updated)
    body: dict[str, object] = {
        # As old versions said it: recent, if all is well.
        "lastUpdated": go_time(verdict.now) if good else updated,
        "currentTime": go_time(verdict.now),
        **more,
        "healthy": verdict.healthy,
    }
    if verdict.updated is not None:
        one = {"lastUpdated": updated, "healthy": verdict.healthy}
        body["status"] = dict.fromkeys(FAMILIES, one)
    text = json.dumps(body, separators=(",", ":"))
    return Answer(200 if good else 503, text.encode(), JSON)


def go_time(moment: int | None) -> str:
    """ns since the epoch as Go writes a time in JSON: RFC 3339, no zeros at the end."""
    if moment is None:
        return NEVER
    seconds, rest = divmod(moment, 1_000_000_000)
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + fraction + "Z"


def service_check(name: ServiceName, endpoints: int, healthy: bool) -> Answer:
    """The answer of a Service's healthCheckNodePort. `endpoints`: those on this node."""
    body = (
        "{\n"
        '\t"service": {\n'
        f'\t\t"namespace": {json.dumps(name.namespace)},\n'
        f'\t\t"name": {json.dumps(name.name)}\n'
        "\t},\n"
        f'\t"localEndpoints": {endpoints},\n'
        f'\t"serviceProxyHealthy": {str(healthy).lower()}\n'
        "}"
    )
    weight = (("X-Load-Balancing-Endpoint-Weight", str(endpoints)),)
    return Answer(200 if endpoints and healthy else 503, body.encode(), JSON, weight)
