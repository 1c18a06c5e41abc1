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
from kbpf.source.api.backoff import Backoff
from kbpf.source.api.credentials import MAX_PAGES_BYTES, Cluster
from kbpf.source.api.resource import (
    PAGE_SIZE,
    HttpStatusError,
    Resource,
    html_page_error,
    is_html,
    make_status_error,
)
from kbpf.source.api.transport import RESPONSE_TIMEOUT, ApiConnection, ReadTimeout, Response
from kbpf.source.api.versions import KnownVersions, is_rewind
from kbpf.source.api.watch import (
    InitialListEnd,
    MalformedLine,
    ObjectChanged,
    VersionExpired,
    VersionRewind,
    WatchFailed,
    WatchMessage,
    WatchStream,
)
from kbpf.source.base import EventHandler, SourceState, SourceStatus
from kbpf.source.decode import decode, wire
from kbpf.source.decode.fields import format_json_error

log = logging.getLogger("kbpf.source")

SILENCE_TIMEOUT: Final = 90.0
MIN_WATCH_TIMEOUT: Final = 300
STREAM_LIST_TIMEOUT: Final = 120.0
PAGED_LIST_TIMEOUT: Final = 600.0
PAGE_TIMEOUT: Final = 120.0
LINE_TIMEOUT: Final = 30.0
SLOW_LIST_AFTER: Final = 30.0
RELIST_INTERVAL: Final = 3600.0
OUTAGE_FAILURES: Final = 2
"""Tries in a row that fail when a server restarts; a cut connection is one."""
MAX_SHORT_WATCHES: Final = 4
"""Watches in a row that end at once without an error: 410 for ever, for example."""
IN_FORCE_HINT: Final = "what is programmed stays in force"
COUNT_ITEMS_FROM_BYTES: Final = 1 << 20
"""Bytes of a page from which on its items are counted before they are made."""
_PAGE_DECODER: Final = msgspec.json.Decoder(wire.ListPage)


class _WatchEnded(Exception):
    """The watch is over and nothing is wrong."""


