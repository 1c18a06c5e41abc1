# SPDX-License-Identifier: Apache-2.0
"""Lists and watches one kind of object of the API server and emits events, until stopped.

- Bookmarks, 410, truncated lines, expired tokens, half-open connections and outages are normal. No
  failure emits Delete; only a DELETED event or a complete and readable list does.
- The list is a stream (sendInitialEvents) if the server supports it, else pages. After a stream
  that broke off, pages are used once; a server that rejects streams (400, 422) gets pages from
  then on. Both request the newest state, not what a cache happens to hold.
- A watch resumes at the last resourceVersion. If that is impossible (410, a malformed line that
  may have been an event), everything is listed again and the difference is emitted.
- A watch that is silent for 90 s is restarted: an API server sends a bookmark every minute (none
  if nothing of the kind has happened since it started; a restart is cheap then). A peer that is
  gone is detected by TCP within 30 s, see transport.py.
- Everything that is read is limited: a response header and a page (transport.py), a list by
  STREAM_LIST_TIMEOUT (pages: PAGED_LIST_TIMEOUT), a line of a watch by LINE_TIMEOUT (in a list
  that is a stream only by the time for the list), a watch by what was requested. A list that takes
  longer than SLOW_LIST_AFTER is a line in `problems` until it ends.
- The server's version only grows. A lower one (a restored etcd, another server behind the address)
  causes one warning and a new list. It is checked in every bookmark and event, and before a watch
  resumes after an outage: a server that has lost changes may not send anything. By then its version
  may have passed ours again, so objects that changed last are compared too (versions.History); if
  one was lost or may have been, everything is listed again.
- Every `relist_interval` seconds (times 3/4 to 5/4) everything is listed again, in case an event
  was missed. Differences are counted and logged as drift.
- A failure is logged once for all watches, and repeated while it lasts (outages.OutageLog).
"""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, assert_never

from kbpf.errors import ObjectError, SourceError
from kbpf.kernel.system import threads
from kbpf.kernel.system.polling import Backoff
from kbpf.model.events import Kind, ObjectKey, Synced
from kbpf.source.api import watch
from kbpf.source.api.credentials import MAX_PAGES_BYTES, Cluster
from kbpf.source.api.resource import (
    PAGE_SIZE,
    HttpStatusError,
    Resource,
    decode_page,
    html_page_error,
    is_html,
    make_status_error,
    process_pages,
)
from kbpf.source.api.transport import RESPONSE_TIMEOUT, ApiConnection, ReadTimeout, Response
from kbpf.source.api.watch import History, KnownVersions, WatchStream, is_rewind
from kbpf.source.base import EventHandler, SourceState, SourceStatus
from kbpf.source.decode import decode, wire

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
"""A restart of the server makes at least this many consecutive attempts fail; a connection that the
server closed makes one fail."""
MAX_SHORT_WATCHES: Final = 4
"""After this many consecutive watches that end at once without an error (endless 410, for
example), that counts as a failure."""
FIRST_RETRY: Final = 0.2
MAX_RETRY: Final = 30.0
STEADY_AFTER: Final = 5.0
FIRST_FORBIDDEN_RETRY: Final = 1.0
MAX_FORBIDDEN_RETRY: Final = 300.0
"""The longest interval between two attempts to watch an optional resource without permission. The
first ones are short: an API server that starts answers 403 until it has read its RBAC rules."""
IN_FORCE_HINT: Final = "what is programmed stays in force"


class _WatchEnded(Exception):
    """The watch ended without an error."""


