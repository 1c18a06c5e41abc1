# SPDX-License-Identifier: Apache-2.0
"""Settings of the node that the packet path needs and that other programs change too.

A FORWARD chain with policy DROP has to accept masqueraded packets, and the kernel must not assign
the ports used for masquerading to sockets of the node. Rules that keep the last connections of a
kube-proxy alive are removed when these have ended.

All of it is checked every few seconds, FORWARD chains less often if that takes long; a check costs
one netlink message if no rule has changed. A failure is logged once, with advice, and stops
nothing.
"""

import contextlib
import errno
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from kbpf.dataplane import node
from kbpf.dataplane.bpf.maps.layout import DEVICE, TARGET, DeviceFlag, Role, ServiceFlag, ServiceValue
from kbpf.dataplane.bpf.maps.pinning import HOST_FOLDER, Pins
from kbpf.dataplane.bpf.packet_path import nat_table, snat_ports
from kbpf.dataplane.bpf.packet_path.nat_table import NatTable
from kbpf.dataplane.node import KeepalivePoll, forwarding_warnings, reconcile_forward_rules
from kbpf.errors import KbpfError, KernelError, kernel_errors
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.netfilter import forward_rules, iptables_legacy
from kbpf.kernel.netfilter.pre_dnat_rules import EarlyChains
from kbpf.kernel.system import sysctl
from kbpf.model.config import Config
from kbpf.model.objects import Protocol
from kbpf.takeover import conntrack_keepalive

log = logging.getLogger("kbpf.dataplane")

HOST_POLL_INTERVAL_S: Final = 2.0
UNREADABLE: Final = "cannot read the firewall rules of the node"
BYPASSED_POLL_INTERVAL_S: Final = 20.0
"""Interval between two looks for changed rules before DNAT."""
MAX_BYPASSED_SHARE: Final = 0.02
"""Of the agent's time: a table may have 50,000 rules, which takes a second."""
MAX_RULES_SHARE: Final = 0.1
"""Of the agent's time, for reading FORWARD chains while rules change all the time: one of 10,000
rules takes 0.2 s."""
CONNTRACK_HINT: Final = (
    "use --mode ipvs, or --forwarding stack with the replacements in docs/migration.md (Firewalls "
    "in front of NodePorts)"
)
MAX_MASQUERADE_PORT: Final = 65_535 - 1024
"""With conntrack, which gives masqueraded clients the ports above (choose_client_port() in
conntrack.h).
"""
PORT_RESERVATION_POLLS: Final = 3
"""Number of polls after the start that also reserve the ports of conntrack's masqueraded
connections, since some of these begin before our programs are attached everywhere.
"""
TRANSIENT_ERRNOS: Final = frozenset((errno.ENOENT, errno.ERESTART, *forward_rules.UNSUPPORTED_ERRNOS))
"""Errors that are not logged: the ruleset changed during the check, which is repeated later, or
nf_tables is missing, and there is nothing to do.
"""


