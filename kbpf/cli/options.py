"""Options that several commands share. Defaults and environment variables are those of `kbpf run`,
so that one setting of the environment serves all; and so do those of the file that `run` was given.
A flag beats a variable, and that beats the file.

`readable=False`: not that a path must not be readable, but that the command says what is wrong with
it, in its own words and with its own exit code, instead of typer.
"""

import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kbpf.errors import ConfigError
from kbpf.model.config import Config

if TYPE_CHECKING:
    from kbpf.config.locations import ConfiguredLocations

DEFAULT: Final = Config()


class Output(StrEnum):
    """How rows are shown."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[
    Output, typer.Option("-o", "--output", help="How to show it.", show_default=True)
]
PinDir = Annotated[
    Path,
    typer.Option(
        "--pin-dir",
        envvar="KBPF_PIN_DIR",
        help="The agent's folder of pins, as given to `run`.",
        readable=False,
    ),
]
CacheDir = Annotated[
    Path,
    typer.Option(
        "--cache-dir",
        envvar="KBPF_CACHE_DIR",
        help="Where the compiled programs are kept.",
        readable=False,
    ),
]
IpvsDevice = Annotated[
    str,
    typer.Option(
        "--ipvs-device", envvar="KBPF_IPVS_DEVICE", help="Mode ipvs: the device, as given to `run`."
    ),
]
NftTable = Annotated[
    str,
    typer.Option(
        "--nft-table", envvar="KBPF_NFT_TABLE", help="Mode ipvs: the table, as given to `run`."
    ),
]
StateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir",
        envvar="KBPF_STATE_DIR",
        help="Mode ipvs: the folder, as given to `run`.",
        readable=False,
    ),
]
CGroup = Annotated[
    Path | None,
    typer.Option(
        "--cgroup",
        envvar="KBPF_CGROUP",
        help="The cgroup v2 folder that `run` is given.",
        readable=False,
    ),
]
Watch = Annotated[
    bool, typer.Option("-w", "--watch", help="Show it again every 2 s, until Ctrl-C.")
]


# ---- the file that `run` was given ---------------------------------------------------------------


def apply_file_defaults(context: typer.Context, file: Path | None) -> "ConfiguredLocations | None":
    """What the file says becomes the default of the other options; None without a file."""
    if file is None:
        return None
    from kbpf.config import locations

    file_names = locations.read_locations(file)
    defaults = {name: str(value) for name, value in file_names.values.items()}
    context.default_map = {**(context.default_map or {}), **defaults}
    return file_names


def warn(file: Path | None, errors: Iterable[ConfigError]) -> None:
    """One line for all that is wrong in the file and does not end the command."""
    if lines := "; ".join(map(str, errors)):
        print(f"kbpf: what can be read of {file} counts, but not all can: {lines}", file=sys.stderr)


def _apply_and_warn(context: typer.Context, file: Path | None) -> Path | None:
    file_names = apply_file_defaults(context, file)
    warn(file, file_names.errors if file_names is not None else ())
    return file


NAMES_KEY: Final = "kbpf.names"
"""Where _take_and_note() leaves the Names in the context."""


def _apply_and_store(context: typer.Context, file: Path | None) -> Path | None:
    context.meta[NAMES_KEY] = apply_file_defaults(context, file)
    return file


def _file_option(callback: Callable[[typer.Context, Path | None], Path | None]) -> Any:
    return typer.Option(
        "--config", metavar="FILE", envvar="KBPF_CONFIG", is_eager=True, callback=callback,
        readable=False,
        help="The file that `run` was given: what it says of the folders and names below.",
    )  # fmt: skip


ConfigFile = Annotated[Path | None, _file_option(_apply_and_warn)]
"""For commands that look: what is wrong in it is told."""
ConfigNames = Annotated[Path | None, _file_option(_apply_and_store)]
"""For those that have to know the names: it leaves them to the command."""
