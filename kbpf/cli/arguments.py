# SPDX-License-Identifier: Apache-2.0
"""`kbpf run`: parses the command line and loads the configuration, without typer.

The agent runs for months, and typer and rich would stay in its memory all the time. So argparse
parses this one command, from the table in config/settings.py.
"""

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kbpf import __version__
from kbpf.config import load
from kbpf.config.load import LoadedConfig
from kbpf.config.settings import REMOVED_SETTINGS, SETTINGS, SETTINGS_BY_FLAG
from kbpf.errors import ConfigError, ConfigErrors, escape_unprintable
from kbpf.model.config import Config

SUMMARY: Final = "Serve the Services of this node until SIGTERM or Ctrl-C. They continue to work afterwards."
EPILOG: Final = (
    "Each flag has an environment variable: KBPF_PIN_DIR for --pin-dir. A flag takes precedence "
    "over the variable, and the variable over the file. kube-proxy's flags are ignored if the file "
    "has a KubeProxyConfiguration."
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The command line and the environment. `explicit_flags` are the flags on the command line, as
    {name: text}. `file`: the configuration file. `write_to` and `init_only`: what to do instead of
    serving.
    """

    explicit_flags: Mapping[str, str]
    environ: Mapping[str, str]
    file: Path | None = None
    write_to: Path | None = None
    init_only: bool = False

    @property
    def log_format(self) -> str:
        """The format from the command line or the environment; the file may set another one."""
        setting = SETTINGS_BY_FLAG["--log-format"]
        return self.explicit_flags.get(setting.name) or self.environ.get(setting.environment_variable) or "text"

    @property
    def flags(self) -> dict[str, str]:
        """The flags that are set, on the command line or by a variable."""
        texts = {"--config": str(self.file)} if self.file is not None else {}
        for setting in SETTINGS:
            text = self.explicit_flags.get(setting.name) or (
                setting.field and self.environ.get(setting.environment_variable)
            )
            if text or setting.name in self.explicit_flags:
                texts[setting.name] = text or ""
        return texts

    def load(self, data: bytes | None = None) -> LoadedConfig:
        """Loads the settings; `data` is the text of the file, if there is one.

        Raises ConfigError, also if they name something that this machine does not have; that is not
        checked if the settings are only written to a file.
        """
        settings = load.load(self.explicit_flags, self.environ, data, str(self.file))
        return settings if self.write_to is not None else load.check_settings(settings)


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser from the rows of config/settings.py, grouped by heading."""
    parser = argparse.ArgumentParser(
        "kbpf run", "kbpf run [--config FILE] [flag ...]", SUMMARY, EPILOG, allow_abbrev=False, add_help=False
    )
    file_group = parser.add_argument_group("Configuration file, and actions instead of serving")
    file_group.add_argument(
        "--config",
        metavar="FILE",
        help="a KubeProxyConfiguration, a KbpfConfiguration, or both; "
        "when the file changes, the agent restarts with it",
    )
    file_group.add_argument("--write-config-to", metavar="FILE", help="write the effective settings to FILE, and exit")
    file_group.add_argument(
        "--init-only", **_OPTIONAL_VALUE, help="write the kernel's conntrack settings, which needs root, and exit"
    )
    file_group.add_argument("--cleanup", **_OPTIONAL_VALUE, help="kube-proxy's flag; use the command kbpf cleanup")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in SETTINGS:
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        groups[setting.group].add_argument(
            setting.name,
            *setting.aliases,
            dest=setting.name,
            help=setting.help,
            # A boolean flag without a value means `true`, as in kube-proxy.
            **(_OPTIONAL_VALUE if setting.kind.json_type is bool else {"metavar": setting.kind.metavar}),
            action="append" if setting.kind.repeatable else "store",
        )
    for setting in REMOVED_SETTINGS:
        parser.add_argument(setting.name, dest=setting.name, help=argparse.SUPPRESS)
    help_group = parser.add_argument_group("Help")
    help_group.add_argument("-h", "--help", action="help", help="show this help and exit")
    help_group.add_argument(
        "--version", action="version", version=f"kbpf {__version__}", help="show the version and exit"
    )
    return parser


_OPTIONAL_VALUE: Final[dict[str, Any]] = {"metavar": "true|false", "nargs": "?", "const": "true"}


def parse_options(arguments: Sequence[str], environ: Mapping[str, str]) -> RunOptions:
    """Parses the command line. Raises SystemExit: 2, after a message, for wrong usage; 0 after
    --help and --version.
    """
    arg_parser = build_parser()
    values = vars(arg_parser.parse_args([_with_hyphens(argument) for argument in arguments]))
    if values["cleanup"] == "true":
        arg_parser.error("--cleanup is not a flag of kbpf run; use the command kbpf cleanup")
    explicit_flags = {
        setting.name: ",".join(text) if setting.kind.repeatable else text
        for setting in (*SETTINGS, *REMOVED_SETTINGS)
        if (text := values[setting.name]) is not None
    }
    file = values["config"] or environ.get(load.CONFIG_FILE_VARIABLE)
    return RunOptions(
        explicit_flags=explicit_flags,
        environ=environ,
        file=Path(file) if file else None,
        write_to=Path(values["write_config_to"]) if values["write_config_to"] else None,
        init_only=(values["init_only"] or "false").lower() == "true",
    )


def _with_hyphens(argument: str) -> str:
    """Converts underscores in a flag's name, as kube-proxy does: ``--masquerade_all``."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def load_settings(options: RunOptions, data: bytes | None) -> LoadedConfig:
    """Loads the settings. Raises SystemExit(2), after one line on stderr for each error."""
    try:
        return options.load(data)
    except ConfigErrors as error:
        for problem in error.errors:
            _report(error.log_format, logging.ERROR, str(problem))
        for warning in error.warnings:
            _report(error.log_format, logging.WARNING, warning)
    except ConfigError as error:
        _report(options.log_format, logging.ERROR, str(error))
    raise SystemExit(2)


def _read_file(options: RunOptions) -> bytes | None:
    """Reads the configuration file, if one is given. Raises SystemExit(1), after a line on stderr,
    if that fails.
    """
    try:
        return load.read_file(options.file) if options.file is not None else None
    except ConfigError as error:
        _report(options.log_format, logging.ERROR, str(error))
        raise SystemExit(1) from None


def _report(log_format: str, level: int, text: str) -> None:
    """Prints a line to stderr; as a JSON log line if the log format is JSON."""
    if log_format != "json":
        prefix = "" if level == logging.ERROR else f"{logging.getLevelName(level).lower()}: "
        print(f"kbpf run: {prefix}{escape_unprintable(text)}", file=sys.stderr)
        return
    from kbpf.cli.log_format import JsonFormatter

    record = logging.LogRecord("kbpf", level, "", 0, "%s", (text,), None)
    print(JsonFormatter().format(record), file=sys.stderr)


def with_node_name(config: Config) -> Config:
    """Fills in the host's name as the node name if none is configured."""
    if config.node_name:
        return config
    from kbpf.source.api.credentials import default_node_name

    return replace(config, node_name=default_node_name())


def prepare(arguments: Sequence[str]) -> tuple[RunOptions, LoadedConfig, bytes | None] | None:
    """Parses the arguments and loads the settings; also returns the text of the configuration file.
    Returns None if the command only had to write its settings, and has done so.
    """
    request = parse_options(arguments, os.environ)
    data = _read_file(request)
    settings = load_settings(request, data)
    if request.write_to is not None:
        from kbpf.config.write import write

        write(settings.config, request.write_to)
        for note in settings.notes:
            level = logging.WARNING if note.is_warning else logging.INFO
            _report(settings.config.log_format, level, note.text)
        return None
    return request, settings, data
