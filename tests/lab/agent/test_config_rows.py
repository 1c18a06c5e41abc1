# SPDX-License-Identifier: Apache-2.0
"""The rows of tests/values/config/rows_kube_proxy_file.py, given to the real kube-proxy: how it
reads each file, and which it refuses. It only writes its settings and exits (--write-config-to).
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kbpf.config import load
from tests.values.config.documents import PROXY, document, field, shown
from tests.values.config.rows_kube_proxy_file import SAYS, WRONG

SAID_OTHERWISE = {
    "mode: ''": "iptables",
    "detectLocalMode: ''": "ClusterCIDR",
    "iptables: {minSyncPeriod: 0s}": "1.0",
}
"""Settings that kube-proxy writes differently: values that we leave unset, and one other
default.
"""

REFUSED_LATER = {
    "mode: ipvs; ipvs: {scheduler: best}",
    "hostnameOverride: ' '",
    "detectLocalMode: BridgeInterface; detectLocal: {bridgeInterface: a/b}",
}
"""Files that kube-proxy reads and writes, but cannot run with."""


@pytest.fixture(scope="module")
def made(kube_proxy: Path, tmp_path_factory) -> dict[str, bytes]:
    """Text of a row → the settings that kube-proxy writes; b"" where it refuses."""
    folder = tmp_path_factory.mktemp("rows")
    texts = list(dict.fromkeys(text for text, _ in (*SAYS, *WRONG)))

    def ask(number: int) -> bytes:
        given, written = folder / f"{number}.in", folder / f"{number}.out"
        given.write_text(PROXY + document(texts[number]))
        command = (str(kube_proxy), "--config", str(given), "--write-config-to", str(written))
        done = subprocess.run(command, capture_output=True, check=False)
        return written.read_bytes() if done.returncode == 0 else b""

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(texts, pool.map(ask, range(len(texts))), strict=True))


def test_kube_proxy_reads_the_same_settings(made: dict[str, bytes]):
    found = {}
    for text, says in SAYS:
        assert made[text], f"kube-proxy refuses {text}"
        name, _, value = says.partition(" = ")
        read = shown(field(load.load({}, {}, made[text]).config, name))
        if read != value:
            found[text] = read
    assert found == SAID_OTHERWISE


def test_kube_proxy_refuses_the_same_files(made: dict[str, bytes]):
    assert {text for text, _ in WRONG if made[text]} == REFUSED_LATER
