# SPDX-License-Identifier: Apache-2.0
"""Reads from the agent's configuration file only the places where the agent keeps its state, and
whether it has a packet path.

Other commands inspect or remove that state, also when the agent could not start with this file. So
a setting is used whenever it can be read, whatever else is wrong with the file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kbpf.config import documents, kubeproxy
from kbpf.config.documents import KBPF, KBPF_SETTINGS, KUBE_PROXY
from kbpf.config.load import read_file
from kbpf.errors import ConfigError

FIELD_BY_PATH: Final[Mapping[str, str]] = {
    path: KBPF_SETTINGS[path].field for path in ("pinDir", "cgroup", "cacheDir", "ipvs.stateDir")
}
"""Path in KbpfConfiguration → field of Config; they are not set anywhere else."""


@dataclass(frozen=True, slots=True)
class ConfiguredLocations:
    """`values`: the locations that the file sets, by field of Config. `unreadable`: those that it
    may set but that cannot be read, with the reason. `other_errors`: what else is wrong.
    `packet_path`: False if the file switches the packet path off.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    unreadable: Mapping[str, ConfigError] = field(default_factory=dict)
    other_errors: tuple[ConfigError, ...] = ()
    packet_path: bool = True

    @property
    def errors(self) -> tuple[ConfigError, ...]:
        """All errors, each once."""
        return (*dict.fromkeys(self.unreadable.values()), *self.other_errors)


def read_locations(path: Path) -> ConfiguredLocations:
    """Reads the locations from a file, which may not exist."""
    try:
        data = read_file(path)
    except ConfigError as error:
        return ConfiguredLocations({}, dict.fromkeys(FIELD_BY_PATH.values(), error))
    return parse_locations(data, str(path))


def parse_locations(data: bytes, where: str) -> ConfiguredLocations:
    """Reads the locations from the text of a file, which comes from `where`."""
    errors: list[ConfigError] = []
    try:
        file_documents = documents.parse(data, where, errors)
    except ConfigError as error:  # after a YAML error anything may follow
        return ConfiguredLocations({}, dict.fromkeys(FIELD_BY_PATH.values(), error))
    values: dict[str, Any] = {}
    packet_path = True
    if file_documents.kbpf is not None:
        kbpf_values = documents.read_kbpf(file_documents.kbpf)
        errors += kbpf_values.errors
        packet_path = kbpf_values.fields.get("packet_path") is not False
        values = {name: kbpf_values.fields[name] for name in FIELD_BY_PATH.values() if name in kbpf_values.fields}
    if file_documents.kube_proxy is not None:
        errors += kubeproxy.read(file_documents.kube_proxy).errors
    unreadable: dict[str, ConfigError] = {}
    other_errors: list[ConfigError] = []
    for problem in errors:
        if problem.where == where:
            affected = _fields_hidden_by_document(problem, file_documents.kbpf is not None)
        else:
            affected = {name for name in _fields_hidden_by_field(problem) if name not in values}
        unreadable |= dict.fromkeys(affected, problem)
        other_errors += () if affected else (problem,)
    return ConfiguredLocations(values, unreadable, tuple(other_errors), packet_path)


def _fields_hidden_by_document(error: ConfigError, has_kbpf_document: bool) -> set[str]:
    """Returns the fields that an unusable document might set. `has_kbpf_document`: another
    document of the file is KbpfConfiguration.
    """
    may_be_kbpf = not has_kbpf_document and not error.what.startswith(KUBE_PROXY)
    return set(FIELD_BY_PATH.values()) if may_be_kbpf or error.what.startswith(KBPF) else set()


def _fields_hidden_by_field(error: ConfigError) -> Iterator[str]:
    """Yields the fields that this error hides: it is at the field, at a parent, or at a misspelt
    name.
    """
    suggestion = error.hint.removeprefix("is ").removesuffix(" meant?")
    misspelt = f"{error.where.rpartition('.')[0]}.{suggestion}"
    for path, name in FIELD_BY_PATH.items():
        place = f"{KBPF}.{path}"
        if any(place == prefix or place.startswith(f"{prefix}.") for prefix in (error.where, misspelt)):
            yield name
