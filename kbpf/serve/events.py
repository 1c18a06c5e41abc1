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

REPEAT_SECONDS: Final = 300.0
BURST: Final = 25
REFILL_SECONDS: Final = 10.0
WAITING: Final = 100
TRIES: Final = 12
PAUSE_SECONDS: Final = 10.0
LONGEST_NOTE: Final = 1024
LONGEST_NAME: Final = 253
REMEMBERED: Final = 1000


class About(NamedTuple):
    """The object that an Event is about."""

    kind: str
    name: str
    namespace: str = ""


class Event(NamedTuple):
    """What is said: `warning` or normal; `reason` and `action` in one word each, `note` in a line.
    `at`: ns since the epoch.
    """

    about: About
    warning: bool
    reason: str
    action: str
    note: str
    at: int


def encode(event: Event, node: str) -> tuple[str, bytes]:
    """Where to POST it, and as what."""
    about, namespace = event.about, event.about.namespace or "default"
    seconds, rest = divmod(event.at, 1_000_000_000)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    suffix = f".{event.at:x}"
    regarding = {"apiVersion": "v1", "kind": about.kind, "name": about.name}
    if about.namespace:
        regarding["namespace"] = about.namespace
    body = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": about.name[: LONGEST_NAME - len(suffix)] + suffix,
            "namespace": namespace,
        },
        "eventTime": f"{stamp}.{rest // 1000:06d}Z",
        "reportingController": CONTROLLER,
        "reportingInstance": f"{CONTROLLER}-{node}"[:128],
        "action": event.action,
        "reason": event.reason,
        "regarding": regarding,
        "note": event.note[:LONGEST_NOTE],
        "type": "Warning" if event.warning else "Normal",
    }
    path = f"/apis/events.k8s.io/v1/namespaces/{quote(namespace)}/events"
    return path, json.dumps(body).encode()


class Events:
    """See the module. Without `post` (no API server) nothing is sent."""

    def __init__(
        self,
        post: Post | None,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        pause: float = PAUSE_SECONDS,
    ) -> None:
        self._post, self._node, self._clock, self._pause = post, node, clock, pause
        self._queue: queue.Queue[Event | None] = queue.Queue(WAITING)
        self._lock = threading.Lock()
        self._said: dict[tuple[About, str], float] = {}
        self._tokens, self._filled = float(BURST), clock()
        self._stop = threading.Event()
        self._thread: threads.Supervised | None = None
        self._complaint = ""
        self.sent = 0
        self.dropped = 0

    def say(
        self, about: About, reason: str, action: str, note: str = "", warning: bool = True
    ) -> None:
        """Leaves it to be sent, unless it was said just now, or too much was. Never waits."""
        if self._post is None or self._stop.is_set():
            return
        with self._lock:
            if self._was_said(about, reason):
                return
            if not self._allowed(about, reason):
                self.dropped += 1
                return
            if self._thread is None:
                self._thread = threads.start("events", self._run)
        try:
            self._queue.put_nowait(Event(about, warning, reason, action, note, time.time_ns()))
        except queue.Full:
            self.dropped += 1

    def _was_said(self, about: About, reason: str) -> bool:
        last = self._said.get((about, reason))
        return last is not None and self._clock() - last < REPEAT_SECONDS

    def _allowed(self, about: About, reason: str) -> bool:
        now = self._clock()
        self._tokens = min(BURST, self._tokens + (now - self._filled) / REFILL_SECONDS)
        self._filled = now
        if self._tokens < 1:
            return False
        if len(self._said) >= REMEMBERED:
            self._said = {k: at for k, at in self._said.items() if now - at < REPEAT_SECONDS}
        self._tokens -= 1
        self._said[about, reason] = now
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
            threads.beat()
            try:
                if event is not None:
                    self._send(event)
            finally:
                self._queue.task_done()

    def _send(self, event: Event) -> None:
        path, body = encode(event, self._node)
        for _ in range(TRIES):
            if self._stop.is_set():
                return
            if self._try(path, body):
                return
            self._stop.wait(self._pause)
        self.dropped += 1

    def _try(self, path: str, body: bytes) -> bool:
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
        complaint = f"the API server answers {status} to events"
        if complaint != self._complaint:
            log.warning("%s: grant create on events.events.k8s.io", complaint)
            self._complaint = complaint
        return True
