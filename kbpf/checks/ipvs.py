"""What IPVS needs of this kernel and machine: one row per thing, with what to do about it. Nothing
is made here. What modprobe does not know of is tried in a network namespace of its own, since the
kernel loads by itself what is asked for: our image has no modprobe.
"""

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from kbpf.checks.row import CheckRow, row
from kbpf.dataplane.ipvs import ruleset
from kbpf.errors import KernelError
from kbpf.kernel.bpf import probe
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.net.ipvs import Change, Command, Ipvs, Service, Settings
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import modules, sandbox
from kbpf.model.address import parse_addr

DEVICES: Final = Path("/sys/class/net")
BRIDGE_CALLS: Final = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
SCHEDULERS: Final = {
    "wrr": "without it weights are not heeded",
    "mh": "without it Maglev is spread by weight",
    "sh": "without it a short circuit has no affinity",
}


def rows() -> Iterator[CheckRow]:
    """Everything, in the order in which the agent would meet it."""
    lacks = "CAP_NET_ADMIN" in probe.missing_capabilities()
    yield _needed("CAP_NET_ADMIN", Probe(not lacks, "missing" if lacks else ""), "run as root")
    there, advice = _ipvs()
    yield _needed("IPVS", there, advice)
    yield _needed(
        "IPVS with conntrack", _conntrack(),
        "the kernel needs CONFIG_IP_VS_NFCT; without it nobody is masqueraded",
    )  # fmt: skip
    scheduler = partial(_scheduler, tried=there.works is True)
    yield _needed("IPVS scheduler rr", scheduler("rr"), "the kernel needs CONFIG_IP_VS_RR")
    for name, without in SCHEDULERS.items():
        yield row(
            f"IPVS scheduler {name}", scheduler(name),
            f"the kernel needs CONFIG_IP_VS_{name.upper()}; {without}", needed=False,
        )  # fmt: skip
    yield _needed("dummy devices", _known("dummy", _make_device), "the kernel needs CONFIG_DUMMY")
    found = forward_rules.available()
    yield _needed(
        "nf_tables", Probe(found.works is True, found.reason),
        "install python3-nftables; the kernel needs CONFIG_NF_TABLES",
    )  # fmt: skip
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


def _ipvs() -> tuple[Probe, str]:
    """And what to do if it is not there. The kernel loads it by itself since Linux 6.1."""
    advice = "the kernel needs CONFIG_IP_VS, or its module ip_vs"
    try:
        Ipvs().close()
    except KernelError as error:
        if error.errno != errno.ENOENT or modules.program() is not None:
            return modules.known("ip_vs"), advice
        found = Probe(False, "not loaded, and there is no modprobe here to load it")
        return found, f"on the node: modprobe ip_vs; {advice}"
    return Probe(True), advice


def _conntrack() -> Probe:
    found = ipvs.knows_conntrack()
    return Probe(found, "IPVS is not loaded, or /proc/sys hidden" if found is None else "")


def _scheduler(name: str, tried: bool) -> Probe:
    """Nothing can be tried where IPVS is not there."""
    module = f"ip_vs_{name}"
    return _known(module, partial(_make_service, name)) if tried else modules.known(module)


def _known(module: str, make: Callable[[], int]) -> Probe:
    """Whether modprobe knows of this module, or else whether `make`, which needs it, gives 0 and no
    errno.
    """
    known = modules.known(module)
    if known.works:
        return known
    try:
        code = sandbox.run(make)
    except KernelError:  # nobody lets us have a namespace
        return known
    if code in (errno.ENOENT, errno.EOPNOTSUPP):
        return Probe(False, f"no module {module}")
    if code:
        return Probe(None, f"cannot be tried: {errno.errorcode.get(code, code)}")
    return Probe(True, "loaded, or built in")


def _make_device() -> int:
    """In a network namespace of its own."""
    try:
        dummy.ensure("kbpf-check")
    except KernelError as error:
        return error.errno
    return 0


def _make_service(scheduler: str) -> int:
    """In a network namespace of its own."""
    service = Service(socket.IPPROTO_TCP, parse_addr("192.0.2.1"), 80)
    try:
        with closing(Ipvs()) as face:
            made = face.try_([Change(Command.NEW_SERVICE, service, Settings(scheduler))])
    except KernelError as error:
        return error.errno
    return made[0]


def _input() -> Probe:
    """Whether the host's firewall lets packets get to IPVS."""
    try:
        closed = forward_rules.closed_inputs()
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
        forward_rules.transaction(*ruleset.table(ruleset.Style("kbpf_check")), dry=True)
    except KernelError as error:
        return Probe(False, error.what)
    return Probe(True)
