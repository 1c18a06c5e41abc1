"""What other commands need of the agent's file: the names of the places where it keeps what it has.

They look at what there is, or remove it, also when the agent would not start with that file. So a
name counts if it can be read, whatever else is wrong.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kbpf.config import documents, kbpf_configuration, kubeproxy
from kbpf.config.documents import KBPF, KUBE_PROXY, Diagnostics
from kbpf.config.flags import FLAGS_BY_NAME
from kbpf.config.kbpf_configuration import FLAG_BY_PATH, KbpfConfiguration
from kbpf.config.kubeproxy import KubeProxyConfiguration
from kbpf.config.load import read_file
from kbpf.errors import ConfigError

LOCATION_PATHS: Final = (
    "pinDir",
    "cgroup",
    "cacheDir",
    "ipvs.device",
    "ipvs.nftTable",
    "ipvs.stateDir",
)
"""Of a KbpfConfiguration; nothing else says them."""
FIELD_BY_PATH: Final[Mapping[str, str]] = {
    path: FLAGS_BY_NAME[FLAG_BY_PATH[path]].field for path in LOCATION_PATHS
}


@dataclass(frozen=True, slots=True)
class ConfiguredLocations:
    """Those that the file says, by field of Config; those that it may say and that cannot be read,
    with why; and what else is wrong in it.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    unreadable: Mapping[str, ConfigError] = field(default_factory=dict)
    other_errors: tuple[ConfigError, ...] = ()

    @property
    def errors(self) -> tuple[ConfigError, ...]:
        """All of it, each once."""
        return (*dict.fromkeys(self.unreadable.values()), *self.other_errors)


def read_locations(path: Path) -> ConfiguredLocations:
    """Those of a file, which may not be there."""
    try:
        data = read_file(path)
    except ConfigError as error:
        return ConfiguredLocations({}, dict.fromkeys(FIELD_BY_PATH.values(), error))
    return parse_locations(data, str(path))


def parse_locations(data: bytes, where: str) -> ConfiguredLocations:
    """Those of the text of a file, which comes from `where`."""
    errors: list[ConfigError] = []
    try:
        file_documents = documents.parse(data, where, errors)
    except ConfigError as error:  # where YAML ends, anything may follow
        return ConfiguredLocations({}, dict.fromkeys(FIELD_BY_PATH.values(), error))
    values: dict[str, Any] = {}
    if file_documents.kbpf is not None:
        diagnostics = Diagnostics()
        kbpf_values = kbpf_configuration.read_settings(
            documents.decode(KbpfConfiguration, file_documents.kbpf, KBPF, diagnostics, True)
        )
        errors += (*diagnostics.errors, *kbpf_values.errors)
        values = {
            name: kbpf_values.fields[name]
            for name in FIELD_BY_PATH.values()
            if name in kbpf_values.fields
        }
    if file_documents.kube_proxy is not None:
        diagnostics = Diagnostics()
        kube_proxy_config = documents.decode(
            KubeProxyConfiguration, file_documents.kube_proxy, KUBE_PROXY, diagnostics
        )
        errors += (*diagnostics.errors, *kubeproxy.read_settings(kube_proxy_config).errors)
    unreadable: dict[str, ConfigError] = {}
    other_errors: list[ConfigError] = []
    for problem in errors:
        if problem.where == where:
            affected = _fields_hidden_by_document(problem, file_documents.kbpf is not None)
        else:
            affected = {name for name in _fields_hidden_by_field(problem) if name not in values}
        unreadable |= dict.fromkeys(affected, problem)
        other_errors += () if affected else (problem,)
    return ConfiguredLocations(values, unreadable, tuple(other_errors))


def _fields_hidden_by_document(error: ConfigError, has_kbpf_document: bool) -> set[str]:
    """The fields that may stand in a document that cannot be taken; `has_own`: another is ours."""
    may_be_kbpf = not has_kbpf_document and not error.what.startswith(KUBE_PROXY)
    return set(FIELD_BY_PATH.values()) if may_be_kbpf or error.what.startswith(KBPF) else set()


def _fields_hidden_by_field(error: ConfigError) -> Iterator[str]:
    """The fields whose names cannot be read for it: it is there, above, or its name is misspelt."""
    suggestion = error.hint.removeprefix("is ").removesuffix(" meant?")
    misspelt = f"{error.where.rpartition('.')[0]}.{suggestion}"
    for path, name in FIELD_BY_PATH.items():
        place = f"{KBPF}.{path}"
        if any(
            place == prefix or place.startswith(f"{prefix}.") for prefix in (error.where, misspelt)
        ):
            yield name
