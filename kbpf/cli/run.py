"""`kbpf run`: the agent."""

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from kbpf.agent import mode
from kbpf.agent.agent import Agent
from kbpf.agent.inbox import Item
from kbpf.model.config import Config
from kbpf.source.base import Source


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON, times in RFC 3339 UTC."""
        return json.dumps(
            {
                "time": _time(record, "%Y-%m-%dT%H:%M:%SZ"),
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage(),
            }
        )


class TextLines(logging.Formatter):
    """`2026-11-21T08:00:00Z INFO kbpf.agent message`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        stamp = _time(record, "%Y-%m-%dT%H:%M:%SZ")
        return f"{stamp} {record.levelname} {record.name} {record.getMessage()}"


def _time(record: logging.LogRecord, form: str) -> str:
    return time.strftime(form, time.gmtime(record.created))


def set_up_logging(config: Config) -> None:
    """Everything of ours to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.log_format == "json" else TextLines())
    root = logging.getLogger("kbpf")
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    root.propagate = False


def sources_of(config: Config) -> Callable[[Callable[[Item], None]], Sequence[Source]]:
    """How to make the sources that the configuration asks for."""

    def make(put: Callable[[Item], None]) -> Sequence[Source]:
        if config.source is not None:
            from kbpf.source.folder import Folder

            return [Folder(config.source, put, node_name=config.node_name)]
        from kbpf.source.cluster import Cluster
        from kbpf.source.kubeconfig import find_access
        from kbpf.source.reflector import Reflector
        from kbpf.source.resource import SERVICES, SLICES, exempt_pods, own_node

        cluster = Cluster(find_access(config.kubeconfig, config.master))
        watched = (SERVICES, SLICES, own_node(config.node_name), exempt_pods(config.node_name))
        return [Reflector(cluster, resource, put) for resource in watched]

    return make


def serve(config: Config) -> None:
    """Runs the agent until SIGTERM or SIGINT. Traffic goes on afterwards."""
    if config.source is not None:  # before anything is made in the kernel
        from kbpf.source.folder import check_folder

        check_folder(config.source)
    set_up_logging(config)
    agent = Agent(config, mode.choose(config), sources_of(config))

    def stop(number: int, _: FrameType | None) -> None:
        agent.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    agent.run()
