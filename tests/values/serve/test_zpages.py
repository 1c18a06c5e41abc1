# SPDX-License-Identifier: Apache-2.0
"""/statusz and /flagz. tests/lab/agent/test_observe.py compares them with a real kube-proxy."""

from kbpf.serve import server

STARTED = 1_796_000_000.0
FLAGS = {"--b": "2", "--a": 'x: "1"', "-v": "", "--master": "https://me:secret@10.0.0.1"}
WARNING = (
    "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility "
    "guarantees and is for debugging purposes only.\n"
)


def test_pages_equal_those_of_kube_proxy(monkeypatch):
    monkeypatch.setattr(server.time, "time", lambda: STARTED + 90_061.9)
    assert server.statusz("0.1", STARTED).body.decode() == (
        f"\nkbpf statusz\n{WARNING}\n"
        "Started: Mon Nov 30 00:53:20 UTC 2026\n"
        "Up: 25 hr 01 min 01 sec\n"
        "Binary version: 0.1\n"
        "Emulation version: 1.37\n"
        "Paths: /configz /flagz /healthz /metrics /proxyMode /readyz\n"
    )
    assert server.flagz(FLAGS).body.decode() == (f'\nkbpf flagz\n{WARNING}a=x: "1"\nb=2\nmaster=CLASSIFIED\nv=\n')
