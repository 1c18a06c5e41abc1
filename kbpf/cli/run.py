# SPDX-License-Identifier: Apache-2.0
"""`kbpf run`: builds the agent from its parts and runs it."""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from kbpf.agent import host_thread
from kbpf.agent.agent import Agent
from kbpf.agent.inbox import Item
from kbpf.checks import fallback
from kbpf.cli.arguments import RunOptions, with_node_name
from kbpf.cli.log_format import JsonFormatter, TextFormatter
from kbpf.config.load import LoadedConfig
from kbpf.config.watcher import ConfigWatcher
from kbpf.config.write import format_configz
from kbpf.dataplane.select import select_data_plane
from kbpf.errors import KbpfError, KernelError, describe_unexpected_error
from kbpf.kernel.system import children, process
from kbpf.model.config import Config
from kbpf.model.events import Kind, Synced
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from kbpf.serve.server import AgentServer
from kbpf.source.base import Source

if TYPE_CHECKING:
    from kbpf.source.api.credentials import Cluster, RequestHandler

log = logging.getLogger("kbpf")

GC_THRESHOLD = (100_000, 50, 100)
"""For gc.set_threshold(). With Python's defaults the collector traverses the objects of the first
list a hundred times while they are being read: a quarter of the start with 10,000 Services. Few of
our objects are in cycles, so reference counting frees nearly all of them."""

RELIST_PERIODS = 4
"""All objects are listed again after this many --config-sync-periods."""


def set_up_logging(config: Config) -> None:
    """Sends the log of the package `kbpf` to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    root = logging.getLogger("kbpf")
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    root.propagate = False


def connect(config: Config, on_request: "RequestHandler") -> "Cluster | None":
    """Finds the API server and its credentials; None if the objects come from --source. Opens no
    connection.
    """
    if config.source is not None:
        return None
    from kbpf.source.api.credentials import Cluster
    from kbpf.source.api.kubeconfig import find_access

    allow_insecure = config.allow_insecure_api
    cluster = Cluster(
        find_access(config.kubeconfig, config.master, allow_insecure=allow_insecure), on_request, allow_insecure
    )
    for problem in cluster.problems:
        log.warning("%s", problem)
    return cluster


def source_factory(config: Config, cluster: "Cluster | None") -> Callable[[Callable[[Item], None]], Sequence[Source]]:
    """Returns a function that creates the configured sources, which put their items into `put`."""

    def make(put: Callable[[Item], None]) -> Sequence[Source]:
        if cluster is None:
            from kbpf.source.folder.folder import FolderSource

            assert config.source is not None
            return [FolderSource(config.source, put, node_name=config.node_name)]
        from kbpf.source.api.reflector import Reflector
        from kbpf.source.api.resource import SERVICES, SLICES, exempt_pod_resource, node_resource

        relist = RELIST_PERIODS * config.config_sync_period
        resources = [SERVICES, SLICES, node_resource(config.node_name)]
        if config.socket_lb_label or config.mesh_pods:
            is_optional = not config.socket_lb_label
            resources.append(exempt_pod_resource(config.node_name, config.mesh_pods, is_optional))
        else:
            put(Synced(Kind.POD))  # none to watch: the (empty) list of exempt pods is complete
        return [Reflector(cluster, resource, put, relist_interval=relist) for resource in resources]

    return make


def run_agent(options: RunOptions, loaded: LoadedConfig, data: bytes | None) -> None:
    """Runs the agent until SIGTERM or SIGINT. What is programmed continues to serve afterwards.

    `data`: the text of the configuration file, if there is one. If the file changes, this process
    restarts with the new text.
    """
    set_up_logging(loaded.config)
    try:
        _run_agent(with_node_name(loaded.config), options, loaded, data)
    except KbpfError as error:
        log.error("%s", error)  # not on stderr by app.py, so that it has the log's format
        raise SystemExit(1) from error
    except OSError as error:
        log.error("%s", describe_unexpected_error(error))
        raise SystemExit(1) from error
    except Exception as error:
        log.exception("the agent failed unexpectedly and exits")
        raise SystemExit(1) from error


def _run_agent(config: Config, options: RunOptions, loaded: LoadedConfig, data: bytes | None) -> None:
    for note in loaded.notes:
        log.log(logging.WARNING if note.is_warning else logging.INFO, "%s", note.text)
    if config.source is not None:  # before anything is created in the kernel
        from kbpf.source.folder.folder import check_folder

        check_folder(config.source)
    if options.init_only:
        host_thread.ConntrackSysctls(config.conntrack).apply(time.monotonic())
        return
    gc.set_threshold(*GC_THRESHOLD)
    protect_process(config)
    proxy_metrics = KubeProxyMetrics()
    cluster = connect(config, proxy_metrics.record_api_request)
    plane = select_data_plane(config, partial(fallback.find_reason, config))
    post = None
    if cluster is not None:
        from kbpf.source.api.transport import EventSink

        post = EventSink(cluster).post
    warnings = {note.event: note.text for note in loaded.notes if note.event}
    server = AgentServer(
        config,
        plane.choice.mode,
        lambda: plane.shared,
        post,
        format_configz(config),
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
        agent.reporter.config_error = watcher.error
    agent.run()
    if watcher is not None and watcher.is_done and not stop_requested.is_set():
        restart_process()


def protect_process(config: Config) -> None:
    """Sets oom_score_adj, as kube-proxy does, so that the kernel rarely kills the agent when memory
    is short, and raises the limit of open files. Missing rights for the former are only logged.
    """
    process.raise_nofile_limit()
    try:
        process.set_oom_score_adj(config.oom_score_adj)
    except KernelError as error:
        log.info("%s", error)


def restart_process() -> None:
    """Executes the same command again in this process, so that no supervisor has to start it. What
    is programmed serves meanwhile. The working directory is kept, because arguments may be relative
    paths.
    """
    sys.stderr.flush()
    safe_path_option = [] if sys.flags.safe_path else ["-P"]
    command = [sys.executable, *safe_path_option, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, children.child_environment())
