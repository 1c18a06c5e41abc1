"""What `kbpf check` looks at for the packet path: the kernel's programs at TC, and settings of the
node that decide whether packets get through. All of it is read, or tried on nothing.
"""

import errno
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.checks.bpf import ROOT
from kbpf.checks.row import CheckRow, row
from kbpf.dataplane import firewalls
from kbpf.dataplane.bpf.hooks import HELPER_COARSE_NS, PROG_SCHED_CLS
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.layout import NODE, U32, NodeFlag
from kbpf.dataplane.bpf.packet_path.device_roles import Role, decide
from kbpf.errors import KernelError, NotFoundError
from kbpf.kernel.bpf import probe, syscalls, tc
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.net.devices import list_devices
from kbpf.kernel.netfilter import forward_rules, pre_dnat_rules
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import sysctl
from kbpf.model.config import Config

REDIRECT_NEIGH: Final = 152
REDIRECT_PEER: Final = 155
PROC: Final = Path("/proc")
STRICT: Final = 1
"""rp_filter: a packet is dropped unless its sender is routed by the device that it came in by."""

Ports = tuple[int, int]


def rows(pin_dir: Path, proc: Path = PROC) -> Iterator[CheckRow]:
    """Everything, in the order in which a packet would meet it. `proc` is where /proc is."""
    yield from _kernel()
    yield _sctp(proc)
    node = node_of(pin_dir)
    yield _ports((node.low, node.high), proc)
    yield from _forwarding(proc)
    yield _way(node.flags)
    yield _forward_chains(node.mark)
    yield _early_rules()
    yield _rp_filter(proc)
    yield _conntrack(proc)


# ---- the kernel ----------------------------------------------------------------------------------


def _kernel() -> Iterator[CheckRow]:
    try:
        syscalls.version()
    except KernelError:
        return  # it has a row of its own, and nothing can be tried without it
    yield _packets(
        "TC programs", probe.loads(PROG_SCHED_CLS, 0), "the kernel needs CONFIG_NET_CLS_BPF",
        "programs on packets of a device",
    )  # fmt: skip
    yield from _attaching()
    yield _packets(
        "bpf_redirect_neigh", probe.helper(PROG_SCHED_CLS, 0, REDIRECT_NEIGH, 1, 0, 0, 0),
        "Linux 5.10 brought it; it sends packets on to backends on other nodes",
        "on to the next machine, whose address the kernel looks up",
    )  # fmt: skip
    yield row(
        "bpf_redirect_peer", probe.helper(PROG_SCHED_CLS, 0, REDIRECT_PEER, 1, 0),
        "Linux 5.10 brought it; without it pods are reached by the host's stack alone",
        needed=False,
        detail="straight into a pod, past the host's stack, where that is asked for",
    )  # fmt: skip
    yield row(
        "bpf_ktime_get_coarse_ns", probe.helper(PROG_SCHED_CLS, 0, HELPER_COARSE_NS),
        "Linux 5.11 brought it; without it each packet reads the processor's clock",
        needed=False,
        detail="the time of the last tick, at no cost",
    )  # fmt: skip


def _packets(name: str, found: Probe, advice: str, detail: str) -> CheckRow:
    """A row without which the packet path does not work."""
    result = {True: "yes", False: "no", None: "unknown"}[found.works]
    told = advice if found.works is False else ""
    return CheckRow(name, result, False, found.reason or detail, told, packets=True)


def _attaching() -> Iterator[CheckRow]:
    """By a TCX link, else by a filter on a clsact qdisc: which cannot be tried without making
    one, so that it is only said.
    """
    links = tc.tcx()
    if links.works:
        yield row("TCX", links, "", needed=False, detail="beside other programs, and kept by a pin")
        return
    fallback = f"{links.reason}: filters on clsact qdiscs are used instead (tc filter show)"
    advice = (
        "Linux 6.6 brought it; until then the kernel needs CONFIG_NET_SCH_INGRESS and "
        "CONFIG_NET_CLS_BPF, and what removes a device's clsact removes kbpf from it"
    )
    yield row("TCX", Probe(links.works, fallback), advice, needed=False)


