# SPDX-License-Identifier: Apache-2.0
"""The lab's tests in mode ipvs: what is configured differently, and which tests are skipped.

With KBPF_TEST_MODE=ipvs the lab's agents run in that mode (lab.MODE); the rows and tests of the lab
are the same. Sockets are not translated then: clients learn errors from packets.

CANNOT lists all tests that IPVS cannot satisfy, which docs/ipvs.md also lists, and those about BPF
itself.
"""

import re

import pytest

from tests.support.lab.lab import MODE

PACKETS = MODE == "ipvs"
"""Whether clients get errors by packets only, never from connect() itself."""
BY_DEVICE = ("--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", "p")
ARGUMENTS = BY_DEVICE if PACKETS else ()
"""For agents of FolderCluster: BPF recognises pods by their devices, IPVS needs flags for it."""
SILENCE = 0.7
"""Seconds that a client waits where no answer is expected."""

LOOPBACK = "NodePort on loopback: the kernel drops packets that IPVS has translated"
EPERM = "a refused or dropped datagram of the node itself is always EPERM"
LEFT_ALONE = "VIPs that the socket hooks leave to the packet path: here source ranges are enforced"
PODS = "without --detect-local-mode pods are not recognised (as with kube-proxy)"
OTHER_PORTS = "other ports of external addresses are refused: the addresses are on the node here"
MAPS = "about the maps, the programs or the packets of BPF"

CANNOT: dict[str, str] = {
    # tests/lab/traffic/test_dials.py
    r"test_dials.*host to 127\.": LOOPBACK,
    r"test_dials.*host to ::1": LOOPBACK,
    r"test_dials.*to 127\.0\.0\.1\]": LOOPBACK,
    r"test_dials.*UDP, host, 127\.0\.0\.1": LOOPBACK,
    r"test_dials.*no local endpoint: 127\.0\.0\.1": LOOPBACK,
    r"test_dials.*source ranges: left alone": LEFT_ALONE,
    r"test_dials.*external IP, another port": OTHER_PORTS,
    r"test_dials.*no endpoints, UDP, IPv6": EPERM,
    # tests/lab/outside/test_north_south.py
    r"test_north_south.*short circuit": PODS,
    r"test_which_packets_bypass_a_closed_forward_chain": MAPS,
    r"test_without_the_packet_path_all_programs_are_detached": MAPS,
}
"""Regular expression for a test's id → why it is skipped, in order of the files."""


def why_not(name: str) -> str:
    """Why this test cannot run in this mode, "" if it can."""
    if not PACKETS:
        return ""
    return next((why for pattern, why in CANNOT.items() if re.search(pattern, name)), "")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips the tests of the table CANNOT."""
    if why := why_not(item.nodeid):
        pytest.skip(f"mode ipvs: {why}")
