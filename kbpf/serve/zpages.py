"""/statusz and /flagz, as kube-proxy 1.37 serves them (k8s.io/apiserver/pkg/server/statusz, flagz).

Without an Accept header the answer is text for people. With
`Accept: application/json;as=Statusz;v=v1beta1;g=config.k8s.io` (or Flagz, YAML, v1alpha1) it is an
object of the API group config.k8s.io. Anything else is 406 with the types that there are.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

from kbpf.errors import printable
from kbpf.serve.message import JSON, Answer, Request

GROUP: Final = "config.k8s.io"
YAML: Final = "application/yaml"
TEXT_PLAIN: Final = "text/plain"
TYPES: Final = (JSON, YAML, TEXT_PLAIN)
"""In the order in which they are tried for a wildcard."""

VERSIONS: Final = ("v1beta1", "v1alpha1")
DEPRECATED: Final = "v1alpha1"
EMULATED: Final = "1.37"
"""The version of kube-proxy that kbpf is compared with."""

PASSWORD: Final = re.compile(r"//[^/]*@")
"""A URL may have one."""

LISTED: Final = ("/configz", "/flagz", "/healthz", "/metrics", "/proxyMode", "/readyz")
WARNING: Final = (
    "\nkbpf %s\nWarning: This endpoint is not meant to be machine parseable, has no formatting "
    "compatibility guarantees and is for debugging purposes only.\n"
)


class Clause(NamedTuple):
    """One type of an Accept header, with its parameters."""

    kind: str
    sub: str
    weight: float
    parameters: Mapping[str, str]

    def matches(self, kind: str) -> bool:
        """Whether it is this type, or a wildcard for it."""
        main, _, sub = kind.partition("/")
        return (self.kind, self.sub) in ((main, sub), (main, "*"), ("*", "*"))


ANYTHING: Final = Clause("*", "*", 1.0, {})


def statusz(request: Request, version: str, started: float) -> Answer:
    """The process: its start as seconds since the epoch, and its version."""
    up = max(0, int(time.time() - started))
    begun = time.gmtime(started)
    fields = {
        "startTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", begun),
        "uptimeSeconds": up,
        "goVersion": "",
        "binaryVersion": version,
        "emulationVersion": EMULATED,
        "paths": list(LISTED),
    }
    text = (
        f"\nStarted: {time.strftime('%a %b', begun)} {begun.tm_mday:2}"
        f" {time.strftime('%H:%M:%S UTC %Y', begun)}\n"
        f"Up: {up // 3600} hr {up // 60 % 60:02} min {up % 60:02} sec\n"
        f"Binary version: {version}\n"
        f"Emulation version: {EMULATED}\n"
        f"Paths: {' '.join(LISTED)}\n"
    )
    return _answer(request, "Statusz", fields, text)


def flagz(request: Request, flags: Mapping[str, str]) -> Answer:
    """The flags that were given, {name: text}."""
    shown = {
        name.lstrip("-"): "CLASSIFIED" if PASSWORD.search(text) else printable(text)
        for name, text in sorted(flags.items())
    }
    text = "".join(f"{name}={value}\n" for name, value in shown.items())
    return _answer(request, "Flagz", {"flags": shown} if shown else {}, text)


def _answer(request: Request, kind: str, fields: Mapping[str, Any], text: str) -> Answer:
    clauses = _clauses(request.accept if request.accept.strip() else TEXT_PLAIN)
    media, clause = next(_acceptable(clauses, kind), ("", ANYTHING))
    pretty = _is_pretty(request, clause)
    if not media:
        return _not_acceptable(request, clauses)
    if media == TEXT_PLAIN:
        return Answer(200, (WARNING % kind.lower() + text).encode())
    version = clause.parameters["v"]
    warning = (
        f"This version of the {kind.lower()} endpoint is deprecated. Please use a newer version."
    )
    made = {
        "kind": kind,
        "apiVersion": f"{GROUP}/{version}",
        "metadata": {"name": "kbpf"},
        **fields,
    }
    return Answer(
        200,
        _encoded(media, made, pretty),
        f"{media};g={GROUP};v={version};as={kind}",
        (("Warning", f'299 - "{warning}"'),) if version == DEPRECATED else (),
    )


def _not_acceptable(request: Request, clauses: list[Clause]) -> Answer:
    """A Status, in a type that is wanted if there is one."""
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"only the following media types are accepted: {', '.join(TYPES)}",
        "reason": "NotAcceptable",
        "code": 406,
    }
    for clause in clauses:
        for media in filter(clause.matches, TYPES):
            if not clause.parameters.keys() & {"as", "g", "v", "stream", "sv"}:
                return Answer(406, _encoded(media, status, _is_pretty(request, clause)), media)
    return Answer(406, _encoded(JSON, status, pretty=True), JSON)


def _is_pretty(request: Request, clause: Clause) -> bool:
    """Whether JSON is indented: for people who type, by their programs."""
    if clause.parameters.get("pretty") == "1":
        return True
    if said := parse_qs(request.query).get("pretty"):
        return said[0] in ("1", "t", "T", "TRUE", "true", "True")
    return request.agent.startswith(("curl", "Wget", "Mozilla/5.0"))


def _encoded(media: str, value: Mapping[str, Any], pretty: bool) -> bytes:
    if media == YAML:
        return "".join(_yaml(value)).encode()
    if pretty:
        return json.dumps(value, indent=2).encode()
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _yaml(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A document without the library, which the agent has no other use for: keys that are words,
    texts in quotes as JSON has them, lists of texts.
    """
    for key, one in sorted(value.items()):
        if isinstance(one, Mapping) and one:
            yield f"{indent}{key}:\n"
            yield from _yaml(one, indent + "  ")
        elif isinstance(one, list):
            yield f"{indent}{key}:\n"
            yield from (f"{indent}- {text}\n" for text in one)
        else:
            yield f"{indent}{key}: {json.dumps(one, ensure_ascii=False)}\n"


def _acceptable(clauses: list[Clause], kind: str) -> Iterator[tuple[str, Clause]]:
    """The types that there are of those that are wanted, with what wants them; the best first."""
    for clause in clauses:
        for media in filter(clause.matches, TYPES):
            given = clause.parameters
            if given.get("stream") or given.get("sv"):
                continue
            named = (given.get("as"), given.get("g")) == (kind, GROUP) and given.get(
                "v"
            ) in VERSIONS
            if named if media != TEXT_PLAIN else not given.keys() & {"as", "g", "v"}:
                yield media, clause


def _clauses(accept: str) -> list[Clause]:
    """Those of the header: by weight, then wildcards last."""
    clauses = []
    for part in accept.split(","):
        media, *rest = part.split(";")
        kind, _, sub = (word.strip(" ") for word in media.partition("/"))
        parameters = {}
        for word in rest:
            name, _, value = word.partition("=")
            if value and "=" not in value:
                parameters[name.strip(" ")] = value.strip(" ")
        weight = parameters.pop("q", "1")
        if sub or kind == "*":
            clauses.append(Clause(kind, sub or "*", _weight(weight), parameters))
    return sorted(clauses, key=lambda each: (-each.weight, each.kind == "*", each.sub == "*"))


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
