# SPDX-License-Identifier: Apache-2.0
"""`kbpf config validate`: whether `kbpf run --config FILE` would accept the file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kbpf.errors import ConfigError, ConfigErrors, escape_unprintable

app = typer.Typer(no_args_is_help=True, help="Check the configuration file of `run`.", rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Makes `validate` a subcommand although it is the only one."""


@app.command("validate")
def validate(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", readable=False, help="A KubeProxyConfiguration, a KbpfConfiguration, or both."),
    ],
    node: Annotated[bool, typer.Option("--node", help="Also check what the file names on this machine.")] = False,
) -> None:
    """Check a configuration file before the agents get it. Prints a line for each error and
    warning, and exits with 0 if `kbpf run --config FILE` would start with it, otherwise with 1.
    Without --node any machine will do: only the file is read. Environment variables do not count.
    """
    from kbpf.config import load

    errors: tuple[ConfigError, ...] = ()
    warnings: tuple[str, ...] = ()
    try:
        loaded = load.load({}, {}, load.read_file(file), str(file))
        if node:
            loaded = load.check_settings(loaded)
        warnings = tuple(note.text for note in loaded.notes if note.is_warning)
    except ConfigErrors as error:
        errors, warnings = error.errors, error.warnings
    except ConfigError as error:
        errors = (error,)
    for problem in errors:
        print(f"kbpf: {problem}", file=sys.stderr)
    for warning in warnings:
        print(f"kbpf: warning: {escape_unprintable(warning)}", file=sys.stderr)
    if errors:
        raise typer.Exit(1)
    print(f"{escape_unprintable(str(file))} is valid")
