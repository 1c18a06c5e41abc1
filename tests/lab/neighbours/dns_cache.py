# SPDX-License-Identifier: Apache-2.0
"""NodeLocal DNSCache on a node of the lab.

CoreDNS is real. node-cache (kubernetes/dns 1.26.7) is CoreDNS with a device and rules around it;
these are imitated from cmd/node-cache/app/cache_app.go and pkg/netif/netif.go:

- At start the device gets the ClusterIP, but is not set up; then CoreDNS starts; the iptables rules
  follow a sync interval later.
- On SIGTERM the device is removed, then the rules, then CoreDNS ends.
- On SIGKILL all of them stay.
"""

import signal
import subprocess
from pathlib import Path

from tests.support.build import go_build
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.lab.lab import DIE_WITH_US, Node, Place, inside, on, run

DEVICE = "nodelocaldns"
METRICS = 9153
WHERE = "where.cluster.local"
"""A name that the cache answers itself, unlike the servers behind it."""
AT_CACHE, AT_SERVER = "192.0.2.53", "192.0.2.1"
_CACHE = """\
cluster.local:53 {{
    errors
    cache {{
        success 9984 30
        denial 9984 5
    }}
    loop
    bind {address}
    template IN A {where} {{
        answer "{{{{ .Name }}}} 0 IN A {at_cache}"
    }}
    forward . {upstream} {{
        force_tcp
    }}
    health {address}:8080
}}
"""
"""The zone of the cluster in nodelocaldns.yaml (kubernetes/kubernetes, cluster/addons/dns), with
`template` in addition.
"""
_SERVER = """\
.:53 {{
    template IN A . {{
        answer "{{{{ .Name }}}} 30 IN A {at_server}"
    }}
}}
"""


def dns_service(name: str, address: str, server: str) -> list[Object]:
    """A Service as kubeadm's kube-dns, whose pod has the address `server`."""
    protocols = {"dns": "UDP", "dns-tcp": "TCP"}
    ports = [port(53, name=each, protocol=protocol) for each, protocol in protocols.items()]
    slices = [slice_port(53, each, protocol) for each, protocol in protocols.items()]
    ports.append(port(METRICS, target=8080, name="metrics"))
    slices.append(slice_port(8080, "metrics"))
    space = {"namespace": "kube-system"}
    return [
        service(name, *ports, cluster_ip=address, **space),
        endpoint_slice(name, endpoint(server, node="node-1"), ports=slices, **space),
    ]


def start_server(pod: Place, folder: Path) -> "subprocess.Popen[bytes]":
    """Starts CoreDNS in a pod, which answers with the same address for every name."""
    corefile = folder / f"Corefile.{pod.name}"
    corefile.write_text(_SERVER.format(at_server=AT_SERVER))
    return _start(pod, str(go_build.build("coredns")), "-conf", str(corefile))


def _start(place: Place, *command: str) -> "subprocess.Popen[bytes]":
    words = [*DIE_WITH_US, *inside(place.netns, place.cgroup, *command)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class NodeCache:
    """The cache at `address`, with the DNS servers at `upstream`."""

    def __init__(self, node: Node, address: str, upstream: str) -> None:
        self._node, self._address = node, address
        self._place = node.host_network_pod("node-cache")
        text = _CACHE.format(address=address, upstream=upstream, where=WHERE, at_cache=AT_CACHE)
        self._corefile = node.lab.folder / "Corefile.cache"
        self._corefile.write_text(text)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; its device may be left of the time before."""
        if not self._has_device():
            self._run("ip", "link", "add", DEVICE, "type", "bridge")  # or dummy, if the kernel can
        if not self.has_address():
            self._run("ip", "addr", "add", f"{self._address}/32", "dev", DEVICE)
        self._process = _start(self._place, str(go_build.build("coredns")), "-conf", str(self._corefile))

    def add_rules(self) -> None:
        """What node-cache does after a sync interval."""
        self._iptables("-I")

    def has_rules(self) -> bool:
        return self._address in self._run("iptables-save", "-t", "raw")

    def has_address(self) -> bool:
        """Whether its device has the address. In mode ipvs kbpf's has it, too."""
        return self._has_device() and self._address in self._run("ip", "-br", "addr", "show", "dev", DEVICE)

    def end(self, number: signal.Signals) -> None:
        """Ends it by SIGTERM or SIGKILL."""
        assert self._process is not None
        if number == signal.SIGTERM:
            self._run("ip", "link", "del", DEVICE)
            self._iptables("-D")
        self._process.send_signal(number)
        self._process.wait()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _has_device(self) -> bool:
        return DEVICE in self._run("ip", "-br", "link", "show")

    def _iptables(self, verb: str) -> None:
        for protocol in ("tcp", "udp"):
            to = f"-p {protocol} -d {self._address} --dport 53"
            back = f"-p {protocol} -s {self._address} --sport 53"
            for rule in (
                f"raw PREROUTING {to} -j NOTRACK",
                f"filter INPUT {to} -j ACCEPT",
                f"raw OUTPUT {back} -j NOTRACK",
                f"filter OUTPUT {back} -j ACCEPT",
                f"raw OUTPUT {to} -j NOTRACK",
            ):
                table, *words = rule.split()
                command = inside(self._node.netns, None, "iptables", "-w", "-t", table)
                exists = not subprocess.run([*command, "-C", *words], capture_output=True, check=False).returncode
                if exists == (verb == "-D"):
                    run(*command, verb, *words)

    def _run(self, *command: str) -> str:
        return on(self._node, *command)
