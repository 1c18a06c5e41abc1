# SPDX-License-Identifier: Apache-2.0
"""A real kube-proxy on a node of the lab, in any of its modes (ipvs needs IPVS and the program ipset),
next to kbpf or instead of it.

Built from its Go module (`go_build`). It runs in the node's network namespace, so its rules and
conntrack entries belong to that namespace and are removed with it. It is stopped as kubelet stops
it: its rules stay.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tests.support.build import go_build
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Kube
from tests.support.cluster.kube_objects import node
from tests.support.lab.lab import DIE_WITH_US, PATIENCE, Lab, Node, inside, until

QUIET = (
    # Not these sysctls: they are the whole machine's, not the namespace's.
    "--conntrack-max-per-core=0",
    "--conntrack-min=0",
    "--conntrack-tcp-timeout-established=0",
    "--conntrack-tcp-timeout-close-wait=0",
)


@contextlib.contextmanager
def lab_for_proxies(nodes: int, name: str) -> Iterator[tuple[Lab, Kube, Path]]:
    """A lab whose outside machine has an API server with its Nodes; a client of this server, and the
    kubeconfig for proxies.
    """
    with (
        Lab(nodes, name, apart=True) as lab,
        ApiServer(address=lab.outside_ip, netns=lab.outside) as api,
        api.kube() as kube,
    ):
        for each in lab.nodes:
            kube.create(node(each.name, each.ip, each.ip6))
        yield lab, kube, api.kubeconfig(lab.folder / "kubeconfig", "kbpf")


class KubeProxy:
    """kube-proxy on one node; its log is in the kubeconfig's folder. `arguments` are
    further flags.
    """

    def __init__(self, node: Node, mode: str, kubeconfig: Path, *arguments: str) -> None:
        self.node, self.mode = node, mode
        self.log = kubeconfig.parent / f"kube-proxy-{node.name}.log"
        self._command = (
            *(str(go_build.build("kube-proxy")), "--proxy-mode", mode),
            *("--kubeconfig", str(kubeconfig), "--hostname-override", node.name),
            *(*QUIET, *arguments),
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Starts it. It writes its first rules once it has listed everything: wait for their
        effect.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*DIE_WITH_US, *inside(self.node.netns, None, *self._command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        return self

    def stop(self) -> None:
        """Sends SIGTERM, as kubelet does; its rules stay. Programs that it runs to write rules end
        with a container; here they are waited for.
        """
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE)
            until("its programs have ended", lambda pid=self.pid: not _members(pid))
            self._process = None

    def has_programmed(self, node_port: int) -> bool:
        """has_programmed() for this kube-proxy."""
        return has_programmed(self.node, self.mode, node_port)

    @property
    def pid(self) -> int:
        """The process id of the running kube-proxy."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _members(group: int) -> list[int]:
    """The processes of this process group that have not exited."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # Of any process of the machine: its name may be no text.
            state, _, its, *_ = path.read_bytes().rpartition(b")")[2].split()
            if int(its) == group and state != b"Z":
                found.append(int(path.parent.name))
    return found


def has_programmed(node: Node, mode: str, node_port: int) -> bool:
    """Whether rules of a kube-proxy in this mode exist for this TCP NodePort, whether or not they
    are what serves it now.
    """
    saved = ("iptables-save", "-t", "nat")
    words, sign = {
        "nftables": (("nft", "list", "table", "ip", "kube-proxy"), f"tcp . {node_port} : goto"),
        "iptables": (saved, f"--dport {node_port} -j KUBE-EXT"),
        # Written last in a sync, so everything else is programmed by then.
        "ipvs": (saved, "--match-set KUBE-NODE-PORT-TCP dst"),
    }[mode]
    command = inside(node.netns, None, *words)
    return sign in subprocess.run(command, capture_output=True, text=True, check=False).stdout
