# SPDX-License-Identifier: Apache-2.0
"""Checks what the packet path needs: TC features of the kernel, and settings of the node that
decide whether packets get through. Settings are only read; features are tried without side
effects.
"""

import contextlib
import errno
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.checks.bpf import ROOT_HINT
from kbpf.checks.row import Check, CheckRow, make_row, sum_up
from kbpf.dataplane import node
from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.layout import NODE, U32, NodeFlag
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path.device_roles import DeviceRole, decide_roles
from kbpf.errors import KernelError, NotFoundError
from kbpf.kernel.bpf import kfuncs, probe, syscalls, tc
from kbpf.kernel.bpf.uapi import BPF_PROG_TYPE_SCHED_CLS, BPF_FUNC_redirect_neigh
from kbpf.kernel.net.devices import list_devices
from kbpf.kernel.netfilter import forward_rules, pre_dnat_rules
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import sysctl
from kbpf.model.config import Config

PROC: Final = Path("/proc")
RP_FILTER_STRICT: Final = 1
"""rp_filter 1: a packet is dropped unless the route to its source uses the device it arrived on."""


def check_packet_path(pin_dir: Path, proc: Path = PROC) -> Iterator[CheckRow]:
    """Yields all rows, in the order in which a packet would meet what they check. `proc`: where
    /proc is mounted.
    """
    yield from _kernel_rows()
    yield _sctp_row(proc)
    settings = read_settings(pin_dir)
    yield _ports_row((settings.low, settings.high), proc)
    yield from sum_up(Check.IP_FORWARDING, dict(_forwarding_rows(proc)))
    yield _forwarding_mode_row(settings.flags)
    yield _forward_rows(settings.mark)[0]
    yield _early_rules_row(pin_dir, settings.flags)
    yield _rp_filter_row(proc)


class RulesOfOthers(NamedTuple):
    """What rules of other programs do to packets: to masqueraded and to other ones when they are
    forwarded, and to all before DNAT.
    """

    masqueraded: CheckRow
    forwarded: CheckRow
    before_dnat: CheckRow


def check_rules_of_others(pin_dir: Path) -> RulesOfOthers:
    settings = read_settings(pin_dir)
    return RulesOfOthers(*_forward_rows(settings.mark), _early_rules_row(pin_dir, settings.flags))


# ---- the kernel ----------------------------------------------------------------------------------


def _kernel_rows() -> Iterator[CheckRow]:
    try:
        syscalls.version()
    except KernelError:
        return  # bpf.rows() reports it, and without libbpf nothing can be tried
    programs = probe.probe_program(BPF_PROG_TYPE_SCHED_CLS, 0)
    if programs.works:
        redirect = probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, BPF_FUNC_redirect_neigh, 1, 0, 0, 0)
        reason = "" if redirect.works else f"bpf_redirect_neigh: {redirect.reason}"
        programs = Probe(redirect.works, reason)
    yield make_row(
        Check.TC_PROGRAMS,
        programs,
        "the kernel needs CONFIG_NET_CLS_BPF and, to forward packets to other nodes, Linux 5.10",
        packets=True,
        detail="programs at ingress and egress of devices",
    )
    yield from _attach_rows()
    yield make_row(
        Check.CONNTRACK_NAT,
        kfuncs.probe_conntrack(),
        "since Linux 6.1; without it --forwarding auto is stack; where firewalls have to see "
        "NodePorts before DNAT, use --mode ipvs instead",
        detail="--forwarding auto is netfilter",
    )


def _attach_rows() -> Iterator[CheckRow]:
    """Whether programs are attached by TCX links, else by filters on a clsact qdisc. The latter
    cannot be tried without creating a qdisc, so the row only mentions it.
    """
    links = tc.probe_tcx()
    if links.works:
        yield CheckRow(Check.TCX, "yes", "runs together with other programs; a pin keeps it attached")
        return
    fallback = f"{links.reason}: filters on clsact qdiscs are used instead (tc filter show)"
    advice = (
        "since Linux 6.6; before that, the kernel needs CONFIG_NET_SCH_INGRESS and "
        "CONFIG_NET_CLS_BPF, deleting a device's clsact qdisc detaches kbpf from it, and Pods with "
        "kubernetes.io/egress-bandwidth see their clients' own addresses (docs/limits.md)"
    )
    yield make_row(Check.TCX, Probe(links.works, fallback), advice)


