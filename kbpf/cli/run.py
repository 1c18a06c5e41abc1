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
from kbpf.cli.arguments import RunOptions, with_node_name
from kbpf.cli.log_format import JsonFormatter, TextFormatter
from kbpf.config.load import LoadedConfig
from kbpf.config.watcher import ConfigWatcher
from kbpf.config.write import format_configz
from kbpf.errors import KbpfError, KernelError, describe_unexpected_error
from kbpf.kernel.system import children, process
from kbpf.model.config import Config
from kbpf.model.events import Kind, Synced
from kbpf.serve.events import Post
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from kbpf.serve.server import AgentServer
from kbpf.source.base import Source

if TYPE_CHECKING:
    from kbpf.source.api.credentials import Cluster
    from kbpf.source.api.credentials import RequestHandler as AskedApi

log = logging.getLogger("kbpf")

GC_THRESHOLD = (100_000, 50, 100)
"""Of gc.set_threshold(). With Python's own numbers the objects of a first list are looked through a
hundred times while it is read, a quarter of the start with 10,000 Services. Few of ours are in
cycles: what is not in use any more goes by its reference count."""

RELIST_PERIODS = 4
"""All objects are listed again each so many --config-sync-periods."""


def set_up_logging(config: Config) -> None:
    """Everything of ours to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    root = logging.getLogger("kbpf")
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    root.propagate = False


def connect(config: Config, on_request: "AskedApi") -> "Cluster | None":
    """The API server that the configuration names, if it does not name a folder."""
    if config.source is not None:
        return None
    from kbpf.source.api.credentials import Cluster
    from kbpf.source.api.kubeconfig import find_access

    allow_insecure = config.allow_insecure_api
    cluster = Cluster(
        find_access(config.kubeconfig, config.master, allow_insecure=allow_insecure),
        on_request,
        allow_insecure,
    )
    for problem in cluster.problems:
        log.warning("%s", problem)
    return cluster


def source_factory(
    config: Config, cluster: "Cluster | None"
) -> Callable[[Callable[[Item], None]], Sequence[Source]]:
    """How to make the sources that the configuration asks for."""

    def make(put: Callable[[Item], None]) -> Sequence[Source]:
        if cluster is None:
            from kbpf.source.folder.folder import FolderSource

            assert config.source is not None
            grace = config.source_empty_grace
            return [FolderSource(config.source, put, node_name=config.node_name, empty_grace=grace)]
        from kbpf.source.api.reflector import Reflector
        from kbpf.source.api.resource import SERVICES, SLICES, exempt_pod_resource, node_resource

        relist = RELIST_PERIODS * config.config_sync_period
        resources = [SERVICES, SLICES, node_resource(config.node_name, config.watch_nodes)]
        if config.socket_lb_label:
            resources.append(exempt_pod_resource(config.node_name))
        else:
            put(Synced(Kind.POD))  # that none is exempt by its label is known
        return [Reflector(cluster, resource, put, relist_interval=relist) for resource in resources]

    return make


def _event_poster(cluster: "Cluster | None") -> Post | None:
    """How Events are sent."""
    if cluster is None:
        return None
    from kbpf.source.api.event_sink import EventSink

    return EventSink(cluster).post


def run_agent(options: RunOptions, loaded: LoadedConfig, data: bytes | None) -> None:
    """Runs the agent until SIGTERM or SIGINT. Traffic goes on afterwards. `data`: the text of the
    configuration file, if there is one; another one makes this process begin anew.
    """
    config = with_node_name(loaded.config)
    set_up_logging(config)
    try:
        _run_agent(config, options, loaded, data)
    except KbpfError as error:
        log.error("%s", error)  # the last line has the form of the others
        raise SystemExit(1) from error
    except OSError as error:
        log.error("%s", describe_unexpected_error(error))
        raise SystemExit(1) from error
    except Exception as error:
        log.exception("a fault of kbpf's own ends the agent")
        raise SystemExit(1) from error


def _run_agent(
    config: Config, options: RunOptions, loaded: LoadedConfig, data: bytes | None
) -> None:
    for note in loaded.notes:
        log.log(logging.WARNING if note.is_warning else logging.INFO, "%s", note.text)
    if config.source is not None:  # before anything is made in the kernel
        from kbpf.source.folder.folder import check_folder

        check_folder(config.source)
    if options.init_only:
        conntrack_sysctls.ConntrackSysctls(config.conntrack).apply(time.monotonic())
        return
    gc.set_threshold(*GC_THRESHOLD)
    protect_process(config)
    proxy_metrics = KubeProxyMetrics()
    cluster = connect(config, proxy_metrics.record_api_request)
    plane = selector.select_data_plane(config)
    configz_document = format_configz(config)
    warnings = {note.event: note.text for note in loaded.notes if note.event}
    server = AgentServer(
        config,
        plane.name,
        plane,
        _event_poster(cluster),
        configz_document,
        proxy_metrics,
        options.flags,
        warnings,
    )
    agent = Agent(config, plane, source_factory(config, cluster), server)
    if cluster is not None:
        cluster.on_connect = agent.on_api_connect
    stop_requested = threading.Event()

    def stop(number: int, _: FrameType | None) -> None:
        stop_requested.set()
        agent.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    watcher = None
    if options.file is not None and data is not None:
        watcher = ConfigWatcher(options.file, data, options.load, agent.stop)
        watcher.start(stop_requested)
        agent.config_error = watcher.error
    agent.run()
    if watcher is not None and watcher.is_done and not stop_requested.is_set():
        restart_process()


def protect_process(config: Config) -> None:
    """From being ended for want of memory, as kube-proxy is. Without the right to it: told. And
    from a want of descriptors.
    """
    process.raise_nofile_limit()
    try:
        process.set_oom_score_adj(config.oom_score_adj)
    except KernelError as error:
        log.info("%s", error)


def restart_process() -> None:
    """The same command in the same process: nobody has to start it again. What is programmed
    serves meanwhile. The working directory stays, since paths among the arguments may be relative.
    """
    sys.stderr.flush()
    safe_path_option = [] if sys.flags.safe_path else ["-P"]
    command = [sys.executable, *safe_path_option, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, children.child_environment())
