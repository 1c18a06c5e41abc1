"""`kbpf run`, from the command line to the running agent, without typer.

The agent runs for months: typer, pydantic and rich would stay in its memory for nothing. So this
one command is parsed by argparse, out of the table of flags in config/flags.py, and typer is not
imported at all.
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
from kbpf.config import flags, load, preflight
from kbpf.config.load import Loaded
from kbpf.errors import ConfigError, ConfigErrors, printable
from kbpf.model.config import Config

SUMMARY: Final = (
    "Serves the Services of this node, until SIGTERM or Ctrl-C; they work on afterwards."
)
EPILOG: Final = (
    "Each flag has an environment variable too: --pin-dir is KBPF_PIN_DIR. A flag beats it, and it "
    "beats the file. kube-proxy's own flags do nothing where the file has a "
    "KubeProxyConfiguration."
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line and the environment ask for: the flags as they were given
    ({name: text}), the file, and what to do instead of serving.
    """

    given: Mapping[str, str]
    environ: Mapping[str, str]
    file: Path | None = None
    write_to: Path | None = None
    init_only: bool = False

    @property
    def log_format(self) -> str:
        """As the command line and the environment have it; the file may say otherwise."""
        name = flags.BY_NAME["--log-format"]
        return self.given.get(name.name) or self.environ.get(name.variable) or "text"

    @property
    def flags(self) -> dict[str, str]:
        """Those that are given, on the command line or by a variable."""
        found = {"--config": str(self.file)} if self.file is not None else {}
        for flag in flags.FLAGS:
            text = self.given.get(flag.name) or (flag.field and self.environ.get(flag.variable))
            if text or flag.name in self.given:
                found[flag.name] = text or ""
        return found

    def load(self, data: bytes | None = None) -> Loaded:
        """The settings, with this text of the file, if there is one. Raises ConfigError, also for
        what they name and this machine does not have, unless they are only to be written.
        """
        made = load.load(self.given, self.environ, data, str(self.file))
        return made if self.write_to is not None else preflight.checked(made)


def parser() -> argparse.ArgumentParser:
    """The flags of config/flags.py, by heading."""
    made = argparse.ArgumentParser(
        "kbpf run", "kbpf run [--config FILE] [flag ...]", SUMMARY, EPILOG,
        allow_abbrev=False, add_help=False,
    )  # fmt: skip
    file = made.add_argument_group("A file, and what to do instead of serving")
    file.add_argument(
        "--config", metavar="FILE", help="a KubeProxyConfiguration, a KbpfConfiguration, or both; "
        "when it changes the agent begins anew with it"
    )  # fmt: skip
    file.add_argument(
        "--write-config-to", metavar="FILE", help="write all settings as they are, and end"
    )
    file.add_argument(
        "--init-only", **_ALONE, help="set the kernel's conntrack, which needs to be root, and end"
    )  # fmt: skip
    file.add_argument(
        "--cleanup", **_ALONE, help="kube-proxy's; here it is a command: kbpf cleanup"
    )  # fmt: skip
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in flags.FLAGS:
        if flag.group not in groups:
            groups[flag.group] = made.add_argument_group(flag.group)
        groups[flag.group].add_argument(
            flag.name, *flag.aliases, dest=flag.name, help=flag.help,
            **(_ALONE if flag.may_stand_alone else {"metavar": flag.metavar}),
            action="append" if flag.is_list else "store",
        )  # fmt: skip
    about = made.add_argument_group("Help")
    about.add_argument("-h", "--help", action="help", help="show this and end")
    about.add_argument(
        "--version", action="version", version=f"kbpf {__version__}", help="show it and end"
    )
    return made


_ALONE: Final[dict[str, Any]] = {"metavar": "true|false", "nargs": "?", "const": "true"}


def asked(arguments: Sequence[str], environ: Mapping[str, str]) -> Asked:
    """What is asked for; SystemExit(2) with a message for wrong usage, SystemExit(0) after help."""
    reader = parser()
    found = vars(reader.parse_args([_with_hyphens(word) for word in arguments]))
    if found["cleanup"] == "true":
        reader.error("--cleanup is a command here: kbpf cleanup")
    given = {
        flag.name: ",".join(said) if flag.is_list else said
        for flag in flags.FLAGS
        if (said := found[flag.name]) is not None
    }
    file = found["config"] or environ.get(load.FILE_VARIABLE)
    return Asked(
        given=given,
        environ=environ,
        file=Path(file) if file else None,
        write_to=Path(found["write_config_to"]) if found["write_config_to"] else None,
        init_only=(found["init_only"] or "false").lower() == "true",
    )


def _with_hyphens(word: str) -> str:
    """As kube-proxy takes it: ``--masquerade_all`` is ``--masquerade-all``."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def loaded(request: Asked, data: bytes | None) -> Loaded:
    """The settings; SystemExit(2) with a line for each that is wrong."""
    try:
        return request.load(data)
    except ConfigErrors as error:
        for each in error.errors:
            _tell(error.log_format, logging.ERROR, str(each))
        for warning in error.warnings:
            _tell(error.log_format, logging.WARNING, warning)
    except ConfigError as error:
        _tell(request.log_format, logging.ERROR, str(error))
    raise SystemExit(2)


def _file(request: Asked) -> bytes | None:
    """The text of the file, if there is one; SystemExit(1) with a line when it cannot be read."""
    try:
        return load.read_file(request.file) if request.file is not None else None
    except ConfigError as error:
        _tell(request.log_format, logging.ERROR, str(error))
        raise SystemExit(1) from None


def _tell(log_format: str, level: int, text: str) -> None:
    """A line to stderr, in the form of the log where that is JSON."""
    if log_format != "json":
        what = "" if level == logging.ERROR else f"{logging.getLevelName(level).lower()}: "
        print(f"kbpf run: {what}{printable(text)}", file=sys.stderr)
        return
    from kbpf.cli.log_format import JsonLines

    record = logging.LogRecord("kbpf", level, "", 0, "%s", (text,), None)
    print(JsonLines().format(record), file=sys.stderr)


def named(config: Config) -> Config:
    """With this machine's name, if nobody said the Node's."""
    if config.node_name:
        return config
    from kbpf.source.api.credentials import default_node_name

    return replace(config, node_name=default_node_name())


def prepare(arguments: Sequence[str]) -> tuple[Asked, Loaded, bytes | None] | None:
    """What the agent runs with; None when the command has only written its settings."""
    request = asked(arguments, os.environ)
    data = _file(request)
    settings = loaded(request, data)
    if request.write_to is not None:
        from kbpf.config.write import write

        write(settings.config, request.write_to)
        for note in settings.notes:
            level = logging.WARNING if note.is_warning else logging.INFO
            _tell(settings.config.log_format, level, note.text)
        return None
    return request, settings, data