def _sctp_row(proc: Path) -> CheckRow:
    # Read the list of protocols: opening an SCTP socket would load the module.
    try:
        is_loaded = any(line.startswith("SCTP") for line in (proc / "net/protocols").read_text().splitlines())
    except OSError as error:
        return make_row(Check.SCTP, _unknown_probe(error))
    detail = "clients and servers on this node may use SCTP"
    if not is_loaded:
        detail = "the module is not loaded; SCTP between other hosts is balanced nevertheless"
    return make_row(Check.SCTP, Probe(is_loaded, detail))


# ---- settings of the node ------------------------------------------------------------------------


class PacketSettings(NamedTuple):
    """The packet path's settings. `low` to `high`: SNAT ports. `mark`: of masqueraded packets."""

    flags: NodeFlag
    low: int
    high: int
    mark: int


def read_settings(pin_dir: Path) -> PacketSettings:
    """Reads the settings of the agent on this node, running or not; if there are none, the defaults
    and what `--forwarding auto` would choose.
    """
    default = Config()
    try:
        with snapshot.find_pins(pin_dir).open_map("node") as node_map:
            raw = node_map.lookup(U32.pack(0)) or bytes(NODE.size)
    except (KernelError, NotFoundError):
        raw = bytes(NODE.size)
    _, _, flags, low, high, mark, _ = NODE.unpack(raw)
    if not high:
        can_translate = (
            kfuncs.probe_conntrack().works is not False and forward_rules.probe_nf_tables().works is not False
        )
        flags = NodeFlag.NETFILTER if can_translate else NodeFlag(0)
        return PacketSettings(flags, *default.masquerade_ports, 1 << default.masquerade_bit)
    return PacketSettings(NodeFlag(flags), low, high, mark)


def _forwarding_mode_row(flags: NodeFlag) -> CheckRow:
    detail = "stack: packets to pods of this node pass the host's netfilter"
    if NodeFlag.DIRECT in flags:
        detail = (
            "direct: packets to pods of this node bypass the host's iptables and nftables, "
            "conntrack, and network policies built on them"
        )
    if NodeFlag.NETFILTER in flags:
        detail = "netfilter: conntrack translates new connections from outside, after raw and mangle PREROUTING"
    return CheckRow(Check.FORWARDING_MODE, "yes", detail)


def _early_rules_row(pin_dir: Path, flags: NodeFlag) -> CheckRow:
    """Whether the host may protect NodePorts with rules that the packet path bypasses."""
    check = Check.PRE_DNAT_RULES
    in_conntrack = NodeFlag.NETFILTER in flags
    external_ports = host.read_external_ports(Pins(pin_dir), in_conntrack)
    if in_conntrack and not external_ports:
        with contextlib.suppress(KernelError):
            if chains := pre_dnat_rules.find_chains_without_effect():
                detail = (
                    f"rules that read bytes, packets or labels of connections never match in {node.join_names(chains)}"
                )
                return CheckRow(check, "no", detail, "use rules about addresses and ports, or --forwarding stack")
        detail = "in force: they see packets for NodePorts and VIPs before conntrack translates"
        return CheckRow(check, "yes", detail)
    chains, unreadable = pre_dnat_rules.find_legacy_chains()
    reasons = []
    try:
        early = pre_dnat_rules.find_chains()
        chains, unreadable = (*early.chains, *chains), (*early.unreadable, *unreadable)
    except KernelError as error:
        reasons.append(str(error))
    if unreadable:
        reasons.insert(0, f"{node.join_names(unreadable)} cannot be read")
    if not chains and reasons:
        advice = f"run `kbpf check` where iptables-legacy-save is installed, or {node.ALTERNATIVE_HINT}"
        return CheckRow(check, "unknown", "; ".join(reasons), advice if unreadable else "")
    if not chains:
        return CheckRow(check, "yes", "none may protect NodePorts or VIPs")
    names = node.join_names(chains)
    detail = f"bypassed by the packet path, so they protect no NodePort or VIP: {names}"
    return CheckRow(check, "no", "; ".join((detail, *reasons)), node.ALTERNATIVE_HINT)


