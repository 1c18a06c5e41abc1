# SPDX-License-Identifier: Apache-2.0
"""What a shell completes besides commands and flags: names from this node, and the flags of `run`.

A completion has no place for an error: without rights, without an agent or with an unreadable map
there is nothing to complete.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kbpf.cli.options import DEFAULT
from kbpf.errors import KbpfError

VARIABLE: Final = "_KBPF_COMPLETE"
"""Set by the completion scripts of `kbpf --show-completion`."""

RUN_FLAGS: Final = ("--config", "--write-config-to", "--init-only", "--version")
"""Flags of `run` that are no settings."""


def is_completing() -> bool:
    return VARIABLE in os.environ


# ---- names ---------------------------------------------------------------------------------------


def complete_services(context: typer.Context, incomplete: str) -> list[str]:
    """Services of this node, as NAMESPACE/NAME; as NAME in the namespace of -n, or if that is what
    was begun.
    """
    services = sorted(set(_read_services(context)))
    if namespace := context.params.get("namespace"):
        services = [service for service in services if service[0] == namespace]
        return _matching((name for _, name in services), incomplete)
    full_names = _matching((f"{namespace}/{name}" for namespace, name in services), incomplete)
    return full_names or _matching((name for _, name in services), incomplete)


def complete_namespaces(context: typer.Context, incomplete: str) -> list[str]:
    """The namespaces of the Services of this node."""
    return _matching((namespace for namespace, _ in _read_services(context)), incomplete)


def complete_pods(incomplete: str) -> list[str]:
    """The Pods of this node."""
    from kbpf.kernel.system import pods

    return _matching(pods.list_pod_names().values(), incomplete)


def complete_clients(incomplete: str) -> list[str]:
    """Values of FROM of `kbpf trace`."""
    return [*_matching(("host", "outside"), incomplete), *complete_pods(incomplete)]


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete)})


def _read_services(context: typer.Context) -> Iterator[tuple[str, str]]:
    """Namespace and name of the Services that are programmed."""
    from kbpf.dataplane import inspect as dataplane
    from kbpf.model.inspection import Part

    with contextlib.suppress(KbpfError, OSError):
        locations = dataplane.Locations(*_find_folders(context.params))
        for port in dataplane.read(locations, Part.NAMES).services:
            if port.key is not None:
                yield port.key.namespace, port.key.name


def _find_folders(values: dict[str, Any]) -> tuple[Path, Path]:
    """The pin folder and the state folder. A completion parses no defaults of options."""

    def find(name: str) -> Any:
        return values.get(name) or getattr(DEFAULT, name)

    return Path(find("pin_dir")), Path(find("state_dir")) / find("ipvs_device")


# ---- the flags of `run` --------------------------------------------------------------------------


def run_command() -> Callable[..., None]:
    """A command with the flags of `kbpf run`, only to complete them: arguments.py parses them."""
    from kbpf.config.settings import SETTINGS

    parameters = [_parameter(flag, (flag,), str, "") for flag in RUN_FLAGS]
    for setting in SETTINGS:
        type_: Any = bool if setting.is_boolean else str
        names = (setting.name, *setting.aliases)
        parameters.append(
            _parameter(
                setting.name, names, list[str] if setting.kind.repeatable else type_,
                setting.kind.metavar, setting.help,
            )
        )  # fmt: skip

    def command(**_: Any) -> None:
        pass

    command.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(command)["__signature__"] = Signature(parameters)
    return command


def _parameter(
    flag: str, names: tuple[str, ...], type_: Any, metavar: str, text: str = ""
) -> Parameter:
    values = metavar.split("|") if "|" in metavar else []

    def complete(incomplete: str) -> list[str]:
        return _matching(values, incomplete)

    option = typer.Option(*names, help=text, autocompletion=complete if values else None)
    default: Any = {bool: False, str: ""}.get(type_, [])
    return Parameter(
        flag.strip("-").replace("-", "_"), Parameter.KEYWORD_ONLY, default=default,
        annotation=Annotated[type_, option],
    )  # fmt: skip
