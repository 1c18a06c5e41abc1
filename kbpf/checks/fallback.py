# SPDX-License-Identifier: Apache-2.0
"""Why mode auto uses IPVS: the checks of `kbpf check` give the reason for an error of BPF."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from kbpf.checks.row import Check, CheckRow
from kbpf.errors import AttachError, CompileError, KbpfError, PinsRemovedError, ProgramLoadError
from kbpf.model.config import Config


class FallbackReason(StrEnum):
    """Why BPF is unavailable: a label for logs, status, metrics and Events."""

    NO_LIBRARY = "libbpf missing"
    NO_BPF = "no bpf(2)"
    NO_PRIVILEGES = "no privileges"
    NO_FEATURE = "kernel feature missing"
    NO_CGROUP = "no cgroup v2"
    NO_COMPILER = "BCC missing"
    COMPILE_FAILED = "compile failure"
    PROGRAM_REFUSED = "verifier refusal"
    ATTACH_FAILED = "attach failure"


REASON_BY_CHECK: Final[Mapping[str, FallbackReason]] = {
    Check.PRIVILEGES: FallbackReason.NO_PRIVILEGES,
    Check.LIBBPF: FallbackReason.NO_LIBRARY,
    Check.BPF_SYSCALL: FallbackReason.NO_BPF,
    Check.BPFFS: FallbackReason.NO_BPF,
    Check.COMPILER: FallbackReason.NO_COMPILER,
    Check.SOURCES: FallbackReason.COMPILE_FAILED,
    Check.CGROUP: FallbackReason.NO_CGROUP,
}
"""The reason for a failed row of `kbpf check`; any other needed row means NO_FEATURE."""
REASON_BY_ERROR: Final[Sequence[tuple[type[KbpfError], FallbackReason]]] = (
    (CompileError, FallbackReason.COMPILE_FAILED),
    (ProgramLoadError, FallbackReason.PROGRAM_REFUSED),
    (AttachError, FallbackReason.ATTACH_FAILED),
)
"""The reason for an error when no check fails. Any other error is no reason to fall back to
IPVS."""


def fallback_reason(error: KbpfError, rows: Sequence[CheckRow]) -> FallbackReason | None:
    """Why BPF is unavailable, by this error and these rows; None if it is available and the error
    has another cause.
    """
    # Another process removed the pins of a working BPF data plane: a restart repairs that.
    if isinstance(error, PinsRemovedError):
        return None
    # First: a failed check names the cause, an error often only a symptom.
    for row in rows:
        if row.needed and row.result != "yes":
            return REASON_BY_CHECK.get(row.name, FallbackReason.NO_FEATURE)
    return next((reason for error_type, reason in REASON_BY_ERROR if isinstance(error, error_type)), None)


def find_reason(config: Config, error: KbpfError) -> FallbackReason | None:
    """The same, for the agent with these settings."""
    from kbpf.checks import bpf  # only now: an agent whose BPF works needs none of it

    return fallback_reason(error, [*bpf.rows(config.cgroup, config.pin_dir, config.cache_dir)])
