"""LIST and WATCH of one kind, for ever: what the API server has → events.

Rules:
- Bookmarks, 410, cut lines, expired tokens, half-open connections and outages are everyday. Nothing
  that fails says Delete; only a DELETED event or a whole and sound list does.
- The list is a stream (sendInitialEvents) where the server offers it, else pages. A stream that
  broke off is followed by pages once; a server that refuses streams (400, 422) gets pages from
  then on. Both ask for the newest state, not for what a cache happens to hold.
- A watch goes on from the last resourceVersion. What makes that impossible (410, a line that is no
  event and may have been one) leads to a new list, whose difference to the old one is said.
- A healthy watch that is mute for 90 s is taken up anew: an API server sends a bookmark each minute
  (none while nothing of the kind has happened since it started; asking again is cheap then). A
  peer that is gone is found by TCP within 30 s, see transport.py.
- Nothing is read without end: an answer's head and a page have bounds (transport.py), a list has
  LIST_SECONDS (by pages: PAGES_SECONDS), a line that has begun LINE_SECONDS, a watch what was asked
  for. A list that takes longer than SLOW_SECONDS is a line in `problems` until it ends.
- The server's version only grows. One that is lower (a restored etcd, another server behind the
  address) is one warning and a new list. It is looked for in each bookmark and event, and before
  a watch is taken up after an outage: a server that knows less than we do may say nothing.
- Every `relist` seconds (three quarters to five quarters of it) all is listed again, in case
  something was missed all the same. What differs then is counted as drift and told.
- What fails is logged once for all watches, and repeated while it lasts (pace.Outages).
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, assert_never

import msgspec

from kbpf.errors import ObjectError, SourceError
from kbpf.kernel.system import threads
from kbpf.model.events import Kind, Synced
from kbpf.source.api.backoff import Pace
from kbpf.source.api.credentials import PAGES_BYTES, Cluster
from kbpf.source.api.resource import PAGE, Refused, Resource, html_page, is_html, refused
from kbpf.source.api.transport import ANSWER_SECONDS, Connection, Response, Silent
from kbpf.source.api.versions import Known, went_back
from kbpf.source.api.watch import (
    Changed,
    Expired,
    Failed,
    Garbled,
    InitialEnd,
    Said,
    WatchStream,
    WentBack,
)
from kbpf.source.base import Put, SourceState, SourceStatus
from kbpf.source.decode import decode, wire
from kbpf.source.decode.fields import json_error

log = logging.getLogger("kbpf.source")

SILENCE: Final = 90.0
WATCH_SECONDS: Final = 300
LIST_SECONDS: Final = 120.0
PAGES_SECONDS: Final = 600.0
PAGE_SECONDS: Final = 120.0
LINE_SECONDS: Final = 30.0
SLOW_SECONDS: Final = 30.0
RELIST_SECONDS: Final = 3600.0
OUTAGE_TRIES: Final = 2
"""Tries in a row that fail when a server restarts; a cut connection is one."""
RESTLESS: Final = 4
"""Watches in a row that end at once without an error: 410 for ever, for example."""
IN_FORCE: Final = "what is programmed stays in force"
COUNT_FROM: Final = 1 << 20
"""Bytes of a page from which on its items are counted before they are made."""
_PAGE: Final = msgspec.json.Decoder(wire.ListPage)


class _Over(Exception):
    """The watch is over and nothing is wrong."""


class Reflector:
    """One kind of object from one API server, in a thread of its own."""

    def __init__(
        self,
        cluster: Cluster,
        resource: Resource,
        put: Put,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
        silence: float = SILENCE,
        relist: float = RELIST_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._cluster, self._resource, self._put = cluster, resource, put
        self._wide, self._narrowed = resource, False
        self._clock, self._chance, self._wait, self._silence = clock, chance, wait, silence
        self._connection = Connection(cluster, answer_seconds=answer_seconds)
        self._pace = Pace(chance)
        self._known = Known()
        self._stop = threading.Event()
        self._thread: threads.Supervised | None = None
        self._version = ""  # where the watch goes on; "" when a list is needed
        self._may_stream = True
        self._heard_through = ""  # the last version that a watch was at
        self._relist, self._relist_due = relist, 0.0
        self._verifies = False  # whether the next list is the regular one
        self._listing_since: float | None = None
        self._drift = 0
        self._broke_off = False
        self._unreadable = ""  # what was wrong with a line of the streaming list
        self._healthy_since: float | None = None
        self._verb = "list"
        self._contact = 0.0
        self._status = SourceStatus(resource.name, (resource.kind,))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind."""
        return (self._resource.kind,)

    def start(self) -> None:
        """Begin in a thread of its own."""
        name = f"kbpf-{self._resource.name}"
        self._thread = threads.start(name, partial(self.run, self._stop))

    def stop(self) -> None:
        """End whatever it waits for. Back when the thread has ended, or after a second when it
        hangs in name resolution, which nobody can interrupt.
        """
        self._stop.set()
        self._connection.close()
        if self._thread is not None:
            self._thread.stop()

    def status(self) -> SourceStatus:
        """How it is doing; from any thread."""
        return replace(
            self._status,
            resource_version=self._version,
            last_contact=self._contact,
            problems=(*self._cluster.problems, *self._slow()),
            drift=self._drift,
        )

    def _slow(self) -> Iterator[str]:
        since = self._listing_since
        if since is not None and self._clock() - since > SLOW_SECONDS:
            what = f"the list of {self._resource.name} has taken more than {SLOW_SECONDS:.0f} s"
            hint = "its objects are served as they were; is the server slow, or its answer endless?"
            yield str(SourceError(what, self._cluster.url, hint))

    def run(self, stop: threading.Event) -> None:
        """List and watch until `stop`; stop() sets it and ends what is waited for."""
        self._stop = stop
        while not stop.is_set():
            threads.beat()
            delay = self._round()
            if delay > 0 and not stop.is_set():
                self._status = replace(self._status, state=SourceState.RETRYING)
                self._wait(stop, delay)
        self._connection.drop()
        self._status = replace(self._status, state=SourceState.STOPPED)

    def _round(self) -> float:
        """List if need be, watch until that ends; returns how long to wait then."""
        self._healthy_since = None
        failure: SourceError | None = None
        if self._version and self._clock() >= self._relist_due:
            self._verify()
        try:
            if self._version:
                self._look_back()
                self._watch()
            else:
                self._choose()
                if self._may_stream and not self._broke_off:
                    self._stream_list()
                else:
                    self._list()
                    self._watch()
        except _Over:
            pass
        except SourceError as error:
            # A mute watch is taken up again; if the server hangs, that try will say so.
            mute = isinstance(error, Silent) and self._healthy_since is not None
            failure = None if mute else error
        except Exception as error:  # the thread's one: a fault of ours must not end the watch
            log.exception("source fault name=%s", self._resource.name)
            failure = SourceError(f"internal error: {error!r}")
            self._version = ""
            self._known.doubt()
        self._listing_since = None
        if failure is not None:
            # Its frames hold the page that it came from, whose room others have been given.
            failure.__traceback__ = failure.__cause__ = failure.__context__ = None
        if failure is not None and not self._stop.is_set():
            self._unwell(failure)
        since = self._healthy_since
        lived = 0.0 if since is None else self._clock() - since
        restless = self._pace.tries >= RESTLESS and lived < self._pace.steady
        if failure is None and restless and not self._stop.is_set():
            self._unwell(SourceError(f"each watch ends within {self._pace.steady:.0f} s"))
        return self._pace.after(
            failed=failure is not None,
            lived=lived,
            retry_after=failure.retry_after if isinstance(failure, Refused) else 0.0,
        )

    # --- listing ---

    def _choose(self) -> None:
        """Before a list: whether all of these objects are watched, or others in their place."""
        narrow = self._wide.instead
        if narrow is None:
            return
        try:
            narrowed = (self._newest(self._wide).remaining or 0) >= PAGE
        except Refused as error:
            if error.status != 403:
                raise
            narrowed = True
        if narrowed != self._narrowed:
            self._narrowed, self._resource = narrowed, narrow if narrowed else self._wide
            self._verifies = False  # what is not asked for any more has not drifted
            log.info("source watches name=%s all=%s", narrow.name, not narrowed)

    def _list(self) -> None:
        """The whole list, page by page. A 410 between pages (or anything else) starts it anew."""
        begun = self._begin_list()
        token = ""
        while True:
            response = self._ask("list", self._resource.page(token))
            what = f"a page of {self._resource.name}"
            with self._cluster.room.lease() as reserve:
                meta = self._page(response.read(PAGES_BYTES, PAGE_SECONDS, what, reserve))
            last, token = token, meta.continue_ or ""
            if not token:
                break
            if token == last:
                raise SourceError("the server gives the same page again and again")
            if self._clock() - begun > PAGES_SECONDS:
                raise SourceError(f"it has no end after {PAGES_SECONDS:.0f} s")
        self._listed(meta.resource_version or "")

    def _page(self, body: bytearray) -> wire.ListMeta:
        """Say what a page has; its metadata."""
        page = self._decoded(body)
        for raw in page.items or ():
            try:
                self._take(decode.read(self._resource.kind, raw))
            except ObjectError as error:
                self._known.unreadable()
                log.warning("object unreadable name=%s error=%r", self._resource.name, error.what)
        return page.metadata

    def _decoded(self, body: bytearray) -> wire.ListPage:
        try:
            if len(body) > COUNT_FROM:
                wire.check_items(body)
            return _PAGE.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if is_html(body):
                raise html_page() from error
            hint = "is this a Kubernetes API server?"
            raise SourceError(f"not a list: {json_error(error)}", hint=hint) from error

    def _stream_list(self) -> None:
        """The list and then the watch, as one stream."""
        self._begin_list()
        response = self._ask("list", self._resource.stream(self._seconds()), self._silence)
        self._broke_off = True  # until its end mark has come
        self._follow(response, WatchStream(self._resource.kind, initial=True))

    def _begin_list(self) -> float:
        """Returns when it was."""
        self._status = replace(self._status, state=SourceState.LISTING)
        self._listing_since, self._unreadable = self._clock(), ""
        self._known.begin_list(self._heard_through if self._verifies else "")
        return self._listing_since

    def _listed(self, version: str) -> None:
        for event in self._known.end_list(self._clock()):
            self._put(event)
        if self._known.drift:
            self._drift += self._known.drift
            log.warning(
                "what was known had drifted name=%s objects=%d; all were listed again",
                self._resource.name, self._known.drift,
            )  # fmt: skip
        if went_back(self._heard_through, version):
            self._cluster.rewound(self._resource.name, self._heard_through, version)
        self._version = self._heard_through = version
        self._broke_off = self._verifies = False
        self._relist_due = self._clock() + self._relist * (0.75 + self._chance() / 2)
        self._listing_since = None
        self._put(Synced(self._resource.kind))
        if not self._status.synced:
            log.info("source synced name=%s objects=%d", self._resource.name, len(self._known))
        self._status = replace(self._status, synced=True)

    def _verify(self) -> None:
        """The next list is the regular one."""
        self._version, self._verifies = "", True

    # --- watching ---

    def _look_back(self) -> None:
        """After an outage: is the server still at our version, or beyond? Raises SourceError, or
        _Over when a list is due.
        """
        if self._status.failures < OUTAGE_TRIES:
            return
        version = self._newest(self._resource).resource_version or ""
        if went_back(self._version, version):
            self._rewound(version)

    def _newest(self, resource: Resource) -> wire.ListMeta:
        """What the server says of the whole list, by a list of one object."""
        response = self._ask("watch" if self._version else "list", resource.newest())
        with self._cluster.room.lease() as reserve:
            what = f"a page of {resource.name}"
            return self._decoded(response.read(PAGES_BYTES, PAGE_SECONDS, what, reserve)).metadata

    def _rewound(self, version: str) -> None:
        """List again. The version stays that of before for the list to be judged by."""
        self._cluster.rewound(self._resource.name, self._heard_through, version)
        self._version, self._heard_through = "", version
        raise _Over

    def _watch(self) -> None:
        response = self._ask(
            "watch", self._resource.watch(self._version, self._seconds()), self._silence
        )
        self._well()
        self._follow(response, WatchStream(self._resource.kind, self._version))

    def _seconds(self) -> int:
        return int(WATCH_SECONDS * (1 + self._chance()))

    def _follow(self, response: Response, stream: WatchStream) -> None:
        """Say what comes until it ends. Raises SourceError, or _Over when a list is due."""
        begun, listing = self._clock(), not self._version
        last_line, line_begun, is_first = begun, begun, True
        while not self._stop.is_set() and (data := response.chunk()):
            now = self._contact = self._clock()
            if is_first and is_html(data):
                raise html_page()
            is_first = False
            if b"\n" in data or not stream.inside_line:
                line_begun = now
            for said in stream.feed(data):
                last_line = now
                self._heard(said, stream)
            if not listing or self._version:
                self._version = self._heard_through = stream.resource_version
                self._still_watching(now, begun, last_line, line_begun)
            elif now - begun > LIST_SECONDS:
                raise SourceError(f"it has no end after {LIST_SECONDS:.0f} s")
        if not self._version and self._unreadable:
            raise SourceError(self._unreadable, hint="is this a Kubernetes API server?")
        if stream.close():
            raise SourceError("broken JSON: the stream ended inside a line")
        if not self._version:
            raise SourceError("the stream ended before the list did")

    def _still_watching(
        self, now: float, begun: float, last_line: float, line_begun: float
    ) -> None:
        """Raises SourceError when bytes come and say nothing, and _Over when the time is over."""
        if now - line_begun > LINE_SECONDS:
            raise SourceError(f"a line has no end after {LINE_SECONDS:.0f} s")
        if now - last_line > self._silence:
            raise Silent("nothing was said in time")
        if now >= self._relist_due:
            self._verify()
            raise _Over
        if now - begun > 2 * WATCH_SECONDS + LINE_SECONDS:
            raise _Over  # the server was to end it

    def _heard(self, said: Said, stream: WatchStream) -> None:
        match said:
            case Changed():
                self._take(said.item, said.gone)
            case InitialEnd():
                if self._unreadable:  # what is missing may be that, not gone: pages tell
                    raise SourceError(self._unreadable)
                self._listed(stream.resource_version)
                self._well()
            case WentBack():
                self._heard_through = said.before
                self._rewound(said.now)
            case Expired():
                self._version = ""
                raise _Over
            case Failed():
                code = f"{said.code} " if said.code else ""
                # It may fail at that very event: a list gets past it.
                self._version = ""
                raise SourceError(f"{code}{said.message}")
            case Garbled():
                # It may have been one: a list tells.
                log.warning("line unreadable name=%s error=%r", self._resource.name, said.error)
                self._unreadable = f"a line is no event: {said.error}"
                if self._version:
                    self._version = ""
                    raise SourceError(self._unreadable)
            case _:
                assert_never(said)

    def _take(self, item: decode.Item, gone: bool = False) -> None:
        event = self._known.take(item, gone, self._clock())
        if event is not None:
            self._put(event)

    # --- asking, and how it went ---

    def _ask(self, verb: str, query: str, silence: float = 0.0) -> Response:
        """The response to a GET, status 200. Anything else raises."""
        self._verb = verb
        response = self._connection.request(query, silence=silence)
        self._contact = self._clock()
        if response.status == 200:
            return response
        error = refused(
            self._resource,
            response.status,
            response.reason,
            response.head_of_body(),
            self._cluster.access.where,
        )
        error.retry_after = response.retry_after
        self._adapt(error, streaming="sendInitialEvents" in query)
        raise error

    def _adapt(self, error: Refused, streaming: bool) -> None:
        """Ask for something else where asking the same again cannot help."""
        if error.status in (400, 410, 422, 504):  # 504: "Too large resource version"
            self._version = ""
        if error.status in (400, 422) and "field label not supported" in error.message:
            self._resource = self._resource.without_fields()
            raise _Over
        if error.status in (400, 422) and streaming:
            log.info("source lists by pages name=%s", self._resource.name)
            self._may_stream = False
            raise _Over
        if error.status == 410:
            raise _Over

    def _well(self) -> None:
        self._healthy_since, self._verb = self._clock(), "watch"
        if outage := self._cluster.outages.ended(self._resource.name, self._clock()):
            names = ",".join(outage.names)
            log.info("watch works again name=%s after=%.0fs", names, outage.seconds)
        self._status = replace(self._status, state=SourceState.WATCHING, failures=0, error="")

    def _unwell(self, error: SourceError) -> None:
        what = f"cannot {self._verb} {self._resource.name}: {error.what}"
        line = str(SourceError(what, error.where or self._cluster.url, error.hint))
        reason = f"{error.what} {error.where} {error.hint}"
        if outage := self._cluster.outages.failed(self._resource.name, reason, self._clock()):
            names = ",".join(outage.names)
            log.warning(
                "watch failed name=%s for=%.0fs error=%r; %s", names, outage.seconds, line, IN_FORCE
            )
        failures = self._status.failures + 1
        self._status = replace(
            self._status, state=SourceState.RETRYING, failures=failures, error=line
        )
