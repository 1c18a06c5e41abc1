# SPDX-License-Identifier: Apache-2.0
"""Detection of a running kube-proxy from processes and from responses at its ports.

Real kube-proxies are detected in tests/lab/cluster/test_takeover_cleanup.py, test_side_by_side.py
and test_drop_in.py.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from kbpf.takeover import detect
from kbpf.takeover.detect import (
    KUBE_PROXY_PORTS,
    Detection,
    ProbeAnswer,
    Responder,
    identify_responder,
    parse_listeners,
    removal_error,
)
from tests.support.table import each_named_pair

HEALTH, METRICS = "0.0.0.0 port 10256", "127.0.0.1 port 10249"
RESPONDERS = {"kube-proxy": Responder.KUBE_PROXY, "kbpf": Responder.KBPF, "other": Responder.UNKNOWN}
RUNS, UNKNOWN = "kube-proxy is running on this node", "cannot tell from here"


@each_named_pair(
    "sight, why",
    f"""\
on the node, no kube-proxy: →
on the node, a kube-proxy: pid=7 health=kube-proxy metrics=kube-proxy → {RUNS} (pid 7)
on the node, a kube-proxy with other ports: pid=7 → {RUNS} (pid 7)
inside k3s: metrics=kube-proxy → {RUNS} (it answers on {METRICS})
on the node, kbpf: health=kbpf metrics=kbpf →
on the node, another program at its port: health=other →
in the pod, a kube-proxy: hidden health=kube-proxy metrics=kube-proxy → {RUNS} (it answers on {HEALTH})
in the pod, kbpf in its place: hidden health=kbpf metrics=kbpf →
in the pod, kbpf without metrics: hidden health=kbpf →
in the pod, a kube-proxy and kbpf at one of its ports: hidden health=kbpf metrics=kube-proxy → \
{RUNS} (it answers on {METRICS})
in the pod, no response: hidden → {UNKNOWN}
in the pod, another program responds: hidden health=other → {UNKNOWN}
""",
)
def test_removal_is_refused_while_a_kube_proxy_may_run(sight, why):
    """What is detected: kube-proxy's pid, whether the node's processes are hidden, and who answers at each address →
    words of the error that prevents the removal; without any it is allowed.
    """
    words = sight.split()
    found = dict(word.split("=") for word in words if "=" in word)
    places = {"health": HEALTH, "metrics": METRICS}
    answers = {place: RESPONDERS[found[name]] for name, place in places.items() if name in found}
    error = removal_error(Detection((7,) if "pid" in found else (), "hidden" not in words, answers))
    assert (error is not None) == bool(why)
    assert why in str(error)


NAME_ITSELF = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode("utf-8", "surrogateescape"), 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""


def test_processes_may_have_any_name():
    """A pod's process that is not named in UTF-8 does not hide a kube-proxy."""
    with contextlib.ExitStack() as stack:
        started = []
        for name in (b"\xff\xfe", b"kube-proxy", b"kube-proxy-not", b" kube-proxy"):
            command = [sys.executable, "-c", NAME_ITSELF, os.fsdecode(name)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(process.communicate)
            assert process.stdout is not None
            process.stdout.readline()
            started.append(process.pid)
        assert set(detect.detect().pids) & set(started) == {started[1]}


CONTENTS: dict[str, ProbeAnswer] = {
    "well": (200, b'{"lastUpdated":"T","currentTime":"T","nodeEligible":true,"healthy":true}'),
    "late": (503, b'{"lastUpdated":"T","currentTime":"T","nodeEligible":true,"healthy":true}'),
    "ok": (200, b"ok"),
    "json": (200, b"[1]"),
    "serves": (200, b"kbpf serves\n"),
    "starts": (503, b"kbpf is not ready: why\n"),
    "nftables": (200, b"nftables"),
    "ipvs": (200, b"ipvs"),
    "empty": (200, b""),
    "no-http": None,
}


@each_named_pair(
    "answers, who",
    """\
kube-proxy's health: healthz=well → kube-proxy
kube-proxy's health, late: healthz=late → kube-proxy
kube-proxy's metrics: healthz=ok proxyMode=nftables → kube-proxy
kbpf's health: readyz=serves healthz=well → kbpf
kbpf's health, not ready yet: readyz=starts healthz=well → kbpf
kbpf's metrics, mode ipvs: readyz=serves proxyMode=ipvs → kbpf
another program: healthz=ok readyz=ok → other
another program's JSON: healthz=json → other
a program that answers every path with 200: readyz=empty proxyMode=empty healthz=empty → other
no HTTP: readyz=no-http proxyMode=no-http healthz=no-http → other
""",
)
def test_identify_responder(answers, who):
    """What is answered at each path, 404 at others → who it is."""
    words = (word.split("=") for word in answers.split())
    found = {f"/{path}": CONTENTS[name] for path, name in words}
    assert identify_responder(lambda path: found.get(path, (404, b"404 page not found\n"))) is RESPONDERS[who]


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_comes_byte_by_byte_is_cut_off(head, monkeypatch):
    """Whoever has a port of kube-proxy's must not hold up `kbpf check`."""
    monkeypatch.setattr(detect, "PROBE_TIMEOUT_S", 0.2)
    was_cut_off = []

    def drip(server: socket.socket) -> None:
        client, _ = server.accept()
        with client:
            client.recv(1 << 16)
            try:
                client.sendall(head)
                for _ in range(6000):
                    client.sendall(b"x")
                    time.sleep(0.01)
            except OSError:
                was_cut_off.append(True)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        answer = detect.http_get("127.0.0.1", server.getsockname()[1], "/healthz")
        thread.join()
    assert was_cut_off
    assert answer is None or set(answer[1]) <= set(b"x")


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
TCP = [
    "   0: 0100007F:2809 00000000:0000 0A 0:0 00:0 0 0 0 1\n",
    "   1: 00000000:1F90 00000000:0000 0A 0:0 00:0 0 0 0 2\n",
    "   2: 00000000:2810 00000000:0000 0A 0:0 00:0 0 0 0 3\n",
    "   3: 0100007F:2810 0100007F:9C40 01 0:0 00:0 0 0 0 4\n",
]
TCP6 = [
    f"   0: {'0' * 32}:2810 {'0' * 32}:0000 0A 0:0 00:0 0 0 0 5\n",
    f"   1: 0000000000000000FFFF00000100007F:2809 {'0' * 32}:0000 0A 0:0 00:0 0 0 0 6\n",
    f"   2: B80D0120000000000000000001000000:2809 {'0' * 32}:0000 0A 0:0 00:0 0 0 0 7\n",
]


def test_parse_listeners():
    """/proc/net/tcp is in host byte order: little-endian on all machines kbpf is built for."""
    assert list(parse_listeners(iter([HEAD, *TCP]), KUBE_PROXY_PORTS)) == [("127.0.0.1", 10249), ("0.0.0.0", 10256)]
    assert list(parse_listeners(iter([HEAD, *TCP6]), KUBE_PROXY_PORTS)) == [
        ("::", 10256),
        ("127.0.0.1", 10249),
        ("2001:db8::1", 10249),
    ]
    assert list(parse_listeners(iter([HEAD]), KUBE_PROXY_PORTS)) == []
