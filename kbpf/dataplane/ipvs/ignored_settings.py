# SPDX-License-Identifier: Apache-2.0
"""Settings that have no effect in mode ipvs."""

from operator import attrgetter
from types import MappingProxyType
from typing import Final

from kbpf.model.config import Config, MapSizes

IGNORED_SETTINGS: Final = MappingProxyType(
    {
        "socket_lb": "--socket-lb",
        "socket_lb_exempt": "--socket-lb-exempt",
        "packet_path": "--packet-path",
        "devices": "--device",
        "excluded_devices": "--exclude-device",
        "forwarding": "--forwarding",
        "accounting": "--accounting",
        "serving.backend_series": "--metrics-backends",
        **{f"sizes.{name}": f"--max-{name}" for name in MapSizes.__dataclass_fields__},
    }
)
"""Field of Config → flag. Paths of BPF objects are not listed: mode auto uses them, and so does an
agent that drains what mode bpf left."""


def list_ignored(config: Config) -> tuple[str, ...]:
    """The flags of ignored settings that differ from the default."""
    defaults = Config()
    fields = ((attrgetter(field), flag) for field, flag in IGNORED_SETTINGS.items())
    return tuple(flag for value, flag in fields if value(config) != value(defaults))