class HostIntegration:
    """Maintains the settings for one agent. Once the data plane is open, all methods except
    problems() are for the thread that calls poll().
    """

    def __init__(self, pins: Pins, config: Config) -> None:
        self._ports = frozenset(range(config.masquerade_ports[0], config.masquerade_ports[1] + 1))
        self._pins = pins
        self._port_reservation = PortReservation(pins)
        self._mark = 1 << config.masquerade_bit
        self._nat_table: NatTable | None = None
        self._generation = -1
        self._due = self._rules_due = float("-inf")
        self._keepalive = KeepalivePoll()
        self._polls = 0
        self._masquerade_ports = config.masquerade_ports
        self._logged_lines: set[str] = set()
        self.bypassed = EarlyChains((), ())
        self._bypassed_due = float("-inf")
        self._bypassed_state: tuple[int, bool] = -1, False

    def choose_forwarding(self, config: Config) -> tuple[Config, str]:
        """Lets conntrack translate if it has to or, with `auto`, if it can. Returns the settings
        with the value of --forwarding that is in force, and why `auto` is not netfilter, or "".
        Raises KernelError if conntrack has to translate, but cannot on this node.
        """
        if not config.packet_path or config.forwarding not in ("auto", "netfilter"):
            return config, ""
        self._port_reservation.mark()
        nat_table = NatTable(self._mark)
        try:
            if config.masquerade_ports[1] > MAX_MASQUERADE_PORT:
                raise KernelError(
                    "--masquerade-ports leaves fewer than 1,024 ports above it to conntrack",
                    hint=f"its last port can be {MAX_MASQUERADE_PORT}",
                )
            nat_table.require()
        except KernelError as error:
            reason = f"{error.what} ({error.hint})" if error.hint else error.what
            if config.forwarding == "auto":
                return replace(config, forwarding="stack"), reason
            raise KernelError(
                f"--forwarding netfilter is not possible: {reason}", error.where, CONNTRACK_HINT, error.errno
            ) from error
        self._nat_table = nat_table
        return replace(config, forwarding="netfilter"), ""

    def leave_conntrack(self) -> None:
        """The kernel has refused the program that lets conntrack translate: the next poll() removes
        what choose_forwarding() has created.
        """
        self._nat_table = None

    def poll(self, now: float) -> None:
        """Repairs the settings if a check is due at `now` (seconds)."""
        if now < self._due:
            return
        if self._due == float("-inf"):
            self._port_reservation.mark()
            self._warn_about_host()
        self._due = now + HOST_POLL_INTERVAL_S
        self._polls += 1
        self._find_bypassed_rules(now)
        if self._polls <= PORT_RESERVATION_POLLS:
            with self._warning_on_error():
                self._reserve_conntrack_ports()
        with self._warning_on_error():
            self._port_reservation.reserve(self._ports)
        with self._warning_on_error():
            self._ensure_rules(now)
        with self._warning_on_error():
            # without nf_tables there are no rules to remove
            if self._generation >= 0:
                self._keepalive.poll(now)

    def _reserve_conntrack_ports(self) -> None:
        """Reserves the ports of clients that kube-proxy has masqueraded."""
        folder = self._pins.maps
        if (folder / "flow_queue").exists():
            with contextlib.ExitStack() as stack:
                maps = {name: stack.enter_context(Map.open(folder / name)) for name in snat_ports.RESERVATION_MAPS}
                count = snat_ports.reserve_conntrack_ports(maps, self._masquerade_ports)
            if count:
                log.info("reserved SNAT ports that conntrack uses count=%d", count)

    def _ensure_rules(self, now: float) -> None:
        try:
            generation = forward_rules.read_generation()
            if generation == self._generation:
                return
            self._ensure_nat_table()
            if now < self._rules_due:
                return
            start = time.thread_time()
            if self._nat_table is not None:
                self._nat_table.set_marks(self._may_refuse_forwarded())
            reconcile_forward_rules(self._mark)
            self._rules_due = now + (time.thread_time() - start) / MAX_RULES_SHARE
        except KernelError as error:
            if error.errno not in TRANSIENT_ERRNOS:
                raise
        else:
            # read before our own changes, so the next poll checks these too
            self._generation = generation

    def _ensure_nat_table(self) -> None:
        if self._nat_table is None:
            if nat_table.retire():
                log.info("removed table=%s: --forwarding is not netfilter any more", nat_table.TABLE)
        elif self._nat_table.ensure():
            log.info("wrote table=%s", nat_table.TABLE)

    def _may_refuse_forwarded(self) -> bool:
        is_closed = any(chain.is_closed for chain in forward_rules.list_forward_chains())
        return is_closed or bool(node.forward_warnings(self._mark))

    def _warn_about_host(self) -> None:
        try:
            lines = (*forwarding_warnings(), *node.forward_warnings(self._mark))
        except Exception:  # a ruleset that we cannot parse must not end the agent
            log.exception(UNREADABLE)
            return
        for line in lines:
            self._warn_once(line)

    def _find_bypassed_rules(self, now: float) -> None:
        """Looks for rules of the host that would guard NodePorts, but see no packet before the
        packet path has translated it. Again when the ruleset changes, which iptables-legacy does
        not tell, or when conntrack begins or ceases to translate all that rules would guard.
        """
        if now < self._bypassed_due:
            return
        self._bypassed_due = now + BYPASSED_POLL_INTERVAL_S
        start = time.thread_time()
        in_conntrack = self._nat_table is not None
        # conntrack translates after these rules
        is_all_in_conntrack = in_conntrack and not read_external_ports(self._pins, in_conntrack)
        try:
            generation = forward_rules.read_generation()
        except KernelError:  # without nf_tables
            generation = 0
        tables = {name for f in iptables_legacy.FAMILIES for name in iptables_legacy.list_tables(f)}
        state = generation, is_all_in_conntrack
        if state == self._bypassed_state and tables.isdisjoint(("raw", "mangle")):
            return
        self._bypassed_state = state
        try:
            self.bypassed = EarlyChains((), ()) if is_all_in_conntrack else node.find_early_chains()
        except Exception:  # a ruleset that we cannot parse must not end the agent
            if UNREADABLE not in self._logged_lines:
                log.exception(UNREADABLE)
            self._logged_lines.add(UNREADABLE)
        cost = time.thread_time() - start
        self._bypassed_due = now + max(BYPASSED_POLL_INTERVAL_S, cost / MAX_BYPASSED_SHARE)
        for line in self.problems():
            self._warn_once(line)

    def problems(self) -> tuple[str, ...]:
        """One line for the chains of the host that do not guard NodePorts, and one for those of
        which this is unknown.
        """
        return node.early_drop_warnings(self.bypassed)

    @contextlib.contextmanager
    def _warning_on_error(self) -> Iterator[None]:
        try:
            yield
        except KbpfError as error:
            self._warn_once(str(error))

    def _warn_once(self, line: str) -> None:
        if line not in self._logged_lines:
            self._logged_lines.add(line)
            log.warning("%s", line)


