# SPDX-License-Identifier: Apache-2.0
"""The map `config`: settings and exemption flags for the socket hooks."""

from collections.abc import Collection
from typing import Final

from kbpf.dataplane.bpf.maps.layout import CONFIG, ConfigFlag
from kbpf.dataplane.bpf.state.commit import ZERO
from kbpf.kernel.bpf import kernel_members
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.bpf.uapi import BPF_FUNC_set_retval
from kbpf.kernel.system import netns
from kbpf.model.config import Accounting, Config, SocketLb
from kbpf.model.metrics import ALL_COUNTERS, CHOICE_COUNTERS, FAILURE_COUNTERS

FLAGS_KEPT_UNTIL_SERVING: Final = (
    ConfigFlag.HOST_ONLY
    | ConfigFlag.EXEMPTIONS
    | ConfigFlag.SOCKET_LB_OFF
    | ConfigFlag.PACKET_PATH
    | ConfigFlag.KERNEL_SOCKETS
)
"""The flags that leave sockets to the packet path, or say that it serves. A restart keeps those of
the earlier agent until our packet path serves.
"""

MIN_AFFINITY_SHARERS: Final = 8
"""One owner may use this fraction (1/n) of the map `affinity` (lookup.h, take_share())."""


def counted_fields(flags: ConfigFlag) -> frozenset[str]:
    """The fields of ConnectionStats that the programs count with these settings."""
    if ConfigFlag.COUNT_CONNECTION_ENDS in flags:
        return ALL_COUNTERS
    if ConfigFlag.ACCOUNTING not in flags:
        return frozenset()
    return CHOICE_COUNTERS | (FAILURE_COUNTERS if ConfigFlag.TRACING in flags else frozenset())


def affinity_share(config: Config) -> int:
    """How many entries of `affinity` one owner may have."""
    return max(1, config.sizes.affinity // MIN_AFFINITY_SHARERS)


def compute_settings(config: Config, missing: Collection[int]) -> ConfigFlag:
    """The flags that the settings alone decide. `missing`: helpers that this kernel lacks."""
    settings = {
        ConfigFlag.SET_RETVAL: BPF_FUNC_set_retval not in missing,
        ConfigFlag.LOCALHOST_NODE_PORTS: config.localhost_node_ports,
        ConfigFlag.ACCOUNTING: config.accounting is not Accounting.OFF,
        ConfigFlag.COUNT_CONNECTION_ENDS: config.accounting is Accounting.FULL,
    }
    return ConfigFlag(sum(flag for flag, enabled in settings.items() if enabled))


def compute_exemptions(config: Config, has_exemptions: bool) -> ConfigFlag:
    """Those of FLAGS_KEPT_UNTIL_SERVING that are set once the packet path serves.
    `has_exemptions`: whether any cgroup is exempt.
    """
    mode, flags = config.socket_lb, ConfigFlag(0)
    if has_exemptions:
        flags |= ConfigFlag.EXEMPTIONS
    if mode is not SocketLb.ON:
        flags |= ConfigFlag.SOCKET_LB_OFF if mode is SocketLb.OFF else ConfigFlag.HOST_ONLY
    if config.packet_path:
        flags |= ConfigFlag.PACKET_PATH
        if kernel_members.find_bit():
            flags |= ConfigFlag.KERNEL_SOCKETS
    return flags


class HookConfig:
    def __init__(self, config: Config, map_: Map, missing: Collection[int], coexisting: bool) -> None:
        """Writes the settings. Exemption flags of an earlier agent are kept until the packet path
        serves.

        `missing`: helpers that this kernel lacks. `coexisting`: another data plane has connections.
        """
        self._config, self._map = config, map_
        self._host_netns = netns.read_cookie() or 0
        self._affinity_share = affinity_share(config)
        _, previous, _ = CONFIG.unpack(map_.lookup(ZERO) or bytes(CONFIG.size))
        kept_flags = ConfigFlag(previous) & (FLAGS_KEPT_UNTIL_SERVING | ConfigFlag.TRACING)
        if coexisting:
            kept_flags |= ConfigFlag.COEXISTING
        self._write(kept_flags | compute_settings(config, missing))

    def _write(self, flags: ConfigFlag) -> None:
        self._map.update(ZERO, CONFIG.pack(self._host_netns, flags, self._affinity_share))
        self.flags = flags

    def set_flags(self, flags: ConfigFlag) -> None:
        """Writes these flags if they have changed."""
        if flags != self.flags:
            self._write(flags)

    def set_tracing(self, tracing: bool) -> None:
        """Whether every failure of a backend is noticed (bpf/trace.h)."""
        flag = ConfigFlag.TRACING if tracing else ConfigFlag(0)
        self.set_flags(self.flags & ~ConfigFlag.TRACING | flag)

    def end_coexistence(self) -> None:
        """Clears the flag once the other data plane has no connections left."""
        self.set_flags(self.flags & ~ConfigFlag.COEXISTING)

    def set_exemptions(self, has_exemptions: bool, may_exempt: bool) -> None:
        """Updates the flags that decide which sockets are left to the packet path. A removed
        exemption takes effect at once, a new one only if `may_exempt`: the packet path serves, or
        is disabled. `has_exemptions`: whether any cgroup is exempt.
        """
        flags, previous = compute_exemptions(self._config, has_exemptions), self.flags
        if not may_exempt:
            # Flags may be cleared, but not set. If the hooks were off, the sockets of pods were
            # exempt before, too, so HOST_ONLY may be set.
            if ConfigFlag.SOCKET_LB_OFF in previous:
                previous |= ConfigFlag.HOST_ONLY
            flags &= previous
        self.set_flags(self.flags & ~FLAGS_KEPT_UNTIL_SERVING | flags)
