# SPDX-License-Identifier: Apache-2.0
"""Sets the kernel's conntrack limits and timeouts as kube-proxy does at its start.

They govern the flows that conntrack translates (`--forwarding netfilter`), not those in kbpf's
maps. CNIs and the node's own connections need them, and without kube-proxy nothing else sets them.
The rules are those of kube-proxy's conntrack/sysctls.go:

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
    name: str
    value: int


def compute_settings(config: Conntrack, cpus: int) -> tuple[SysctlSetting, ...]:
    """Returns the sysctls to set, in order. Settings of 0 mean "leave it as it is"."""
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
    return tuple(SysctlSetting(f"{SYSCTL_PREFIX}nf_conntrack_{name}", value) for name, value in values if value)


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
