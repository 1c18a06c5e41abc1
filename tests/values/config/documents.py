# SPDX-License-Identifier: Apache-2.0
"""Documents of configuration."""

import textwrap
from typing import Any, NamedTuple

import pytest

from kbpf.config import load
from kbpf.config.load import LoadedConfig
from kbpf.errors import ConfigError, ConfigErrors
from kbpf.model.address import parse_addr
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


class FieldRow(NamedTuple):
    """Fields of a document, a field of Config and the value it gets from them."""

    text: str
    field: str
    value: object


class Wrong(NamedTuple):
    """A document that is refused; each item of `words` occurs in one error."""

    text: str
    words: tuple[str, ...]


P = "KubeProxyConfiguration."


def complaints(text: str, **given: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(text, **given)
    error = caught.value
    return [str(each) for each in (error.errors if isinstance(error, ConfigErrors) else (error,))]
