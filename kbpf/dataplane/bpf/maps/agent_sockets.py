# SPDX-License-Identifier: Apache-2.0
"""The map `agent_sockets`: the agent's own connections to the API server, by socket cookie."""

import logging
import threading
from collections import deque
from typing import Final

from kbpf.dataplane.bpf.maps.layout import AGENT_SOCKETS, U32, U64
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map

log = logging.getLogger("kbpf.dataplane")

ONE: Final = U32.pack(1)


class AgentSockets:
    """Registers the agent's sockets. Any thread may call. The programs read an entry only when the
    connection begins, so the newest AGENT_SOCKETS entries suffice, and a closed socket needs no
    deletion.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._map: Map | None = None
        self._cookies: deque[int] = deque()

    def open(self, map_: Map) -> None:
        """Uses this map, and deletes the entries of an earlier agent, whose sockets are closed."""
        with self._lock:
            self._map = map_
            self._cookies.clear()
            if stale_keys := b"".join(key for key, _ in map_.items()):
                map_.delete_batch(stale_keys)

    def claim(self, cookie: int) -> None:
        """Registers a socket (by its SO_COOKIE). Does nothing before open(): no program that would
        read the entry is loaded yet.
        """
        with self._lock:
            if self._map is None:
                return
            try:
                if len(self._cookies) == AGENT_SOCKETS:
                    self._map.delete(U64.pack(self._cookies.popleft()))
                self._map.update(U64.pack(cookie), ONE)
                self._cookies.append(cookie)
            except KernelError as error:
                log.warning("cannot exempt a connection to the API server from Services: %s", error)

    def close(self) -> None:
        with self._lock:
            self._map = None
