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
SECRET_NAME: Final = re.compile(r"TOKEN|PASS|SECRET|CREDENTIAL|PRIVATE|API[-_]?KEY|AUTH", re.IGNORECASE)
TOKEN_FILES: Final = (Path("/var/run/secrets/kubernetes.io/serviceaccount/token"),)

_PATH: Final = r"/(?:bin|boot|dev|etc|home|lib|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var)(?:[/\s]|\Z)"
"""What begins like a path, which names a file and is no secret. One of 64 random values in base64
begins with a slash.
"""
_NAMES: Final = (
    rb"[\w.-]*(?:(?<!by)pass(?:word|wd|phrase)?|pwd|secret|token|credentials?|\bauth"
    rb"|(?:access|account|api|encryption|private|secret|signing)[_-]?key|key[_-]data)"
)
_VALUE: Final = (
    rb"(?![\"']?" + _PATH.encode() + rb"|[\"']{2}|null\b|true\b|false\b|\d{1,3}(?:[,}\s]|\Z))"
    # Unquoted: what may end a list or a string belongs to the value if more of it follows.
    rb"(\"(?:[^\"\\\n]|\\.)*\"?|'[^'\n]*'?|(?:[^\s,}\]\"'\\]|\\.|[,}\]\"'](?![\s,}\]\"':]|\Z))+)"
)
_NAMED: Final = (
    # ``password: value``, ``--token=value``, ``"secret": "value"``
    re.compile(rb"(?i)(?<![\w.-])(" + _NAMES + rb"[\"']?\s*[:=]\s*)" + _VALUE),
    # ``--token value``, also as items of a list in JSON and YAML, but not in a sentence
    re.compile(
        rb"(?i)(?<![\w.-])(-" + _NAMES + rb"(?:[ \t\0]+|[\"']\s*,\s*|[\"']?[ \t\r]*\n[ \t]*- ))"
        rb"(?!(?:and|are|cannot|file|for|has|if|in|is|must|needs|or|to|was|with)\b|-)" + _VALUE
    ),
)
_BODY: Final = rb"(?:[^\r\n\"'\\]|\\[^nr]|(?<==)\"[^\"\r\n]*\")+"
_HEADERS: Final = (
    re.compile(rb"(?i)(authorization[\"']?[ \t]*:[ \t]*[\"']?(?:[\w-]+[ ]+)?)" + _BODY),
    re.compile(rb"(?i)(cookie[\"']?[ \t]*:[ \t]*[\"']?)(?=[\w.+~-]{1,256}=)" + _BODY),
)
_PATTERNS: Final = (
    # PEM, also if its lines were joined with \\n as in JSON. It may be cut off; then nothing but
    # what looks like a key is removed, since tenants write into the same texts.
    re.compile(
        rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"
        rb"(?:(?:Proc-Type|DEK-Info): [\w-]+,|[A-Za-z0-9+/=\\\s]){0,16384}"
        rb"(?:-----END [A-Z ]*PRIVATE KEY-----)?"
    ),
    re.compile(rb"(?<=//)[^/\s@\"']+(?=@)"),  # user and password in a URL
    # A JWT. Each word is tried once, from its beginning: tenants write annotations and logs, and
    # one of 256 KiB with many beginnings would take minutes.
    re.compile(rb"(?<![\w-])(?=[\w-]*eyJ)[\w-]{11,}+\.[\w-]{8,}+(?:\.[\w-]*+)++"),
    re.compile(rb"(?i)(?<=\bbearer )[^\s\"']{8,}"),
    # keys of AWS, GitHub, GitLab, Slack, Google, Docker, Vault, Stripe
    re.compile(
        rb"(?<![A-Za-z0-9])(?:A[KS]IA[A-Z0-9]{16}|gh[opsur]_\w{30,}|github_pat_\w{20,}"
        rb"|gl[a-z]{1,6}-[\w-]{20,}|xox[a-z]-[\w-]{10,}|AIza[\w-]{35}|ya29\.[\w-]{20,}"
        rb"|dckr_pat_[\w-]{20,}|hv[bs]\.[\w-]{20,}|[rs]k_live_\w{20,})"
    ),
)


class Redactor:
    """Replaces secrets in texts. `secrets`: known values."""

    def __init__(self, secrets: Iterable[str | bytes]) -> None:
        # Variables of the environment may have bytes that are not UTF-8 (surrogateescape).
        values = {os.fsencode(s) for s in secrets}
        values = {form for value in values for form in _forms(value.strip())}
        # the longest first: one secret may contain another
        self._values = sorted((value for value in values if len(value) >= MIN_SECRET_BYTES), key=len, reverse=True)

    def redact(self, data: bytes) -> bytes:
        """The text without secrets."""
        for value in self._values:
            data = data.replace(value, REDACTED)
        for pattern in _PATTERNS:
            data = pattern.sub(REDACTED, data)
        for pattern in _HEADERS:
            data = pattern.sub(rb"\1" + REDACTED, data)
        for pattern in _NAMED:
            data = pattern.sub(_redact_named, data)
        return data


def _redact_named(match: re.Match[bytes]) -> bytes:
    quote = match[2][:1] if match[2][:1] in (b'"', b"'") else b""  # so that JSON stays JSON
    return match[1] + quote + REDACTED + quote


def _forms(value: bytes) -> Iterator[bytes]:
    """The value as it may occur in texts."""
    text = value.decode(errors="replace")
    yield from (value, base64.b64encode(value), json.dumps(text)[1:-1].encode())
    yield urllib.parse.quote(text, safe="").encode()


def find_secrets(kubeconfigs: Iterable[Path], urls: Iterable[str], environ: Mapping[str, str]) -> Iterator[str]:
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
        if SECRET_NAME.search(name) and not re.match(_PATH, value):
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
        case str() if SECRET_NAME.search(name) and not re.match(_PATH, value):
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
