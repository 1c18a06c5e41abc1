# SPDX-License-Identifier: Apache-2.0
"""The formats of a log line: text and JSON."""

import json
import logging
import re
import time
from typing import Final

from kbpf.errors import escape_unprintable

PLACEHOLDER: Final = re.compile(r"(=?)%([-#0 +]*[\d.]*[a-zA-Z]|%)")
PLAIN_VALUE: Final = re.compile(r"[^\s=\"'\\]*")


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Times are RFC 3339, UTC. The field `fault` has the traceback of an unexpected error."""
        document = {
            "time": _format_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _format_message(record),
        }
        if record.exc_info:
            document["fault"] = _format_traceback(self, record)
        return json.dumps(document)


class TextFormatter(logging.Formatter):
    """`2026-11-21T08:00:00Z INFO kbpf.agent message`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line. A traceback follows only if kbpf itself failed unexpectedly."""
        line = f"{_format_time(record)} {record.levelname} {record.name} {_format_message(record)}"
        return f"{line}\n{_format_traceback(self, record)}" if record.exc_info else line


def _format_message(record: logging.LogRecord) -> str:
    """The message, escaped. A text after ``field=`` is quoted unless it is a single word: it may
    come from outside, and must not look like other fields.
    """
    if not (record.args and isinstance(record.args, tuple) and "=%s" in record.msg):
        return escape_unprintable(record.getMessage())
    values = list(record.args)
    places = [match for match in PLACEHOLDER.finditer(record.msg) if match[2] != "%"]
    for index, match in enumerate(places):
        text = str(values[index])
        if match[0] == "=%s" and not PLAIN_VALUE.fullmatch(text):
            values[index] = json.dumps(text, ensure_ascii=False)
    return escape_unprintable(record.msg % tuple(values))


def _format_traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback, escaped: its message may contain text from objects and other programs."""
    assert record.exc_info
    return "\n".join(map(escape_unprintable, formatter.formatException(record.exc_info).split("\n")))


def _format_time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