class Reflector:
    """One kind of object from one API server, in a thread of its own."""

    def __init__(
        self,
        cluster: Cluster,
        resource: Resource,
        emit: EventHandler,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
        silence_timeout: float = SILENCE_TIMEOUT,
        relist_interval: float = RELIST_INTERVAL,
        response_timeout: float = RESPONSE_TIMEOUT,
    ) -> None:
        self._cluster, self._resource, self._emit = cluster, resource, emit
        self._full_resource, self._is_narrowed = resource, False
        self._clock, self._rng, self._wait, self._silence_timeout = (
            clock,
            rng,
            wait,
            silence_timeout,
        )
        self._connection = ApiConnection(cluster, response_timeout=response_timeout)
        self._backoff = Backoff(rng)
        self._known_versions = KnownVersions()
        self._stop = threading.Event()
        self._thread: threads.SupervisedThread | None = None
        self._version = ""  # where the watch goes on; "" when a list is needed
        self._may_stream = True
        self._last_version = ""  # the last version that a watch was at
        self._relist_interval, self._relist_due = relist_interval, 0.0
        self._is_relist = False  # whether the next list is the regular one
        self._listing_since: float | None = None
        self._drift = 0
        self._stream_broke_off = False
        self._unreadable_line = ""  # what was wrong with a line of the streaming list
        self._healthy_since: float | None = None
        self._verb = "list"
        self._last_contact = 0.0
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
            last_contact=self._last_contact,
            problems=(*self._cluster.problems, *self._slow_list_problems()),
            drift=self._drift,
        )

    def _slow_list_problems(self) -> Iterator[str]:
        since = self._listing_since
        if since is not None and self._clock() - since > SLOW_LIST_AFTER:
            what = f"the list of {self._resource.name} has taken more than {SLOW_LIST_AFTER:.0f} s"
            hint = "its objects are served as they were; is the server slow, or its answer endless?"
            yield str(SourceError(what, self._cluster.url, hint))

    def run(self, stop: threading.Event) -> None:
        """List and watch until `stop`; stop() sets it and ends what is waited for."""
        self._stop = stop
        while not stop.is_set():
            threads.heartbeat()
            delay = self._run_once()
            if delay > 0 and not stop.is_set():
                self._status = replace(self._status, state=SourceState.RETRYING)
                self._wait(stop, delay)
        self._connection.drop()
        self._status = replace(self._status, state=SourceState.STOPPED)

    def _run_once(self) -> float:
        """List if need be, watch until that ends; returns how long to wait then."""
        self._healthy_since = None
        failure: SourceError | None = None
        if self._version and self._clock() >= self._relist_due:
            self._begin_relist()
        try:
            if self._version:
                self._check_for_rewind()
                self._watch()
            else:
                self._choose_resource()
                if self._may_stream and not self._stream_broke_off:
                    self._stream_list()
                else:
                    self._list_pages()
                    self._watch()
        except _WatchEnded:
            pass
        except SourceError as error:
            # A mute watch is taken up again; if the server hangs, that try will say so.
            is_silent = isinstance(error, ReadTimeout) and self._healthy_since is not None
            failure = None if is_silent else error
        except Exception as error:  # the thread's one: a fault of ours must not end the watch
            log.exception("source fault name=%s", self._resource.name)
            failure = SourceError(f"internal error: {error!r}")
            self._version = ""
            self._known_versions.invalidate()
        self._listing_since = None
        if failure is not None:
            # Its frames hold the page that it came from, whose room others have been given.
            failure.__traceback__ = failure.__cause__ = failure.__context__ = None
        if failure is not None and not self._stop.is_set():
            self._record_failure(failure)
        since = self._healthy_since
        healthy_for = 0.0 if since is None else self._clock() - since
        is_restless = (
            self._backoff.tries >= MAX_SHORT_WATCHES and healthy_for < self._backoff.steady_after
        )
        if failure is None and is_restless and not self._stop.is_set():
            self._record_failure(
                SourceError(f"each watch ends within {self._backoff.steady_after:.0f} s")
            )
        return self._backoff.next_delay(
            failed=failure is not None,
            healthy_for=healthy_for,
            retry_after=failure.retry_after if isinstance(failure, HttpStatusError) else 0.0,
        )

    # --- listing ---

    def _choose_resource(self) -> None:
        """Before a list: whether all of these objects are watched, or others in their place."""
        narrow = self._full_resource.narrower
        if narrow is None:
            return
        try:
            is_narrowed = (self._fetch_newest(self._full_resource).remaining or 0) >= PAGE_SIZE
        except HttpStatusError as error:
            if error.status != 403:
                raise
            is_narrowed = True
        if is_narrowed != self._is_narrowed:
            self._is_narrowed, self._resource = (
                is_narrowed,
                narrow if is_narrowed else self._full_resource,
            )
            self._is_relist = False  # what is not asked for any more has not drifted
            log.info("source watches name=%s all=%s", narrow.name, not is_narrowed)

    def _list_pages(self) -> None:
        """The whole list, page by page. A 410 between pages (or anything else) starts it anew."""
        start = self._begin_list()
        token = ""
        while True:
            response = self._request("list", self._resource.page_query(token))
            what = f"a page of {self._resource.name}"
            with self._cluster.page_memory.lease() as reserve:
                meta = self._process_page(
                    response.read(MAX_PAGES_BYTES, PAGE_TIMEOUT, what, reserve)
                )
            previous, token = token, meta.continue_ or ""
            if not token:
                break
            if token == previous:
                raise SourceError("the server gives the same page again and again")
            if self._clock() - start > PAGED_LIST_TIMEOUT:
                raise SourceError(f"it has no end after {PAGED_LIST_TIMEOUT:.0f} s")
        self._finish_list(meta.resource_version or "")

    def _process_page(self, body: bytearray) -> wire.ListMeta:
        """Say what a page has; its metadata."""
        page = self._decode_page(body)
        for raw in page.items or ():
            try:
                self._update_object(decode.decode_object(self._resource.kind, raw))
            except ObjectError as error:
                self._known_versions.mark_unreadable()
                log.warning("object unreadable name=%s error=%r", self._resource.name, error.what)
        return page.metadata

    def _decode_page(self, body: bytearray) -> wire.ListPage:
        try:
            if len(body) > COUNT_ITEMS_FROM_BYTES:
                wire.check_items(body)
            return _PAGE_DECODER.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if is_html(body):
                raise html_page_error() from error
            hint = "is this a Kubernetes API server?"
            raise SourceError(f"not a list: {format_json_error(error)}", hint=hint) from error

    def _stream_list(self) -> None:
        """The list and then the watch, as one stream."""
        self._begin_list()
        response = self._request(
            "list", self._resource.stream_query(self._watch_timeout()), self._silence_timeout
        )
        self._stream_broke_off = True  # until its end mark has come
        self._process_stream(response, WatchStream(self._resource.kind, initial=True))

    def _begin_list(self) -> float:
        """Returns when it was."""
        self._status = replace(self._status, state=SourceState.LISTING)
        self._listing_since, self._unreadable_line = self._clock(), ""
        self._known_versions.begin_list(self._last_version if self._is_relist else "")
        return self._listing_since

    def _finish_list(self, version: str) -> None:
        for event in self._known_versions.end_list(self._clock()):
            self._emit(event)
        if self._known_versions.drift:
            self._drift += self._known_versions.drift
            log.warning(
                "what was known had drifted name=%s objects=%d; all were listed again",
                self._resource.name, self._known_versions.drift,
            )  # fmt: skip
        if is_rewind(self._last_version, version):
            self._cluster.report_rewind(self._resource.name, self._last_version, version)
        self._version = self._last_version = version
        self._stream_broke_off = self._is_relist = False
        self._relist_due = self._clock() + self._relist_interval * (0.75 + self._rng() / 2)
        self._listing_since = None
        self._emit(Synced(self._resource.kind))
        if not self._status.synced:
            log.info(
                "source synced name=%s objects=%d", self._resource.name, len(self._known_versions)
            )
        self._status = replace(self._status, synced=True)

    def _begin_relist(self) -> None:
        """The next list is the regular one."""
        self._version, self._is_relist = "", True

    # --- watching ---

    def _check_for_rewind(self) -> None:
        """After an outage: is the server still at our version, or beyond? Raises SourceError, or
        _Over when a list is due.
        """
        if self._status.failures < OUTAGE_FAILURES:
            return
        version = self._fetch_newest(self._resource).resource_version or ""
        if is_rewind(self._version, version):
            self._handle_rewind(version)

    def _fetch_newest(self, resource: Resource) -> wire.ListMeta:
        """What the server says of the whole list, by a list of one object."""
        response = self._request("watch" if self._version else "list", resource.newest_query())
        with self._cluster.page_memory.lease() as reserve:
            what = f"a page of {resource.name}"
            return self._decode_page(
                response.read(MAX_PAGES_BYTES, PAGE_TIMEOUT, what, reserve)
            ).metadata

    def _handle_rewind(self, version: str) -> None:
        """List again. The version stays that of before for the list to be judged by."""
        self._cluster.report_rewind(self._resource.name, self._last_version, version)
        self._version, self._last_version = "", version
        raise _WatchEnded

    def _watch(self) -> None:
        response = self._request(
            "watch",
            self._resource.watch_query(self._version, self._watch_timeout()),
            self._silence_timeout,
        )
        self._record_success()
        self._process_stream(response, WatchStream(self._resource.kind, self._version))

    def _watch_timeout(self) -> int:
        return int(MIN_WATCH_TIMEOUT * (1 + self._rng()))

    def _process_stream(self, response: Response, stream: WatchStream) -> None:
        """Say what comes until it ends. Raises SourceError, or _Over when a list is due."""
        start, is_listing = self._clock(), not self._version
        last_line, line_start, is_first = start, start, True
        while not self._stop.is_set() and (data := response.read_chunk()):
            now = self._last_contact = self._clock()
            if is_first and is_html(data):
                raise html_page_error()
            is_first = False
            if b"\n" in data or not stream.is_inside_line:
                line_start = now
            for message in stream.feed(data):
                last_line = now
                self._handle_message(message, stream)
            if not is_listing or self._version:
                self._version = self._last_version = stream.resource_version
                self._check_watch(now, start, last_line, line_start)
            elif now - start > STREAM_LIST_TIMEOUT:
                raise SourceError(f"it has no end after {STREAM_LIST_TIMEOUT:.0f} s")
        if not self._version and self._unreadable_line:
            raise SourceError(self._unreadable_line, hint="is this a Kubernetes API server?")
        if stream.close():
            raise SourceError("broken JSON: the stream ended inside a line")
        if not self._version:
            raise SourceError("the stream ended before the list did")

    def _check_watch(self, now: float, start: float, last_line: float, line_start: float) -> None:
        """Raises SourceError when bytes come and say nothing, and _Over when the time is over."""
        if now - line_start > LINE_TIMEOUT:
            raise SourceError(f"a line has no end after {LINE_TIMEOUT:.0f} s")
        if now - last_line > self._silence_timeout:
            raise ReadTimeout("nothing was said in time")
        if now >= self._relist_due:
            self._begin_relist()
            raise _WatchEnded
        if now - start > 2 * MIN_WATCH_TIMEOUT + LINE_TIMEOUT:
            raise _WatchEnded  # the server was to end it

    def _handle_message(self, message: WatchMessage, stream: WatchStream) -> None:
        match message:
            case ObjectChanged():
                self._update_object(message.item, message.deleted)
            case InitialListEnd():
                if self._unreadable_line:  # what is missing may be that, not gone: pages tell
                    raise SourceError(self._unreadable_line)
                self._finish_list(stream.resource_version)
                self._record_success()
            case VersionRewind():
                self._last_version = message.old_version
                self._handle_rewind(message.new_version)
            case VersionExpired():
                self._version = ""
                raise _WatchEnded
            case WatchFailed():
                code = f"{message.code} " if message.code else ""
                # It may fail at that very event: a list gets past it.
                self._version = ""
                raise SourceError(f"{code}{message.message}")
            case MalformedLine():
                # It may have been one: a list tells.
                log.warning("line unreadable name=%s error=%r", self._resource.name, message.error)
                self._unreadable_line = f"a line is no event: {message.error}"
                if self._version:
                    self._version = ""
                    raise SourceError(self._unreadable_line)
            case _:
                assert_never(message)

    def _update_object(self, item: decode.DecodedObject, deleted: bool = False) -> None:
        event = self._known_versions.update(item, deleted, self._clock())
        if event is not None:
            self._emit(event)

    # --- asking, and how it went ---

    def _request(self, verb: str, query: str, silence_timeout: float = 0.0) -> Response:
        """The response to a GET, status 200. Anything else raises."""
        self._verb = verb
        response = self._connection.request(query, silence_timeout=silence_timeout)
        self._last_contact = self._clock()
        if response.status == 200:
            return response
        error = make_status_error(
            self._resource,
            response.status,
            response.reason,
            response.read_error_body(),
            self._cluster.access.where,
        )
        error.retry_after = response.retry_after
        self._adapt_to_error(error, streaming="sendInitialEvents" in query)
        raise error

    def _adapt_to_error(self, error: HttpStatusError, streaming: bool) -> None:
        """Ask for something else where asking the same again cannot help."""
        if error.status in (400, 410, 422, 504):  # 504: "Too large resource version"
            self._version = ""
        if error.status in (400, 422) and "field label not supported" in error.server_message:
            self._resource = self._resource.without_field_selector()
            raise _WatchEnded
        if error.status in (400, 422) and streaming:
            log.info("source lists by pages name=%s", self._resource.name)
            self._may_stream = False
            raise _WatchEnded
        if error.status == 410:
            raise _WatchEnded

    def _record_success(self) -> None:
        self._healthy_since, self._verb = self._clock(), "watch"
        if outage := self._cluster.outages.record_recovery(self._resource.name, self._clock()):
            names = ",".join(outage.names)
            log.info("watch works again name=%s after=%.0fs", names, outage.seconds)
        self._status = replace(self._status, state=SourceState.WATCHING, failures=0, error="")

    def _record_failure(self, error: SourceError) -> None:
        what = f"cannot {self._verb} {self._resource.name}: {error.what}"
        line = str(SourceError(what, error.where or self._cluster.url, error.hint))
        reason = f"{error.what} {error.where} {error.hint}"
        if outage := self._cluster.outages.record_failure(
            self._resource.name, reason, self._clock()
        ):
            names = ",".join(outage.names)
            log.warning(
                "watch failed name=%s for=%.0fs error=%r; %s",
                names,
                outage.seconds,
                line,
                IN_FORCE_HINT,
            )
        failures = self._status.failures + 1
        self._status = replace(
            self._status, state=SourceState.RETRYING, failures=failures, error=line
        )
