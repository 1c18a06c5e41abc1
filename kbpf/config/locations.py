"""What other commands need of the agent's file: the names of the places where it keeps what it has.

They look at what there is, or remove it, also when the agent would not start with that file. So a
name counts if it can be read, whatever else is wrong.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kbpf.config import documents, kbpf_configuration, kubeproxy
from kbpf.config.documents import KUBE_PROXY, OWN, Findings
from kbpf.config.flags import BY_NAME
from kbpf.config.kbpf_configuration import FLAG_OF, KbpfConfiguration
from kbpf.config.kubeproxy import KubeProxyConfiguration
from kbpf.config.load import read_file
from kbpf.errors import ConfigError

PATHS: Final = ("pinDir", "cgroup", "cacheDir", "ipvs.device", "ipvs.nftTable", "ipvs.stateDir")
"""Of a KbpfConfiguration; nothing else says them."""
FIELD_OF: Final[Mapping[str, str]] = {path: BY_NAME[FLAG_OF[path]].field for path in PATHS}


@dataclass(frozen=True, slots=True)
class Names:
    """Those that the file says, by field of Config; those that it may say and that cannot be read,
    with why; and what else is wrong in it.
    """

    said: Mapping[str, Any] = field(default_factory=dict)
    unreadable: Mapping[str, ConfigError] = field(default_factory=dict)
    beside: tuple[ConfigError, ...] = ()

    @property
    def wrong(self) -> tuple[ConfigError, ...]:
        """All of it, each once."""
        return (*dict.fromkeys(self.unreadable.values()), *self.beside)


def of_file(path: Path) -> Names:
    """Those of a file, which may not be there."""
    try:
        data = read_file(path)
    except ConfigError as error:
        return Names({}, dict.fromkeys(FIELD_OF.values(), error))
    return read(data, str(path))


def read(data: bytes, where: str) -> Names:
    """Those of the text of a file, which comes from `where`."""
    wrong: list[ConfigError] = []
    try:
        found = documents.parse(data, where, wrong)
    except ConfigError as error:  # where YAML ends, anything may follow
        return Names({}, dict.fromkeys(FIELD_OF.values(), error))
    said: dict[str, Any] = {}
    if found.own is not None:
        findings = Findings()
        made = kbpf_configuration.settings(
            documents.decode(KbpfConfiguration, found.own, OWN, findings, True)
        )
        wrong += (*findings.errors, *made.errors)
        said = {name: made.found[name] for name in FIELD_OF.values() if name in made.found}
    if found.kube_proxy is not None:
        findings = Findings()
        proxy = documents.decode(KubeProxyConfiguration, found.kube_proxy, KUBE_PROXY, findings)
        wrong += (*findings.errors, *kubeproxy.settings(proxy).errors)
    unreadable: dict[str, ConfigError] = {}
    beside: list[ConfigError] = []
    for each in wrong:
        if each.where == where:
            lost = _lost_with_document(each, found.own is not None)
        else:
            lost = {name for name in _lost_with_field(each) if name not in said}
        unreadable |= dict.fromkeys(lost, each)
        beside += () if lost else (each,)
    return Names(said, unreadable, tuple(beside))


def _lost_with_document(error: ConfigError, has_own: bool) -> set[str]:
    """The fields that may stand in a document that cannot be taken; `has_own`: another is ours."""
    maybe = not has_own and not error.what.startswith(KUBE_PROXY)
    return set(FIELD_OF.values()) if maybe or error.what.startswith(OWN) else set()


def _lost_with_field(error: ConfigError) -> Iterator[str]:
    """The fields whose names cannot be read for it: it is there, above, or its name is misspelt."""
    meant = error.hint.removeprefix("is ").removesuffix(" meant?")
    misspelt = f"{error.where.rpartition('.')[0]}.{meant}"
    for path, name in FIELD_OF.items():
        place = f"{OWN}.{path}"
        if any(place == at or place.startswith(f"{at}.") for at in (error.where, misspelt)):
            yield name
