"""The two forms of a log line: text and JSON."""

import json
import logging
import time

from kbpf.errors import printable


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON, times in RFC 3339 UTC. `fault`: where in our code."""
        made = {
            "time": _time(record, "%Y-%m-%dT%H:%M:%SZ"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            made["fault"] = _fault(self, record)
        return json.dumps(made)


class TextLines(logging.Formatter):
    """`2026-11-21T08:00:00Z INFO kbpf.agent message`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, with more below it only where a fault of ours is told."""
        stamp = _time(record, "%Y-%m-%dT%H:%M:%SZ")
        line = f"{stamp} {record.levelname} {record.name} {printable(record.getMessage())}"
        return f"{line}\n{_fault(self, record)}" if record.exc_info else line


def _fault(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback; its message may hold what others wrote."""
    assert record.exc_info
    return "\n".join(map(printable, formatter.formatException(record.exc_info).split("\n")))


def _time(record: logging.LogRecord, form: str) -> str:
    return time.strftime(form, time.gmtime(record.created))
