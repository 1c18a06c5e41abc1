# SPDX-License-Identifier: Apache-2.0
"""What the agent asks the node, and repairs there, in the thread `host`.

Reading thousands of firewall rules or connections takes seconds, and a change of a Service must not
wait for that. So the agent's thread, which writes the data plane, asks the node only what a change
depends on, and this thread does the rest:

- firewall rules, other settings of the node, and the remains of another data plane
  (DataPlane.maintain_host());
- the ports on which processes of the node listen (Listeners): Services cannot take them at the
  node's addresses, nor ClusterIPs that a device of the node has;
- the limits of conntrack (ConntrackSysctls), as kube-proxy sets them at its start.

The limits govern the flows that conntrack translates (`--forwarding netfilter`), not those in
kbpf's maps. CNIs and the node's own connections need them, and without kube-proxy nothing else
sets them. The rules are those of kube-proxy's conntrack/sysctls.go:

- Only values that differ are written, in kube-proxy's order. The number of entries is written even
  if it was higher before.
- The hash table grows to a quarter of the number of entries and never shrinks. kube-proxy sets it
  below /sys, which a pod cannot write; the sysctl for the same number is tried first.
- Everything that cannot be written is logged in one line, with what to do. kube-proxy exits
  instead.
- In a network namespace other than the initial one, where the file with the number of entries is
  read-only, that number is the host's business and no warning is logged.
- On a node without nf_conntrack there is nothing to set; the agent polls for the module.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Set
from pathlib import Path
from typing import Final

from kbpf.dataplane.base import DataPlane
from kbpf.errors import KbpfError, KernelError, LastError
from kbpf.kernel.net import sock_diag
from kbpf.kernel.system import sysctl, threads
from kbpf.model.config import MAX_CONNTRACK_ENTRIES, Config, Conntrack
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol
from kbpf.policy.admission import is_listening

log = logging.getLogger("kbpf.agent")

# ---- ports on which processes listen -------------------------------------------------------------

LISTENER_POLL_INTERVAL_S: Final = 30.0
DEVICE_POLL_INTERVAL_S: Final = 0.25
"""A node-local DNS cache that is killed leaves its address on its device; its Service is served
again after at most this long. One poll takes a fifth of a millisecond: it reads the sockets at the
Services' ports only, since some nodes have tens of thousands of UDP sockets."""
MAX_SELECTED_PORTS: Final = 16
"""For more ports, all sockets are read at once."""
RELEASE_GRACE_S: Final = 600.0
"""A port stays reserved for this long after its listener is gone, so that a restart of sshd does
not hand its port to a Service."""


