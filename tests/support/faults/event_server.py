# SPDX-License-Identifier: Apache-2.0
"""An API server that is sent Events."""

import json
from typing import Any

from kbpf.errors import SourceError


class EventServer:
    """Returns the status codes in turn, the last one for ever. None: the server is unreachable."""

    def __init__(self, *codes: int | None) -> None:
        self._codes = list(codes or (201,))
        self.events: list[dict[str, Any]] = []

    def __call__(self, path: str, body: bytes) -> int:
        self.events.append(json.loads(body))
        code = self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]
        if code is None:
            raise SourceError("unreachable")
        return code