def _forward_rows(mark: int) -> tuple[CheckRow, CheckRow]:
    """Whether masqueraded packets pass the node's FORWARD chains, and whether other packets do. The
    former pass by a rule of the agent (kernel/netfilter/forward_rules.py), the others as without
    kbpf.
    """
    check = Check.FORWARD_CHAINS
    accept_advice = f"accept packets with mark {mark:#x} there"
    nft_probe = forward_rules.probe_nf_tables()
    if not nft_probe.works:
        # A kernel without nf_tables has no such chains; a missing library only hides them.
        advice = f"install python3-nftables; or, if FORWARD drops or rejects, {accept_advice}"
        library_missing = "python3" in nft_probe.reason
        row = CheckRow(check, "unknown", nft_probe.reason, advice if library_missing else "")
        return row, row
    try:
        closed = [str(chain) for chain in forward_rules.list_forward_chains() if chain.is_closed]
        foreign = [*forward_rules.list_other_drop_chains(), *forward_rules.list_legacy_families()]
    except KernelError as error:
        row = CheckRow(check, "unknown", str(error), error.hint)
        return row, row
    if foreign:
        locations = ", ".join(source if " " in source else f"{source} filter (iptables-legacy)" for source in foreign)
        detail = f"the agent does not read {locations}, which may drop"
        return (
            CheckRow(check, "no", f"{detail} masqueraded packets", accept_advice),
            CheckRow(check, "no", f"{detail} forwarded packets"),
        )
    if not closed:
        row = CheckRow(check, "yes", "no chain drops by default")
        return row, row
    detail = f"drops by default: {', '.join(closed)}"
    ours = f"{detail}; the agent keeps a rule there for masqueraded packets"
    return (
        CheckRow(check, "yes", ours),
        CheckRow(check, "unknown", f"{detail}; passes where a rule there accepts it"),
    )


def _ports_row(ports: tuple[int, int], proc: Path) -> CheckRow:
    check = Check.SNAT_PORTS
    try:
        low, high = map(int, (proc / "sys/net/ipv4/ip_local_port_range").read_text().split())
        reserved = (proc / "sys/net/ipv4/ip_local_reserved_ports").read_text()
    except OSError as error:
        return make_row(check, _unknown_probe(error))
    first, last = max(ports[0], low), min(ports[1], high)
    text = f"{ports[0]} to {ports[1]}"
    if first > last:
        return CheckRow(check, "yes", f"{text}: sockets of this node use {low} to {high}")
    if set(range(first, last + 1)) <= sysctl.parse_ports(reserved):
        detail = f"{text}: reserved, so that no socket gets one automatically"
        return CheckRow(check, "yes", detail)
    return CheckRow(
        check,
        "no",
        f"{text}: sockets of this node may use {first} to {last} too; a "
        "connection and a masqueraded one on the same port break each other",
        f"the agent adds {ports[0]}-{ports[1]} to net.ipv4.ip_local_reserved_ports; where it must "
        "not, do it yourself, or keep net.ipv4.ip_local_port_range below",
    )


def _forwarding_rows(proc: Path) -> Iterator[tuple[str, CheckRow]]:
    """Yields a family and its row."""
    for name, key in (("IPv4", "ipv4/ip_forward"), ("IPv6", "ipv6/conf/all/forwarding")):
        setting = f"net.{key.replace('/', '.')}"
        try:
            enabled = int((proc / "sys/net" / key).read_text()) != 0
            outcome = Probe(enabled, "" if enabled else f"{setting} = 0: the stack does not forward packets")
        except OSError as error:
            missing = Probe(None, f"this kernel has no {name}")
            outcome = missing if error.errno == errno.ENOENT else _unknown_probe(error)
        advice = f"sysctl -w {setting}=1, permanently in /etc/sysctl.d; most network plugins set it"
        yield name, make_row(Check.IP_FORWARDING.of(name), outcome, advice)


def _rp_filter_row(proc: Path) -> CheckRow:
    check = Check.RP_FILTER
    try:
        strict = tuple(_strict_devices(proc))
    except (OSError, KernelError) as error:
        return make_row(check, Probe(None, str(error)), ROOT_HINT)
    if not strict:
        detail = "not strict (1) on any device to other machines"
        return CheckRow(check, "yes", detail)
    return CheckRow(
        check,
        "yes",
        f"strict (1) on {', '.join(strict)}: a packet is dropped unless it arrives on the "
        "device that routes to its source; harmless unless routes are asymmetric, then set it to 2",
    )


def _strict_devices(proc: Path) -> Iterable[str]:
    """Yields host devices in strict mode. The kernel uses the larger of a device's value and
    `all`.
    """
    devices = list_devices()
    choices = decide_roles(devices)
    conf = proc / "sys/net/ipv4/conf"
    overall = int((conf / "all/rp_filter").read_text())
    for device in devices:
        if choices[device.ifindex].role is not DeviceRole.HOST:
            continue
        try:
            device_value = int((conf / device.name / "rp_filter").read_text())
        except FileNotFoundError:
            continue  # the device was removed
        if max(device_value, overall) == RP_FILTER_STRICT:
            yield device.name


def _unknown_probe(error: OSError) -> Probe:
    return Probe(None, f"{error.filename}: {error.strerror}")
