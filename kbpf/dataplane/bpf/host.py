"""What the packet path needs of a node that others have set up too: that a closed FORWARD chain
lets masqueraded packets pass, and that no socket of the node takes their ports. And what a
kube-proxy's connections needed after it had gone is taken away when they are over.

All is looked at again every few seconds, since others write there as well; a look at rules that
nobody changed is one message to the kernel. What cannot be done is said once, with what to do, and
stops nothing.
"""

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kbpf.dataplane import firewalls
from kbpf.dataplane.bpf.maps.flow_entries import look_for_flows
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import snat_ports
from kbpf.errors import KbpfError, KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.system import sysctl
from kbpf.model.config import Config
from kbpf.takeover import conntrack_keepalive

log = logging.getLogger("kbpf.dataplane")

NOTE: Final = "beside"
"""A folder in the pin folder: we may have put something into the node. It has an empty one for each
range of ports that we have reserved (``61000-65535``), since a bpffs holds no files."""
LOOK_SECONDS: Final = 2.0
HOLD_LOOKS: Final = 3
"""So many looks at whom others have masqueraded: before and after our programs are everywhere."""
HANDOVER_SECONDS: Final = 30.0
"""Between two looks at whether the last connection of a kube-proxy has ended."""
PASSING: Final = frozenset((errno.ENOENT, errno.ERESTART, *forward_rules.UNKNOWN))
"""The ruleset changed under our hands: next time; or there is no nf_tables: nothing to do."""
FORWARDING: Final = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")


