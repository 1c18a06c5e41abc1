"""The map `config`: what the socket hooks are told of the machine and the settings, and whom they
leave alone.
"""

from collections.abc import Collection
from typing import Final

from kbpf.dataplane.bpf.changes.commit import ZERO
from kbpf.dataplane.bpf.maps.layout import CONFIG, ConfigFlag
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.bpf.uapi import (
    BPF_FUNC_set_retval,
)
from kbpf.kernel.system import netns
from kbpf.model.config import Accounting, Config, SocketLb

EXEMPTION_FLAGS: Final = (
    ConfigFlag.HOST_ONLY | ConfigFlag.EXEMPTIONS | ConfigFlag.SOCKET_LB_OFF | ConfigFlag.PACKET_PATH
)
"""What a restart takes over: whom the hooks leave alone, and whether packets are served then."""

MIN_AFFINITY_SHARERS: Final = 8
"""One client may have this part of the map `affinity` (lookup.h, take_share())."""


class HookConfig:
    """What they are told."""

    def __init__(
        self, config: Config, map_: Map, missing: Collection[int], coexisting: bool
    ) -> None:
        """Writes what follows from the machine and the settings; whom the hooks leave alone stays
        as it was, until the packet path serves. `lacks`: helpers that this kernel has not;
        `follows`: another data plane has connections here.
        """
        self._config, self._map = config, map_
        self._host_netns = netns.read_cookie() or 0
        self._affinity_share = max(1, config.sizes.affinity // MIN_AFFINITY_SHARERS)
        _, previous, _ = CONFIG.unpack(map_.lookup(ZERO) or bytes(CONFIG.size))
        settings = {
            ConfigFlag.SET_RETVAL: BPF_FUNC_set_retval not in missing,
            ConfigFlag.LOCALHOST_NODE_PORTS: config.localhost_node_ports,
            ConfigFlag.COEXISTING: coexisting,
            ConfigFlag.ACCOUNTING: config.accounting is not Accounting.OFF,
            ConfigFlag.COUNT_CONNECTION_ENDS: config.accounting is Accounting.FULL,
        }
        enabled_flags = sum(flag for flag, enabled in settings.items() if enabled)
        self._write(ConfigFlag(previous) & EXEMPTION_FLAGS | ConfigFlag(enabled_flags))

    def _write(self, flags: ConfigFlag) -> None:
        self._map.update(ZERO, CONFIG.pack(self._host_netns, flags, self._affinity_share))
        self.flags = flags

    def set_flags(self, flags: ConfigFlag) -> None:
        """Writes these flags, if they are news."""
        if flags != self.flags:
            self._write(flags)

    def end_coexistence(self) -> None:
        """Nothing is left of the other data plane."""
        self.set_flags(self.flags & ~ConfigFlag.COEXISTING)

    def set_exemptions(self, has_exemptions: bool, packet_path_serves: bool) -> None:
        """Tells whom to leave alone, once the packet path has `served` them; until then it stays as
        it was. Who is not to be left alone any more is served by the hooks at once. `exempt`:
        whether some cgroups are.
        """
        mode, previous = self._config.socket_lb, self.flags
        flags = ConfigFlag.EXEMPTIONS if has_exemptions else ConfigFlag(0)
        if mode is not SocketLb.ON:
            is_off = mode is SocketLb.OFF
            flags |= ConfigFlag.SOCKET_LB_OFF if is_off else ConfigFlag.HOST_ONLY
        if self._config.packet_path:
            flags |= ConfigFlag.PACKET_PATH
        if not packet_path_serves:
            if ConfigFlag.SOCKET_LB_OFF in previous:
                previous |= ConfigFlag.HOST_ONLY
            flags &= previous
        self.set_flags(self.flags & ~EXEMPTION_FLAGS | flags)
