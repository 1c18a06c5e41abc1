# SPDX-License-Identifier: Apache-2.0
"""Removes secrets from texts of unknown form: those that are known by their value (the credentials
that the agent uses, and variables of the environment), and those that look like one.
"""

import base64
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kbpf import bounded_yaml

REDACTED: Final = b"REDACTED"
MIN_SECRET_BYTES: Final = 5
"""Shorter values are not searched for: they occur everywhere."""
MAX_FILE_BYTES: Final = 4 << 20
SECRET_NAME: Final = re.compile(
    r"TOKEN|PASS|SECRET|CREDENTIAL|PRIVATE|API[-_]?KEY|AUTH", re.IGNORECASE
)
TOKEN_FILES: Final = (Path("/var/run/secrets/kubernetes.io/serviceaccount/token"),)

_NAMES: Final = (
    rb"[\w.-]*(?:password|passwd|passphrase|secret|token|api[_-]?key|private[_-]?key|key[_-]data)"
)
_NAMED: Final = re.compile(
    rb"(?i)(?<![\w.-])(" + _NAMES + rb"[\"']?\s*[:=]\s*)"
    # not the paths of files, and what cannot be a secret
    rb"(?![\"']?/|[\"']{2}|null\b|true\b|false\b|[\d.]+\s*(?:[,}\n]|\Z))"
    rb"(\"(?:[^\"\\]|\\.)*\"?|'[^']*'?|[^\s,}]+)"
)
"""``password: value``, ``--token=value``, ``"secret": "value"``."""
_PATTERNS: Final = (
    # PEM, also if its lines were joined with \\n as in JSON
    re.compile(
        rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
    ),
    re.compile(rb"(?<=//)[^/\s@\"']+(?=@)"),  # user and password in a URL
    # A JWT. Each word is tried once, from its beginning: tenants write annotations and logs, and
    # one of 256 KiB with many beginnings would take minutes.
    re.compile(rb"(?<![\w-])(?=[\w-]*eyJ)[\w-]{11,}+\.[\w-]{8,}+(?:\.[\w-]*+)++"),
    re.compile(rb"(?i)(?<=\bbearer )[^\s\"']{8,}"),
    re.compile(rb"(?i)(?<=authorization: basic )[\w+/=]+"),
)


class Redactor:
    """Replaces secrets in texts. `secrets`: known values."""

    def __init__(self, secrets: Iterable[str | bytes]) -> None:
        # Variables of the environment may have bytes that are not UTF-8 (surrogateescape).
        values = {os.fsencode(s) for s in secrets}
        values = {form for value in values for form in _forms(value.strip())}
        # the longest first: one secret may contain another
        self._values = sorted(
            (value for value in values if len(value) >= MIN_SECRET_BYTES), key=len, reverse=True
        )

    def redact(self, data: bytes) -> bytes:
        """The text without secrets."""
        for value in self._values:
            data = data.replace(value, REDACTED)
        for pattern in _PATTERNS:
            data = pattern.sub(REDACTED, data)
        return _NAMED.sub(_redact_named, data)


def _redact_named(match: re.Match[bytes]) -> bytes:
    quote = match[2][:1] if match[2][:1] in (b'"', b"'") else b""  # so that JSON stays JSON
    return match[1] + quote + REDACTED + quote


def _forms(value: bytes) -> Iterator[bytes]:
    """The value as it may occur in texts."""
    text = value.decode(errors="replace")
    yield from (value, base64.b64encode(value), json.dumps(text)[1:-1].encode())
    yield urllib.parse.quote(text, safe="").encode()


def find_secrets(
    kubeconfigs: Iterable[Path], urls: Iterable[str], environ: Mapping[str, str]
) -> Iterator[str]:
    """Yields the secrets that this process can know: what authenticates users in the kubeconfigs,
    tokens in the files that these name, passwords in URLs, and variables with such a name. What
    cannot be read cannot get into the archive either.
    """
    for path in kubeconfigs:
        yield from _secrets_of_kubeconfig(path)
    for path in TOKEN_FILES:
        yield _read_text(path)
    for text in (*urls, *environ.values()):
        for match in re.finditer(r"//([^/\s@]*)@", text):
            yield from (match[1], match[1].partition(":")[2])
    for name, value in environ.items():
        if SECRET_NAME.search(name) and not value.startswith("/"):
            yield value


def _secrets_of_kubeconfig(path: Path) -> Iterator[str]:
    data = _read_text(path).encode()
    try:
        documents = list(bounded_yaml.load_all(data, bounded_yaml.KUBECONFIG))
    except bounded_yaml.YAML_ERRORS:
        return
    for document in documents:
        users = document.get("users") if isinstance(document, dict) else None
        for user in users if isinstance(users, list) else ():
            yield from _secrets_of_user(user.get("user") if isinstance(user, dict) else None)


def _secrets_of_user(value: Any, name: str = "") -> Iterator[str]:
    """The secrets of a user, or of its exec plugin or auth provider; of token files the content."""
    match value:
        case {"name": str(variable), "value": str(text)}:  # of a plugin's environment
            yield from _secrets_of_user(text, variable)
        case dict():
            for key, child in value.items():
                yield from _secrets_of_user(child, str(key))
        case list():
            for child in value:
                key, equals, text = child.partition("=") if isinstance(child, str) else ("", "", "")
                yield from _secrets_of_user(text if equals else child, key if equals else name)
        case str() if name == "tokenFile":
            yield _read_text(Path(value))
        case str() if name.endswith("-data"):
            yield value
            yield from _decode(value)
        case str() if SECRET_NAME.search(name) and not value.startswith("/"):
            yield value


def _decode(text: str) -> Iterator[str]:
    try:
        yield base64.b64decode(text).decode()
    except ValueError:
        return


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""
