"""What `kbpf check` looks at for the packet path: the kernel's programs at TC, and settings of the
node that decide whether packets get through. All of it is read, or tried on nothing.
"""

import errno
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.checks.bpf import ROOT_HINT
from kbpf.checks.row import CheckRow, make_row
from kbpf.dataplane import firewalls
from kbpf.dataplane.bpf.hooks import BPF_PROG_TYPE_SCHED_CLS, BPF_FUNC_ktime_get_coarse_ns
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.layout import NODE, U32, NodeFlag
from kbpf.dataplane.bpf.packet_path.device_roles import DeviceRole, decide_roles
from kbpf.errors import KernelError, NotFoundError
from kbpf.kernel.bpf import probe, syscalls, tc
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.net.devices import list_devices
from kbpf.kernel.netfilter import forward_rules, pre_dnat_rules
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import sysctl
from kbpf.model.config import Config

BPF_FUNC_redirect_neigh: Final = 152
BPF_FUNC_redirect_peer: Final = 155
PROC: Final = Path("/proc")
RP_FILTER_STRICT: Final = 1
"""rp_filter: a packet is dropped unless its sender is routed by the device that it came in by."""

PortRange = tuple[int, int]


def check_packet_path(pin_dir: Path, proc: Path = PROC) -> Iterator[CheckRow]:
    """Everything, in the order in which a packet would meet it. `proc` is where /proc is."""
    yield from _kernel_rows()
    yield _sctp_row(proc)
    settings = read_settings(pin_dir)
    yield _ports_row((settings.low, settings.high), proc)
    yield from _forwarding_rows(proc)
    yield _forwarding_mode_row(settings.flags)
    yield _forward_chains_row(settings.mark)
    yield _early_rules_row()
    yield _rp_filter_row(proc)
    yield _conntrack_row(proc)


# ---- the kernel ----------------------------------------------------------------------------------


def _kernel_rows() -> Iterator[CheckRow]:
    try:
        syscalls.version()
    except KernelError:
        return  # it has a row of its own, and nothing can be tried without it
    yield _packet_row(
        "TC programs",
        probe.probe_program(BPF_PROG_TYPE_SCHED_CLS, 0),
        "the kernel needs CONFIG_NET_CLS_BPF",
        "programs on packets of a device",
    )
    yield from _attach_rows()
    yield _packet_row(
        "bpf_redirect_neigh",
        probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, BPF_FUNC_redirect_neigh, 1, 0, 0, 0),
        "Linux 5.10 brought it; it sends packets on to backends on other nodes",
        "on to the next machine, whose address the kernel looks up",
    )
    yield make_row(
        "bpf_redirect_peer",
        probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, BPF_FUNC_redirect_peer, 1, 0),
        "Linux 5.10 brought it; without it pods are reached by the host's stack alone",
        needed=False,
        detail="straight into a pod, past the host's stack, where that is asked for",
    )
    yield make_row(
        "bpf_ktime_get_coarse_ns",
        probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, BPF_FUNC_ktime_get_coarse_ns),
        "Linux 5.11 brought it; without it each packet reads the processor's clock",
        needed=False,
        detail="the time of the last tick, at no cost",
    )


def _packet_row(name: str, outcome: Probe, advice: str, detail: str) -> CheckRow:
    """A row without which the packet path does not work."""
    result = {True: "yes", False: "no", None: "unknown"}[outcome.works]
    shown_advice = advice if outcome.works is False else ""
    return CheckRow(name, result, False, outcome.reason or detail, shown_advice, packets=True)


def _attach_rows() -> Iterator[CheckRow]:
    """By a TCX link, else by a filter on a clsact qdisc: which cannot be tried without making
    one, so that it is only said.
    """
    links = tc.probe_tcx()
    if links.works:
        yield make_row(
            "TCX", links, "", needed=False, detail="beside other programs, and kept by a pin"
        )
        return
    fallback = f"{links.reason}: filters on clsact qdiscs are used instead (tc filter show)"
    advice = (
        "Linux 6.6 brought it; until then the kernel needs CONFIG_NET_SCH_INGRESS and "
        "CONFIG_NET_CLS_BPF, and what removes a device's clsact removes kbpf from it"
    )
    yield make_row("TCX", Probe(links.works, fallback), advice, needed=False)


