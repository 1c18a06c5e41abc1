# SPDX-License-Identifier: Apache-2.0
"""Reports the agent's state: its status, and the problems of the objects that it has read."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kbpf import __version__
from kbpf.agent.host_thread import HostThread
from kbpf.agent.problem_book import ProblemBook
from kbpf.agent.reconciler import Reconciler
from kbpf.agent.recorder import Recorder
from kbpf.agent.self_check import SelfCheck
from kbpf.dataplane.base import DataPlane
from kbpf.errors import KbpfError, LastError, PinsRemovedError, escape_unprintable
from kbpf.kernel.system import threads
from kbpf.model.config import Config, is_system_service
from kbpf.model.events import Event, Kind, Synced
from kbpf.model.objects import ServiceName
from kbpf.model.status import (
    MAX_NAMESPACES,
    MAX_PROBLEMS,
    AgentStatus,
    SourceView,
    encode,
)
from kbpf.policy.frontends import node_port_problem
from kbpf.serve.server import AgentServer
from kbpf.source.base import Source, SourceState, SourceStatus

log = logging.getLogger("kbpf.agent")

UNKNOWN_PODS: Final = (
    "Pods whose traffic a mesh redirects are not recognized: grant list and watch on pods "
    "(manifests/components/mesh-pods), or set --mesh-pods false"
)

NOT_TRANSLATED: Final = "connections to Services are not translated: "


class Reporter:
    """Used by the agent's thread only."""

    def __init__(
        self,
        config: Config,
        plane: DataPlane,
        server: AgentServer,
        sources: Sequence[Source],
        reconciler: Reconciler,
        recorder: Recorder,
        book: ProblemBook,
        self_check: SelfCheck,
        host_thread: HostThread,
    ) -> None:
        self.config_error: Callable[[], str] | None = None
        """Returns what is wrong with the configuration file, "" if nothing; None if there is no
        file."""
        self._config, self._plane, self._server, self._sources = config, plane, server, sources
        self._reconciler, self._recorder = reconciler, recorder
        self._book, self._self_check, self._host_thread = book, self_check, host_thread
        self.is_plane_ready = False
        """Whether the data plane has completed the first apply."""
        self.tick_error = LastError()
        self._status_error = LastError()
        self._node_port_problem = LastError()
        self._mesh_services: dict[ServiceName, str] = {}
        self._start_time = time.clock_gettime(time.CLOCK_BOOTTIME)

    def write_status(self) -> None:
        node_port_line = node_port_problem(self._reconciler.node_addresses, self._config)
        if self._node_port_problem.replace(node_port_line):
            log.warning("%s", node_port_line)  # this node stops answering on NodePorts
        status = self.status()
        try:
            self._plane.write_status(encode(status))
            self._status_error.replace(None)
        except PinsRemovedError:
            raise
        except KbpfError as error:
            if self._status_error.replace(error):
                log.warning("cannot write the status: %s", error)
        self._server.set_verification_failed(self._config.verify_readiness and self._self_check.is_broken)
        # last, so that a client that sees /readyz succeed can read everything else
        self._server.set_status(status)

    def status(self) -> AgentStatus:
        plane = self._plane.status()
        problems, problem_count = self._list_problems(plane.problems)
        reconciler, now = self._reconciler, time.monotonic()
        computer, applier = reconciler.computer, reconciler.applier
        p50_ms, p99_ms = computer.latencies(0.5, 0.99)
        refused = self._book.not_programmed
        refused_namespaces = Counter(key.namespace for key in refused)
        names = {key.service for key in refused}
        refused_system = sorted(str(name) for name in names if is_system_service(name, self._config))
        return AgentStatus(
            version=__version__,
            pid=os.getpid(),
            mode=plane.choice.mode,
            node=self._config.node_name,
            started=self._start_time,
            heartbeat=time.clock_gettime(time.CLOCK_BOOTTIME),
            synced=reconciler.state.has_applied and self.is_plane_ready,
            services=len(reconciler.store.service_names()),
            service_ports=len(computer.builder.state.services),
            applied=applier.count,
            last_apply_ms=round(applier.last_ms, 3),
            event_to_map_p50_ms=p50_ms,
            event_to_map_p99_ms=p99_ms,
            sources=tuple(_source_view(source.status(), now) for source in self._sources),
            problems=tuple(problems[:MAX_PROBLEMS]),
            problem_count=problem_count,
            refused=len(refused),
            refused_namespaces=dict(refused_namespaces.most_common(MAX_NAMESPACES)),
            refused_system=tuple(refused_system[:MAX_PROBLEMS]),
            error=applier.error.text or self.tick_error.text,
            packets=plane.packets,
            without_endpoints=self._recorder.without_endpoints,
            choice=plane.choice,
            faults=(*plane.faults, *self._verification_faults()),
            threads=threads.list_threads(),
            disabled_features=self._disabled_features(),
            left_to_node=tuple(self._book.left_to_node.first(MAX_PROBLEMS)),
            address_refusals=len(self._book.not_served),
            config_error=self.config_error() if self.config_error is not None else None,
            verified=tuple(filter(None, (applier.compared, self._self_check.connections))),
            failing_backends=self._self_check.failing_backends,
        )

    def _verification_faults(self) -> Iterator[str]:
        if self._config.verify_readiness and self._self_check.is_broken:
            yield NOT_TRANSLATED + "; ".join(self._self_check.failures)

    def _list_problems(self, plane_problems: Iterable[str]) -> tuple[list[str], int]:
        """The first problem lines, the node's own before those of objects, and the total number of
        them.
        """
        general_lines = sorted([*plane_problems, *threads.list_problems(), *self._own_problems()])
        general_lines += [line for source in self._sources for line in source.status().problems]
        lines = [*general_lines, *self._book.problems.first(MAX_PROBLEMS)]
        total = len(self._book.problems) + len(general_lines)
        return list(dict.fromkeys(map(escape_unprintable, lines))), total

    def _own_problems(self) -> Iterator[str]:
        yield from self._server.problems()
        for line in self._self_check.failures:
            yield f"{NOT_TRANSLATED}{line}; `kbpf verify` compares everything"
        if self._host_thread.error.text:
            yield self._host_thread.error.text
        if self._node_port_problem.text:
            yield self._node_port_problem.text
        if self.config_error is not None and (error := self.config_error()):
            yield f"the configuration file was rejected, and the next start would fail: {error}"

    def _disabled_features(self) -> tuple[str, ...]:
        if self._config.source is not None or self._config.socket_lb_label:
            return ()
        if not self._config.mesh_pods:
            return ("Pods are not watched: their label kbpf.io/socket-lb is ignored",)
        if all(source.status().state is not SourceState.FORBIDDEN for source in self._sources):
            return ()
        return (UNKNOWN_PODS, *self._describe_meshes())

    def _describe_meshes(self) -> Iterator[str]:
        """Yields a line for each mesh. No problem: any tenant may set the labels of its Service."""
        for mesh in sorted(set(self._mesh_services.values())):
            first = min(name for name, its in self._mesh_services.items() if its == mesh)
            yield (f"the Service {first} has the labels of the mesh {mesh}: its Pods are translated like all others")

    def report_objects(self, events: Iterable[Event]) -> None:
        """Reports each object or endpoint that is newly left out, or that other programs would read
        differently.
        """
        keys = {event.key for event in events if not isinstance(event, Synced)}
        self._book.report_objects(keys, self._reconciler.store)
        for key in keys:
            if key.kind is Kind.SERVICE:
                self._update_mesh(ServiceName(key.namespace, key.name))

    def _update_mesh(self, name: ServiceName) -> None:
        service = self._reconciler.store.service(name)
        if service is not None and service.mesh:
            self._mesh_services[name] = service.mesh
        else:
            self._mesh_services.pop(name, None)


def _source_view(status: SourceStatus, now: float) -> SourceView:
    return SourceView(
        status.name,
        str(status.state),
        status.synced,
        status.resource_version,
        status.error,
        status.failures,
        round(now - status.last_contact, 1) if status.last_contact else 0.0,
        status.drift,
    )
