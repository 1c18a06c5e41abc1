"""The flags of `kbpf run`: one row each. Text, from the command line or the environment, becomes
model.Config here and nowhere else.

A flag beats its environment variable (`--pin-dir`: KBPF_PIN_DIR), which beats the default; an
empty variable is as good as none. What is wrong is a ConfigError that names where the text stood.
"""

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from kbpf.errors import ConfigError, ObjectError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, LocalMode, MapSizes, Serving, SocketLb
from kbpf.model.objects import Algorithm, Cidr

Reader = Callable[[str, str], Any]
"""(text, where it stood) → value, or ConfigError."""

MOST_ENTRIES: Final = 1 << 30
LEAST_CONNECTIONS: Final = 1000
MOST_PORTS: Final = 65_535
LONGEST_NAME: Final = 15  # IFNAMSIZ - 1


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag: its name, the field of Config (or, with a dot, of one of its parts) that it sets, how
    it is read, what stands for its value in the help, under which heading, and the help.
    """

    name: str
    field: str
    read: Reader
    metavar: str
    group: str
    help: str

    @property
    def variable(self) -> str:
        """The environment variable that sets it too."""
        return "KBPF_" + self.name.strip("-").replace("-", "_").upper()


def _text(text: str, where: str) -> str:
    return text


def _path(text: str, where: str) -> Path:
    return Path(text)


def _absolute(text: str, where: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise ConfigError(f"not an absolute path: {text!r}", where, "begin it with /")
    return path


def _words(text: str, where: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ConfigError("no names", where, "give names with commas between them")
    return words


def _choice(choices: tuple[str, ...], text: str, where: str) -> str:
    if text not in choices:
        raise ConfigError(f"unknown value {text!r}", where, f"use {' or '.join(choices)}")
    return text


def _truth(text: str, where: str) -> bool:
    return _choice(("true", "false"), text.lower(), where) == "true"


def _algorithm(text: str, where: str) -> Algorithm:
    return Algorithm(_choice(tuple(Algorithm), text, where))


def _entries(text: str, where: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 0 < number <= MOST_ENTRIES:
        raise ConfigError(
            f"not a number of entries: {text!r}", where, f"give a whole number, 1 to {MOST_ENTRIES}"
        )
    return number


def _ports(text: str, where: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if all(part.isascii() and part.isdigit() for part in (low, high)):
        ends = int(low), int(high)
        if 0 < ends[0] <= ends[1] <= MOST_PORTS:
            return ends
    raise ConfigError(f"not a range of ports: {text!r}", where, "write it as 1024-29999")


def _bit(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 32):
        raise ConfigError(f"not a bit of the mark: {text!r}", where, "give a number, 0 to 31")
    return int(text)


def read_cidr(text: str, where: str) -> Cidr:
    """A network; its host bits need not be zero."""
    address, _, length = text.partition("/")
    hint = "write it as 192.0.2.0/24 or 2001:db8::/32"
    try:
        addr = parse_addr(address)
    except ObjectError as error:
        raise ConfigError(f"not a network: {text!r}", where, hint) from error
    shift, most = (0, 128) if ":" in address else (96, 32)
    if not (length.isascii() and length.isdigit() and int(length) <= most):
        raise ConfigError(f"not a network: {text!r}", where, hint)
    network = ipaddress.IPv6Network((addr, shift + int(length)), strict=False)
    return Cidr(parse_addr(str(network.network_address)), network.prefixlen)


def _node_ports(text: str, where: str) -> str | tuple[Cidr, ...]:
    """`primary` and `all` stay words; anything else is networks."""
    if text in ("primary", "all"):
        return text
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError("no networks", where, "give networks, or `primary` or `all`")
    return tuple(read_cidr(word, where) for word in words)


def _networks(text: str, where: str) -> tuple[Cidr, ...]:
    """Networks; none in an empty text, as kube-proxy reads it."""
    return tuple(read_cidr(word.strip(), where) for word in text.split(",") if word.strip())


def _table(text: str, where: str) -> str:
    if not text.isidentifier() or not text.isascii():
        raise ConfigError(f"not a table's name: {text!r}", where, "use letters, digits and _")
    return text


def _local_mode(text: str, where: str) -> LocalMode:
    if not text:
        return LocalMode.NONE
    return LocalMode(_choice(tuple(filter(None, LocalMode)), text, where))


def _device(text: str, where: str) -> str:
    """A device's name, or how it begins."""
    if len(text) > LONGEST_NAME or "/" in text or any(c.isspace() for c in text):
        raise ConfigError(
            f"not the name of a device: {text!r}",
            where,
            f"at most {LONGEST_NAME} characters, without / and blanks",
        )
    return text


