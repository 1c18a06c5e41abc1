# SPDX-License-Identifier: Apache-2.0
"""Checks what the settings refer to on this machine before anything is created in the kernel."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from kbpf.config.diagnostic import Diagnostic
from kbpf.config.load import LoadedConfig
from kbpf.errors import ConfigError, ConfigErrors
from kbpf.kernel.system import mounts

SYS_CLASS_NET: Final = Path("/sys/class/net")


def check_settings(loaded: LoadedConfig) -> LoadedConfig:
    """Returns the settings with further diagnostics. Raises ConfigErrors."""
    if errors := tuple(_errors(loaded)):
        warnings = tuple(note.text for note in loaded.notes if note.is_warning)
        raise ConfigErrors(errors, warnings, loaded.config.log_format)
    return replace(loaded, notes=(*loaded.notes, *_notes(loaded)))


def _errors(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """A misspelt cgroup would otherwise look like a missing feature of the kernel, and mode auto
    would fall back to IPVS.
    """
    cgroup = loaded.config.cgroup
    if cgroup is not None and loaded.config.mode != "ipvs":
        location = loaded.origins["cgroup"]
        if not cgroup.is_dir():
            yield ConfigError(
                f"no such cgroup v2 folder: {cgroup}", location,
                "name an existing folder, or leave it out for the root cgroup",
            )  # fmt: skip
        elif not mounts.is_cgroup2(cgroup):
            yield ConfigError(
                f"not a cgroup v2 folder: {cgroup}", location,
                "name a folder of cgroup v2, or leave it out for the root cgroup",
            )  # fmt: skip


def _notes(loaded: LoadedConfig) -> Iterator[Diagnostic]:
    bridge = loaded.config.pod_bridge_interface
    if bridge and not (SYS_CLASS_NET / bridge).exists():
        yield Diagnostic(
            f"{loaded.origins['pod_bridge_interface']}: device {bridge} does not exist yet; until "
            "it does, no traffic counts as traffic of this node's pods",
            is_warning=True,
        )
