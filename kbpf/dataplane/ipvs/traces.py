"""What an agent of mode ipvs leaves on its node: how it is named, whose it is, how it goes."""

import contextlib
import errno
from pathlib import Path
from typing import Final

from kbpf.dataplane.ipvs import notes, rules
from kbpf.dataplane.ipvs.plan import noted
from kbpf.errors import KernelError
from kbpf.kernel import dummy, ipvs, netfilter
from kbpf.kernel.ipvs import Command, Ipvs, Service
from kbpf.kernel.process import LOCK_SECONDS, lock_folder
from kbpf.model.config import Config, LocalMode

ROOT: Final = "run as root"


def style_of(config: Config) -> rules.Style:
    """What the chains depend on."""
    local = ""
    if config.detect_local_mode is LocalMode.BRIDGE:
        local = config.pod_bridge_interface
    elif config.detect_local_mode is LocalMode.PREFIX:
        local = f"{config.pod_interface_name_prefix}*"
    return rules.Style(
        config.nft_table, config.masquerade_bit, local, beside(config.masquerade_ports)
    )


def beside(ports: tuple[int, int]) -> tuple[int, int]:
    """The larger range of unprivileged ports that has none of these."""
    low, high = ports
    above, below = (high + 1, 65535), (1024, low - 1)
    return above if above[1] - above[0] >= below[1] - below[0] else below


def lock(folder: Path, patience: float = LOCK_SECONDS) -> int:
    """A descriptor that makes this process the only one at work with this device and table."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock_folder(folder, patience, "stop it first")
    except OSError as error:
        raise KernelError("cannot make the state folder", str(folder), "run as root",
                          error.errno or 0) from error  # fmt: skip


def remove(config: Config, forward: bool = True) -> tuple[str, ...]:
    """Every trace of an agent with these settings, in an order that leaves nobody half served;
    what there was. Rules in FORWARD stay if another mode needs them (not `forward`). KernelError if
    the kernel refuses.
    """
    style, gone = style_of(config), []
    try:
        elements = rules.read(netfilter.transaction(rules.listing(style)))
    except KernelError as error:
        if error.errno != errno.ENOENT:
            raise
        elements = None
    if elements is not None:
        ours = [v for element in elements if (v := noted(element)) is not None]
        if ours:
            face = Ipvs()
            try:
                face.change([ipvs.Change(Command.DEL_SERVICE, Service(*v)) for v in sorted(ours)],
                            (errno.ESRCH,))  # fmt: skip
            finally:
                face.close()
            gone.append(f"{len(ours)} virtual services")
    if dummy.remove(config.ipvs_device):
        gone.append(f"device {config.ipvs_device}")
    if elements is not None:
        for chain in netfilter.forward_chains() if forward else ():
            netfilter.remove_ours(chain)
        netfilter.transaction(*rules.no_table(style), hint=ROOT)
        gone.append(f"nftables inet {style.table}")
    folder = config.state_dir / config.ipvs_device
    notes.remove(folder)
    for one in (folder, config.state_dir):
        with contextlib.suppress(OSError):
            one.rmdir()
    return tuple(gone)