def _listen(port: int, text: str, where: str) -> str:
    """Addresses to listen on, each with a port, which may be left out; "" for none."""
    return ",".join(_address(word.strip(), port, where) for word in text.split(",") if word.strip())


def _address(text: str, port: int, where: str) -> str:
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, number = text, str(port)  # an address alone
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        address = None
    good = number.isascii() and number.isdigit() and 0 < int(number) <= MOST_PORTS
    if address is None or not good:
        raise ConfigError(
            f"not an address to listen on: {text!r}", where, f"write it as 0.0.0.0:{port}"
        )
    return f"[{address}]:{number}" if address.version == 6 else f"{address}:{number}"


def _count(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"not a number: {text!r}", where, "give a whole number, 0 or more")
    return int(text)


CLUSTER: Final = "Where Services come from"
NODE: Final = "This node"
SERVING: Final = "Health and metrics"
LOGGING: Final = "Logging"
SIZES: Final = "Sizes of the maps (entries at most)"


def _socket_lb(text: str, where: str) -> SocketLb:
    return SocketLb(_choice(tuple(SocketLb), text, where))


def _cgroups(text: str, where: str) -> tuple[str, ...]:
    """Patterns of folders below the cgroup v2 root. That of the root would be everybody."""
    found = tuple(word.strip("/") for word in _words(text, where))
    if not all(found):
        raise ConfigError(
            "the root of all cgroups cannot be exempt", where, "use --socket-lb off for everybody"
        )
    return found


_MODE = partial(_choice, ("auto", "bpf", "ipvs"))
_SCHEDULER = partial(
    _choice,
    ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "mh", "dh", "sed", "nq", "fo"),
)
_FORWARDING = partial(_choice, ("stack", "direct"))
_LEVEL = partial(_choice, ("debug", "info", "warning", "error"))
_FORMAT = partial(_choice, ("text", "json"))


def _sizes() -> Iterator[Flag]:
    told = {
        "frontends": "addresses that clients dial",
        "slots": "places in all backend sets together",
        "backends": "backends",
        "sockets": "connected sockets that are remembered; the oldest goes",
        "connections": "connections of the packet path; the oldest goes",
        "flows": "UDP flows of unconnected sockets; the oldest goes",
        "affinity": "clients with session affinity; the oldest goes",
    }
    default = MapSizes()
    for name, what in told.items():
        text = f"{what} (default {getattr(default, name)})"
        yield Flag(f"--max-{name}", f"sizes.{name}", _entries, "NUMBER", SIZES, text)