class Reflector:
    """Lists and watches one kind of object of one API server, in its own thread."""

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
        self._full_resource = resource
        self._clock, self._rng, self._wait, self._silence_timeout = (clock, rng, wait, silence_timeout)
        self._connection = ApiConnection(cluster, response_timeout=response_timeout)
        self._backoff = Backoff(FIRST_RETRY, MAX_RETRY, rng, STEADY_AFTER)
        self._forbidden_backoff = Backoff(FIRST_FORBIDDEN_RETRY, MAX_FORBIDDEN_RETRY, rng)
        self._known_versions = KnownVersions()
        self._stop = threading.Event()
        self._thread: threads.SupervisedThread | None = None
        self._version = ""  # where the watch resumes; "" if a list is needed
        self._may_stream = True
        self._last_version = ""  # the last version that a watch has reached
        self._relist_interval, self._relist_due = relist_interval, 0.0
        self._is_relist = False  # whether the next list is the periodic one
        self._listing_since: float | None = None
        self._drift = 0
        self._stream_broke_off = False
        self._unreadable_line = ""  # what was wrong with a line of the streaming list
        self._healthy_since: float | None = None
        self._is_forbidden_logged = False
        self._verb = "list"
        self._last_contact = 0.0
        self._status = SourceStatus(resource.name, (resource.kind,))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (self._resource.kind,)

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threads.start(self._resource.name, partial(self.run, self._stop))

    def stop(self) -> None:
        """Stops the thread. Returns when it has ended, or after one second if it hangs in name
        resolution, which cannot be interrupted.
        """
        self._stop.set()
        self._connection.close()
        if self._thread is not None:
            self._thread.stop()

    def status(self) -> SourceStatus:
        """The current status. Thread-safe."""
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
            what = f"listing {self._resource.name} has taken more than {SLOW_LIST_AFTER:.0f} s"
            hint = "the objects known before stay in force; is the server slow?"
            yield str(SourceError(what, self._cluster.url, hint))

    def run(self, stop: threading.Event) -> None:
        """Lists and watches until `stop` is set; stop() also aborts the current request."""
        self._stop = stop
        while not stop.is_set():
            threads.heartbeat()
            delay = self._run_once()
            if delay > 0 and not stop.is_set():
                if self._status.state is not SourceState.FORBIDDEN:
                    self._status = replace(self._status, state=SourceState.RETRYING)
                self._wait(stop, delay)
        self._connection.drop()
        self._status = replace(self._status, state=SourceState.STOPPED)

    def _run_once(self) -> float:
        """Lists if needed and watches until the watch ends. Returns the seconds to wait
        afterwards.
        """
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
            is_forbidden = isinstance(error, HttpStatusError) and error.status == 403
            if is_forbidden and self._resource.is_optional:
                return self._record_forbidden(error)
            # A silent watch is restarted without an error; if the server hangs, the next attempt
            # fails.
            is_silent = isinstance(error, ReadTimeout) and self._healthy_since is not None
            failure = None if is_silent else error
        # the thread has no other handler: a bug here must not end the watch
        except Exception as error:
            log.exception("watch failed with an internal error name=%s", self._resource.name)
            failure = SourceError(f"internal error: {error!r}")
            self._version = ""
            self._known_versions.invalidate()
        self._listing_since = None
        if failure is not None:
            # Its frames hold the page, whose reserved memory has been released.
            failure.__traceback__ = failure.__cause__ = failure.__context__ = None
        if failure is not None and not self._stop.is_set():
            self._record_failure(failure)
        since = self._healthy_since
        healthy_for = 0.0 if since is None else self._clock() - since
        is_restless = self._backoff.tries >= MAX_SHORT_WATCHES and healthy_for < STEADY_AFTER
        if failure is None and is_restless and not self._stop.is_set():
            self._record_failure(SourceError(f"each watch ends within {STEADY_AFTER:.0f} s"))
        return self._backoff.next_delay(
            failed=failure is not None,
            healthy_for=healthy_for,
            retry_after=failure.retry_after if isinstance(failure, HttpStatusError) else 0.0,
        )

    # --- listing ---

    def _choose_resource(self) -> None:
        """Before a list: decides whether all objects are watched, or only the narrower
        selection.
        """
        narrow = self._full_resource.narrower
        if narrow is None:
            return
        try:
            # One object is listed, so `remaining` is the number of all others.
            meta, _ = self._fetch_one(self._full_resource)
            is_narrowed = (meta.remaining or 0) >= PAGE_SIZE
        except HttpStatusError as error:
            # Listing all may be forbidden where the narrower selection is permitted.
            if error.status != 403:
                raise
            is_narrowed = True
        resource = narrow if is_narrowed else self._full_resource
        if resource is not self._resource:
            self._resource = resource
            self._is_relist = False  # objects that are no longer requested have not drifted
            log.info("watch scope changed name=%s all=%s", narrow.name, not is_narrowed)

    def _list_pages(self) -> None:
        """Lists page by page. Any error, such as a 410 between pages, starts over."""
        start = self._begin_list()

        def list_page(token: str) -> wire.ListMeta:
            if token and self._clock() - start > PAGED_LIST_TIMEOUT:
                raise SourceError(f"the list is not complete after {PAGED_LIST_TIMEOUT:.0f} s")
            response = self._request("list", self._resource.page_query(token))
            what = f"a page of {self._resource.name}"
            with self._cluster.page_memory.lease() as reserve:
                return self._process_page(response.read(MAX_PAGES_BYTES, PAGE_TIMEOUT, what, reserve))

        self._finish_list(process_pages(list_page).resource_version or "")

    def _process_page(self, body: bytearray) -> wire.ListMeta:
        """Updates the objects of a page; returns the page's metadata."""
        page = decode_page(body)
        for raw in page.items or ():
            try:
                self._update_object(decode.decode_object(self._resource.kind, raw))
            except ObjectError as error:
                self._known_versions.mark_unreadable()
                log.warning("cannot read an object watch=%s error=%r", self._resource.name, error.what)
        return page.metadata

    def _stream_list(self) -> None:
        """Lists and then watches, in one stream."""
        self._begin_list()
        response = self._request("list", self._resource.stream_query(self._watch_timeout()), self._silence_timeout)
        self._stream_broke_off = True  # until the end mark has arrived
        self._process_stream(response, WatchStream(self._resource.kind, initial=True))

    def _begin_list(self) -> float:
        """Starts a list; returns its start time."""
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
                "objects changed without an event name=%s objects=%d; the new list corrects them",
                self._resource.name,
                self._known_versions.drift,
            )
        if is_rewind(self._last_version, version):
            self._cluster.report_rewind(self._resource.name, self._last_version, version)
        self._version = self._last_version = version
        self._stream_broke_off = self._is_relist = False
        # At random, so that nodes that started together do not list together.
        self._relist_due = self._clock() + self._relist_interval * (0.75 + self._rng() / 2)
        self._listing_since = None
        # After all objects of the list: the agent programs nothing before.
        self._emit(Synced(self._resource.kind))
        if not self._status.synced:
            log.info("source synced name=%s objects=%d", self._resource.name, len(self._known_versions))
        self._status = replace(self._status, synced=True)

    def _begin_relist(self) -> None:
        """Makes the next list the periodic one."""
        self._version, self._is_relist = "", True

    # --- watching ---

    def _check_for_rewind(self) -> None:
        """After an outage, checks that the server has not lost changes. Raises SourceError, or
        _WatchEnded if a list is needed.
        """
        if self._status.failures < OUTAGE_FAILURES:
            return
        newest_keys: list[ObjectKey | None] = [*self._known_versions.newest_keys()]
        for key in newest_keys or [None]:
            meta, item = self._fetch_one(self._resource, key)
            version = meta.resource_version or ""
            if is_rewind(self._version, version):
                self._handle_rewind(version)
            history = self._known_versions.check_newest(key, item, self._version)
            if item is not None and history is History.LOST:
                self._handle_rewind(item.version)
            if history is not History.CHANGED:
                break
        if history is not History.KNOWN:
            log.info("listing again after an outage name=%s changed=%s", self._resource.name, key)
            self._version = ""
            raise _WatchEnded

    def _fetch_one(
        self, resource: Resource, key: ObjectKey | None = None
    ) -> tuple[wire.ListMeta, decode.DecodedObject | None]:
        """Lists one object, `key` or any. Returns the list's metadata and the object, None if it
        does not exist or cannot be read.
        """
        query = resource.one_object_query(key)
        response = self._request("watch" if self._version else "list", query)
        with self._cluster.page_memory.lease() as reserve:
            what = f"a page of {resource.name}"
            page = decode_page(response.read(MAX_PAGES_BYTES, PAGE_TIMEOUT, what, reserve))
            item = None
            with contextlib.suppress(ObjectError):
                item = decode.decode_object(resource.kind, page.items[0]) if page.items else None
            return page.metadata, item

    def _handle_rewind(self, version: str) -> None:
        """Schedules a new list. `_last_version` becomes the lower version, for later
        comparisons.
        """
        self._cluster.report_rewind(self._resource.name, self._last_version, version)
        self._version, self._last_version = "", version
        raise _WatchEnded

    def _watch(self) -> None:
        response = self._request(
            "watch", self._resource.watch_query(self._version, self._watch_timeout()), self._silence_timeout
        )
        self._record_success()
        self._process_stream(response, WatchStream(self._resource.kind, self._version))

    def _watch_timeout(self) -> int:
        # At random between one and two times the minimum, as in client-go's reflector.go.
        return int(MIN_WATCH_TIMEOUT * (1 + self._rng()))

    def _process_stream(self, response: Response, stream: WatchStream) -> None:
        """Handles messages until the stream ends. Raises SourceError, or _WatchEnded if a list is
        needed.
        """
        start, is_listing = self._clock(), not self._version
        last_line, line_start, is_first = start, start, True
        while not self._stop.is_set() and (data := response.read_chunk()):
            now = self._last_contact = self._clock()
            if is_first and is_html(data):
                raise html_page_error()
            is_first = False
            # Without a newline the line that began earlier is still incomplete.
            if b"\n" in data or not stream.is_inside_line:
                line_start = now
            for message in stream.feed(data):
                last_line = now
                self._handle_message(message, stream)
            # In a streaming list, `_version` stays empty until the end mark, since a watch cannot
            # resume from a part of a list.
            if not is_listing or self._version:
                self._version = self._last_version = stream.resource_version
                self._check_watch(now, start, last_line, line_start)
            elif now - start > STREAM_LIST_TIMEOUT:
                raise SourceError(f"the list is not complete after {STREAM_LIST_TIMEOUT:.0f} s")
        if not self._version and self._unreadable_line:
            raise SourceError(self._unreadable_line, hint="is this a Kubernetes API server?")
        if stream.close():
            raise SourceError("invalid JSON: the stream ended inside a line")
        if not self._version:
            raise SourceError("the stream ended before the list did")

    def _check_watch(self, now: float, start: float, last_line: float, line_start: float) -> None:
        """Raises SourceError if bytes arrive without completing lines, and _WatchEnded when time
        is up.
        """
        if now - line_start > LINE_TIMEOUT:
            raise SourceError(f"a line is not complete after {LINE_TIMEOUT:.0f} s")
        if now - last_line > self._silence_timeout:
            raise ReadTimeout("no event in time")
        if now >= self._relist_due:
            self._begin_relist()
            raise _WatchEnded
        # longer than any timeout that was requested, see _watch_timeout()
        if now - start > 2 * MIN_WATCH_TIMEOUT + LINE_TIMEOUT:
            raise _WatchEnded  # the server should have ended it

    def _handle_message(self, message: watch.WatchMessage, stream: WatchStream) -> None:
        match message:
            case watch.ObjectChanged():
                self._update_object(message.item, message.deleted)
            case watch.InitialListEnd():
                # a missing object may be the malformed line: list by pages
                if self._unreadable_line:
                    raise SourceError(self._unreadable_line)
                self._finish_list(stream.resource_version)
                self._record_success()
            case watch.VersionRewind():
                self._last_version = message.old_version
                self._handle_rewind(message.new_version)
            case watch.VersionExpired():
                self._version = ""
                raise _WatchEnded
            case watch.WatchFailed():
                code = f"{message.code} " if message.code else ""
                # The same event may fail again; a list gets past it.
                self._version = ""
                raise SourceError(f"{code}{message.message}")
            case watch.MalformedLine():
                # It may have been an event; a list is needed to know.
                log.warning("cannot read an event watch=%s error=%r", self._resource.name, message.error)
                self._unreadable_line = f"a line is not an event: {message.error}"
                if self._version:
                    self._version = ""
                    raise SourceError(self._unreadable_line)
            case _:
                assert_never(message)

    def _update_object(self, item: decode.DecodedObject, deleted: bool = False) -> None:
        event = self._known_versions.update(item, deleted, self._clock())
        if event is not None:
            self._emit(event)

    # --- requests and their outcome ---

    def _request(self, verb: str, query: str, silence_timeout: float = 0.0) -> Response:
        """Sends a GET; returns the response if its status is 200, else raises."""
        self._verb = verb
        response = self._connection.request(
            query, silence_timeout=silence_timeout, accept=self._resource.accept(is_watch="watch=1" in query)
        )
        self._last_contact = self._clock()
        if response.status == 200:
            return response
        error = make_status_error(
            self._resource, response.status, response.reason, response.read_error_body(), self._cluster.access.where
        )
        error.retry_after = response.retry_after
        self._adapt_to_error(error, streaming="sendInitialEvents" in query)
        raise error

    def _adapt_to_error(self, error: HttpStatusError, streaming: bool) -> None:
        """Changes the next request if repeating this one cannot succeed."""
        if error.status in (400, 410, 422, 504):  # 504: "Too large resource version"
            self._version = ""
        if error.status in (400, 422) and "field label not supported" in error.server_message:
            self._resource = self._resource.without_field_selector()
            raise _WatchEnded
        if error.status in (400, 422) and streaming:
            log.info("server does not support streaming lists, using pages name=%s", self._resource.name)
            self._may_stream = False
            raise _WatchEnded
        if error.status == 410:
            raise _WatchEnded

    def _record_success(self) -> None:
        self._healthy_since, self._verb = self._clock(), "watch"
        self._is_forbidden_logged, self._forbidden_backoff.tries = False, 0
        if outage := self._cluster.outages.record_recovery(self._resource.name, self._clock()):
            names = ",".join(outage.names)
            log.info("watch recovered name=%s after=%.0fs", names, outage.seconds)
        self._status = replace(self._status, state=SourceState.WATCHING, failures=0, error="")

    def _record_forbidden(self, error: SourceError) -> float:
        """Returns the seconds until the next attempt: permission may be granted at any time."""
        if not self._is_forbidden_logged:
            self._is_forbidden_logged = True
            log.info("not permitted, continuing without name=%s; %s", self._resource.name, error.hint)
        self._version, self._listing_since = "", None
        self._status = replace(self._status, state=SourceState.FORBIDDEN, failures=0, error="")
        return self._forbidden_backoff.next_delay()

    def _record_failure(self, error: SourceError) -> None:
        """Logs and counts it. The status stays `authoritative`: what was listed is complete, only old."""
        what = f"cannot {self._verb} {self._resource.name}: {error.what}"
        line = str(SourceError(what, error.where or self._cluster.url, error.hint))
        reason = f"{error.what} {error.where} {error.hint}"
        if outage := self._cluster.outages.record_failure(self._resource.name, reason, self._clock()):
            names = ",".join(outage.names)
            log.warning("watch failed name=%s for=%.0fs error=%r; %s", names, outage.seconds, line, IN_FORCE_HINT)
        failures = self._status.failures + 1
        self._status = replace(self._status, state=SourceState.RETRYING, failures=failures, error=line)