def _sctp_row(proc: Path) -> CheckRow:
    """Asking for a socket would load the module, so the list of protocols is read."""
    try:
        is_loaded = any(
            line.startswith("SCTP") for line in _read_text(proc / "net/protocols").splitlines()
        )
    except OSError as error:
        return make_row("SCTP sockets", _unknown_probe(error), "", needed=False)
    detail = "clients and servers on this node may use SCTP"
    if not is_loaded:
        detail = "the module is not loaded; SCTP of pods elsewhere is balanced all the same"
    return make_row("SCTP sockets", Probe(is_loaded, detail), "", needed=False)


# ---- settings of the node ------------------------------------------------------------------------


class PacketSettings(NamedTuple):
    """Settings of the packet path: ports for translated sources, and the mark of their packets."""

    flags: NodeFlag
    low: int
    high: int
    mark: int


def read_settings(pin_dir: Path) -> PacketSettings:
    """Those of the agent here, running or not, else the default ones."""
    default = Config()
    try:
        with Map.open(snapshot.find_pins(pin_dir).maps / "node") as node_map:
            raw = node_map.lookup(U32.pack(0)) or bytes(NODE.size)
    except (KernelError, NotFoundError):
        raw = bytes(NODE.size)
    _, _, flags, low, high, mark, _ = NODE.unpack(raw)
    if not high:
        return PacketSettings(NodeFlag(0), *default.masquerade_ports, 1 << default.masquerade_bit)
    return PacketSettings(NodeFlag(flags), low, high, mark)


def _forwarding_mode_row(flags: NodeFlag) -> CheckRow:
    detail = "stack: the host's netfilter sees what is for pods of this node"
    if NodeFlag.DIRECT in flags:
        detail = (
            "direct: what is for pods of this node passes by the host's iptables and nftables, "
            "conntrack, and network policies built on them"
        )
    return make_row("--forwarding", Probe(True), "", needed=False, detail=detail)


def _early_rules_row() -> CheckRow:
    """Whether the host guards NodePorts by rules that the packet path passes."""
    name = "rules before DNAT"
    nft_probe = forward_rules.probe_nf_tables()
    legacy = pre_dnat_rules.find_legacy_chains()
    chains, unreadable = (
        legacy.chains,
        [f"{', '.join(legacy.unreadable)} cannot be read"] * bool(legacy.unreadable),
    )
    try:
        if nft_probe.works:
            chains = (*pre_dnat_rules.find_chains(), *chains)
        else:
            unreadable.append(nft_probe.reason)
    except KernelError as error:
        unreadable.append(str(error))
    if not chains and unreadable:
        advice = f"run `kbpf check` where iptables-legacy-save is, or {firewalls.ALTERNATIVE_HINT}"
        return CheckRow(
            name, "unknown", False, "; ".join(unreadable), advice if legacy.unreadable else ""
        )
    if not chains:
        return make_row(
            name, Probe(True), "", needed=False, detail="none that guards NodePorts or VIPs"
        )
    detail = f"passed by the packet path, so they guard no NodePort or VIP: {', '.join(chains)}"
    return CheckRow(name, "no", False, detail, firewalls.ALTERNATIVE_HINT)


def _forward_chains_row(mark: int) -> CheckRow:
    """Whether masqueraded packets get through the node's FORWARD
    (kernel/netfilter/forward_rules.py).
    """
    name = "FORWARD"
    accept_advice = f"let packets with mark {mark:#x} pass there"
    nft_probe = forward_rules.probe_nf_tables()
    if not nft_probe.works:
        # A kernel without nf_tables has no such chains; a missing library only hides them.
        advice = f"install python3-nftables; or, if FORWARD drops or rejects, {accept_advice}"
        library_missing = "python3" in nft_probe.reason
        return CheckRow(name, "unknown", False, nft_probe.reason, advice if library_missing else "")
    try:
        closed = [str(chain) for chain in forward_rules.list_forward_chains() if chain.is_closed]
        foreign = [*forward_rules.list_other_drop_chains(), *forward_rules.list_legacy_families()]
    except KernelError as error:
        return CheckRow(name, "unknown", False, str(error), error.hint)
    if foreign:
        locations = ", ".join(
            source if " " in source else f"{source} filter (iptables-legacy)" for source in foreign
        )
        detail = f"the agent does not look into {locations}, which may drop masqueraded packets"
        return CheckRow(name, "no", False, detail, accept_advice)
    detail = "no chain drops all that it does not know"
    if closed:
        detail = (
            f"closed: {', '.join(closed)}; the agent keeps a rule there for masqueraded packets"
        )
    return make_row(name, Probe(True), "", needed=False, detail=detail)