FLAGS: Final = (
    Flag("--kubeconfig", "kubeconfig", _path, "FILE", CLUSTER,
         "how to reach the API server (default: the Pod's own service account)"),
    Flag("--master", "master", _text, "URL", CLUSTER,
         "the API server's address, over what the kubeconfig says"),
    Flag("--source", "source", _path, "DIR", CLUSTER,
         "a folder of Kubernetes YAML instead of an API server; watched for changes"),
    Flag("--hostname-override", "node_name", _text, "NAME", NODE,
         "this node's name in Kubernetes (default: the hostname)"),
    Flag("--mode", "mode", _MODE, "auto|bpf|ipvs", NODE,
         "the data plane: BPF, which auto is, or IPVS and nftables (default auto)"),
    Flag("--ipvs-scheduler", "ipvs_scheduler", _SCHEDULER, "NAME", NODE,
         "mode ipvs: how a backend is chosen for Services without an algorithm or weights of their "
         "own: rr, wrr, lc, wlc, lblc, lblcr, sh, mh, dh, sed, nq or fo (default rr)"),
    Flag("--ipvs-strict-arp", "strict_arp", _truth, "true|false", NODE,
         "mode ipvs: whether the node keeps from answering ARP for addresses of Services "
         "(default false)"),
    Flag("--ipvs-device", "ipvs_device", _device, "NAME", NODE,
         f"mode ipvs: the dummy device for addresses of Services (default {Config().ipvs_device})"),
    Flag("--nft-table", "nft_table", _table, "NAME", NODE,
         f"mode ipvs: the nftables table, of the family inet (default {Config().nft_table})"),
    Flag("--state-dir", "state_dir", _absolute, "DIR", NODE,
         f"mode ipvs: a folder for the agent's lock and status (default {Config().state_dir})"),
    Flag("--pin-dir", "pin_dir", _absolute, "DIR", NODE,
         "where maps and attachments are kept over restarts: a folder in a bpffs "
         f"(default {Config().pin_dir})"),
    Flag("--cgroup", "cgroup", _path, "DIR", NODE,
         "the cgroup v2 folder whose processes get Services (default: the root, so all)"),
    Flag("--cache-dir", "cache_dir", _path, "DIR", NODE,
         f"where the compiled programs are kept (default {Config().cache_dir})"),
    Flag("--nodeport-addresses", "node_ports", _node_ports, "CIDRS", NODE,
         "where NodePorts answer: networks with commas between them, `primary` (the Node's own "
         "addresses) or `all` (default primary)"),
    Flag("--localhost-nodeports", "localhost_node_ports", _truth, "true|false", NODE,
         "whether NodePorts answer on loopback, for the host's own processes (default true)"),
    Flag("--algorithm", "algorithm", _algorithm, "random|maglev", NODE,
         "how a backend is chosen for Services without the annotation kbpf.io/algorithm "
         "(default random)"),
    Flag("--socket-lb", "socket_lb", _socket_lb, "off|hostNamespaceOnly|on", NODE,
         "whose sockets are led to a backend at connect(): nobody's, those of the node's own "
         "network, or everybody's (default on); the others need the packet path"),
    Flag("--socket-lb-exempt", "socket_lb_exempt", _cgroups, "PATTERNS", NODE,
         "cgroups whose processes are left to the packet path, as folders below the cgroup v2 "
         "root with commas between them; patterns as system.slice/istio* will do (a pod says it "
         "by the label kbpf.io/socket-lb=off)"),
    Flag("--packet-path", "packet_path", _truth, "true|false", NODE,
         "whether traffic from outside of the node, and of pods that the socket hooks do not see, "
         "is balanced per packet (default true)"),
    Flag("--device", "devices", _words, "NAMES", NODE,
         "devices to other machines, with commas between them; patterns as *.100 will do "
         "(default: chosen by their kind)"),
    Flag("--exclude-device", "excluded_devices", _words, "NAMES", NODE,
         "devices that packets are left alone on"),
    Flag("--masquerade-ports", "masquerade_ports", _ports, "LOW-HIGH", NODE,
         "the node's ports for clients whose address becomes the node's; kept clear of the node's "
         "own sockets (default 1024-29999)"),
    Flag("--masquerade-bit", "masquerade_bit", _bit, "NUMBER", NODE,
         "the bit of the mark that packets of such clients carry through the node's stack "
         "(default 14, as kube-proxy's)"),
    Flag("--masquerade-all", "masquerade_all", _truth, "true|false", NODE,
         "whether backends see the node instead of the client for ClusterIPs too (default false)"),
    Flag("--forwarding", "forwarding", _FORWARDING, "stack|direct", NODE,
         "how the packet path reaches pods of this node: up the host's stack with its netfilter, "
         "or direct to the pod's device, past firewalls and policies of the host (default stack)"),
    Flag("--detect-local-mode", "detect_local_mode", _local_mode, "MODE", NODE,
         "how pods of this node are told from others: ClusterCIDR, NodeCIDR, BridgeInterface or "
         "InterfaceNamePrefix (default: ClusterCIDR with --cluster-cidr, else by their devices)"),
    Flag("--cluster-cidr", "cluster_cidrs", _networks, "CIDRS", NODE,
         "the networks of the cluster's pods, with a comma between them; the first of each family "
         "counts"),
    Flag("--pod-bridge-interface", "pod_bridge_interface", _device, "NAME", NODE,
         "the bridge that pods are on, for BridgeInterface"),
    Flag("--pod-interface-name-prefix", "pod_interface_name_prefix", _device, "PREFIX", NODE,
         "how the names of pods' devices begin, for InterfaceNamePrefix"),
    Flag("--healthz-bind-address", "serving.healthz", partial(_listen, 10256), "IP:PORT", SERVING,
         "where /healthz and /livez answer; empty: nowhere (default 0.0.0.0:10256, so all of both "
         "families)"),
    Flag("--metrics-bind-address", "serving.metrics", partial(_listen, 10249), "IP:PORT", SERVING,
         "where /metrics, /proxyMode and /configz answer; empty: nowhere (default "
         "127.0.0.1:10249)"),
    Flag("--bind-address-hard-fail", "serving.hard_fail", _truth, "true|false", SERVING,
         "whether one of these addresses that is taken ends the agent; else it is tried again "
         "(default false)"),
    Flag("--metrics-services", "serving.service_series", _count, "NUMBER", SERVING,
         "so many Services at most have series of their own: those with the most connections "
         "(default 1000)"),
    Flag("--log-level", "log_level", _LEVEL, "LEVEL", LOGGING,
         "debug, info, warning or error (default info)"),
    Flag("--log-format", "log_format", _FORMAT, "text|json", LOGGING,
         "lines for people, or one JSON object a line (default text)"),
    *_sizes(),
)  # fmt: skip