class Beside:
    """Keeps both for one agent. One thread calls."""

    def __init__(self, pins: Pins, config: Config) -> None:
        self._ports = frozenset(range(config.masquerade_ports[0], config.masquerade_ports[1] + 1))
        self._pins = pins
        self._reserved = Reserved(pins)
        self._mark = 1 << config.masquerade_bit
        self._generation = -1
        self._due = float("-inf")
        self._handover_due = float("-inf")
        self._looks = 0
        self._masquerade_ports = config.masquerade_ports
        self._told: set[str] = set()

    def look(self, now: float) -> None:
        """Puts right what is not as it should be, if it is time to look; `now` in seconds."""
        if now < self._due:
            return
        if self._due == float("-inf"):
            self._reserved.begin()
            self._say_what_is_missing()
        self._due = now + LOOK_SECONDS
        self._looks += 1
        if self._looks <= HOLD_LOOKS:
            with self._saying_problems():
                self._hold_theirs()
        with self._saying_problems():
            self._reserved.keep(self._ports)
        with self._saying_problems():
            self._keep_rules()
        with self._saying_problems():
            self._end_handover(now)

    def _hold_theirs(self) -> None:
        """Clients that a kube-proxy before us has masqueraded keep their ports."""
        maps = self._pins.maps
        if (maps / "order").exists():
            with Map.open(maps / "flows") as flows, Map.open(maps / "order") as order:
                count = snat_ports.hold_theirs(flows, order, self._masquerade_ports)
            if count:
                with Map.open(maps / "tracked") as tracked:
                    look_for_flows(tracked)
                log.info("ports that conntrack has given are left to it count=%d", count)

    def _end_handover(self, now: float) -> None:
        if self._generation < 0 or now < self._handover_due:  # without nf_tables there is none
            return
        self._handover_due = now + HANDOVER_SECONDS
        for family in conntrack_keepalive.end():
            log.info("the last connection of kube-proxy is over family=%s", family)

    def _keep_rules(self) -> None:
        try:
            generation = forward_rules.generation()
            if generation == self._generation:
                return
            chains = forward_rules.forward_chains()
            for chain in chains:
                self._keep_rule(chain)
            for done in conntrack_keepalive.let_pass(chains):
                log.info("%s", done)
        except KernelError as error:
            if error.errno not in PASSING:
                raise
        else:
            self._generation = generation  # of before: our own changes are looked at, too

    def _keep_rule(self, chain: forward_rules.Chain) -> None:
        if done := forward_rules.let_pass(chain, self._mark):
            log.info("%s chain=%r mark=%#x", done, str(chain), self._mark)

    def _say_what_is_missing(self) -> None:
        for name in FORWARDING:
            with contextlib.suppress(KernelError):
                if sysctl.read(name) == "0":
                    self._warn(f"{name} is 0: this node forwards nothing to pods; set it to 1")
        for line in (*firewalls.forward(self._mark), *firewalls.early()):
            self._warn(line)

    @contextlib.contextmanager
    def _saying_problems(self) -> Iterator[None]:
        try:
            yield
        except KbpfError as error:
            self._warn(str(error))

    def _warn(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            log.warning("%s", line)


class Reserved:
    """Ports that sockets of the node keep away from, and which of them we have put there (NOTE).
    Ports that others had reserved before us stay when ours go.
    """

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._seen: tuple[object, ...] = ()

    @property
    def _folder(self) -> Path:
        return self._pins.root / NOTE

    def begin(self) -> None:
        """Says, in the pin folder, that there may be something of ours from now on."""
        with contextlib.suppress(OSError):  # told when it is needed
            self._folder.mkdir(exist_ok=True)

    def keep(self, wanted: frozenset[int]) -> None:
        """Reserves them where the kernel would else give them to sockets."""
        low, high = sysctl.local_ports()
        seen = wanted, low, high, sysctl.read(sysctl.RESERVED_PORTS)
        if seen == self._seen:
            return
        self._seen = seen  # also when it fails: it is tried again when something changes
        meet = low <= max(wanted) and min(wanted) <= high
        self._become(wanted if meet else frozenset())

    def release(self) -> bool:
        """Takes away what we have put there; whether there was anything."""
        return self._become(frozenset())

    def _become(self, wanted: frozenset[int]) -> bool:
        there = sysctl.parse_ports(sysctl.read(sysctl.RESERVED_PORTS))
        ours = self._ours()
        if not ours <= there:  # somebody has written the list anew: all in it is theirs
            self._note(ours := frozenset())
        theirs = there - ours
        if theirs | wanted == there:
            return False
        added = wanted - theirs
        self._note(added)
        try:
            sysctl.write(sysctl.RESERVED_PORTS, sysctl.format_ports(theirs | wanted))
        except KernelError:
            self._note(ours)
            raise
        if added:
            log.info("reserved %s=%s", sysctl.RESERVED_PORTS, sysctl.format_ports(theirs | wanted))
        return True

    def _ours(self) -> frozenset[int]:
        try:
            return sysctl.parse_ports(",".join(path.name for path in self._folder.iterdir()))
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()

    def _note(self, ports: frozenset[int]) -> None:
        wanted = {f"{low}-{high}" for low, high in sysctl.ranges(ports)}
        try:
            self._folder.mkdir(exist_ok=True)
            for path in self._folder.iterdir():
                if path.name not in wanted:
                    path.rmdir()
            for name in wanted:
                (self._folder / name).mkdir(exist_ok=True)
        except OSError as error:
            raise KernelError(
                "cannot note which ports are reserved", str(self._folder), "", error.errno or 0
            ) from error


def may_hold(pins: Pins) -> bool:
    """Whether an agent with this pin folder has looked after the node."""
    return (pins.root / NOTE).is_dir()


def remove(pins: Pins, rules: bool = True) -> tuple[str, ...]:
    """Takes our rules (unless they serve another mode) out of the chains, and our ports from the
    reserved ones; what was there.

    KernelError if the kernel refuses. Without nf_tables or its library there can be nothing of it.
    """
    gone = []
    if rules and forward_rules.available().works:
        for chain in forward_rules.forward_chains():
            gone += [f"rule in {chain}"] * forward_rules.remove_ours(chain)
        gone += [
            f"table {family} {conntrack_keepalive.TABLE}"
            for family in conntrack_keepalive.end(force=True)
        ]
        conntrack_keepalive.let_pass(
            forward_rules.forward_chains()
        )  # somebody else may have taken the table
    if Reserved(pins).release():
        gone.append(f"ports in {sysctl.RESERVED_PORTS}")
    with contextlib.suppress(OSError):
        (pins.root / NOTE).rmdir()
    return tuple(gone)
