"""Events, as `kubectl get events` shows them: few, and never in anybody's way.

As kube-proxy sends them (events.k8s.io/v1, by client-go's recorder): what is said of the Node
stands in the namespace `default`, what is said of a Service in its own. say() only leaves the event
in a queue; the thread `events` sends it, and tries again while the API server is away. The same
event of the same object is sent once in REPEAT_SECONDS, and BURST at once at most.
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
"""(path, JSON) → the status that the API server answered with; SourceError when there is none."""

CONTROLLER: Final = "kube-proxy"
"""Whoever looks for its Events finds ours; the note says who speaks."""

REPEAT_INTERVAL_S: Final = 300.0
BURST: Final = 25
TOKEN_INTERVAL_S: Final = 10.0
MAX_QUEUED: Final = 100
MAX_ATTEMPTS: Final = 12
RETRY_INTERVAL_S: Final = 10.0
MAX_NOTE_LENGTH: Final = 1024
MAX_NAME_LENGTH: Final = 253
MAX_REMEMBERED: Final = 1000


class EventObject(NamedTuple):
    """The object that an Event is about."""

    kind: str
    name: str
    namespace: str = ""


class KubeEvent(NamedTuple):
    """What is said: `warning` or normal; `reason` and `action` in one word each, `note` in a line.
    `at`: ns since the epoch.
    """

    regarding: EventObject
    warning: bool
    reason: str
    action: str
    note: str
    time_ns: int


def encode(event: KubeEvent, node: str) -> tuple[str, bytes]:
    """Where to POST it, and as what."""
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
        "note": event.note[:MAX_NOTE_LENGTH],
        "type": "Warning" if event.warning else "Normal",
    }
    path = f"/apis/events.k8s.io/v1/namespaces/{quote(namespace)}/events"
    return path, json.dumps(body).encode()


class EventRecorder:
    """See the module. Without `post` (no API server) nothing is sent."""

    def __init__(
        self,
        post: Post | None,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        retry_interval: float = RETRY_INTERVAL_S,
    ) -> None:
        self._post, self._node, self._clock, self._retry_interval = (
            post,
            node,
            clock,
            retry_interval,
        )
        self._queue: queue.Queue[KubeEvent | None] = queue.Queue(MAX_QUEUED)
        self._lock = threading.Lock()
        self._last_emitted: dict[tuple[EventObject, str], float] = {}
        self._tokens, self._refill_time = float(BURST), clock()
        self._stop = threading.Event()
        self._thread: threads.SupervisedThread | None = None
        self._last_error = ""
        self.sent = 0
        self.dropped = 0

    def emit(
        self, regarding: EventObject, reason: str, action: str, note: str = "", warning: bool = True
    ) -> None:
        """Leaves it to be sent, unless it was said just now, or too much was. Never waits."""
        if self._post is None or self._stop.is_set():
            return
        with self._lock:
            if self._is_repeated(regarding, reason):
                return
            if not self._consume_token(regarding, reason):
                self.dropped += 1
                return
            if self._thread is None:
                self._thread = threads.start("events", self._run)
        try:
            self._queue.put_nowait(
                KubeEvent(regarding, warning, reason, action, note, time.time_ns())
            )
        except queue.Full:
            self.dropped += 1

    def _is_repeated(self, regarding: EventObject, reason: str) -> bool:
        last_emitted = self._last_emitted.get((regarding, reason))
        return last_emitted is not None and self._clock() - last_emitted < REPEAT_INTERVAL_S

    def _consume_token(self, regarding: EventObject, reason: str) -> bool:
        now = self._clock()
        self._tokens = min(BURST, self._tokens + (now - self._refill_time) / TOKEN_INTERVAL_S)
        self._refill_time = now
        if self._tokens < 1:
            return False
        if len(self._last_emitted) >= MAX_REMEMBERED:
            self._last_emitted = {
                k: emit_time
                for k, emit_time in self._last_emitted.items()
                if now - emit_time < REPEAT_INTERVAL_S
            }
        self._tokens -= 1
        self._last_emitted[regarding, reason] = now
        return True

    def flush(self, seconds: float) -> None:
        """Waits until what was said has been tried, so long at most."""
        deadline = time.monotonic() + seconds
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            self._stop.wait(0.02)

    def stop(self) -> None:
        """Sends nothing more."""
        self._stop.set()
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return  # it sees the end before the next one
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
        self.dropped += 1

    def _try_post(self, path: str, body: bytes) -> bool:
        """Whether nothing is gained by trying again."""
        assert self._post is not None
        try:
            status = self._post(path, body)
        except SourceError:
            return False  # the watches say so already
        except Exception:
            log.exception("an event could not be sent")
            self.dropped += 1
            return True
        if status == 429 or status >= 500:
            return False
        if status < 300 or status == 409:  # 409: it had arrived, and the answer was lost
            self.sent += 1
            return True
        self.dropped += 1
        message = f"the API server answers {status} to events"
        if message != self._last_error:
            log.warning("%s: grant create on events.events.k8s.io", message)
            self._last_error = message
        return True
