# SPDX-License-Identifier: Apache-2.0
"""Locks the pin folder, and checks while the agent runs that it is still ours and complete."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError, LastError, PinsRemovedError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import mounts

log = logging.getLogger("kbpf.dataplane")


class PinWatch:
    """Holds the lock. `hidden_reason`: why the pin folder's path does not lead to our pins."""

    def __init__(self, pins: Pins, folder: Path) -> None:
        self._pins, self._folder = pins, folder
        self._lock = -1
        self.hidden_reason = ""
        self._pin_error = LastError()

    def lock(self) -> None:
        """Locks the pins, so that there is one writer. Raises KernelError if there is another."""
        self._lock = pinning.lock_pins(self._pins)
        self._pins.use_descriptor(self._lock)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with the pins."""
        return (*filter(None, (self.hidden_reason, self._pin_error.text)),)

    def check(self, are_attached: bool, maps: Mapping[str, Map]) -> None:
        """Checks that the pin folder is still ours. If another process removed the pins, our writes
        have no effect: PinsRemovedError. If it removed some of the `maps` only, they are pinned
        again. If something is mounted over the folder, the agent continues through its descriptor
        and logs an error. `are_attached`: the programs have been attached.
        """
        links_removed = are_attached and not self._pins.links.is_dir()
        if links_removed or mounts.is_removed(self._folder, self._lock):
            raise PinsRemovedError(
                "the pins were removed while the agent ran",
                str(self._folder),
                "the agent exits; restart it to serve Services again",
            )
        previous, self.hidden_reason = self.hidden_reason, self._find_hidden_reason()
        if self.hidden_reason and not previous:
            log.error("%s", self.hidden_reason)
        if previous and not self.hidden_reason:
            log.info("the pin folder is visible again pin_dir=%s", self._folder)
        self._pin_lost(maps)

    def _pin_lost(self, maps: Mapping[str, Map]) -> None:
        try:
            with self._pins.with_operator_path():
                lost = pinning.pin_lost(self._pins, maps)
            if lost:
                log.warning("removed pins of maps were restored maps=%s", ",".join(lost))
            self._pin_error.replace(None)
        except (KernelError, OSError) as error:
            text = str(error).replace(str(self._pins.root), str(self._folder))
            if self._pin_error.replace(f"pins of maps cannot be checked or restored: {text}"):
                log.error("%s", self._pin_error.text)

    def _find_hidden_reason(self) -> str:
        if mounts.is_same(self._folder, self._lock):
            return ""
        return (
            f"the pin folder {self._folder} is hidden by a mount on top of it, so the next agent "
            "will not find the programs and will refuse to start: unmount it "
            f"(findmnt -T {self._folder})"
        )

    def close(self) -> None:
        """Releases the lock."""
        if self._lock >= 0:
            self._pins.use_path()
            os.close(self._lock)
            self._lock = -1