NEEDS: Final = {
    LocalMode.BRIDGE: "--pod-bridge-interface",
    LocalMode.PREFIX: "--pod-interface-name-prefix",
}
"""The flag without which a mode is refused. ClusterCIDR without a network detects nothing, as
with kube-proxy, whose configuration files often have it so."""


def config(given: Mapping[str, str], environ: Mapping[str, str]) -> Config:
    """The Config that these flags ({name: text}) and variables say. `node_name` is "" when
    nobody said it.
    """
    values = dict(_read_all(given, environ))
    parts: dict[str, Any] = {"sizes": MapSizes(), "serving": Serving()}
    for name, value in values.items():
        part, dot, of = name.partition(".")
        if dot:
            parts[part] = replace(parts[part], **{of: value})
    plain = {k: v for k, v in values.items() if "." not in k and k != "node_ports"}
    made = Config(**plain, **parts)
    match values.get("node_ports", "primary"):
        case "all":
            made = replace(made, all_node_port_addresses=True)
        case tuple(networks):
            made = replace(made, node_port_addresses=networks)
    if made.cluster_cidrs and not made.detect_local_mode:
        made = replace(made, detect_local_mode=LocalMode.CLUSTER_CIDR)
    return _together(made)


def _read_all(given: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for flag in FLAGS:
        if flag.name in given:
            yield flag.field, flag.read(given[flag.name], flag.name)
        elif environ.get(flag.variable):
            yield flag.field, flag.read(environ[flag.variable], flag.variable)


def _together(made: Config) -> Config:
    """What contradicts itself."""
    if made.source is not None and (made.kubeconfig is not None or made.master):
        raise ConfigError(
            "a folder and an API server cannot both be the source",
            "--source",
            "leave out --source, or --kubeconfig and --master",
        )
    if made.sizes.connections < LEAST_CONNECTIONS:
        raise ConfigError(
            f"too few connections: {made.sizes.connections}",
            "--max-connections",
            f"give {LEAST_CONNECTIONS} or more: the kernel hands out places in portions",
        )
    for mode, name in NEEDS.items():
        flag = next(flag for flag in FLAGS if flag.name == name)
        if made.detect_local_mode is mode and not getattr(made, flag.field):
            raise ConfigError(
                f"{mode} says nothing by itself", "--detect-local-mode", f"add {name}"
            )
    if made.socket_lb is not SocketLb.ON and not made.packet_path:
        raise ConfigError(
            f"with {made.socket_lb} nobody would serve the sockets that the hooks leave alone",
            "--socket-lb",
            "leave out --packet-path false, or --socket-lb",
        )
    return made
