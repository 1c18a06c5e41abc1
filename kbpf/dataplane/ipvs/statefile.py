# SPDX-License-Identifier: Apache-2.0
"""The files in the agent's state folder that `kbpf inspect` reads: the agent's status, the Service
ports that it has programmed (their backends are read from the kernel), and the names of their
endpoints.

Each file is written under another name and renamed, so readers always see a complete one.
"""

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from kbpf.errors import kernel_errors
from kbpf.model.address import Addr
from kbpf.model.desired import Backend, ServicePortKey, ServiceState
from kbpf.model.inspection import EndpointEntry
from kbpf.model.objects import SlicePort
from kbpf.policy.endpoints import EndpointCopies, add_copies

T = TypeVar("T")
STATUS_FILE: Final = "status"
SERVICES_FILE: Final = "services"
ENDPOINTS_FILE: Final = "endpoints"
FILES: Final = tuple(f"{name}{end}" for name in (STATUS_FILE, SERVICES_FILE, ENDPOINTS_FILE) for end in ("", ".new"))
MAX_NAMED_ENDPOINTS: Final = 1_000
"""A Service port with more endpoints has no names: the file is written again after each change."""


class ProgrammedPort(msgspec.Struct, frozen=True):
    """A Service port without its backends, and the fwmark of its short circuit (0: none)."""

    state: ServiceState
    fwmark: int = 0


class PortEndpoints(NamedTuple):
    """The endpoints of a Service port."""

    key: ServicePortKey
    endpoints: tuple[EndpointEntry, ...]


class StateFile:
    """The files of one agent. set_service() is cheap; write() writes all Service ports again if
    one of them has changed, and is called when the status is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: dict[ServicePortKey, bytes] = {}
        self._endpoints: dict[ServicePortKey, bytes] = {}
        self._is_written = False

    def set_service(
        self, key: ServicePortKey, state: ServiceState | None, node_addresses: Container[Addr] = (), fwmark: int = 0
    ) -> None:
        """Records a programmed Service port; None: it was removed. `node_addresses`: see
        DesiredState.other_node_addresses. `fwmark`: see ProgrammedPort.
        """
        if state is None:
            self._is_written = self._services.pop(key, None) is None and self._is_written
            self._endpoints.pop(key, None)
            return
        summary = replace(state, cluster=(), local=(), serving=(), source_ranges=(), lost=(), on_node=(), slices=())
        raw = msgspec.json.encode(ProgrammedPort(summary, fwmark))
        endpoints = msgspec.json.encode(PortEndpoints(key, tuple(_describe(state, node_addresses))))
        before = self._services.get(key), self._endpoints.get(key)
        self._is_written = before == (raw, endpoints) and self._is_written
        self._services[key], self._endpoints[key] = raw, endpoints

    def write(self, status: bytes) -> None:
        """Writes the status, and the Service ports if they have changed. Raises KernelError if the
        folder cannot be written.
        """
        hint = "free space there, or choose another folder with --state-dir"
        with kernel_errors("cannot write the status", str(self._folder), hint):
            if not self._is_written:
                for name, entries in ((SERVICES_FILE, self._services), (ENDPOINTS_FILE, self._endpoints)):
                    write_file(self._folder, name, b"[" + b",".join(entries.values()) + b"]")
                self._is_written = True
            write_file(self._folder, STATUS_FILE, status)


def _describe(state: ServiceState, node_addresses: Container[Addr]) -> Iterator[EndpointEntry]:
    key = state.key
    if sum(len(slice_.endpoints) for slice_ in state.slices) > MAX_NAMED_ENDPOINTS:
        return
    copies: EndpointCopies = {}
    for slice_ in state.slices:
        add_copies(copies, slice_, SlicePort(key.port, key.protocol, 0), key.family)
    pods = {id(slice_): slice_.pods for slice_ in state.slices}
    for (address, port), (slice_, index) in sorted(copies.items(), key=lambda item: item[0]):
        endpoint, pod = slice_.endpoints[index], pods[id(slice_)][index]
        yield EndpointEntry(
            Backend(address, port, key.protocol),
            f"{key.namespace}/{pod}" if pod else "",
            endpoint.node,
            endpoint.zone,
            endpoint.ready,
            endpoint.serving,
            endpoint.terminating,
            address in node_addresses,
        )


def write_file(folder: Path, name: str, content: bytes) -> None:
    """Replaces a file atomically."""
    new = folder / f"{name}.new"
    new.write_bytes(content)
    new.rename(folder / name)


def read_services(folder: Path) -> tuple[ProgrammedPort, ...]:
    """The Service ports in the folder; empty if there is no file, or one that this version cannot
    decode.
    """
    return _read(folder / SERVICES_FILE, tuple[ProgrammedPort, ...]) or ()


def read_endpoints(folder: Path) -> dict[ServicePortKey, tuple[EndpointEntry, ...]]:
    """The endpoints of these Service ports; empty under the same conditions."""
    return dict(_read(folder / ENDPOINTS_FILE, tuple[PortEndpoints, ...]) or ())


def _read(path: Path, type_: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except (OSError, msgspec.DecodeError):
        return None


def remove_files(folder: Path) -> None:
    """Deletes the files; missing ones are ignored."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
