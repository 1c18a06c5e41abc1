"""Which data plane serves.

Two at once would both translate: what another mode has left on the node is to be removed first, by
`kbpf cleanup`, and its absence is checked before anything is made.
"""

from kbpf.dataplane.base import DataPlane
from kbpf.errors import ConfigError
from kbpf.model.config import Config

CLEANUP = "stop its agent and run `kbpf cleanup` with the same folders"


def choose(config: Config) -> DataPlane:
    """The data plane of these settings, not opened. ConfigError while another mode's is there."""
    if config.mode == "ipvs":
        if (config.pin_dir / "links").is_dir():
            raise ConfigError(
                "mode ipvs finds BPF programs of kbpf attached", str(config.pin_dir), CLEANUP
            )
        from kbpf.dataplane.ipvs.plane import IpvsPlane

        return IpvsPlane(config)
    left = config.state_dir / config.ipvs_device
    if left.is_dir():
        raise ConfigError(f"mode {config.mode} finds IPVS services of kbpf", str(left), CLEANUP)
    from kbpf.dataplane.bpf.plane import BpfPlane

    return BpfPlane(config)