def _sctp(proc: Path) -> CheckRow:
    """Asking for a socket would load the module, so the list of protocols is read."""
    try:
        known = any(line.startswith("SCTP") for line in _text(proc / "net/protocols").splitlines())
    except OSError as error:
        return row("SCTP sockets", _unknown(error), "", needed=False)
    detail = "clients and servers on this node may use SCTP"
    if not known:
        detail = "the module is not loaded; SCTP of pods elsewhere is balanced all the same"
    return row("SCTP sockets", Probe(known, detail), "", needed=False)


# ---- settings of the node ------------------------------------------------------------------------


class Node(NamedTuple):
    """Settings of the packet path: ports for translated sources, and the mark of their packets."""

    flags: NodeFlag
    low: int
    high: int
    mark: int


def node_of(pin_dir: Path) -> Node:
    """Those of the agent here, running or not, else the default ones."""
    default = Config()
    try:
        with Map.open(snapshot.find(pin_dir).maps / "node") as node:
            raw = node.lookup(U32.pack(0)) or bytes(NODE.size)
    except (KernelError, NotFoundError):
        raw = bytes(NODE.size)
    _, _, flags, low, high, mark, _ = NODE.unpack(raw)
    if not high:
        return Node(NodeFlag(0), *default.masquerade_ports, 1 << default.masquerade_bit)
    return Node(NodeFlag(flags), low, high, mark)


def _way(flags: NodeFlag) -> CheckRow:
    detail = "stack: the host's netfilter sees what is for pods of this node"
    if NodeFlag.DIRECT in flags:
        detail = (
            "direct: what is for pods of this node passes by the host's iptables and nftables, "
            "conntrack, and network policies built on them"
        )
    return row("--forwarding", Probe(True), "", needed=False, detail=detail)


def _early_rules() -> CheckRow:
    """Whether the host guards NodePorts by rules that the packet path passes."""
    name = "rules before DNAT"
    can = forward_rules.available()
    old = pre_dnat_rules.legacy_chains()
    found, unread = old.chains, [f"{', '.join(old.unread)} cannot be read"] * bool(old.unread)
    try:
        if can.works:
            found = (*pre_dnat_rules.chains(), *found)
        else:
            unread.append(can.reason)
    except KernelError as error:
        unread.append(str(error))
    if not found and unread:
        advice = f"run `kbpf check` where iptables-legacy-save is, or {firewalls.INSTEAD}"
        return CheckRow(name, "unknown", False, "; ".join(unread), advice if old.unread else "")
    if not found:
        return row(name, Probe(True), "", needed=False, detail="none that guards NodePorts or VIPs")
    detail = f"passed by the packet path, so they guard no NodePort or VIP: {', '.join(found)}"
    return CheckRow(name, "no", False, detail, firewalls.INSTEAD)


def _forward_chains(mark: int) -> CheckRow:
    """Whether masqueraded packets get through the node's FORWARD
    (kernel/netfilter/forward_rules.py).
    """
    name = "FORWARD"
    lets_pass = f"let packets with mark {mark:#x} pass there"
    can = forward_rules.available()
    if not can.works:
        # A kernel without nf_tables has no such chains; a missing library only hides them.
        advice = f"install python3-nftables; or, if FORWARD drops or rejects, {lets_pass}"
        hidden = "python3" in can.reason
        return CheckRow(name, "unknown", False, can.reason, advice if hidden else "")
    try:
        closed = [str(chain) for chain in forward_rules.forward_chains() if chain.is_closed]
        foreign = [*forward_rules.other_drops(), *forward_rules.legacy_tables()]
    except KernelError as error:
        return CheckRow(name, "unknown", False, str(error), error.hint)
    if foreign:
        where = ", ".join(
            one if " " in one else f"{one} filter (iptables-legacy)" for one in foreign
        )
        detail = f"the agent does not look into {where}, which may drop masqueraded packets"
        return CheckRow(name, "no", False, detail, lets_pass)
    detail = "no chain drops all that it does not know"
    if closed:
        detail = (
            f"closed: {', '.join(closed)}; the agent keeps a rule there for masqueraded packets"
        )
    return row(name, Probe(True), "", needed=False, detail=detail)


