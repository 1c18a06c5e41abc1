"""`kbpf run`: the agent."""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from kbpf.agent import conntrack_sysctls, selector
from kbpf.agent.agent import Agent
from kbpf.agent.inbox import Item
from kbpf.cli.arguments import Asked, named
from kbpf.cli.log_format import JsonLines, TextLines
from kbpf.config.load import Loaded
from kbpf.config.watcher import Follower
from kbpf.config.write import configz
from kbpf.errors import KbpfError, KernelError, unexpected_refusal
from kbpf.kernel.system import children, process
from kbpf.model.config import Config
from kbpf.model.events import Kind, Synced
from kbpf.serve.events import Post
from kbpf.serve.kubeproxy_metrics import Record
from kbpf.serve.server import Desk
from kbpf.source.base import Source

if TYPE_CHECKING:
    from kbpf.source.api.credentials import Asked as AskedApi
    from kbpf.source.api.credentials import Cluster

log = logging.getLogger("kbpf")

LOOK_FOR_CYCLES = (100_000, 50, 100)
"""Of gc.set_threshold(). With Python's own numbers the objects of a first list are looked through a
hundred times while it is read, a quarter of the start with 10,000 Services. Few of ours are in
cycles: what is not in use any more goes by its reference count."""

RELISTS = 4
"""All objects are listed again each so many --config-sync-periods."""


def set_up_logging(config: Config) -> None:
    """Everything of ours to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.log_format == "json" else TextLines())
    root = logging.getLogger("kbpf")
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    root.propagate = False


def connect(config: Config, asked: "AskedApi") -> "Cluster | None":
    """The API server that the configuration names, if it does not name a folder."""
    if config.source is not None:
        return None
    from kbpf.source.api.credentials import Cluster
    from kbpf.source.api.kubeconfig import find_access

    fine = config.allow_insecure_api
    cluster = Cluster(
        find_access(config.kubeconfig, config.master, allow_insecure=fine), asked, fine
    )
    for problem in cluster.problems:
        log.warning("%s", problem)
    return cluster


def sources_of(
    config: Config, cluster: "Cluster | None"
) -> Callable[[Callable[[Item], None]], Sequence[Source]]:
    """How to make the sources that the configuration asks for."""

    def make(put: Callable[[Item], None]) -> Sequence[Source]:
        if cluster is None:
            from kbpf.source.folder.folder import Folder

            assert config.source is not None
            grace = config.source_empty_grace
            return [Folder(config.source, put, node_name=config.node_name, empty_seconds=grace)]
        from kbpf.source.api.reflector import Reflector
        from kbpf.source.api.resource import SERVICES, SLICES, exempt_pods, nodes

        relist = RELISTS * config.config_sync_period
        watched = [SERVICES, SLICES, nodes(config.node_name, config.watch_nodes)]
        if config.socket_lb_label:
            watched.append(exempt_pods(config.node_name))
        else:
            put(Synced(Kind.POD))  # that none is exempt by its label is known
        return [Reflector(cluster, resource, put, relist=relist) for resource in watched]

    return make


def _poster(cluster: "Cluster | None") -> Post | None:
    """How Events are sent."""
    if cluster is None:
        return None
    from kbpf.source.api.event_sink import Poster

    return Poster(cluster).post


def serve(request: Asked, loaded: Loaded, data: bytes | None) -> None:
    """Runs the agent until SIGTERM or SIGINT. Traffic goes on afterwards. `data`: the text of the
    configuration file, if there is one; another one makes this process begin anew.
    """
    config = named(loaded.config)
    set_up_logging(config)
    try:
        _serve(config, request, loaded, data)
    except KbpfError as error:
        log.error("%s", error)  # the last line has the form of the others
        raise SystemExit(1) from error
    except OSError as error:
        log.error("%s", unexpected_refusal(error))
        raise SystemExit(1) from error
    except Exception as error:
        log.exception("a fault of kbpf's own ends the agent")
        raise SystemExit(1) from error


def _serve(config: Config, request: Asked, loaded: Loaded, data: bytes | None) -> None:
    for note in loaded.notes:
        log.log(logging.WARNING if note.is_warning else logging.INFO, "%s", note.text)
    if config.source is not None:  # before anything is made in the kernel
        from kbpf.source.folder.folder import check_folder

        check_folder(config.source)
    if request.init_only:
        conntrack_sysctls.Keeper(config.conntrack).look(time.monotonic())
        return
    gc.set_threshold(*LOOK_FOR_CYCLES)
    protect(config)
    record = Record()
    cluster = connect(config, record.requested)
    plane = selector.choose(config)
    shown = configz(config)
    warnings = {note.event: note.text for note in loaded.notes if note.event}
    desk = Desk(config, plane.name, plane, _poster(cluster), shown, record, request.flags, warnings)
    agent = Agent(config, plane, sources_of(config, cluster), desk)
    if cluster is not None:
        cluster.connecting = agent.connecting
    ended = threading.Event()

    def stop(number: int, _: FrameType | None) -> None:
        ended.set()
        agent.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    follower = None
    if request.file is not None and data is not None:
        follower = Follower(request.file, data, request.load, agent.stop)
        follower.start(ended)
        agent.config_error = follower.error
    agent.run()
    if follower is not None and follower.is_over and not ended.is_set():
        begin_anew()


def protect(config: Config) -> None:
    """From being ended for want of memory, as kube-proxy is. Without the right to it: told. And
    from a want of descriptors.
    """
    process.allow_many_files()
    try:
        process.set_oom_score_adj(config.oom_score_adj)
    except KernelError as error:
        log.info("%s", error)


def begin_anew() -> None:
    """The same command in the same process: nobody has to start it again. What is programmed
    serves meanwhile. The working directory stays, since paths among the arguments may be relative.
    """
    sys.stderr.flush()
    safe = [] if sys.flags.safe_path else ["-P"]
    command = [sys.executable, *safe, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, children.environment())