def _ports_row(ports: PortRange, proc: Path) -> CheckRow:
    name = "masquerade ports"
    try:
        low, high = map(int, _read_text(proc / "sys/net/ipv4/ip_local_port_range").split())
        reserved = _read_text(proc / "sys/net/ipv4/ip_local_reserved_ports")
    except OSError as error:
        return make_row(name, _unknown_probe(error), "", needed=False)
    first, last = max(ports[0], low), min(ports[1], high)
    text = f"{ports[0]} to {ports[1]}"
    if first > last:
        return make_row(
            name, Probe(True), "", needed=False,
            detail=f"{text}: sockets of this node take theirs from {low} to {high}",
        )  # fmt: skip
    if set(range(first, last + 1)) <= sysctl.parse_ports(reserved):
        detail = f"{text}: reserved, so that no socket takes one by chance"
        return make_row(name, Probe(True), "", needed=False, detail=detail)
    return make_row(
        name, Probe(False, f"{text}: sockets of this node may take {first} to {last}, too; such a "
                    "connection and a translated one of the same port break each other"),
        f"the agent adds {ports[0]}-{ports[1]} to net.ipv4.ip_local_reserved_ports; where it must "
        "not, do so, or keep net.ipv4.ip_local_port_range below",
        needed=False,
    )  # fmt: skip


def _forwarding_rows(proc: Path) -> Iterator[CheckRow]:
    for name, key in (("IPv4", "ipv4/ip_forward"), ("IPv6", "ipv6/conf/all/forwarding")):
        try:
            enabled = int(_read_text(proc / "sys/net" / key)) != 0
        except OSError as error:
            if error.errno == errno.ENOENT:
                outcome = Probe(None, f"this kernel has no {name}")
            else:
                outcome = _unknown_probe(error)
            yield make_row(f"{name} forwarding", outcome, "", needed=False)
            continue
        setting = f"net.{key.replace('/', '.')}"
        if enabled:
            detail = "packets go on to pods and to other nodes"
            yield make_row(f"{name} forwarding", Probe(True), "", needed=False, detail=detail)
        else:
            yield make_row(
                f"{name} forwarding",
                Probe(False, f"{setting} = 0: packets that go up the stack end there"),
                f"sysctl -w {setting}=1, for good in /etc/sysctl.d; most network plugins do",
                needed=False,
            )


def _rp_filter_row(proc: Path) -> CheckRow:
    name = "rp_filter"
    try:
        strict = tuple(_strict_devices(proc))
    except (OSError, KernelError) as error:
        return make_row(name, Probe(None, str(error)), ROOT_HINT, needed=False)
    if not strict:
        detail = "not strict (1) on any device to other machines"
        return make_row(name, Probe(True), "", needed=False, detail=detail)
    return make_row(
        name, Probe(True), "", needed=False,
        detail=f"strict (1) on {', '.join(strict)}: what comes in by another device than the one "
        "that its sender is routed by is dropped; harmless unless routes differ by direction, "
        "then set it to 2",
    )  # fmt: skip


def _strict_devices(proc: Path) -> Iterable[str]:
    """Host devices on which it holds: the greater one of a device's setting and that of all."""
    devices = list_devices()
    choices = decide_roles(devices)
    conf = proc / "sys/net/ipv4/conf"
    overall = int(_read_text(conf / "all/rp_filter"))
    for device in devices:
        if choices[device.ifindex].role is not DeviceRole.HOST:
            continue
        try:
            device_value = int(_read_text(conf / device.name / "rp_filter"))
        except FileNotFoundError:
            continue  # it has gone
        if max(device_value, overall) == RP_FILTER_STRICT:
            yield device.name


def _conntrack_row(proc: Path) -> CheckRow:
    is_loaded = (proc / "sys/net/netfilter/nf_conntrack_max").exists()
    detail = "not needed: the packet path tracks connections itself"
    if is_loaded:
        detail += "; others use it here, and see client and backend"
    return make_row("without conntrack", Probe(True), "", needed=False, detail=detail)


def _read_text(path: Path) -> str:
    return path.read_text()


def _unknown_probe(error: OSError) -> Probe:
    return Probe(None, f"{error.filename}: {error.strerror}")
