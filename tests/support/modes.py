"""The lab's tests in mode ipvs: what is the same in other words, and what cannot be the same.

With KBPF_TEST_MODE=ipvs the lab's agents are of that mode (lab.MODE), and the rows and tests of the
lab run as they stand. Sockets are not translated then: who dials hears of it by packets.

CANNOT is the one table of what IPVS cannot express, or what is about BPF itself; the first are in
docs/ipvs.md, too.
"""

import re

import pytest

from tests.support.lab import MODE

PACKETS = MODE == "ipvs"
"""Clients are answered by packets, never by the call itself."""
SILENCE = 0.7
"""Seconds that a client waits for what must not be answered."""

LOOPBACK = "NodePort on loopback: the kernel drops what IPVS has translated"
EPERM = "a datagram of the node's own that is refused or dropped is EPERM, whatever the reason"
FRONTENDS = "each frontend has an affinity of its own"
DELETED = "connections end with their Service"
AGE = "looks into the maps of BPF"
LEFT_ALONE = "about VIPs that the socket hooks leave to the packet path: here they are enforced"
HOOKS = "about sockets that a hook has connected"
UNREACHABLE = "about who answers for an address that is nobody's, in the packet path of BPF"

CANNOT: dict[str, str] = {
    # tests/lab/test_policy.py
    r"test_policy.*host to 127\.": LOOPBACK,
    r"test_policy.*host to ::1": LOOPBACK,
    r"test_policy.*to 127\.0\.0\.1\]": LOOPBACK,
    r"test_policy.*UDP, host, 127\.0\.0\.1": LOOPBACK,
    r"test_policy.*short circuit.*127": LOOPBACK,
    r"test_policy.*none here: 127\.0\.0\.1": LOOPBACK,
    r"test_policy.*source ranges: left alone": LEFT_ALONE,
    # tests/lab/test_services.py
    r"test_services.*no endpoints, UDP, IPv6": EPERM,
    # tests/lab/test_affinity.py
    r"test_all_addresses_of_a_service_share_it": FRONTENDS,
    r"test_affinity_is_the_clients_at_every_address": FRONTENDS,
    r"test_after_the_timeout_a_client_may_go_elsewhere": AGE,
    # tests/lab/test_updates.py
    r"test_established_connections_outlive_their_endpoint": DELETED,
}
"""Expressions over a test's name, in order of their files."""


def why_not(name: str) -> str:
    """Why this test cannot be in this mode, "" if it can."""
    if not PACKETS:
        return ""
    return next((why for pattern, why in CANNOT.items() if re.search(pattern, name)), "")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out what the table says."""
    if why := why_not(item.nodeid):
        pytest.skip(f"mode ipvs: {why}")
