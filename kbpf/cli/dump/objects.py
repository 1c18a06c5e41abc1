# SPDX-License-Identifier: Apache-2.0
"""Prints the Nodes, Services and EndpointSlices that the agent reads as YAML for a folder of
`--source`. They have only the fields of source/decode/wire.py: other annotations may be secrets.
"""

import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from kbpf import bounded_yaml
from kbpf.cli import origin
from kbpf.errors import KbpfError
from kbpf.model.events import Kind
from kbpf.source.decode import wire
from kbpf.source.folder import folder
from kbpf.source.folder.documents import API_VERSIONS, load_objects

WIRE_TYPES: Final[dict[str, type[msgspec.Struct]]] = {
    Kind.NODE: wire.Node,
    Kind.SERVICE: wire.Service,
    Kind.SLICE: wire.EndpointSlice,
}
END: Final = "---\n"
"""Follows each document, so that one that is cut off can be recognized."""


def print_object(kind: str, value: object, creation_time: str = "") -> None:
    """Prints a plain object. `creation_time`: if it has none. What an API server would refuse,
    since a field has the wrong JSON type, is left out.
    """
    try:
        obj = msgspec.convert(value, WIRE_TYPES[kind])
    except msgspec.ValidationError:
        return
    reduced = _without_nulls(msgspec.to_builtins(obj))
    if kind == Kind.SERVICE and creation_time:
        reduced["metadata"].setdefault("creationTimestamp", creation_time)
    head = {"apiVersion": API_VERSIONS[kind], "kind": str(kind)}
    print(bounded_yaml.dump(head | reduced), end=END)


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {k: _without_nulls(v) for k, v in value.items() if v is not None}
        case list() | tuple():
            return [_without_nulls(item) for item in value]
    return value


def print_folder(path: Path) -> bool:
    """Returns whether all files could be read; otherwise a line on stderr says why not."""
    folder.check_folder(path)
    is_complete = True
    for name, stamp in sorted(folder.scan_folder(path)):
        try:
            for _, _, kind, value in load_objects(name, (path / name).read_bytes(), []):
                if kind in WIRE_TYPES:  # and never a Secret
                    print_object(kind, value, folder.format_time(stamp.mtime_ns))
        except (KbpfError, OSError) as error:
            print(error, file=sys.stderr)
            is_complete = False
    return is_complete


def main(*arguments: str) -> int:
    """`arguments`: --kubeconfig FILE and --config FILE, or none."""
    paths = dict(zip(arguments[::2], map(Path, arguments[1::2]), strict=True))
    try:
        config = origin.read_config(paths.get("--config"), paths.get("--kubeconfig"))
        if config.source is not None:
            return int(not print_folder(config.source))
        origin.read_cluster(config, lambda kind, raw: print_object(kind, msgspec.json.decode(raw)))
    except KbpfError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
