# SPDX-License-Identifier: Apache-2.0
"""`kbpf verify`: compares the API, the desired state that follows from it, and the kernel."""

import os
from dataclasses import replace
from typing import Annotated, Final

import typer

from kbpf.cli import arguments, render
from kbpf.cli.arguments import RunOptions
from kbpf.cli.options import Output, OutputOption
from kbpf.config import load
from kbpf.config.settings import SETTINGS_BY_FLAG
from kbpf.errors import NotFoundError
from kbpf.model.config import Config

MAX_DIFFERENCES: Final = 100
PATH_METAVARS: Final = frozenset(("FILE", "DIR"))

Limit = Annotated[int, typer.Option("--limit", min=0, metavar="N", help="Show at most N differences; 0: all.")]


def verify(context: typer.Context, output: OutputOption = Output.TABLE, limit: Limit = MAX_DIFFERENCES) -> None:
    """Compare the API server and the kernel of this node. Computes from all objects what the kernel
    should have, names each difference, and tries real connections and packets. Exits with 0 if
    there is none, otherwise with 1. Changes nothing.

    Uses the settings of the agent that runs here. All flags of `kbpf run` are accepted, and take
    precedence; give them if no agent runs.
    """
    from kbpf.cli import run
    from kbpf.cli.verifier import Verifier
    from kbpf.views import verification as view

    config = _find_config(context.args)
    cluster = run.connect(config, lambda *_: None)
    verifier = Verifier(config, run.source_factory(config, cluster))
    if cluster is not None:
        cluster.on_connect = verifier.on_api_connect
    render.show(view.build_page(*verifier.run(), limit), output)


def _find_config(flags: list[str]) -> Config:
    """The settings: those of the running agent, changed by these flags and the environment. Raises
    NotFoundError if no agent has run here, or only one in mode ipvs.
    """
    from kbpf.cli.origin import with_own_node
    from kbpf.dataplane import reader as dataplane
    from kbpf.model.inspection import Part

    options = arguments.parse_options(flags, os.environ)
    config = _load(options)
    locations = dataplane.Locations.of_settings(config.pin_dir, config.state_dir)
    if dataplane.is_ipvs(locations):
        raise NotFoundError(
            "the agent of this node is in mode ipvs, which `kbpf verify` does not know",
            str(locations.state_dir),
            "`kbpf inspect status` shows what the agent itself finds",
        )
    inspection = dataplane.read(locations, Part.STATUS)
    status = inspection.status
    if status is not None and inspection.agent_alive:
        agents = _read_agent_options(status.pid, status.started)
        if agents is not None:
            config = _load(_merge(agents, options))
    return with_own_node(config, "", config.pin_dir)


def _load(options: RunOptions) -> Config:

    data = load.read_file(options.file) if options.file is not None else None
    return arguments.load_settings(options, data).config


def _read_agent_options(pid: int, started: float) -> RunOptions | None:
    """The command line of the agent; None if it cannot be read, as from another container."""
    from kbpf.kernel.system import process

    command = process.read_command(pid, started)
    if command is None or "run" not in command.arguments:
        return None
    start = command.arguments.index("run")
    if not any("kbpf" in argument for argument in command.arguments[:start]):
        return None
    options = arguments.parse_options(command.arguments[start + 1 :], command.environ)
    explicit_flags = {
        flag: str(command.folder / text) if text and SETTINGS_BY_FLAG[flag].kind.metavar in PATH_METAVARS else text
        for flag, text in options.explicit_flags.items()
    }
    file = command.folder / options.file if options.file is not None else None
    return replace(options, explicit_flags=explicit_flags, file=file)


def _merge(agents: RunOptions, own: RunOptions) -> RunOptions:
    """The agent's options, and our own, which take precedence."""
    return replace(
        agents,
        explicit_flags={**agents.explicit_flags, **own.explicit_flags},
        environ={**agents.environ, **own.environ},
        file=own.file or agents.file,
    )
