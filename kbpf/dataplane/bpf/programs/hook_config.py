"""The map `config`: what the socket hooks are told of the machine and the settings, and whom they
leave alone.
"""

from collections.abc import Collection
from typing import Final

from kbpf.dataplane.bpf.changes.commit import ZERO
from kbpf.dataplane.bpf.hooks import HELPER_SET_RETVAL
from kbpf.dataplane.bpf.maps.layout import CONFIG, ConfigFlag
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import netns
from kbpf.model.config import Accounting, Config, SocketLb

LEAVING: Final = (
    ConfigFlag.HOST_ONLY | ConfigFlag.EXEMPTIONS | ConfigFlag.SOCKETS_OFF | ConfigFlag.PACKETS
)
"""What a restart takes over: whom the hooks leave alone, and whether packets are served then."""

SHARERS: Final = 8
"""One client may have this part of the map `affinity` (lookup.h, takes_share())."""


class HookSettings:
    """What they are told."""

    def __init__(self, config: Config, held: Map, lacks: Collection[int], follows: bool) -> None:
        """Writes what follows from the machine and the settings; whom the hooks leave alone stays
        as it was, until the packet path serves. `lacks`: helpers that this kernel has not;
        `follows`: another data plane has connections here.
        """
        self._config, self._map = config, held
        self._host_netns = netns.cookie() or 0
        self._share = max(1, config.sizes.affinity // SHARERS)
        _, before, _ = CONFIG.unpack(held.lookup(ZERO) or bytes(CONFIG.size))
        wanted = {
            ConfigFlag.SET_RETVAL: HELPER_SET_RETVAL not in lacks,
            ConfigFlag.LOCALHOST_NODE_PORTS: config.localhost_node_ports,
            ConfigFlag.FOLLOWS: follows,
            ConfigFlag.ACCOUNTING: config.accounting is not Accounting.OFF,
            ConfigFlag.ENDS: config.accounting is Accounting.FULL,
        }
        said = sum(flag for flag, holds in wanted.items() if holds)
        self._write(ConfigFlag(before) & LEAVING | ConfigFlag(said))

    def _write(self, flags: ConfigFlag) -> None:
        self._map.update(ZERO, CONFIG.pack(self._host_netns, flags, self._share))
        self.flags = flags

    def stand(self, flags: ConfigFlag) -> None:
        """Writes these flags, if they are news."""
        if flags != self.flags:
            self._write(flags)

    def alone(self) -> None:
        """Nothing is left of the other data plane."""
        self.stand(self.flags & ~ConfigFlag.FOLLOWS)

    def leave_alone(self, exempt: bool, served: bool) -> None:
        """Tells whom to leave alone, once the packet path has `served` them; until then it stays as
        it was. Who is not to be left alone any more is served by the hooks at once. `exempt`:
        whether some cgroups are.
        """
        mode, before = self._config.socket_lb, self.flags
        wanted = ConfigFlag.EXEMPTIONS if exempt else ConfigFlag(0)
        if mode is not SocketLb.ON:
            off = mode is SocketLb.OFF
            wanted |= ConfigFlag.SOCKETS_OFF if off else ConfigFlag.HOST_ONLY
        if self._config.packet_path:
            wanted |= ConfigFlag.PACKETS
        if not served:
            if ConfigFlag.SOCKETS_OFF in before:
                before |= ConfigFlag.HOST_ONLY
            wanted &= before
        self.stand(self.flags & ~LEAVING | wanted)