def read_external_ports(pins: Pins, in_conntrack: bool = False) -> frozenset[int]:
    """The ports of NodePorts, ExternalIPs and VIPs that are programmed, by an agent that may have
    ended; none if nothing is pinned. `in_conntrack`: only those that kbpf's own table translates
    although conntrack is used (may_use_conntrack() in begin.h).
    """
    external = ServiceFlag.NODE_PORT | ServiceFlag.EXTERNAL_IP | ServiceFlag.LOAD_BALANCER
    try:
        in_own_table = set(Protocol) if not in_conntrack or _has_bridges(pins) else {Protocol.SCTP}
        with pins.open_map("services") as services:
            return frozenset(
                int.from_bytes(port, "big")
                for key, raw in services.items()
                for _, port, protocol in [TARGET.unpack(key)]
                if protocol in in_own_table and ServiceValue.unpack(raw).flags & external
            )
    except (KernelError, OSError):
        return frozenset()


def _has_bridges(pins: Pins) -> bool:
    """Whether packets of other machines may arrive at a bridge where conntrack cannot translate."""
    with pins.open_map("devices") as devices:
        return any(
            (bridge and role == Role.HOST) or DeviceFlag.SPANS in DeviceFlag(flags)
            for _, raw in devices.items()
            for role, _, flags, *_, bridge in [DEVICE.unpack(raw)]
        )


