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
from kbpf.model.config import CONNTRACK_MOST, Conntrack

log = logging.getLogger("kbpf.agent")

LOOK_SECONDS: Final = 10.0
PREFIX: Final = "net.netfilter."
MAXIMUM: Final = f"{PREFIX}nf_conntrack_max"
BUCKETS: Final = f"{PREFIX}nf_conntrack_buckets"
HASHSIZE: Final = Path("/sys/module/nf_conntrack/parameters/hashsize")
HASH_SHARE: Final = 4


class Setting(NamedTuple):
    """A sysctl and its value."""

    name: str
    value: int


def wanted(config: Conntrack, cpus: int) -> tuple[Setting, ...]:
    """What is to be set, in order; nothing that is to stay as it is."""
    most = 0
    if config.max_per_core:
        scaled = config.max_per_core * cpus
        most = CONNTRACK_MOST if scaled > CONNTRACK_MOST else max(scaled, config.least)
    told = (
        ("max", most),
        ("tcp_timeout_established", config.tcp_established),
        ("tcp_timeout_close_wait", config.tcp_close_wait),
        ("tcp_be_liberal", int(config.tcp_be_liberal)),
        ("udp_timeout", config.udp),
        ("udp_timeout_stream", config.udp_stream),
    )
    return tuple(Setting(f"{PREFIX}nf_conntrack_{name}", value) for name, value in told if value)


class Keeper:
    """Sets it once, as soon as it can be. One thread calls."""

    def __init__(self, config: Conntrack) -> None:
        self._wanted = wanted(config, os.cpu_count() or 1)
        self._due = float("-inf")
        self._told = False

    def look(self, now: float) -> None:
        """Sets what is wanted, if it is time to look; `now` in seconds."""
        if now < self._due:
            return
        try:
            sysctl.read(MAXIMUM)
        except KernelError:
            self._due = now + LOOK_SECONDS
            if not self._told and self._wanted:
                log.info("conntrack is not loaded: it is set when it is")
            self._told = True
            return
        self._due = float("inf")
        self._set()

    def _set(self) -> None:
        failed: list[str] = []
        why: list[str] = []
        for name, value in self._wanted:
            try:
                if name == MAXIMUM and not sysctl.path_of(name).stat().st_mode & stat.S_IWUSR:
                    log.info("%s=%d is the machine's to set", name, value)
                    continue
                if sysctl.read(name) != str(value):
                    sysctl.write(name, str(value))
                    log.info("set %s=%d", name, value)
            except KernelError as error:
                failed.append(f"{name}={value}")
                why.append(error.reason)
                continue
            if name == MAXIMUM and (reason := _grow(value // HASH_SHARE)):
                failed.append(f"{BUCKETS}={value // HASH_SHARE}")
                why.append(reason)
        if failed:
            log.warning(
                "conntrack is not set as kube-proxy would: %s (%s); set it on the node, or mount "
                "its /proc/sys/net at /host/proc/sys/net, to be written",
                " ".join(failed), ", ".join(dict.fromkeys(why)),
            )  # fmt: skip


def _grow(least: int) -> str:
    """Makes the table of hashes as large, if it is smaller; why that cannot be, or ""."""
    try:
        if int(sysctl.read(BUCKETS)) < least:
            sysctl.write(BUCKETS, str(least))
            log.info("set %s=%d", BUCKETS, least)
    except KernelError as error:
        return "" if _grow_by_parameter(least) else error.reason
    return ""


def _grow_by_parameter(least: int) -> bool:
    try:
        if int(HASHSIZE.read_text()) < least:
            HASHSIZE.write_text(str(least))
            log.info("set %s=%d", HASHSIZE, least)
    except (OSError, ValueError):
        return False
    return True
