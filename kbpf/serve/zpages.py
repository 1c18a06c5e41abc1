# SPDX-License-Identifier: Apache-2.0
"""/statusz and /flagz, as kube-proxy 1.37 serves them (k8s.io/apiserver/pkg/server/statusz, flagz).

Without an Accept header the response is plain text. With
`Accept: application/json;as=Statusz;v=v1beta1;g=config.k8s.io` (or Flagz, YAML, v1alpha1) it is an
object of the API group config.k8s.io. Any other Accept header leads to 406 with a list of the
supported types.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qs

from kbpf.errors import escape_unprintable
from kbpf.serve.accept import ANY_CLAUSE, AcceptClause, parse_accept
from kbpf.serve.message import JSON, HttpRequest, HttpResponse

API_GROUP: Final = "config.k8s.io"
YAML: Final = "application/yaml"
TEXT_PLAIN: Final = "text/plain"
MEDIA_TYPES: Final = (JSON, YAML, TEXT_PLAIN)
"""Ordered as they are tried for a wildcard."""

VERSIONS: Final = ("v1beta1", "v1alpha1")
DEPRECATED_VERSION: Final = "v1alpha1"
EMULATION_VERSION: Final = "1.37"
"""The version of kube-proxy whose behaviour kbpf follows."""

URL_CREDENTIALS: Final = re.compile(r"//[^/]*@")
"""The user name and password in a URL."""

PATHS: Final = ("/configz", "/flagz", "/healthz", "/metrics", "/proxyMode", "/readyz")
TEXT_WARNING: Final = (
    "\nkbpf %s\nWarning: This endpoint is not meant to be machine parseable, has no formatting "
    "compatibility guarantees and is for debugging purposes only.\n"
)


def statusz(request: HttpRequest, version: str, start_time: float) -> HttpResponse:
    """Returns the response to /statusz. `start_time`: of the process, in seconds since the
    epoch.
    """
    uptime = max(0, int(time.time() - start_time))
    start = time.gmtime(start_time)
    fields = {
        "startTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", start),
        "uptimeSeconds": uptime,
        "goVersion": "",
        "binaryVersion": version,
        "emulationVersion": EMULATION_VERSION,
        "paths": list(PATHS),
    }
    text = (
        f"\nStarted: {time.strftime('%a %b', start)} {start.tm_mday:2}"
        f" {time.strftime('%H:%M:%S UTC %Y', start)}\n"
        f"Up: {uptime // 3600} hr {uptime // 60 % 60:02} min {uptime % 60:02} sec\n"
        f"Binary version: {version}\n"
        f"Emulation version: {EMULATION_VERSION}\n"
        f"Paths: {' '.join(PATHS)}\n"
    )
    return _respond(request, "Statusz", fields, text)


def flagz(request: HttpRequest, flags: Mapping[str, str]) -> HttpResponse:
    """Returns the response to /flagz. `flags`: the flags that were given, {name: text}."""
    visible_flags = {
        name.lstrip("-"): "CLASSIFIED" if URL_CREDENTIALS.search(text) else escape_unprintable(text)
        for name, text in sorted(flags.items())
    }
    text = "".join(f"{name}={value}\n" for name, value in visible_flags.items())
    return _respond(request, "Flagz", {"flags": visible_flags} if visible_flags else {}, text)


def _respond(request: HttpRequest, kind: str, fields: Mapping[str, Any], text: str) -> HttpResponse:
    clauses = parse_accept(request.accept if request.accept.strip() else TEXT_PLAIN)
    media, clause = next(_acceptable_types(clauses, kind), ("", ANY_CLAUSE))
    pretty = _is_pretty(request, clause)
    if not media:
        return _not_acceptable(request, clauses)
    if media == TEXT_PLAIN:
        return HttpResponse(200, (TEXT_WARNING % kind.lower() + text).encode())
    version = clause.parameters["v"]
    warning = (
        f"This version of the {kind.lower()} endpoint is deprecated. Please use a newer version."
    )
    document = {
        "kind": kind,
        "apiVersion": f"{API_GROUP}/{version}",
        "metadata": {"name": "kbpf"},
        **fields,
    }
    return HttpResponse(
        200,
        _encode(media, document, pretty),
        f"{media};g={API_GROUP};v={version};as={kind}",
        (("Warning", f'299 - "{warning}"'),) if version == DEPRECATED_VERSION else (),
    )


def _not_acceptable(request: HttpRequest, clauses: list[AcceptClause]) -> HttpResponse:
    """Returns 406 with a Status object, in an accepted type if there is one, otherwise as JSON."""
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"only the following media types are accepted: {', '.join(MEDIA_TYPES)}",
        "reason": "NotAcceptable",
        "code": 406,
    }
    for clause in clauses:
        for media in filter(clause.matches, MEDIA_TYPES):
            if not clause.parameters.keys() & {"as", "g", "v", "stream", "sv"}:
                return HttpResponse(406, _encode(media, status, _is_pretty(request, clause)), media)
    return HttpResponse(406, _encode(JSON, status, pretty=True), JSON)


def _is_pretty(request: HttpRequest, clause: AcceptClause) -> bool:
    """Whether JSON is indented: if `pretty` asks for it, otherwise for curl, wget and browsers."""
    if clause.parameters.get("pretty") == "1":
        return True
    if values := parse_qs(request.query).get("pretty"):
        return values[0] in ("1", "t", "T", "TRUE", "true", "True")
    return request.user_agent.startswith(("curl", "Wget", "Mozilla/5.0"))


def _encode(media: str, value: Mapping[str, Any], pretty: bool) -> bytes:
    if media == YAML:
        return "".join(_encode_yaml(value)).encode()
    if pretty:
        return json.dumps(value, indent=2).encode()
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _encode_yaml(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yields a document as YAML. Supports what the pages need: keys that need no quotes, strings
    (quoted as in JSON), numbers, and lists of such words. The agent does not import a YAML library
    for this alone.
    """
    for key, item in sorted(value.items()):
        if isinstance(item, Mapping) and item:
            yield f"{indent}{key}:\n"
            yield from _encode_yaml(item, indent + "  ")
        elif isinstance(item, list):
            yield f"{indent}{key}:\n"
            yield from (f"{indent}- {text}\n" for text in item)
        else:
            yield f"{indent}{key}: {json.dumps(item, ensure_ascii=False)}\n"


def _acceptable_types(clauses: list[AcceptClause], kind: str) -> Iterator[tuple[str, AcceptClause]]:
    """Yields the supported types that the clauses accept, each with its clause, best first."""
    for clause in clauses:
        for media in filter(clause.matches, MEDIA_TYPES):
            parameters = clause.parameters
            if parameters.get("stream") or parameters.get("sv"):
                continue
            names_kind = (parameters.get("as"), parameters.get("g")) == (
                kind,
                API_GROUP,
            ) and parameters.get("v") in VERSIONS
            if names_kind if media != TEXT_PLAIN else not parameters.keys() & {"as", "g", "v"}:
                yield media, clause
