# SPDX-License-Identifier: Apache-2.0
"""A real kube-apiserver with its etcd for one test run: started in seconds, removed afterwards.

There is no kubelet and no controller: a test does their work (it writes the EndpointSlices, the
Nodes and the load balancers' status). Rules:

- Nothing is shared: each server has a separate temporary folder, etcd listens on unix sockets in
  it, and a bound socket reserves the port from before the start until after the end, so that it
  stays the same across `restart`.
- Nothing is left behind: the children are killed when the thread that started them ends
  (PR_SET_PDEATHSIG is about the thread, not the process: don't start a server in a thread that
  ends).
- Users have tokens and RBAC applies: `admin` may do everything; `kbpf` is the user
  system:kube-proxy, which Kubernetes binds to system:node-proxier and we to the rights of
  manifests/base/rbac.yaml on Pods; `nobody` is authenticated but may do nothing.
"""

import base64
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

import yaml

from tests.support.build import go_build
from tests.support.cluster.certs import Authority
from tests.support.cluster.kube import Kube
from tests.support.lab import sockets
from tests.support.lab.lab import PATIENCE

START_SECONDS = 3 * PATIENCE  # 3 to 5 seconds; a minute on a busy machine, minutes in an emulator
STOP_SECONDS = 20.0
ETCD, SERVER = "etcd", "kube-apiserver"
ETCD_DATA = "etcd-data"
SNAPSHOT = "etcd-snapshot"
MEMBER = (
    "--name=tests",
    f"--data-dir={ETCD_DATA}",
    "--initial-advertise-peer-urls=unix://peer:1",
    "--initial-cluster=tests=unix://peer:1",
)
"""etcd's flags about its cluster, needed when its data are created, by etcd or from a snapshot."""
DUAL_STACK = "10.96.0.0/16,fd00:10:96::/112"
USERS = {  # our name → the user's name and groups in Kubernetes
    "admin": ("admin", "system:masters"),
    "kbpf": ("system:kube-proxy", ""),
    "nobody": ("nobody", ""),
}
PODS = """
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: kbpf-pods}
rules: [{apiGroups: [""], resources: [pods], verbs: [list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kbpf-pods}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: kbpf-pods}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: system:kube-proxy}]
"""
"""The rights of the user kbpf on Pods, which kube-proxy's role lacks."""
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: tests, cluster: {{server: "{server}", certificate-authority-data: {crt}}}}}]
users: [{{name: {user}, user: {{token: "{token}"}}}}]
contexts: [{{name: tests, context: {{cluster: tests, user: {user}}}}}]
current-context: tests
"""


class ServerDied(Exception):
    """A child exited or did not become ready; the message ends with the last lines of its log."""


class ApiServer:
    """One API server; a context manager, or start() and stop().

    `address` is another IPv4 address that clients dial, for example from other network namespaces:
    the server then listens on all addresses, and the Service `kubernetes` gets this endpoint.
    `netns` names a namespace below /run/netns to run in, in which `lo` must be up.
    """

    def __init__(self, *, address: str = "", netns: str | None = None) -> None:
        self._address = address
        self._bind = "::" if address else "127.0.0.1"
        self.netns = netns
        self.port = 0
        self.tokens = {user: secrets.token_hex(16) for user in USERS}
        self._folder: Path | None = None
        self._authority: Authority | None = None
        self._held: socket.socket | None = None
        self._children: dict[str, _Child] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"https://{self._address or self._bind}:{self.port}"

    @property
    def token(self) -> str:
        """The admin's token."""
        return self.tokens["admin"]

    @property
    def authority(self) -> Authority:
        """The CA that signed the server's certificate; it also issues certificates for proxies."""
        if self._authority is None:
            raise RuntimeError("the API server has not been started")
        return self._authority

    @property
    def folder(self) -> Path:
        """The temporary folder with data, certificates and logs (*.log)."""
        if self._folder is None:
            raise RuntimeError("the API server has not been started")
        return self._folder

    def start(self) -> None:
        """Start etcd and the API server; return once Services can be created."""
        try:
            self._prepare()
            self._start_etcd()
            self._start_server()
            with self.kube() as kube:
                for obj in yaml.safe_load_all(PODS):
                    kube.create(obj)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill both, free the port and remove the folder; idempotent."""
        self._end(signal.SIGKILL, SERVER, ETCD)
        if self._held is not None:
            self._held.close()
            self._held = None
            self.port = 0
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = self._authority = None

    def kill(self) -> None:
        """Kill the API server as in a crash: connections break, and new ones are refused.

        etcd keeps running; restart() starts the server again.
        """
        self._end(signal.SIGKILL, SERVER)

    def restart(self) -> None:
        """Stop the API server gracefully (if it runs) and start it with the same data and port."""
        self._end(signal.SIGTERM, SERVER)
        self._start_server()

    def _end(self, how: signal.Signals, *names: str) -> None:
        for name in names:
            if child := self._children.pop(name, None):
                child.end(how)

    def back_up(self) -> None:
        """Save etcd's data for restore(), as an administrator does with `etcdctl snapshot`."""
        snapshot = self.folder / SNAPSHOT
        snapshot.unlink(missing_ok=True)
        self._run("etcdctl", "--endpoints=unix://client:1", "snapshot", "save", SNAPSHOT)

    def restore(self) -> None:
        """Restart with the data of back_up(), as an administrator does after a loss, with `etcdutl
        snapshot restore`: later writes are lost, and the revision goes back to that of the
        snapshot.
        """
        self._end(signal.SIGTERM, SERVER, ETCD)
        (self.folder / "client:1").unlink(missing_ok=True)
        shutil.rmtree(self.folder / ETCD_DATA)
        self._run("etcdutl", "snapshot", "restore", SNAPSHOT, *MEMBER)
        self._start_etcd()
        self._start_server()

    def _run(self, name: str, *arguments: str) -> None:
        command = [str(go_build.build(name)), *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerDied(f"{' '.join(command)}: {done.stderr.strip()}")

    def kube(self, user: str = "admin") -> Kube:
        """Return a client; the caller closes it."""
        return Kube(self.url, self.tokens[user], self.authority.crt, netns=self.netns)

    def kubeconfig(self, path: Path, user: str = "kbpf", *, url: str | None = None) -> Path:
        """Write a kubeconfig that verifies TLS, and return its path; `url` is another URL to use, such as a fault
        proxy's.
        """
        crt = base64.b64encode(self.authority.crt.read_bytes()).decode()
        text = KUBECONFIG.format(server=url or self.url, crt=crt, user=user, token=self.tokens[user])
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    def _prepare(self) -> None:
        """Create what survives a restart: the folder, the port, the certificates, the tokens."""
        folder = self._folder = Path(tempfile.mkdtemp(prefix="kbpf-apiserver-"))
        self._held = sockets.bound(self.netns, self._bind, self.port)
        self.port = self._held.getsockname()[1]
        self._authority = Authority(folder)
        hosts = {"localhost", "127.0.0.1", "kubernetes.default.svc", "10.96.0.1", "fd00:10:96::1"}
        self._authority.issue("server", hosts | ({self._address} - {""}))
        self._authority.issue("accounts", {"localhost"})  # for its key: it signs service accounts
        rows = [
            f"{self.tokens[user]},{name},{user}{f',{group}' if group else ''}" for user, (name, group) in USERS.items()
        ]
        tokens = folder / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text("\n".join(rows) + "\n")

    def _start_etcd(self) -> None:
        etcd = self._child(
            ETCD,
            *MEMBER,
            # Unix sockets in the working folder: etcd requires HOST:PORT and uses it as a file
            # name.
            "--listen-client-urls=unix://client:1",
            "--advertise-client-urls=unix://client:1",
            "--listen-peer-urls=unix://peer:1",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        deadline = time.monotonic() + START_SECONDS
        while not (self.folder / "client:1").is_socket():
            etcd.check(deadline, "it has not made its socket")
            time.sleep(0.01)

    def _start_server(self) -> None:
        server = self._child(SERVER, *self._flags())
        deadline = time.monotonic() + START_SECONDS
        with self.kube() as kube:
            while (why := kube.not_ready()) is not None:
                server.check(deadline, why)
                time.sleep(0.05)

    def _flags(self) -> tuple[str, ...]:
        return (
            "--etcd-servers=unix://client:1",
            f"--bind-address={self._bind}",
            f"--secure-port={self.port}",
            "--permit-port-sharing",  # with the socket that holds the port
            # A loopback address is refused as an endpoint of the Service `kubernetes`.
            f"--advertise-address={self._address or '127.0.0.1'}",
            *(() if self._address else ("--endpoint-reconciler-type=none",)),
            "--cert-dir=certificates",
            "--tls-cert-file=server.crt",
            "--tls-private-key-file=server.key",
            "--token-auth-file=tokens.csv",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",  # as kubeadm sets it: its kube-proxy is privileged
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file=accounts.crt",
            "--service-account-signing-key-file=accounts.key",
            f"--service-cluster-ip-range={DUAL_STACK}",
        )

    def _child(self, name: str, *flags: str) -> "_Child":
        inside = ["nsenter", f"--net=/run/netns/{self.netns}", "--"] if self.netns else []
        command = [*inside, str(go_build.build(name)), *flags]
        self._children[name] = _Child(name, command, self.folder)
        return self._children[name]


class _Child:
    """A process that is killed when we end. Its log is NAME.log; the next one of that name
    appends.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self._name = name
        self._path = folder / f"{name}.log"
        self._log: IO[bytes] = self._path.open("ab")
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def check(self, deadline: float, why: str) -> None:
        """Raise ServerDied if it has exited, or if the deadline (monotonic) has passed."""
        if (code := self._process.poll()) is not None:
            raise ServerDied(f"{self._name} ended with {code}{self._tail()}")
        if time.monotonic() > deadline:
            raise ServerDied(f"{self._name} is not ready in time: {why}{self._tail()}")

    def end(self, how: signal.Signals) -> None:
        """Send the signal and wait; kill it if that takes too long."""
        try:
            self._process.send_signal(how)
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _tail(self) -> str:
        lines = self._path.read_text(errors="replace").splitlines()[-25:]
        return "; the end of its log:\n" + "\n".join(lines)
