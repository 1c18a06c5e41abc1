# SPDX-License-Identifier: Apache-2.0
"""Where commands get the objects of a cluster: the API server or folder of the agent's
configuration, or another folder. The running agent is not involved.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from kbpf.cli.endpoints import own_node_name
from kbpf.errors import SourceError
from kbpf.model.config import Config
from kbpf.model.events import Event, Kind, Upsert
from kbpf.model.fairness import take_turns
from kbpf.source.decode.decode import decode_object

RunConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="KBPF_CONFIG",
        readable=False,
        help="The configuration file of `run`. Its settings apply, and say where the objects are.",
    ),
]
MAX_REJECTED: Final = 20

CLUSTER: Final = "cluster"
"""The name of the API server or folder of the configuration, where a path is expected."""


def read_config(file: Path | None, kubeconfig: Path | None) -> Config:
    """The settings of `run` in this file, the environment and these options. Raises ConfigError."""
    from kbpf.config import load

    data = load.read_file(file) if file is not None else None
    config = load.load({}, os.environ, data, str(file)).config
    if kubeconfig is not None:
        config = replace(config, kubeconfig=kubeconfig, source=None)
    return config


def with_own_node(config: Config, node: str, pin_dir: Path) -> Config:
    """With this name, the configured one, or the one under which the agent knows this node."""
    return replace(config, node_name=node or config.node_name or own_node_name(pin_dir))


def read_cluster(config: Config, handle: Callable[[Kind, msgspec.Raw], None]) -> None:
    """Calls `handle` with each Node, Service and EndpointSlice of the API server. Raises KbpfError
    at the first failure: a command does not wait for a server that is down.
    """
    from kbpf.source.api.credentials import Cluster
    from kbpf.source.api.kubeconfig import find_access
    from kbpf.source.api.resource import NODES, PAGE_TIMEOUT_S, SERVICES, SLICES, list_once
    from kbpf.source.api.transport import ApiConnection

    allow_insecure = config.allow_insecure_api
    access = find_access(config.kubeconfig, config.master, allow_insecure=allow_insecure)
    cluster = Cluster(access, allow_insecure=allow_insecure)
    with contextlib.closing(ApiConnection(cluster, response_timeout=PAGE_TIMEOUT_S)) as connection:
        for resource in (NODES, SERVICES, SLICES):
            list_once(connection, cluster, resource, partial(handle, resource.kind))


def read_world(text: str, config: Config, problems: list[str]) -> list[Event]:
    """All events of a folder, or of `cluster`. Appends a line to `problems` for each object that is
    left out. Raises KbpfError.
    """
    path = config.source if text == CLUSTER else Path(text)
    return _read_server(config, problems) if path is None else _read_folder(path, problems)


def _read_server(config: Config, problems: list[str]) -> list[Event]:
    events: list[Event] = []
    errors: list[tuple[str, str]] = []

    def handle(kind: Kind, raw: msgspec.Raw) -> None:
        item = decode_object(kind, raw)
        if item.error:
            errors.append((item.key.namespace, f"{item.key}: {item.error}"))
        elif item.object is not None:
            events.append(Upsert(item.key, item.object))

    read_cluster(config, handle)
    lines = [line for _, line in take_turns(errors, lambda error: error[0])]
    problems += lines[:MAX_REJECTED]
    if len(lines) > MAX_REJECTED:
        problems.append(f"{len(lines) - MAX_REJECTED} more objects cannot be used")
    return events


def _read_folder(path: Path, problems: list[str]) -> list[Event]:
    from kbpf.source.folder.folder import FolderSource, check_folder

    check_folder(path)
    events: list[Event] = []
    source = FolderSource(path, events.append)
    source.poll()
    status = source.status()
    if status.error:
        raise SourceError(status.error)
    problems += status.problems
    return events
