# SPDX-License-Identifier: Apache-2.0
"""Replaces the names and addresses in a recording, so that it can be sent to anyone.

Policy must decide the same about the masked objects as about the real ones, up to these names:

- One name always gets the same mask, within its class: Services, namespaces, nodes, zones, Pods,
  slices, port names, uids.
- Masks sort like the names: names decide which of several slices, Services or zones comes first.
- So do the masks of addresses. Two addresses have as many leading bits in common as their masks, so
  an address is in a network exactly if its mask is in the network's mask.
- Kept are names that have a meaning of their own (KEPT_NAMES), and addresses that have one
  (loopback, unspecified, IPv4 multicast). Of all others the first byte (IPv4) or the first two
  (IPv6) are kept, since these say whether they are link-local or multicast. An IPv6 address that
  contains one of IPv4 (64:ff9b::/96, ::/96) or of a device (fe80::/64) shows no more of it.
- What kbpf would reject is replaced by something that it rejects as well.

Any other text is kept only if it is a known value: MASKS has a row for every text that kbpf reads.
Numbers (ports, times, weights) are kept.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, BinaryIO, Final

import msgspec

from kbpf.errors import ObjectError
from kbpf.model.address import V4_PREFIX, Addr, format_addr, parse_addr
from kbpf.model.events import Kind
from kbpf.model.objects import Algorithm, Cidr
from kbpf.source.decode.decode import TO_BE_DELETED_TAINT
from kbpf.source.decode.fields import LABEL, SUBDOMAIN
from kbpf.source.recording.fields import SHAPES, Shape


class NameClass(Enum):
    """Names that are masked together. The value is the beginning of their masks."""

    SERVICE = "service"
    NAMESPACE = "ns"
    SLICE = "slice"
    NODE = "node"
    POD = "pod"
    ZONE = "zone"
    PORT = "port"
    UID = "uid"


KEPT_NAMES: Final[Mapping[NameClass, Mapping[str, str]]] = {
    NameClass.NAMESPACE: {"default": "a-ns", "kube-system": "e-ns"},
    NameClass.SERVICE: {"kubernetes": "a-service"},
}
"""Names that are kept, sorted, each with the beginning of the masks of names that sort before it
and after the previous one: default/kubernetes is the API server's Service, and Services of
kube-system are programmed first.
"""

UNUSABLE: Final = "MASKED"
"""The beginning of masks of names that the API server would reject; it rejects these, too."""
MASKED_TEXT: Final = "masked"
_PATTERNS: Final = {
    NameClass.SERVICE: (LABEL, 63),
    NameClass.NAMESPACE: (LABEL, 63),
    NameClass.PORT: (LABEL, 63),
    NameClass.UID: (re.compile(r"[0-9A-Za-z-]*"), 64),
    NameClass.ZONE: (re.compile(r".*", re.DOTALL), 1 << 20),
}
_OF_OBJECTS: Final = (SUBDOMAIN, 253)
_TIME: Final = re.compile(r"[0-9TZ:.+-]{1,40}")
_NUMBER: Final = re.compile(r"[0-9]{1,20}")


def _is_usable(class_: NameClass, name: str) -> bool:
    pattern, length = _PATTERNS.get(class_, _OF_OBJECTS)
    return len(name) <= length and pattern.fullmatch(name) is not None


# ---- addresses -----------------------------------------------------------------------------------

KEPT_FIRST_BYTES: Final = frozenset((0, 127, *range(224, 256)))
"""IPv4 addresses that begin with one of these are kept."""
ZEROS_V6: Final = (bytes(2), bytes(13))
"""IPv6 addresses that begin with the longer one are kept, such as ::1; of those with the shorter
one, as many bits.
"""
LINK_LOCAL_FIRST_BYTE: Final = 169


class AddressMasks:
    """Masks of a set of addresses. Where all of them that share the bits so far have the same next
    bit, the mask's is 0 (the last one 1, as hosts have it); where they differ, it is kept.
    """

    def __init__(self, addresses: Iterable[Addr]) -> None:
        self._addresses = sorted(set(addresses))
        self._masks: dict[Addr, Addr] = {}
        numbers = [int.from_bytes(address) for address in self._addresses]
        # (first, last, rest, head): these addresses share all but `rest` bits, whose masks are in
        # `head`.
        todo = [(0, len(numbers), 128, 0)] if numbers else []
        while todo:
            first, last, rest, head = todo.pop()
            differing = (numbers[first] ^ numbers[last - 1]).bit_length()
            number, kept = numbers[first], _count_kept_bits(self._addresses[first])
            shared = head | number >> max(128 - kept, differing) << max(128 - kept, differing)
            if not differing:
                is_free = rest > 0 and kept < 128
                self._masks[self._addresses[first]] = Addr((shared | is_free).to_bytes(16))
                continue
            bit = 1 << differing - 1
            split = bisect_left(numbers, numbers[last - 1] >> differing - 1 << differing - 1)
            todo.append((first, split, differing - 1, shared))
            todo.append((split, last, differing - 1, shared | bit))

    def mask(self, address: Addr) -> Addr:
        """Raises KeyError for an address that was not in the set."""
        return self._masks[address]

    def mask_network(self, network: Cidr) -> Cidr:
        """Its first address must be in the set."""
        host_bits = 128 - network.bits
        number = int.from_bytes(self._masks[network.address]) >> host_bits << host_bits
        return Cidr(Addr(number.to_bytes(16)), network.bits)


def _count_kept_bits(address: Addr) -> int:
    """The number of leading bits of an address that its mask has, too."""
    if address[:12] != V4_PREFIX:
        few, many = ZEROS_V6
        if not address.startswith(few):
            return 8 * len(few)
        return 128 if address.startswith(many) else 8 * len(many)
    if address[12] in KEPT_FIRST_BYTES:
        return 128
    return 112 if address[12] == LINK_LOCAL_FIRST_BYTE else 104


def _parse_address(text: str) -> Addr | None:
    try:
        return parse_addr(text)
    except (ObjectError, ValueError):
        return None


def _parse_network(text: str) -> Cidr | None:
    try:
        return Cidr.parse(text.strip())
    except (ObjectError, ValueError):
        return None


# ---- the masker ----------------------------------------------------------------------------------

Rule = Callable[["Masker", str], str]


class Masker:
    """Masks objects in two passes: collect() sees all of them, mask() replaces what it has seen."""

    def __init__(self) -> None:
        self._names: dict[NameClass, dict[str, str]] = {class_: {} for class_ in NameClass}
        self._addresses: set[Addr] = set()
        self._address_masks: AddressMasks | None = None

    def collect(self, value: dict[str, Any]) -> dict[str, Any]:
        """Notes the names and addresses of an object, and returns it without masks."""
        assert self._address_masks is None
        return self._walk(value)

    def finish(self) -> None:
        """Decides the masks."""
        self._address_masks = AddressMasks(self._addresses)
        for class_, names in self._names.items():
            names.update(_make_masks(class_, names))

    def mask(self, value: dict[str, Any]) -> dict[str, Any]:
        """Returns the object with masks; it must have been collected."""
        assert self._address_masks is not None
        return self._walk(value)

    def mask_name(self, class_: NameClass, name: str) -> str:
        if not name:
            return name
        return self._names[class_].setdefault(name, name)

    def mask_address(self, text: str) -> str:
        address = _parse_address(text)
        if address is None:
            return MASKED_TEXT if text else text
        if self._address_masks is None:
            self._addresses.add(address)
            return text
        return format_addr(self._address_masks.mask(address))

    def mask_network(self, text: str) -> str:
        network = _parse_network(text)
        if network is None:
            return MASKED_TEXT if text else text
        if self._address_masks is None:
            self._addresses.add(network.address)
            return text
        return str(self._address_masks.mask_network(network))

    def mask_weights(self, text: str) -> str:
        """kbpf.io/weights: ``web-0=3, 10.0.0.7=0, node:worker-2=2``."""
        return ", ".join(self._mask_weight(part.strip()) for part in text.split(","))

    def _mask_weight(self, part: str) -> str:
        name, equals, number = (piece.strip() for piece in part.rpartition("="))
        if not equals or not _NUMBER.fullmatch(number):
            return MASKED_TEXT if part else part
        kind, colon, value = name.partition(":")
        if name == "*":
            masked = name
        elif _parse_address(name) is not None:
            masked = self.mask_address(name)
        elif colon and kind in ("node", "zone"):
            class_ = NameClass.NODE if kind == "node" else NameClass.ZONE
            masked = f"{kind}:{self.mask_name(class_, value)}"
        else:
            masked = self.mask_name(NameClass.POD, name)
        return f"{masked}={number}"

    def _walk(self, value: dict[str, Any]) -> dict[str, Any]:
        kind = Kind(value["kind"])
        body = {name: child for name, child in value.items() if name != "kind"}
        return {"kind": str(kind), **self._walk_value(body, SHAPES[kind], kind, "")}

    def _walk_value(self, value: Any, shape: Shape | Any, kind: Kind, path: str) -> Any:
        match value:
            case dict():
                return {
                    name: self._walk_value(
                        child, shape[name], kind, f"{path}.{name}" if path else name
                    )
                    for name, child in value.items()
                    if isinstance(shape, dict) and name in shape
                }
            case list():
                if not isinstance(shape, list):
                    return []
                return [self._walk_value(child, shape[0], kind, f"{path}[]") for child in value]
            case str():
                rule = MASKS[kind].get(path)
                return rule(self, value) if rule is not None else MASKED_TEXT
        return value


def mask_recording(read_lines: Callable[[], Iterable[bytes]], output: BinaryIO) -> None:
    """Masks the lines of a recording that this process has written. Raises OSError."""
    masker = Masker()
    for line in read_lines():
        _mask_line(line, masker.collect, masker)
    masker.finish()
    for line in read_lines():
        output.write(_mask_line(line, masker.mask, masker))


def _mask_line(
    line: bytes, mask_object: Callable[[dict[str, Any]], dict[str, Any]], masker: Masker
) -> bytes:
    value = msgspec.json.decode(line)
    if "apiVersion" in value:
        node = masker.mask_name(NameClass.NODE, value["node"])
        value |= {"node": node, "masked": True}
    elif "object" in value:
        value["object"] = mask_object(value["object"])
    return msgspec.json.encode(value) + b"\n"


def _make_masks(class_: NameClass, names: Iterable[str]) -> dict[str, str]:
    """A mask for each name of a class."""
    kept = KEPT_NAMES.get(class_, {})
    ordered = sorted(names)
    width = max(3, len(str(len(ordered))))
    masks = {}
    for rank, name in enumerate(ordered, 1):
        if name in kept:
            masks[name] = name
        elif not _is_usable(class_, name):
            masks[name] = f"{UNUSABLE}_{rank:0{width}}"
        else:
            following = [beginning for anchor, beginning in kept.items() if name < anchor]
            masks[name] = f"{(following or [class_.value])[0]}-{rank:0{width}}"
    return masks


def _name(class_: NameClass) -> Rule:
    return lambda masker, text: masker.mask_name(class_, text)


def _keep(*values: str) -> Rule:
    """For a text of which kbpf knows the values."""
    return lambda masker, text: text if text in ("", *values) else MASKED_TEXT


def _keep_matching(pattern: re.Pattern[str]) -> Rule:
    return lambda masker, text: text if not text or pattern.fullmatch(text) else MASKED_TEXT


_PROTOCOLS: Final = _keep("TCP", "UDP", "SCTP")
_POLICIES: Final = _keep("Cluster", "Local")


def _ids(class_: NameClass) -> dict[str, Rule]:
    return {
        "metadata.name": _name(class_),
        "metadata.namespace": _name(NameClass.NAMESPACE),
        "metadata.uid": _name(NameClass.UID),
        "metadata.resourceVersion": _keep_matching(_NUMBER),
    }


def _meta(class_: NameClass) -> dict[str, Rule]:
    return {
        **_ids(class_),
        "metadata.creationTimestamp": _keep_matching(_TIME),
        "metadata.labels.kubernetes.io/service-name": _name(NameClass.SERVICE),
        "metadata.labels.service.kubernetes.io/headless": _keep(),
        "metadata.labels.service.kubernetes.io/service-proxy-name": _keep(),
        "metadata.labels.topology.kubernetes.io/zone": _name(NameClass.ZONE),
    }


MASKS: Final[Mapping[Kind, Mapping[str, Rule]]] = {
    Kind.SERVICE: {
        **_meta(NameClass.SERVICE),
        "metadata.labels.app": _keep("istiod"),
        "metadata.labels.app.kubernetes.io/name": _keep("istiod"),
        "metadata.labels.component": _keep("connect-injector"),
        "metadata.labels.linkerd.io/control-plane-component": _keep("destination"),
        "metadata.annotations.kbpf.io/algorithm": _keep(*Algorithm),
        "metadata.annotations.kbpf.io/weights": Masker.mask_weights,
        "spec.type": _keep("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
        "spec.clusterIP": lambda masker, text: (
            text if text == "None" else masker.mask_address(text)
        ),
        "spec.clusterIPs[]": lambda masker, text: (
            text if text == "None" else masker.mask_address(text)
        ),
        "spec.ports[].name": _name(NameClass.PORT),
        "spec.ports[].protocol": _PROTOCOLS,
        "spec.externalIPs[]": Masker.mask_address,
        "spec.loadBalancerSourceRanges[]": Masker.mask_network,
        "spec.externalTrafficPolicy": _POLICIES,
        "spec.internalTrafficPolicy": _POLICIES,
        "spec.sessionAffinity": _keep("None", "ClientIP"),
        "status.loadBalancer.ingress[].ip": Masker.mask_address,
        "status.loadBalancer.ingress[].ipMode": _keep("VIP", "Proxy"),
    },
    Kind.SLICE: {
        **_meta(NameClass.SLICE),
        "metadata.annotations.endpoints.kubernetes.io/last-change-trigger-time": _keep_matching(
            _TIME
        ),
        "addressType": _keep("IPv4", "IPv6", "FQDN"),
        "endpoints[].addresses[]": Masker.mask_address,
        "endpoints[].nodeName": _name(NameClass.NODE),
        "endpoints[].zone": _name(NameClass.ZONE),
        "endpoints[].hints.forZones[].name": _name(NameClass.ZONE),
        "endpoints[].hints.forNodes[].name": _name(NameClass.NODE),
        "endpoints[].targetRef.kind": _keep("Pod"),
        "endpoints[].targetRef.name": _name(NameClass.POD),
        "ports[].name": _name(NameClass.PORT),
        "ports[].protocol": _PROTOCOLS,
    },
    Kind.NODE: {
        **_meta(NameClass.NODE),
        "metadata.deletionTimestamp": _keep_matching(_TIME),
        "spec.podCIDR": Masker.mask_network,
        "spec.podCIDRs[]": Masker.mask_network,
        "spec.taints[].key": _keep(TO_BE_DELETED_TAINT),
        "status.addresses[].type": _keep("InternalIP", "ExternalIP"),
        "status.addresses[].address": Masker.mask_address,
    },
    Kind.POD: {
        **_ids(NameClass.POD),
        "metadata.labels.kbpf.io/socket-lb": _keep("off"),
        "metadata.annotations.sidecar.istio.io/status": _keep(),
        "metadata.annotations.ambient.istio.io/redirection": _keep("enabled", "pending"),
        "metadata.annotations.linkerd.io/proxy-version": _keep(),
        "metadata.annotations.consul.hashicorp.com/transparent-proxy-status": _keep(),
        "spec.nodeName": _name(NameClass.NODE),
    },
}
"""What is done to each text; it becomes MASKED_TEXT if it has no row."""