class Listeners:
    """The agent's thread reads the listeners first; then refresh() is for the thread `host`, and
    all else for the agent's. `read`: see sock_diag.list_listeners(). `device_ports`: ClusterIPs
    with ports that a device of the node has, and where a process listens now.
    """

    def __init__(self, read: Callable[..., frozenset[FrontendAddress]] = sock_diag.list_listeners) -> None:
        self._read = read
        self._error, self._was_read = LastError(), False
        self._due = float("-inf")
        self._last_seen: dict[FrontendAddress, float] = {}
        self.ports: frozenset[FrontendAddress] = frozenset()
        self.device_due = float("-inf")
        self.device_ports: frozenset[FrontendAddress] = frozenset()

    def read_first(self, now: float) -> None:
        """Reads the listeners unless this was done. Raises KernelError."""
        if not self._was_read:
            self._refresh(now)

    def refresh(self, now: float) -> bool:
        """Reads the listeners again if that is due; returns whether `ports` has changed. Does
        nothing before read_first(). `now` is time.monotonic().
        """
        return self._was_read and now >= self._due and self._refresh(now)

    def _refresh(self, now: float) -> bool:
        self._due = now + LISTENER_POLL_INTERVAL_S
        if (listeners := self._try_read()) is None:
            return False
        self._last_seen |= dict.fromkeys(listeners, now)
        self._last_seen = {
            address: last_seen for address, last_seen in self._last_seen.items() if now - last_seen < RELEASE_GRACE_S
        }
        has_changed = self.ports != self._last_seen.keys()
        if has_changed:
            self.ports = frozenset(self._last_seen)
        return has_changed

    def refresh_device_ports(self, now: float, device_frontends: Collection[frozenset[FrontendAddress]]) -> None:
        """Reads which of the `device_frontends` have a listener, if that is due: at once after
        there was none.
        """
        if not device_frontends:
            self.device_due, self.device_ports = float("-inf"), frozenset()
        elif now >= self.device_due:
            self.device_due = now + DEVICE_POLL_INTERVAL_S
            ports = {(at.protocol, at.port) for frontends in device_frontends for at in frontends}
            selected = (ports,) if len(ports) <= MAX_SELECTED_PORTS else ()
            if (listeners := self._try_read(*selected)) is not None:
                self.device_ports = select_listening(device_frontends, listeners)

    def _try_read(self, *ports: Collection[tuple[Protocol, int]]) -> frozenset[FrontendAddress] | None:
        """Where processes listen; None after an error, for example without free descriptors: what
        was read last then stays in force. Raises KernelError if nothing was.
        """
        try:
            listeners = self._read(*ports)
        except KernelError as error:
            if not self._was_read:
                raise
            if self._error.replace(error):
                log.warning("cannot read where processes listen, retrying: %s", error)
            return None
        self._error.replace(None)
        self._was_read = True
        return listeners


def select_listening(
    device_frontends: Iterable[frozenset[FrontendAddress]], listeners: Set[FrontendAddress]
) -> frozenset[FrontendAddress]:
    """Those of the frontends that have one of the `listeners`."""
    return frozenset(at for frontends in device_frontends for at in frontends if is_listening(at, listeners))


# ---- the limits of conntrack ---------------------------------------------------------------------

MODULE_POLL_INTERVAL_S: Final = 10.0
SYSCTL_PREFIX: Final = "net.netfilter."
NF_CONNTRACK_MAX: Final = f"{SYSCTL_PREFIX}nf_conntrack_max"
NF_CONNTRACK_BUCKETS: Final = f"{SYSCTL_PREFIX}nf_conntrack_buckets"
HASHSIZE_PARAMETER: Final = Path("/sys/module/nf_conntrack/parameters/hashsize")
ENTRIES_PER_BUCKET: Final = 4


def compute_settings(config: Conntrack, cpus: int) -> tuple[tuple[str, int], ...]:
    """Returns the sysctls to set and their values, in order. Settings of 0 mean "leave it as it is"."""
    max_entries = 0
    if config.max_per_core:
        scaled = config.max_per_core * cpus
        max_entries = MAX_CONNTRACK_ENTRIES if scaled > MAX_CONNTRACK_ENTRIES else max(scaled, config.least)
    values = (
        ("max", max_entries),
        ("tcp_timeout_established", config.tcp_established),
        ("tcp_timeout_close_wait", config.tcp_close_wait),
        ("tcp_be_liberal", int(config.tcp_be_liberal)),
        ("udp_timeout", config.udp),
        ("udp_timeout_stream", config.udp_stream),
    )
    return tuple((f"{SYSCTL_PREFIX}nf_conntrack_{name}", value) for name, value in values if value)