class PortReservation:
    """The reserved ports of the node, and a record of which of them are ours (HOST_FOLDER). Ports
    that were reserved before stay reserved when ours are released.
    """

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._last_state: tuple[object, ...] = ()

    @property
    def _folder(self) -> Path:
        return self._pins.root / HOST_FOLDER

    def mark(self) -> None:
        """Records in the pin folder that settings of the node may have been changed."""
        with contextlib.suppress(OSError):  # retried when the record is needed
            self._folder.mkdir(exist_ok=True)

    def reserve(self, ports: frozenset[int]) -> None:
        """Reserves these ports if they are in the range that the kernel assigns to sockets."""
        low, high = sysctl.read_local_port_range()
        state = ports, low, high, sysctl.read(sysctl.RESERVED_PORTS)
        if state == self._last_state:
            return
        self._last_state = state  # also on failure: retried when something changes
        overlaps = low <= max(ports) and min(ports) <= high
        self._set_ports(ports if overlaps else frozenset())

    def release(self, dry_run: bool = False) -> bool:
        """Releases our ports. Returns whether there were any."""
        if dry_run:
            reserved = sysctl.parse_ports(sysctl.read(sysctl.RESERVED_PORTS))
            our_ports = self._read_note()
            return bool(our_ports) and our_ports <= reserved
        return self._set_ports(frozenset())

    def _set_ports(self, ports: frozenset[int]) -> bool:
        reserved = sysctl.parse_ports(sysctl.read(sysctl.RESERVED_PORTS))
        our_ports = self._read_note()
        if not our_ports <= reserved:  # the list was overwritten, so it has no entry of ours
            self._write_note(our_ports := frozenset())
        foreign_ports = reserved - our_ports
        if foreign_ports | ports == reserved:
            return False
        added = ports - foreign_ports
        self._write_note(added)
        try:
            sysctl.write(sysctl.RESERVED_PORTS, sysctl.format_ports(foreign_ports | ports))
        except KernelError:
            self._write_note(our_ports)
            raise
        if added:
            log.info("reserved %s=%s", sysctl.RESERVED_PORTS, sysctl.format_ports(foreign_ports | ports))
        return True

    def _read_note(self) -> frozenset[int]:
        try:
            return sysctl.parse_ports(",".join(path.name for path in self._folder.iterdir()))
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()

    def _write_note(self, ports: frozenset[int]) -> None:
        names = {f"{low}-{high}" for low, high in sysctl.merge_ranges(ports)}
        with kernel_errors("cannot record which ports are reserved", str(self._folder), ""):
            self._folder.mkdir(exist_ok=True)
            for path in self._folder.iterdir():
                if path.name not in names:
                    path.rmdir()
            for name in names:
                (self._folder / name).mkdir(exist_ok=True)


def may_need_cleanup(pins: Pins) -> bool:
    """Whether an agent with this pin folder may have changed settings of the node."""
    return (pins.root / HOST_FOLDER).is_dir()


def remove(pins: Pins, rules: bool = True, dry_run: bool = False) -> tuple[str, ...]:
    """Removes our rules (unless another mode uses them: `rules`) and releases our reserved
    ports. Returns what was removed, a line each; with `dry_run` what would be.

    Raises KernelError if the kernel refuses. Without nf_tables there are no rules to remove.
    """
    removed = []
    has_nf_tables = bool(forward_rules.probe_nf_tables().works)
    if has_nf_tables and (nat_table.exists() if dry_run else nat_table.retire()):
        removed.append(f"table inet {nat_table.TABLE}")
    if rules and has_nf_tables:
        for chain in forward_rules.list_forward_chains():
            removed += [f"rule in {chain}"] * len(chain.masquerade_rules)
            if not dry_run:
                forward_rules.remove_masquerade_rules(chain)
        families = conntrack_keepalive.list_families() if dry_run else conntrack_keepalive.remove_unneeded(force=True)
        removed += [f"table {family} {conntrack_keepalive.TABLE}" for family in families]
        if not dry_run:
            conntrack_keepalive.reconcile_forward_rules(
                forward_rules.list_forward_chains()
            )  # another program may own the table now
    if PortReservation(pins).release(dry_run):
        removed.append(f"ports in {sysctl.RESERVED_PORTS}")
    if dry_run:
        return tuple(removed)
    with contextlib.suppress(OSError):
        (pins.root / HOST_FOLDER).rmdir()
    return tuple(removed)
