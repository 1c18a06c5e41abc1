"""The lab's tests in mode ipvs: what is the same in other words, and what cannot be the same.

With KBPF_TEST_MODE=ipvs the lab's agents are of that mode (lab.MODE), and the rows and tests of the
lab run as they stand. Sockets are not translated then: who dials hears of it by packets.

CANNOT is the one table of what IPVS cannot express, or what is about BPF itself; the first are in
docs/ipvs.md, too.
"""

import re

import pytest

from tests.support.lab.lab import MODE

PACKETS = MODE == "ipvs"
"""Clients are answered by packets, never by the call itself."""
BY_DEVICE = ("--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", "p")
ARGUMENTS = BY_DEVICE if PACKETS else ()
"""Of the agents of FolderCluster: BPF knows pods by their devices, IPVS has to be told."""
SILENCE = 0.7
"""Seconds that a client waits for what must not be answered."""

LOOPBACK = "NodePort on loopback: the kernel drops what IPVS has translated"
EPERM = "a datagram of the node's own that is refused or dropped is EPERM, whatever the reason"
FRONTENDS = "each frontend has an affinity of its own"
DELETED = "connections end with their Service"
LEFT_ALONE = "about VIPs that the socket hooks leave to the packet path: here they are enforced"
PODS = "without --detect-local-mode pods are not known (as with kube-proxy)"
OTHER_PORTS = "other ports of external addresses are refused: the addresses are the node's here"
SOCKETS = "a connected UDP socket is not told: its next datagram meets another backend"
UNHEARD = "a socket that is not connected hears of no refusal by packets"
MAPS = "about the maps, the programs or the packets of BPF"

CANNOT: dict[str, str] = {
    # tests/lab/traffic/test_policy.py
    r"test_policy.*host to 127\.": LOOPBACK,
    r"test_policy.*host to ::1": LOOPBACK,
    r"test_policy.*to 127\.0\.0\.1\]": LOOPBACK,
    r"test_policy.*UDP, host, 127\.0\.0\.1": LOOPBACK,
    r"test_policy.*short circuit.*127": LOOPBACK,
    r"test_policy.*none here: 127\.0\.0\.1": LOOPBACK,
    r"test_policy.*source ranges: left alone": LEFT_ALONE,
    r"test_policy.*external IP, another port": OTHER_PORTS,
    # tests/lab/traffic/test_services.py
    r"test_services.*no endpoints, UDP, IPv6": EPERM,
    # tests/lab/traffic/test_affinity.py
    r"test_all_addresses_of_a_service_share_affinity": FRONTENDS,
    r"test_affinity_spans_all_addresses_of_a_service": FRONTENDS,
    r"test_after_the_timeout_a_client_may_change_backend": MAPS,
    # tests/lab/outside/test_north_south.py
    r"test_north_south.*short circuit": PODS,
    r"test_an_unknown_port_is_refused_by_a_bpf_program": MAPS,
    r"test_an_unknown_external_port_is_refused_by_the_node": OTHER_PORTS,
    r"test_a_device_added_later_is_served_and_forgotten_when_deleted": MAPS,
    r"test_a_restart_attaches_no_hook_again": MAPS,
    r"test_switching_the_packet_path_off_detaches_all_programs": MAPS,
    r"test_cleanup_detaches_all_programs": MAPS,
    # tests/lab/traffic/test_local_mode.py
    r"test_which_clients_use_the_short_circuit\[none-": PODS,
    # tests/lab/traffic/test_datagrams.py
    r"test_connected_sockets_are_aborted_when_their_backend_stops": SOCKETS,
    r"test_a_backend_connected_to_itself_is_aborted_too": SOCKETS,
    r"test_a_deleted_service_aborts_its_sockets": SOCKETS,
    r"test_sockets_of_other_backends_are_not_aborted": SOCKETS,
    r"test_unconnected_sockets_change_to_a_serving_backend": UNHEARD,
    # tests/lab/traffic/test_updates.py
    r"test_established_connections_outlive_their_service": DELETED,
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
