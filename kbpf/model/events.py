# SPDX-License-Identifier: Apache-2.0
"""Events of a source: the same four types from an API server and from a folder of YAML."""

from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.model.objects import EndpointSlice, Node, Pod, Service


class Kind(StrEnum):
    """The kinds of objects that are watched."""

    SERVICE = "Service"
    SLICE = "EndpointSlice"
    NODE = "Node"
    POD = "Pod"


REQUIRED_KINDS: Final = frozenset(Kind) - {Kind.POD}
"""Nothing is programmed until all of these are listed. Pods only decide about exemptions."""


class ObjectKey(NamedTuple):
    """Identifies an object; `namespace` is "" for a Node."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        full_name = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.kind} {full_name}"


class Upsert(msgspec.Struct, frozen=True):
    """The object exists, with this content. `received_at` is time.monotonic().

    `trigger_time` is when an EndpointSlice's change began, from its annotation
    endpoints.kubernetes.io/last-change-trigger-time (RFC 3339); "" without one.
    """

    key: ObjectKey
    object: Service | EndpointSlice | Node | Pod
    received_at: float = 0.0
    trigger_time: str = ""


class Delete(msgspec.Struct, frozen=True):
    """The object was deleted, or no longer matches the selector."""

    key: ObjectKey
    received_at: float = 0.0


class Rejected(msgspec.Struct, frozen=True):
    """The object is invalid; its last valid version stays in force. `error` is one line."""

    key: ObjectKey
    error: str


class Synced(msgspec.Struct, frozen=True):
    """All objects of this kind have been listed once. Sent again after each full relist."""

    kind: Kind


Event = Upsert | Delete | Rejected | Synced
