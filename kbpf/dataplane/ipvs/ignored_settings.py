"""Settings that do nothing in this mode."""

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
"""Those that say how it is served: field of Config → flag. Not where BPF's things are: an agent of
mode auto, or one that comes after mode bpf, looks there."""


def list_ignored(config: Config) -> tuple[str, ...]:
    """The flags of those that are not the default."""
    defaults = Config()
    fields = ((attrgetter(field), flag) for field, flag in IGNORED_SETTINGS.items())
    return tuple(flag for value, flag in fields if value(config) != value(defaults))
