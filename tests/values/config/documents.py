# SPDX-License-Identifier: Apache-2.0
"""Documents of configuration."""

import textwrap
from typing import Any

import pytest

from kbpf.config import load
from kbpf.config.load import LoadedConfig
from kbpf.errors import ConfigError, ConfigErrors
from kbpf.model.address import Addr, format_addr, parse_addr
from kbpf.model.config import Config
from kbpf.model.objects import Cidr

PROXY = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
OWN = "apiVersion: kbpf.io/v1alpha1\nkind: KbpfConfiguration\n"


def cidr(address: str, bits: int) -> Cidr:
    return Cidr(parse_addr(address), bits)


def proxy(text: str = "", **flags: str) -> LoadedConfig:
    """Loads kube-proxy's document with these fields, and flags by name."""
    return loaded(PROXY + textwrap.dedent(text), **flags)


def ours(text: str = "", **flags: str) -> LoadedConfig:
    return loaded(OWN + textwrap.dedent(text), **flags)


def loaded(text: str, **given: str) -> LoadedConfig:
    return load.load({f"--{k.replace('_', '-')}": v for k, v in given.items()}, {}, text.encode())


def field(config: Config, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def told(made: LoadedConfig) -> str:
    return "\n".join(note.text for note in made.notes)


def document(text: str) -> str:
    """The fields of a document in a table: "; " separates lines."""
    return text.replace("; ", "\n")


def shown(value: object) -> str:
    """A field of Config as tables write it: `true`, `none`, `''`, `10.0.0.0/8, fd00::/8`, `()`."""
    match value:
        case None | bool():
            return str(value).lower()
        case Cidr():
            return str(value)
        case bytes():
            return format_addr(Addr(value))
        case tuple():
            return ", ".join(map(str, value)) or "()"
    return str(value) or "''"


def assert_mistakes(text: str, words: str, kind: str) -> None:
    """A document leads to these errors, with words of each, `|` between them; `(.a.b)` is a path in it."""
    lines, wanted = complaints(text), words.replace("(.", f"({kind}").split(" | ")
    assert len(lines) == len(wanted)
    for each, line in zip(wanted, lines, strict=True):
        assert each in line


P = "KubeProxyConfiguration."


def complaints(text: str, **given: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(text, **given)
    error = caught.value
    return [str(each) for each in (error.errors if isinstance(error, ConfigErrors) else (error,))]
