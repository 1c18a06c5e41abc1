"""What IPVS needs of this kernel and machine: one row per thing, with what to do about it. Nothing
is loaded or made: what is not there yet is looked for where the agent would find it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kbpf.dataplane.checks import CheckRow, row
from kbpf.dataplane.ipvs import rules
from kbpf.errors import KernelError
from kbpf.kernel import modules, netfilter, probe
from kbpf.kernel.ipvs import Ipvs
from kbpf.kernel.probe import Probe

DEVICES: Final = Path("/sys/class/net")
BRIDGE_CALLS: Final = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
SCHEDULERS: Final = {
    "wrr": "without it Services with weights get nobody",
    "mh": "without it Maglev is spread by weight",
    "sh": "without it a short circuit has no affinity",
}


def rows() -> Iterator[CheckRow]:
    """Everything, in the order in which the agent would meet it."""
    lacks = "CAP_NET_ADMIN" in probe.missing_capabilities()
    yield _needed("CAP_NET_ADMIN", Probe(not lacks, "missing" if lacks else ""), "run as root")
    yield _needed("IPVS", _ipvs(), "the kernel needs CONFIG_IP_VS, or its module ip_vs")
    yield _needed(
        "IPVS scheduler rr", modules.known("ip_vs_rr"), "the kernel needs CONFIG_IP_VS_RR"
    )
    for name, without in SCHEDULERS.items():
        yield row(
            f"IPVS scheduler {name}", modules.known(f"ip_vs_{name}"),
            f"the kernel needs CONFIG_IP_VS_{name.upper()}; {without}", needed=False,
        )  # fmt: skip
    yield _needed("dummy devices", modules.known("dummy"), "the kernel needs CONFIG_DUMMY")
    found = netfilter.available()
    yield _needed("nf_tables", found, "install python3-nftables; the kernel needs CONFIG_NF_TABLES")
    if found.works:
        yield _needed(
            "nftables rules", _rules(), "mode ipvs needs sets, reject and masquerade of nf_tables"
        )
        yield row(
            "INPUT", _input(),
            "let in what is sent to addresses and NodePorts of Services: IPVS gets it by INPUT",
            needed=False,
        )  # fmt: skip
    yield row(
        "bridged answers", _bridged(),
        "modprobe br_netfilter and set net.bridge.bridge-nf-call-iptables to 1, or pods behind one "
        "bridge do not reach each other by Services", needed=False,
    )  # fmt: skip


def _needed(name: str, found: Probe, advice: str) -> CheckRow:
    """A row without which mode ipvs does not work."""
    made = row(name, found, advice, needed=False)
    return CheckRow(made.name, made.result, False, made.detail, made.advice, ipvs=True)


def _ipvs() -> Probe:
    try:
        Ipvs().close()
    except KernelError:
        return modules.known("ip_vs")
    return Probe(True)


def _input() -> Probe:
    """Whether the host's firewall lets packets get to IPVS."""
    try:
        closed = netfilter.closed_inputs()
    except KernelError as error:
        return Probe(None, error.what)
    return Probe(not closed, f"closed: {', '.join(closed)}" if closed else "")


def _bridged() -> Probe:
    """Whether answers between pods behind one bridge go through the node's stack."""
    if not any(DEVICES.glob("*/bridge")):
        return Probe(True, "there is no bridge")
    try:
        called = BRIDGE_CALLS.read_text().strip()
    except OSError:
        return Probe(False, "br_netfilter is not loaded")
    return Probe(called == "1", f"{BRIDGE_CALLS.name} is {called}")


def _rules() -> Probe:
    """The kernel looks at all of the table, and then does without it."""
    try:
        netfilter.transaction(*rules.table(rules.Style("kbpf_check")), dry=True)
    except KernelError as error:
        return Probe(False, error.what)
    return Probe(True)
