# SPDX-License-Identifier: Apache-2.0
"""Sends Kubernetes Events: few, and without ever delaying the caller.

As kube-proxy does (events.k8s.io/v1, client-go's recorder): an Event about the Node is created in
the namespace `default`, one about a Service in the namespace of the Service. emit() only queues
the Event; the thread `events` sends it and retries while the API server cannot be reached. An
Event with the same object and reason is sent once per REPEAT_INTERVAL_S, and at most BURST are
sent at once.

Tenants control how many Services have something to report, on every node at once. So a namespace
has a share of its own, which leaves some to others, and all namespaces together leave some Events
to the Node.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import quote

from kbpf.errors import SourceError
from kbpf.kernel.system import threads

log = logging.getLogger("kbpf.serve")

Post = Callable[[str, bytes], int]
"""(path, JSON body) → HTTP status of the response. Raises SourceError if there was none."""

CONTROLLER: Final = "kube-proxy"
"""kube-proxy's name, so that searches for its Events find ours. The note names kbpf."""

REPEAT_INTERVAL_S: Final = 300.0
BURST: Final = 25
TOKEN_INTERVAL_S: Final = 10.0
NAMESPACE_BURST: Final = 10
NAMESPACE_INTERVAL_S: Final = 300.0
"""The same for the Services of one namespace. With 5,000 nodes these are 17 Events a second."""
NODE_EVENTS: Final = 5
"""Of BURST, for Events about the Node only."""
MAX_QUEUED: Final = 100
MAX_ATTEMPTS: Final = 12
RETRY_INTERVAL_S: Final = 10.0
MAX_NOTE_BYTES: Final = 1024
MAX_NAME_LENGTH: Final = 253
MAX_REMEMBERED: Final = 1000


class EventObject(NamedTuple):
    """The object that an Event is about."""

    kind: str
    name: str
    namespace: str = ""


class KubeEvent(NamedTuple):
    """One Event. `reason` and `action` are single words, `note` is one line. `time_ns` is in ns
    since the epoch.
    """

    regarding: EventObject
    warning: bool
    reason: str
    action: str
    note: str
    time_ns: int


def encode(event: KubeEvent, node: str) -> tuple[str, bytes]:
    """Returns the path to POST to and the JSON body."""
    subject, namespace = event.regarding, event.regarding.namespace or "default"
    seconds, nanoseconds = divmod(event.time_ns, 1_000_000_000)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    suffix = f".{event.time_ns:x}"
    regarding = {"apiVersion": "v1", "kind": subject.kind, "name": subject.name}
    if subject.namespace:
        regarding["namespace"] = subject.namespace
    body = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": subject.name[: MAX_NAME_LENGTH - len(suffix)] + suffix,
            "namespace": namespace,
        },
        "eventTime": f"{stamp}.{nanoseconds // 1000:06d}Z",
        "reportingController": CONTROLLER,
        "reportingInstance": f"{CONTROLLER}-{node}"[:128],
        "action": event.action,
        "reason": event.reason,
        "regarding": regarding,
        "note": event.note.encode(errors="replace")[:MAX_NOTE_BYTES].decode(errors="ignore"),
        "type": "Warning" if event.warning else "Normal",
    }
    path = f"/apis/events.k8s.io/v1/namespaces/{quote(namespace)}/events"
    return path, json.dumps(body).encode()


class EventRecorder:
    """Queues and sends Events; see the module. Without `post` (no API server) it sends none."""

    def __init__(
        self,
        post: Post | None,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        retry_interval: float = RETRY_INTERVAL_S,
    ) -> None:
        self._post, self._node, self._clock = post, node, clock
        self._retry_interval = retry_interval
        self._queue: queue.Queue[KubeEvent | None] = queue.Queue(MAX_QUEUED)
        self._lock = threading.Lock()
        self._last_emitted: dict[tuple[EventObject, str], float] = {}
        self._tokens, self._refill_time = float(BURST), clock()
        # Namespace → until when its Events are paid for, NAMESPACE_INTERVAL_S for each.
        self._spent_until: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread: threads.SupervisedThread | None = None
        self._last_error = ""
        self.sent = 0  # written by the thread only
        self.dropped = 0  # guarded by _lock

    def emit(self, regarding: EventObject, reason: str, action: str, note: str = "", warning: bool = True) -> None:
        """Queues an Event, unless it repeats a recent one or the rate limit is exceeded. Never
        blocks.
        """
        if self._post is None or self._stop.is_set():
            return
        with self._lock:
            last_emitted = self._last_emitted.get((regarding, reason), float("-inf"))
            if self._clock() - last_emitted < REPEAT_INTERVAL_S:
                return
            if not self._consume_token(regarding, reason):
                self.dropped += 1
                return
            if self._thread is None:
                self._thread = threads.start("events", self._run)
        try:
            self._queue.put_nowait(KubeEvent(regarding, warning, reason, action, note, time.time_ns()))
        except queue.Full:
            self._count_dropped()

    def _count_dropped(self) -> None:
        with self._lock:
            self.dropped += 1

    def _consume_token(self, regarding: EventObject, reason: str) -> bool:
        now = self._clock()
        self._tokens = min(BURST, self._tokens + (now - self._refill_time) / TOKEN_INTERVAL_S)
        self._refill_time = now
        if namespace := regarding.namespace:
            until = max(now, self._spent_until.get(namespace, now)) + NAMESPACE_INTERVAL_S
            # At most as many as remain for others, as state/quotas.py shares maps.
            share = min(NAMESPACE_BURST, self._tokens - NODE_EVENTS)
            if until > now + share * NAMESPACE_INTERVAL_S:
                return False
            self._spent_until[namespace] = until
        elif self._tokens < 1:
            return False
        if len(self._spent_until) >= MAX_REMEMBERED:
            self._spent_until = {k: v for k, v in self._spent_until.items() if v > now}
        if len(self._last_emitted) >= MAX_REMEMBERED:
            self._last_emitted = {
                k: emit_time for k, emit_time in self._last_emitted.items() if now - emit_time < REPEAT_INTERVAL_S
            }
        self._tokens -= 1
        self._last_emitted[regarding, reason] = now
        return True

    def flush(self, seconds: float) -> None:
        """Waits up to `seconds` until every queued Event has been attempted."""
        deadline = time.monotonic() + seconds
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            self._stop.wait(0.02)

    def stop(self) -> None:
        """Stops sending. Queued Events are discarded."""
        self._stop.set()
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return  # the thread checks _stop before the next Event
            self._thread.stop()

    # ---- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            event = self._queue.get()
            threads.heartbeat()
            try:
                if event is not None:
                    self._send(event)
            finally:
                self._queue.task_done()

    def _send(self, event: KubeEvent) -> None:
        path, body = encode(event, self._node)
        for _ in range(MAX_ATTEMPTS):
            if self._stop.is_set():
                return
            if self._try_post(path, body):
                return
            self._stop.wait(self._retry_interval)
        self._count_dropped()

    def _try_post(self, path: str, body: bytes) -> bool:
        """Returns whether the Event is finished with: sent, or not worth a retry."""
        assert self._post is not None
        try:
            status = self._post(path, body)
        except SourceError:
            return False  # the watches report it
        except Exception:
            log.exception("cannot send an Event")
            self._count_dropped()
            return True
        if status == 429 or status >= 500:
            return False
        if status < 300 or status == 409:  # 409: it was created, but the response was lost
            self.sent += 1
            return True
        self._count_dropped()
        message = f"the API server returned {status} for an Event"
        if message != self._last_error:
            log.warning("%s; grant create on events.events.k8s.io", message)
            self._last_error = message
        return True
