"""What `kbpf check` looks at for the packet path: the kernel's programs at TC, and settings of the
node that decide whether packets get through. All of it is read, or tried on nothing.
"""

import errno
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kbpf.cli.checks import ROOT, CheckRow, row
from kbpf.dataplane.bpf.devices import Role, decide
from kbpf.dataplane.bpf.hooks import PROG_SCHED_CLS
from kbpf.dataplane.bpf.layout import NODE, U32
from kbpf.errors import KernelError, NotFoundError
from kbpf.kernel import libbpf, probe, tc
from kbpf.kernel.devices import list_devices
from kbpf.kernel.libbpf import Map
from kbpf.kernel.probe import Probe
from kbpf.model.config import Config
from kbpf.views import snapshot

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
    yield _ports(masquerade_ports(pin_dir), proc)
    yield from _forwarding(proc)
    yield _rp_filter(proc)
    yield _conntrack(proc)


# ---- the kernel ----------------------------------------------------------------------------------


def _kernel() -> Iterator[CheckRow]:
    try:
        libbpf.version()
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


def masquerade_ports(pin_dir: Path) -> Ports:
    """Those that the running agent gives to translated sources, else the default ones."""
    try:
        pins = snapshot.find(pin_dir)
        with Map.open(pins.maps / "node") as node:
            _, _, _, low, high, *_ = NODE.unpack(node.lookup(U32.pack(0)) or bytes(NODE.size))
    except (KernelError, NotFoundError):
        return Config().masquerade_ports
    return (low, high) if high else Config().masquerade_ports


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
    if covered(first, last, reserved):
        detail = f"{text}: reserved, so that no socket takes one by chance"
        return row(name, Probe(True), "", needed=False, detail=detail)
    return row(
        name, Probe(False, f"{text}: sockets of this node may take {first} to {last}, too; such a "
                    "connection and a translated one of the same port break each other"),
        f"add {ports[0]}-{ports[1]} to net.ipv4.ip_local_reserved_ports, or keep "
        "net.ipv4.ip_local_port_range below",
        needed=False,
    )  # fmt: skip


def covered(first: int, last: int, reserved: str) -> bool:
    """Whether a list as ``8080,9000-9100`` has all of these ports."""
    at = first
    for low, high in sorted(_ranges(reserved)):
        if low <= at <= high:
            at = high + 1
    return at > last


def _ranges(text: str) -> Iterator[Ports]:
    for word in filter(None, text.strip().split(",")):
        low, _, high = word.partition("-")
        yield int(low), int(high or low)


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
