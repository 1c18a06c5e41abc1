# SPDX-License-Identifier: Apache-2.0
"""/statusz and /flagz, as kube-proxy 1.37 serves them (k8s.io/apiserver/pkg/server/statusz, flagz),
but always as text: kube-proxy also has them as objects of the API group config.k8s.io.
"""

import re
import time
from collections.abc import Mapping
from typing import Final

from kbpf.errors import escape_unprintable
from kbpf.serve.message import HttpResponse

EMULATION_VERSION: Final = "1.37"
"""The version of kube-proxy whose behaviour kbpf follows."""

URL_CREDENTIALS: Final = re.compile(r"//[^/]*@")
"""The user name and password in a URL."""

PATHS: Final = ("/configz", "/flagz", "/healthz", "/metrics", "/proxyMode", "/readyz")
TEXT_WARNING: Final = (
    "\nkbpf %s\nWarning: This endpoint is not meant to be machine parseable, has no formatting "
    "compatibility guarantees and is for debugging purposes only.\n"
)


def statusz(version: str, start_time: float) -> HttpResponse:
    """Returns the response to /statusz. `start_time`: of the process, in seconds since the
    epoch.
    """
    uptime = max(0, int(time.time() - start_time))
    start = time.gmtime(start_time)
    text = (
        f"\nStarted: {time.strftime('%a %b', start)} {start.tm_mday:2}"
        f" {time.strftime('%H:%M:%S UTC %Y', start)}\n"
        f"Up: {uptime // 3600} hr {uptime // 60 % 60:02} min {uptime % 60:02} sec\n"
        f"Binary version: {version}\n"
        f"Emulation version: {EMULATION_VERSION}\n"
        f"Paths: {' '.join(PATHS)}\n"
    )
    return HttpResponse(200, (TEXT_WARNING % "statusz" + text).encode())


def flagz(flags: Mapping[str, str]) -> HttpResponse:
    """Returns the response to /flagz. `flags`: the flags that were given, {name: text}."""
    text = "".join(f"{name.lstrip('-')}={_mask_credentials(value)}\n" for name, value in sorted(flags.items()))
    return HttpResponse(200, (TEXT_WARNING % "flagz" + text).encode())


def _mask_credentials(text: str) -> str:
    return "CLASSIFIED" if URL_CREDENTIALS.search(text) else escape_unprintable(text)