def _ports(ports: Ports, proc: Path) -> CheckRow:
    name = "masquerade ports"
    try:
        low, high = map(int, _text(proc / "sys/net/ipv4/ip_local_port_range").split())
        reserved = _text(proc / "sys/net/ipv4/ip_local_reserved_ports")
    except OSError as error:
        return row(name, _unknown(error), "", needed=False)
    first, last = max(ports[0], low), min(ports[1], high)
    text = f"{ports[0]} to {ports[1]}"
    if first > last:
        return row(
            name, Probe(True), "", needed=False,
            detail=f"{text}: sockets of this node take theirs from {low} to {high}",
        )  # fmt: skip
    if set(range(first, last + 1)) <= sysctl.parse_ports(reserved):
        detail = f"{text}: reserved, so that no socket takes one by chance"
        return row(name, Probe(True), "", needed=False, detail=detail)
    return row(
        name, Probe(False, f"{text}: sockets of this node may take {first} to {last}, too; such a "
                    "connection and a translated one of the same port break each other"),
        f"the agent adds {ports[0]}-{ports[1]} to net.ipv4.ip_local_reserved_ports; where it must "
        "not, do so, or keep net.ipv4.ip_local_port_range below",
        needed=False,
    )  # fmt: skip


def _forwarding(proc: Path) -> Iterator[CheckRow]:
    for name, key in (("IPv4", "ipv4/ip_forward"), ("IPv6", "ipv6/conf/all/forwarding")):
        try:
            on = int(_text(proc / "sys/net" / key)) != 0
        except OSError as error:
            if error.errno == errno.ENOENT:
                found = Probe(None, f"this kernel has no {name}")
            else:
                found = _unknown(error)
            yield row(f"{name} forwarding", found, "", needed=False)
            continue
        setting = f"net.{key.replace('/', '.')}"
        if on:
            detail = "packets go on to pods and to other nodes"
            yield row(f"{name} forwarding", Probe(True), "", needed=False, detail=detail)
        else:
            yield row(
                f"{name} forwarding",
                Probe(False, f"{setting} = 0: packets that go up the stack end there"),
                f"sysctl -w {setting}=1, for good in /etc/sysctl.d; most network plugins do",
                needed=False,
            )


def _rp_filter(proc: Path) -> CheckRow:
    name = "rp_filter"
    try:
        strict = tuple(_strict(proc))
    except (OSError, KernelError) as error:
        return row(name, Probe(None, str(error)), ROOT, needed=False)
    if not strict:
        detail = "not strict (1) on any device to other machines"
        return row(name, Probe(True), "", needed=False, detail=detail)
    return row(
        name, Probe(True), "", needed=False,
        detail=f"strict (1) on {', '.join(strict)}: what comes in by another device than the one "
        "that its sender is routed by is dropped; harmless unless routes differ by direction, "
        "then set it to 2",
    )  # fmt: skip


def _strict(proc: Path) -> Iterable[str]:
    """Host devices on which it holds: the greater one of a device's setting and that of all."""
    devices = list_devices()
    choices = decide(devices)
    conf = proc / "sys/net/ipv4/conf"
    overall = int(_text(conf / "all/rp_filter"))
    for device in devices:
        if choices[device.ifindex].role is not Role.HOST:
            continue
        try:
            own = int(_text(conf / device.name / "rp_filter"))
        except FileNotFoundError:
            continue  # it has gone
        if max(own, overall) == STRICT:
            yield device.name


def _conntrack(proc: Path) -> CheckRow:
    there = (proc / "sys/net/netfilter/nf_conntrack_max").exists()
    detail = "not needed: the packet path tracks connections itself"
    if there:
        detail += "; others use it here, and see client and backend"
    return row("without conntrack", Probe(True), "", needed=False, detail=detail)


def _text(path: Path) -> str:
    return path.read_text()


def _unknown(error: OSError) -> Probe:
    return Probe(None, f"{error.filename}: {error.strerror}")
