"""What a source says. The same four words from an API server and from a folder of YAML."""

from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.model.objects import EndpointSlice, Node, Pod, Service


class Kind(StrEnum):
    """The kinds of objects that we watch."""

    SERVICE = "Service"
    SLICE = "EndpointSlice"
    NODE = "Node"
    POD = "Pod"


REQUIRED_KINDS: Final = frozenset(Kind) - {Kind.POD}
"""Without all of these nothing is programmed. Pods only say who is left alone."""


class ObjectKey(NamedTuple):
    """Which object: kind, namespace ("" for a Node), name."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        full_name = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.kind} {full_name}"


class Upsert(msgspec.Struct, frozen=True):
    """The object is there, and this is what it says now. `received` is time.monotonic().

    `triggered` is when an EndpointSlice's change began, as its annotation
    endpoints.kubernetes.io/last-change-trigger-time says (RFC 3339); "" if it says nothing.
    """

    key: ObjectKey
    object: Service | EndpointSlice | Node | Pod
    received_at: float = 0.0
    trigger_time: str = ""


class Delete(msgspec.Struct, frozen=True):
    """The object is gone, or no longer selected."""

    key: ObjectKey
    received_at: float = 0.0


class Rejected(msgspec.Struct, frozen=True):
    """The object cannot be used; what it said before stays in force. `error` is one line."""

    key: ObjectKey
    error: str


class Synced(msgspec.Struct, frozen=True):
    """All objects of this kind have been listed once. Sent again after each complete re-list."""

    kind: Kind


Event = Upsert | Delete | Rejected | Synced
