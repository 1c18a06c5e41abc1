# SPDX-License-Identifier: Apache-2.0
"""kbpf's own document in the configuration file, KbpfConfiguration. It has the settings that
kube-proxy's document lacks: the rows of settings.py with a path in it. Each has the parser and the
errors of its flag.
"""

from operator import attrgetter
from typing import Any, Final

import msgspec

from kbpf.config.documents import KBPF
from kbpf.config.settings import SETTINGS
from kbpf.config.values import ConfigValues

KBPF_SETTINGS: Final = {setting.kbpf: setting for setting in SETTINGS if setting.kbpf}
"""Path in the document → setting."""


def _document_type() -> type[msgspec.Struct]:
    """Builds the document, without kind and apiVersion, and its sections. None means unset."""
    fields: dict[str, Any] = {}
    sections: dict[str, list[Any]] = {}
    for path, setting in KBPF_SETTINGS.items():
        section, dot, name = path.rpartition(".")
        if dot:
            fields[section] = sections.setdefault(section, [])
            sections[section].append((name, setting.kind.json_type | None, None))
        else:
            fields[name] = (name, setting.kind.json_type | None, None)
    for section, members in sections.items():
        kind = msgspec.defstruct(section, members, frozen=True)
        fields[section] = (section, kind, kind())
    return msgspec.defstruct(KBPF, fields.values(), frozen=True)


KbpfConfiguration: Final = _document_type()


def read_settings(document: msgspec.Struct) -> ConfigValues:
    """Returns the fields of Config that the document sets. Empty values count as unset."""
    values = ConfigValues(f"{KBPF}.")
    for path, setting in KBPF_SETTINGS.items():
        text = setting.kind.flag_text(attrgetter(path)(document))
        if text:
            values.parse(setting.field, path, text, setting.parse)
    return values
