"""The kernel's conntrack, set as kube-proxy sets it at its start: how much it holds, how long.

kbpf needs none of it for itself. But CNIs and the node's own connections do, and with kube-proxy
gone nobody else would set it. Rules (kube-proxy's conntrack/sysctls.go):
- Only what differs is written, in kube-proxy's order; a number of entries is written even if there
  were more before.
- The table of hashes grows to a quarter of the entries, and never shrinks. kube-proxy sets it below
  /sys, which a pod may not write; a sysctl is the same number.
- What cannot be written is one line for all of it, with what to do; kube-proxy ends there.
- In a network namespace other than the machine's, where the number of entries has no file that
  could be written, it is the machine's to set: that is no warning.
- A node without nf_conntrack has nothing to set: it is looked for again now and then.
"""

import logging
import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.system import sysctl
from kbpf.model.config import MAX_CONNTRACK_ENTRIES, Conntrack

log = logging.getLogger("kbpf.agent")

MODULE_POLL_INTERVAL_S: Final = 10.0
SYSCTL_PREFIX: Final = "net.netfilter."
NF_CONNTRACK_MAX: Final = f"{SYSCTL_PREFIX}nf_conntrack_max"
NF_CONNTRACK_BUCKETS: Final = f"{SYSCTL_PREFIX}nf_conntrack_buckets"
HASHSIZE_PARAMETER: Final = Path("/sys/module/nf_conntrack/parameters/hashsize")
ENTRIES_PER_BUCKET: Final = 4


class SysctlSetting(NamedTuple):
    """A sysctl and its value."""

    name: str
    value: int


def compute_settings(config: Conntrack, cpus: int) -> tuple[SysctlSetting, ...]:
    """What is to be set, in order; nothing that is to stay as it is."""
    max_entries = 0
    if config.max_per_core:
        scaled = config.max_per_core * cpus
        max_entries = (
            MAX_CONNTRACK_ENTRIES if scaled > MAX_CONNTRACK_ENTRIES else max(scaled, config.least)
        )
    values = (
        ("max", max_entries),
        ("tcp_timeout_established", config.tcp_established),
        ("tcp_timeout_close_wait", config.tcp_close_wait),
        ("tcp_be_liberal", int(config.tcp_be_liberal)),
        ("udp_timeout", config.udp),
        ("udp_timeout_stream", config.udp_stream),
    )
    return tuple(
        SysctlSetting(f"{SYSCTL_PREFIX}nf_conntrack_{name}", value)
        for name, value in values
        if value
    )


class ConntrackSysctls:
    """Sets it once, as soon as it can be. One thread calls."""

    def __init__(self, config: Conntrack) -> None:
        self._settings = compute_settings(config, os.cpu_count() or 1)
        self._due = float("-inf")
        self._not_loaded_logged = False

    def apply(self, now: float) -> None:
        """Sets what is wanted, if it is time to look; `now` in seconds."""
        if now < self._due:
            return
        try:
            sysctl.read(NF_CONNTRACK_MAX)
        except KernelError:
            self._due = now + MODULE_POLL_INTERVAL_S
            if not self._not_loaded_logged and self._settings:
                log.info("conntrack is not loaded: it is set when it is")
            self._not_loaded_logged = True
            return
        self._due = float("inf")
        self._write_settings()

    def _write_settings(self) -> None:
        failures: list[str] = []
        reasons: list[str] = []
        for name, value in self._settings:
            try:
                if (
                    name == NF_CONNTRACK_MAX
                    and not sysctl.path_of(name).stat().st_mode & stat.S_IWUSR
                ):
                    log.info("%s=%d is the machine's to set", name, value)
                    continue
                if sysctl.read(name) != str(value):
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
                "conntrack is not set as kube-proxy would: %s (%s); set it on the node, or mount "
                "its /proc/sys/net at /host/proc/sys/net, to be written",
                " ".join(failures), ", ".join(dict.fromkeys(reasons)),
            )  # fmt: skip


def _grow_buckets(min_buckets: int) -> str:
    """Makes the table of hashes as large, if it is smaller; why that cannot be, or ""."""
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
