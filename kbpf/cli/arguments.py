"""`kbpf run`, from the command line to the running agent, without typer.

The agent runs for months: typer, pydantic and rich would stay in its memory for nothing. So this
one command is parsed by argparse, out of the table of flags in config/flags.py, and typer is not
imported at all.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kbpf.config import flags
from kbpf.errors import ConfigError
from kbpf.model.config import Config

SUMMARY: Final = (
    "Serves the Services of this node, until SIGTERM or Ctrl-C; they work on afterwards."
)
EPILOG: Final = (
    "Each flag has an environment variable too: --pin-dir is KBPF_PIN_DIR. A flag beats it."
)


def parser() -> argparse.ArgumentParser:
    """The flags of config/flags.py, by heading."""
    made = argparse.ArgumentParser(
        "kbpf run", description=SUMMARY, epilog=EPILOG, allow_abbrev=False, add_help=False
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in flags.FLAGS:
        if flag.group not in groups:
            groups[flag.group] = made.add_argument_group(flag.group)
        groups[flag.group].add_argument(flag.name, metavar=flag.metavar, help=flag.help)
    made.add_argument_group("Help").add_argument(
        "-h", "--help", action="help", help="show this and end"
    )
    return made


def config(arguments: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The settings; SystemExit(2) with a message when they are wrong, SystemExit(0) after help."""
    reader = parser()
    given = vars(reader.parse_args(arguments))
    texts = {
        flag.name: text
        for flag in flags.FLAGS
        if (text := given[flag.name.strip("-").replace("-", "_")]) is not None
    }
    try:
        made = flags.config(texts, environ)
    except ConfigError as error:
        print(f"kbpf run: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if made.node_name:
        return made
    from kbpf.source.cluster import default_node_name

    return replace(made, node_name=default_node_name())


def run(arguments: Sequence[str]) -> None:
    """Runs the agent."""
    settings = config(arguments, os.environ)
    from kbpf.cli.run import serve

    serve(settings)
