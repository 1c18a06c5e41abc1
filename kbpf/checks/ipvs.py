# SPDX-License-Identifier: Apache-2.0
"""Checks what mode ipvs needs of the kernel and the node; each row says what to do.

Nothing on the node is changed. A module that modprobe does not find is tested by using it in a
temporary network namespace, because the kernel loads modules on demand and our image has no
modprobe.
"""

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from kbpf.checks.row import Check, CheckRow, make_row, sum_up
from kbpf.dataplane.ipvs import ruleset
from kbpf.errors import KernelError
from kbpf.kernel.bpf import probe
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.net.ipvs import IpvsClient, IpvsCommand, IpvsRequest, VirtualServiceSettings
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import modules, sandbox
from kbpf.model.address import parse_addr
from kbpf.model.desired import VirtualService

SYS_CLASS_NET: Final = Path("/sys/class/net")
BRIDGE_NF_CALL_IPTABLES: Final = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
SCHEDULERS: Final = {
    "rr": "without it mode ipvs cannot be used",
    "wrr": "without it weights are ignored",
    "mh": "without it, Maglev Services are balanced by weight",
    "sh": "without it connections from pods to a LoadBalancer address have no affinity",
}


_required_row: Final = partial(make_row, ipvs=True)
"""A row without which mode ipvs does not work."""


def rows() -> Iterator[CheckRow]:
    """Yields all rows, in the order in which the agent would meet what they check."""
    if "CAP_NET_ADMIN" in probe.missing_capabilities():
        ipvs_probe, advice = Probe(False, "CAP_NET_ADMIN is missing"), "run as root"
    else:
        ipvs_probe, advice = _probe_ipvs()
    yield _required_row(Check.IPVS, ipvs_probe, advice)
    supports_conntrack = ipvs.supports_conntrack()
    unknown = "IPVS is not loaded, or /proc/sys is hidden" if supports_conntrack is None else ""
    yield _required_row(
        Check.IPVS_CONNTRACK,
        Probe(supports_conntrack, unknown),
        "the kernel needs CONFIG_IP_VS_NFCT; without it sources cannot be masqueraded",
    )
    probe_scheduler = partial(_probe_scheduler, is_loaded=ipvs_probe.works is True)
    schedulers = {
        name: make_row(
            Check.IPVS_SCHEDULER.of(name),
            probe_scheduler(name),
            f"the kernel needs CONFIG_IP_VS_{name.upper()}; {consequence}",
            ipvs=name == "rr",
        )
        for name, consequence in SCHEDULERS.items()
    }
    yield from sum_up(Check.IPVS_SCHEDULER, schedulers)
    yield _required_row(Check.DUMMY, _probe_module("dummy", _try_device), "the kernel needs CONFIG_DUMMY")
    nft_probe = forward_rules.probe_nf_tables()
    yield _required_row(
        Check.NF_TABLES,
        _probe_rules() if nft_probe.works else Probe(False, nft_probe.reason),
        "install python3-nftables; the kernel needs CONFIG_NF_TABLES with sets, reject and masquerade",
    )
    if nft_probe.works:
        yield make_row(
            Check.INPUT_CHAINS,
            _probe_input(),
            "accept packets to Service addresses and NodePorts: IPVS takes them from INPUT",
        )
    yield make_row(
        Check.BRIDGE_NETFILTER,
        _probe_bridge_netfilter(),
        "modprobe br_netfilter and set net.bridge.bridge-nf-call-iptables to 1, or pods behind one "
        "bridge cannot reach each other through Services",
    )


def _probe_ipvs() -> tuple[Probe, str]:
    """Also returns the advice for a failure. The kernel loads ip_vs on demand since Linux 6.1."""
    advice = "the kernel needs CONFIG_IP_VS, or its module ip_vs"
    try:
        IpvsClient().close()
    except KernelError as error:
        if error.errno != errno.ENOENT or modules.find_modprobe() is not None:
            return modules.probe_module("ip_vs"), advice
        result = Probe(False, "not loaded, and no modprobe is installed here to load it")
        return result, f"on the node: modprobe ip_vs; {advice}"
    return Probe(True), advice


def _probe_scheduler(name: str, is_loaded: bool) -> Probe:
    """A scheduler can be tested by using it only if IPVS itself is loaded."""
    module = f"ip_vs_{name}"
    return _probe_module(module, partial(_try_service, name)) if is_loaded else modules.probe_module(module)


def _probe_module(module: str, attempt: Callable[[], int]) -> Probe:
    """Whether modprobe finds this module; otherwise whether `attempt`, which needs it, returns 0
    rather than an errno.
    """
    module_probe = modules.probe_module(module)
    if module_probe.works:
        return module_probe
    try:
        code = sandbox.run(attempt)
    except KernelError:  # not allowed to create a namespace
        return module_probe
    # ENOENT: IPVS has no such scheduler. EOPNOTSUPP: rtnetlink has no such kind of device.
    if code in (errno.ENOENT, errno.EOPNOTSUPP):
        return Probe(False, f"no module {module}")
    if code:
        return Probe(None, f"cannot be tried: {errno.errorcode.get(code, code)}")
    return Probe(True, "loaded, or built in")


def _try_device() -> int:
    """Runs in a temporary network namespace."""
    try:
        dummy.ensure("kbpf-check")
    except KernelError as error:
        return error.errno
    return 0


def _try_service(scheduler: str) -> int:
    """Runs in a temporary network namespace."""
    service = VirtualService(socket.IPPROTO_TCP, parse_addr("192.0.2.1"), 80)
    try:
        with closing(IpvsClient()) as client:
            codes = client.try_apply(
                [IpvsRequest(IpvsCommand.IPVS_CMD_NEW_SERVICE, service, settings=VirtualServiceSettings(scheduler))]
            )
    except KernelError as error:
        return error.errno
    return codes[0]


def _probe_input() -> Probe:
    """Whether the host's firewall lets packets through INPUT to IPVS."""
    try:
        chains = forward_rules.list_closed_input_chains()
    except KernelError as error:
        return Probe(None, error.what)
    return Probe(not chains, f"closed: {', '.join(chains)}" if chains else "")


def _probe_bridge_netfilter() -> Probe:
    """Whether replies between pods on the same bridge pass through the node's IP stack."""
    if not any(SYS_CLASS_NET.glob("*/bridge")):
        return Probe(True, "no bridge on this node")
    try:
        value = BRIDGE_NF_CALL_IPTABLES.read_text().strip()
    except OSError:
        return Probe(False, "br_netfilter is not loaded")
    return Probe(value == "1", f"{BRIDGE_NF_CALL_IPTABLES.name} is {value}")


def _probe_rules() -> Probe:
    """Whether the kernel accepts our ruleset; a dry run, nothing is committed."""
    try:
        forward_rules.run_transaction(*ruleset.create_table(ruleset.RulesetOptions("kbpf_check")), dry_run=True)
    except KernelError as error:
        return Probe(False, error.what)
    return Probe(True)
