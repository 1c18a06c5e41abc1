# SPDX-License-Identifier: Apache-2.0
"""The network. A bridge in a separate namespace, the fabric, connects the machines and is the
default gateway of each. It answers "unreachable" for the rest of the world. The client is on
another network, which the fabric routes.
"""

from tests.conformance.cluster.cnis import cni
from tests.conformance.cluster.layout import (
    CLIENT_NETWORKS,
    FABRIC,
    GATEWAY_HOST,
    NODE_NETWORKS,
    POD_CIDRS,
    PREFIX,
    SERVICE_CIDRS,
    Cluster,
    Machine,
    call,
    shell,
)

BRIDGE = "br0"
HOST_SETTINGS = """
sysctl -qw net.ipv6.conf.all.disable_ipv6=0 net.ipv6.conf.default.disable_ipv6=0
sysctl -qw net.ipv6.conf.{all,default,eth0}.accept_dad=0
sysctl -qw net.ipv6.conf.{all,eth0}.accept_ra=0 net.ipv6.conf.{all,eth0}.accept_redirects=0
sysctl -qw net.ipv4.conf.{all,default}.rp_filter=0
"""


def make_namespace(name: str) -> None:
    call(["ip", "netns", "add", name])
    call(["ip", "-n", name, "link", "set", "lo", "up"])


def make_fabric(cluster: Cluster) -> None:
    make_namespace(cluster.global_name(FABRIC))
    shell(
        f"""
sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
sysctl -qw net.ipv4.conf.all.send_redirects=0 net.ipv4.conf.default.send_redirects=0
sysctl -qw net.ipv4.fib_multipath_hash_policy=1 net.ipv6.fib_multipath_hash_policy=1
ip link add {BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0
{_bridge_netfilter(0)}
ip link set {BRIDGE} up
{_gateway_addresses(NODE_NETWORKS, BRIDGE)}
ip route add unreachable default
ip -6 route add unreachable default
""",
        cluster.netns(FABRIC),
    )


def _bridge_netfilter(value: int) -> str:
    """Bridged packets do, or do not, pass the firewall, if br_netfilter is loaded."""
    return f"""
for file in /proc/sys/net/bridge/bridge-nf-call-*tables; do
  [ ! -e $file ] || echo {value} >$file
done"""


def _gateway_addresses(networks: tuple, device: str) -> str:
    ipv4, ipv6 = networks
    return f"""
ip addr add {ipv4[GATEWAY_HOST]}/{ipv4.prefixlen} dev {device}
ip addr add {ipv6[GATEWAY_HOST]}/{ipv6.prefixlen} dev {device} nodad"""


def connect(cluster: Cluster, machine: Machine) -> None:
    """Makes a machine's network namespace, with its address and routes."""
    name = cluster.global_name(machine.name)
    make_namespace(name)
    is_client = machine.kind == "client"
    shell(
        f"""
ip link add {machine.name} type veth peer name eth0 netns {name}
ip link set {machine.name} {"" if is_client else f"master {BRIDGE}"} up
{_gateway_addresses(CLIENT_NETWORKS, machine.name) if is_client else ""}
""",
        cluster.netns(FABRIC),
    )
    ipv4, ipv6 = CLIENT_NETWORKS if is_client else NODE_NETWORKS
    address, address6 = machine.addresses
    shell(
        f"""{HOST_SETTINGS}
ip link set eth0 up
ip addr add {address}/{ipv4.prefixlen} dev eth0
ip addr add {address6}/{ipv6.prefixlen} dev eth0 nodad
ip route add default via {ipv4[GATEWAY_HOST]}
ip -6 route add default via {ipv6[GATEWAY_HOST]}
{_pod_routes(cluster) if machine.kind == "control-plane" else ""}
{_router(machine, masquerades=not cni(cluster).masquerades) if machine.kind == "node" else ""}
""",
        cluster.netns(machine.name),
    )


def _pod_routes(cluster: Cluster) -> str:
    """The control plane's routes to pods. Nodes have those of the CNI."""
    return "\n".join(
        f"ip route add {cidr} via {gateway}"
        for node in cluster.nodes
        for cidr, gateway in zip(node.pod_cidrs, node.addresses, strict=True)
    )


def _router(machine: Machine, *, masquerades: bool) -> str:
    """A node forwards. If it masquerades, what pods send to neither pods nor Services gets the
    node's address.
    """
    script = f"""
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
{_bridge_netfilter(1)}
"""
    if not masquerades:
        return script
    pods, pods6 = machine.pod_cidrs
    return f"""{script}
nft -f - <<'TABLE'
table inet e2e-masq {{
  chain post {{
    type nat hook postrouting priority 110; policy accept;
    ip saddr {pods} ip daddr != {{ {POD_CIDRS[0]}, {SERVICE_CIDRS[0]} }} masquerade
    ip6 saddr {pods6} ip6 daddr != {{ {POD_CIDRS[1]}, {SERVICE_CIDRS[1]} }} masquerade
  }}
}}
TABLE"""


def remove_all(cluster_name: str) -> None:
    """Removes every network namespace of a cluster."""
    for line in call(["ip", "netns", "list"]).splitlines():
        name = line.split()[0] if line else ""
        if name.startswith(f"{PREFIX}{cluster_name}-"):
            call(["ip", "netns", "delete", name])
