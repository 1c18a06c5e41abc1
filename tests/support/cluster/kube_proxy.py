"""A real kube-proxy on a node of the lab, in any of its modes, beside kbpf or in its place.

Built from its Go module (`go_build`). It runs in the node's network namespace, so its rules and
conntrack are that namespace's own and are gone with it. It ends as kubelet ends it: its rules stay.
"""

import subprocess
from pathlib import Path
from typing import Protocol, Self

from tests.support.build import go_build
from tests.support.lab.lab import DIE_WITH_US, PATIENCE, inside

MODES = ("nftables", "iptables")
"""Those that any kernel has; "ipvs" wants IPVS, and the program ipset."""
QUIET = (
    # Sysctls of the whole machine: not a namespace's to set, and not needed here.
    "--conntrack-max-per-core=0",
    "--conntrack-min=0",
    "--conntrack-tcp-timeout-established=0",
    "--conntrack-tcp-timeout-close-wait=0",
)


class Home(Protocol):
    """Where it runs: a node of the lab, or any other network namespace."""

    @property
    def name(self) -> str:
        """Kubernetes' name of the node."""

    @property
    def netns(self) -> str:
        """The namespace, below /run/netns."""


class KubeProxy:
    """`kube-proxy` on one node; its log is beside the kubeconfig. `arguments` are further flags."""

    def __init__(self, node: Home, mode: str, kubeconfig: Path, *arguments: str) -> None:
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
        """Starts it. Its first rules come when it has listed everything: wait for what they do."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*DIE_WITH_US, *inside(self.node.netns, None, *self._command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def stop(self) -> None:
        """SIGTERM, as kubelet does; what it has programmed stays."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE)
            self._process = None

    def has_programmed(self, node_port: int) -> bool:
        """See has_programmed() below."""
        return has_programmed(self.node, self.mode, node_port)

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self._process is not None and self._process.poll() is None

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def has_programmed(node: Home, mode: str, node_port: int) -> bool:
    """Whether rules of a kube-proxy in this mode lead this TCP NodePort to somebody, whoever serves
    it now.
    """
    saved = ("iptables-save", "-t", "nat")
    words, sign = {
        "nftables": (("nft", "list", "table", "ip", "kube-proxy"), f"tcp . {node_port} : goto"),
        "iptables": (saved, f"--dport {node_port} -j KUBE-EXT"),
        # The last of a pass, which has all that it knows.
        "ipvs": (saved, "--match-set KUBE-NODE-PORT-TCP dst"),
    }[mode]
    command = inside(node.netns, None, *words)
    return sign in subprocess.run(command, capture_output=True, text=True, check=False).stdout
