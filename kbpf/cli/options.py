# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and those of all lists: they choose rows by namespace, order
them, and limit them.

Defaults and environment variables are those of `kbpf run`, and --config reads the file that `run`
was given, so one configuration applies to all commands. A flag takes precedence over a variable,
and a variable over the file.

`readable=False` does not mean that a path must be unreadable. It turns off typer's check, so that
the command reports the problem itself, with its own exit code.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from kbpf.config import durations
from kbpf.errors import ConfigError
from kbpf.model.config import Config
from kbpf.views.page import Page

if TYPE_CHECKING:
    from kbpf.config.locations import ConfiguredLocations


DEFAULT: Final = Config()


class Output(StrEnum):
    """An output format."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"

    @property
    def is_text(self) -> bool:
        """Whether people read it: notes are printed as well."""
        return self in (Output.TABLE, Output.WIDE)


OutputOption = Annotated[
    Output, typer.Option("-o", "--output", metavar="table|wide|json|yaml|name", help="Output format.")
]
PinDir = Annotated[
    Path,
    typer.Option("--pin-dir", envvar="KBPF_PIN_DIR", help="The agent's pin folder, as given to `run`.", readable=False),
]
CacheDir = Annotated[
    Path, typer.Option("--cache-dir", envvar="KBPF_CACHE_DIR", help="The folder for compiled programs.", readable=False)
]
StateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir", envvar="KBPF_STATE_DIR", help="Mode ipvs: the state folder, as given to `run`.", readable=False
    ),
]
CGroup = Annotated[
    Path | None,
    typer.Option("--cgroup", envvar="KBPF_CGROUP", help="The cgroup v2 folder, as given to `run`.", readable=False),
]
Watch = Annotated[bool, typer.Option("-w", "--watch", help="Refresh every 2 s, until Ctrl-C.")]


# ---- the file that `run` was given ---------------------------------------------------------------


def apply_file_defaults(context: typer.Context, file: Path | None) -> "ConfiguredLocations | None":
    """Makes the values in the file the defaults of the other options. None without a file."""
    if file is None:
        return None
    from kbpf.config import locations

    file_names = locations.read_locations(file)
    defaults = {name: str(value) for name, value in file_names.values.items()}
    context.default_map = {**(context.default_map or {}), **defaults}
    return file_names


def warn(file: Path | None, errors: Iterable[ConfigError]) -> None:
    """Prints one line about errors in the file that do not end the command."""
    if lines := "; ".join(map(str, errors)):
        print(f"kbpf: {file} has errors, and its other settings are used: {lines}", file=sys.stderr)


def _apply_and_warn(context: typer.Context, file: Path | None) -> Path | None:
    file_names = apply_file_defaults(context, file)
    if file_names is not None and not context.resilient_parsing:  # a completion prints no warning
        warn(file, file_names.errors)
    return file


NAMES_KEY: Final = "kbpf.names"
"""The key under which _apply_and_store() puts the ConfiguredLocations into the context."""


def _apply_and_store(context: typer.Context, file: Path | None) -> Path | None:
    context.meta[NAMES_KEY] = apply_file_defaults(context, file)
    return file


def _file_option(callback: Callable[[typer.Context, Path | None], Path | None]) -> Any:
    return typer.Option(
        "--config",
        metavar="FILE",
        envvar="KBPF_CONFIG",
        is_eager=True,
        callback=callback,
        readable=False,
        help="The configuration file of `run`. It sets the defaults of the options below.",
    )


ConfigFile = Annotated[Path | None, _file_option(_apply_and_warn)]
"""For commands that only read: errors in the file are warnings."""
ConfigNames = Annotated[Path | None, _file_option(_apply_and_store)]
"""For commands that must know all names, such as cleanup: these handle the errors themselves."""


# ---- lists ---------------------------------------------------------------------------------------

Namespace = Annotated[str, typer.Option("-n", "--namespace", help="Only this namespace.")]
AllNamespaces = Annotated[bool, typer.Option("-A", "--all-namespaces", help="All namespaces, as without -n.")]
NoHeaders = Annotated[bool, typer.Option("--no-headers", help="Leave out the titles of the columns.")]
SortBy = Annotated[str, typer.Option("--sort-by", metavar="COLUMN", help="The column that orders the rows.")]
Limit = Annotated[int, typer.Option("--limit", min=0, metavar="N", help="Show at most N rows; 0: all.")]


def parse_duration(text: str, option: str) -> float:
    """The seconds of the value of an option. Raises typer.BadParameter."""
    try:
        return durations.parse(text, option)
    except ConfigError as error:
        raise typer.BadParameter(f"{error.what}; {error.hint}", param_hint=option) from None


def split_name(name: str, namespace: str) -> tuple[str, str]:
    """Namespace ("" if none is given) and name of NAME or NAMESPACE/NAME. Raises
    typer.BadParameter if -n contradicts it.
    """
    name_namespace, _, bare = name.rpartition("/")
    if name_namespace and namespace not in ("", name_namespace):
        raise typer.BadParameter(f"{namespace} contradicts the namespace of {name}", param_hint="--namespace")
    return name_namespace or namespace, bare


def choose_namespace(name: str, namespace: str, all_namespaces: bool) -> str:
    """The value of -n, "" with -A. Raises typer.BadParameter if it contradicts NAMESPACE/NAME."""
    chosen = "" if all_namespaces else namespace
    split_name(name, chosen)
    return chosen


class Selection(NamedTuple):
    """The rows to show, and their order: the values of the options above."""

    namespace: str = ""
    sort_by: str = ""
    limit: int = 0

    def apply(self, page: Page) -> Page:
        """The page with these rows. Raises typer.BadParameter."""
        rows, notes, empty = page.rows, page.notes, page.empty
        if self.namespace and (namespaces := page.kind.namespaces):
            rows = [row for row in rows if self.namespace in namespaces(row)]
            empty = "" if rows else f"No resources found in {self.namespace} namespace."
        if self.sort_by:
            column = next((c for c in page.columns if c.title.lower() == self.sort_by.lower()), None)
            if column is None:
                titles = ", ".join(column.title for column in page.columns)
                raise typer.BadParameter(f"no column {self.sort_by}; there are {titles}", param_hint="--sort-by")
            rows = sorted(rows, key=column.sort_key)
        if self.limit:
            left_out = (len(rows) if isinstance(rows, Sequence) else page.total) - self.limit
            rows, notes = islice(rows, self.limit), (f"and {left_out} more rows" if left_out > 0 else "", *notes)
        return replace(page, rows=rows, notes=notes, empty=empty)