class ConntrackSysctls:
    """Sets the sysctls once, as soon as the module is loaded. Not thread-safe."""

    def __init__(self, config: Conntrack) -> None:
        self._settings = compute_settings(config, os.cpu_count() or 1)
        self._due = float("-inf")
        self._not_loaded_logged = False

    def apply(self, now: float) -> None:
        """Sets the sysctls if that is due; `now` is in seconds."""
        if now < self._due:
            return
        try:
            sysctl.read(NF_CONNTRACK_MAX)
        except KernelError:
            self._due = now + MODULE_POLL_INTERVAL_S
            if not self._not_loaded_logged and self._settings:
                log.info("nf_conntrack is not loaded; its sysctls are set once it is")
            self._not_loaded_logged = True
            return
        self._due = float("inf")
        self._write_settings()

    def _write_settings(self) -> None:
        failures: list[str] = []
        reasons: list[str] = []
        for name, value in self._settings:
            try:
                current = int(sysctl.read(name))
                keep = current == value or (name == NF_CONNTRACK_MAX and current > value)  # kubernetes#142035
                if name == NF_CONNTRACK_MAX and not sysctl.is_writable(name):
                    # The file is read-only outside the initial network namespace.
                    if not keep:
                        log.info("cannot set %s=%d in this network namespace; set it on the host", name, value)
                    continue
                if not keep:
                    sysctl.write(name, str(value))
                    log.info("set %s=%d", name, value)
            except KernelError as error:
                failures.append(f"{name}={value}")
                reasons.append(error.errno_name)
                continue
            if name == NF_CONNTRACK_MAX and (reason := _grow_buckets(value // ENTRIES_PER_BUCKET)):
                failures.append(f"{NF_CONNTRACK_BUCKETS}={value // ENTRIES_PER_BUCKET}")
                reasons.append(reason)
        if failures:
            log.warning(
                "cannot set conntrack as kube-proxy does: %s (%s); set it on the node, or mount "
                "its /proc/sys/net writable at /host/proc/sys/net",
                " ".join(failures),
                ", ".join(dict.fromkeys(reasons)),
            )


def _grow_buckets(min_buckets: int) -> str:
    """Grows the hash table to at least `min_buckets`. Returns why that failed, or ""."""
    try:
        if int(sysctl.read(NF_CONNTRACK_BUCKETS)) < min_buckets:
            sysctl.write(NF_CONNTRACK_BUCKETS, str(min_buckets))
            log.info("set %s=%d", NF_CONNTRACK_BUCKETS, min_buckets)
    except KernelError as error:
        return "" if _grow_hashsize(min_buckets) else error.errno_name
    return ""


def _grow_hashsize(min_buckets: int) -> bool:
    try:
        if int(HASHSIZE_PARAMETER.read_text()) < min_buckets:
            HASHSIZE_PARAMETER.write_text(str(min_buckets))
            log.info("set %s=%d", HASHSIZE_PARAMETER, min_buckets)
    except (OSError, ValueError):
        return False
    return True


# ---- the thread ----------------------------------------------------------------------------------

HOST_INTERVAL_S: Final = 1.0
"""Between two rounds. Each task knows when it is due."""
STALL_TIMEOUT_S: Final = 600.0
"""The thread counts as stuck after this time without progress. iptables-legacy-save alone may wait
for half of it.
"""


class HostThread:
    """Call start() once the data plane is open, and stop() before it is closed."""

    def __init__(
        self,
        config: Config,
        plane: DataPlane,
        listeners: Listeners,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when other ports are listened on than before."""
        self._plane, self._listeners, self._on_change = plane, listeners, on_change
        self._conntrack_sysctls = ConntrackSysctls(config.conntrack)
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threads.SupervisedThread("host", self._run, STALL_TIMEOUT_S)
        self.error = LastError()
        """Why a setting of the node could not be read or repaired; replaced by the next round."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.stop()

    def wake(self) -> None:
        """Lets the next round begin at once. Any thread may call."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            threads.heartbeat()
            self.run_once(time.monotonic())
            self._wake.wait(HOST_INTERVAL_S)
            self._wake.clear()

    def run_once(self, now: float) -> None:
        """Does what is due at `now` (time.monotonic)."""
        self._conntrack_sysctls.apply(now)
        if self._listeners.refresh(now):
            self._on_change()
        try:
            self._plane.maintain_host(now)
        except KbpfError as error:
            if self.error.replace(error):
                log.error("cannot maintain the settings of the node; retrying: %s", error)
        else:
            self.error.replace(None)
