"""Options that several commands share. Defaults and environment variables are those of `kbpf run`,
so that one setting of the environment serves all.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from kbpf.model.config import Config

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
        "--pin-dir", envvar="KBPF_PIN_DIR", help="The agent's folder of pins, as given to `run`."
    ),
]
CacheDir = Annotated[
    Path,
    typer.Option(
        "--cache-dir", envvar="KBPF_CACHE_DIR", help="Where the compiled programs are kept."
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
        "--state-dir", envvar="KBPF_STATE_DIR", help="Mode ipvs: the folder, as given to `run`."
    ),
]
CGroup = Annotated[
    Path | None,
    typer.Option(
        "--cgroup", envvar="KBPF_CGROUP", help="The cgroup v2 folder that `run` is given."
    ),
]
Watch = Annotated[
    bool, typer.Option("-w", "--watch", help="Show it again every 2 s, until Ctrl-C.")
]
