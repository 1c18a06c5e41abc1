"""The map agent_sockets: the agent's own connections to the API server, by socket cookie."""

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
    """Any thread may claim. The programs read an entry when the connection begins, so the newest
    AGENT_SOCKETS are enough and no entry has to be deleted when its socket is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._map: Map | None = None
        self._cookies: deque[int] = deque()

    def open(self, map_: Map) -> None:
        """Takes the map, and deletes what an earlier agent left in it: its sockets are closed."""
        with self._lock:
            self._map = map_
            self._cookies.clear()
            if stale_keys := b"".join(key for key, _ in map_.items()):
                map_.delete_batch(stale_keys)

    def claim(self, cookie: int) -> None:
        """See DataPlane.claim_socket(). Without a map no program is there that would ask."""
        with self._lock:
            if self._map is None:
                return
            try:
                if len(self._cookies) == AGENT_SOCKETS:
                    self._map.delete(U64.pack(self._cookies.popleft()))
                self._map.update(U64.pack(cookie), ONE)
                self._cookies.append(cookie)
            except KernelError as error:
                log.warning("a connection to the API server is not exempt from Services: %s", error)

    def close(self) -> None:
        """Lets go of the map."""
        with self._lock:
            self._map = None
