# SPDX-License-Identifier: Apache-2.0
"""States of connections, by TCP's flags and ends, SCTP's and UDP's."""

import contextlib
import struct
import time

import pytest

from kbpf.dataplane.bpf import udp as udp_cut
from kbpf.dataplane.bpf.maps.flow_entries import DIRECTION, STATE, is_original
from kbpf.dataplane.bpf.maps.layout import (
    FLOW,
    NEXT_HOP,
    TCP_SIDE,
    FinFlag,
    FlowDirection,
    Reason,
    TcpState,
    pack_target,
)
from kbpf.errors import LastError
from kbpf.model.address import parse_addr
from tests.programs.packets.path.single_packets import (
    CLIENT,
    CLUSTER,
    LOCAL,
    NET,
    NODE,
    ROUTER,
    Flow,
    Path_,
    both_policies,
    client,
    established,
    expect_packet,
    host_of,
    parsed,
    pod,
    set_only_port,
    vip,
)
from tests.support.packets import packets
from tests.support.packets.packets import Talk, icmp_error, sctp, tcp
from tests.support.packets.parse import Tcp
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC
from tests.support.table import pairs

# ---- TCP's states --------------------------------------------------------------------------------


LIVE = "S <SA A A+ <A"
ALIVE = {
    "the SYN-ACK was lost": "S <SA S",
    "forged SYN": f"{LIVE} S!",
    "forged FIN and SYN": f"{LIVE} FA! S!",
    "the client has closed, and its port is used again": f"{LIVE} FA S",
    "the backend has closed, and the client's port is used again": f"{LIVE} <FA S S",
    "forged RST and SYN": f"{LIVE} R! S!",
    "forged RST of the backend": f"{LIVE} <R!|",
    "RST out of window": f"{LIVE} R",
}


SCALES = {
    "none": (b"", b"", 0),
    "the only option": (b"\3\3\7", b"", 7),
    "as Linux sends them": (b"\2\4\5\xb4\4\2\x08\n01234567\1\3\3\7", b"", 7),
    "more than the largest": (b"\3\3\xff", b"", 14),
    "behind the end": (b"\0\3\3\7", b"", 0),
    "behind an option without length": (b"\2\0\3\3\7", b"", 0),
    "in the data of a SYN": (b"\2\4\5\xb4", b"\3\3\7", 0),
    "in the data, without options": (b"", b"\3\3\7", 0),
}
"""TCP options and data of a SYN, and the shift of the client's windows."""


@pytest.mark.parametrize("where", SCALES)
def test_window_scale_of_a_syn(path: Path_, v: int, where: str):
    options, data, shift = SCALES[where]
    own = client(v)
    path.ingress(tcp(own, vip(v, LOCAL), data, flags="S", tcp_options=options))
    (original,) = filter(is_original, Flow(path, v, own=own).entries())
    scale = TCP_SIDE.unpack(FLOW.unpack(original)[14])[6]
    assert scale & 15 == shift
    assert bool(scale) == bool(shift), "whether there was one"


@pytest.mark.parametrize("story", ALIVE)
def test_connection_that_may_be_alive_keeps_its_entries(path: Path_, v: int, story: str):
    """Only the two ends know whether a SYN or a RST is genuine; until they react, nothing
    changes.
    """
    with path.counted(Reason.NEW_FLOW):
        flow = Flow(path, v).send(ALIVE[story] + (" S A+ <A" if "used again" in story else " A+ <A"))
    assert flow.sources == {flow.source}
    assert host_of(flow.source) == NODE[v]
    assert flow.states() <= {TcpState.ESTABLISHED, TcpState.CLOSING}


SCRIPTS = """
S → NEW
The backend has an older connection with these ports: nothing of it reaches the new client.
S <A| → NEW
S <A!| → NEW
S <A+| → NEW
S <A!+| → NEW
S <FA| → NEW
S <FA!+| → NEW
S <SA!| → NEW
S <R| → NEW
S <R!| → NEW
S <RA!| → NEW
S <A| <SA!| <A+| → NEW
S <A| <SA A → UNPROVEN
S <SA → ANSWERED
S <RA → CLOSED
S <SA R → CLOSED
The client alone proves nothing, whether its segments are forged, damaged or genuine.
S <SA A! A+! FA! R! → ANSWERED
S <SA A!~ → ANSWERED
S <SA A → UNPROVEN
S <SA A~ → UNPROVEN
S <SA A A+ A+ → UNPROVEN
A backend that answered a SYN repeats its SYN-ACK or an ACK, whatever it receives.
S <SA S! <A → ANSWERED
S <SA A! <A <SA <A → ANSWERED
It may have another connection by now, or none: nothing counts before the client's ACK.
S <SA <A+ → ANSWERED
S <SA <FA → ANSWERED
S <SA SA → ANSWERED
S <SA A <SA → UNPROVEN
S <SA A <A <SA A <A → UNPROVEN
Proof: the backend sends data, or acknowledges some.
S <SA A <A+ → ESTABLISHED
S <SA A+ <A → ESTABLISHED
S <SA A+~ <A → UNPROVEN
FIN and RST count if their sequence numbers are plausible.
LIVE FA! → ESTABLISHED
LIVE <FA!| → ESTABLISHED
LIVE R! → ESTABLISHED
LIVE <R!| → ESTABLISHED
LIVE RA! → ESTABLISHED
LIVE <RA!| → ESTABLISHED
LIVE S! → ESTABLISHED
LIVE SA! → ESTABLISHED
LIVE <SA!| → ESTABLISHED
LIVE FA!~ → ESTABLISHED
LIVE R!~ → ESTABLISHED
LIVE A! → ESTABLISHED
LIVE A+! → ESTABLISHED
LIVE A+! R! → ESTABLISHED
LIVE R! <R!| FA! <FA!| → ESTABLISHED
LIVE A! <R!| → ESTABLISHED
LIVE A! <FA!| FA! → ESTABLISHED
LIVE <A!| R! <A → ESTABLISHED
LIVE FA → CLOSING
LIVE <FA → CLOSING
LIVE FA <A <A+ → CLOSING
LIVE FA S! <A → CLOSING
The backend had not received the client's ACK yet.
LIVE FA <SA <A → CLOSING
S <SA A FA → CLOSING
S <SA A <FA → CLOSING
LIVE FA <FA A → CLOSED
LIVE <FA FA <A → CLOSED
LIVE FA <FA R! <R!| A → CLOSED
LIVE R → CLOSED
LIVE R <FA → CLOSED
LIVE <R → CLOSED
LIVE <RA → CLOSED
Data is still unacknowledged.
LIVE A+ RA → CLOSED
S <SA A FA <FA → CLOSED
The client uses the port again; we do not know whether its old connection is gone.
LIVE R S → NEW
"""
STATES = {script.replace("LIVE", LIVE): TcpState[state] for script, state in pairs(SCRIPTS) if state}
"""Segments of a connection → the state of all its entries."""


@both_policies
@pytest.mark.parametrize("script", STATES)
def test_tcp_state_after_segments(path: Path_, v: int, which: int, script: str):
    assert Flow(path, v, which).send(script).states() == {STATES[script]}


@both_policies
@pytest.mark.parametrize("word", ["<A", "<A+", "<FA", "<SA!", "<RA!", "<R"])
def test_denied_answer_becomes_a_reset_of_the_client(path: Path_, v: int, which: int, word: str):
    """With number 0, it ends the handshake for conntrack, and nothing for the backend. Conntrack
    has not seen the answer to a masqueraded client, and sees its reset on its way to egress. An
    answer without ACK says nothing about a connection.
    """
    source = Flow(path, v, which).send("S").source
    verdict, out = path.through(Talk().segment(word, pod(v), source))
    if word == "<R":
        assert verdict == TC_ACT_SHOT
        return
    assert verdict == (TC_ACT_REDIRECT if which == LOCAL else TC_ACT_UNSPEC)
    want = tcp(source, pod(v), bytes(10 * ("+" in word)), flags="R", seq=0)
    expect_packet(out, want)


@both_policies
def test_refusal_of_another_connection_does_not_reach_a_refused_client(path: Path_, v: int, which: int):
    """The client's port was another's, whose SYN is refused late. All refusals have the number 0."""
    flow = Flow(path, v, which).send("S")
    for ack, passes in ((1001, True), (5001, False), (1001, True)):
        verdict, _ = path.through(tcp(flow.back, flow.source, flags="RA", seq=0, ack=ack))
        assert (verdict != TC_ACT_SHOT) == passes


@both_policies
def test_syn_after_both_fins_begins_a_new_flow(path: Path_, v: int, which: int):
    """The client uses its port again: the entries are replaced. Unless it is masqueraded, the
    backend sees the same port as before. Late packets of the old connection do not end the new one.
    """
    flow = established(path, v, which).send("FA <FA A")
    there, before = len(flow.entries()), flow.source
    with path.counted(Reason.NEW_FLOW):
        again = flow.send("S").source
        assert flow.send("S").source == again, "the SYN is repeated"
    assert (again == flow.own) == (which == LOCAL)
    assert [FLOW.unpack(raw)[9:11] for raw in flow.entries()] == [(TcpState.NEW, 0)] * there
    flow.send("<SA A+ <A")
    if again != before:
        path.ingress(tcp(pod(v), before, flags="RA"))
    (raw,) = filter(is_original, flow.entries())
    assert FLOW.unpack(raw)[9] == TcpState.ESTABLISHED


@pytest.mark.parametrize("end", ["FA <FA A", "<FA FA <A", "<R"])
def test_a_connection_of_the_node_from_the_port_of_an_ended_one(path: Path_, v: int, end: str):
    """A socket of the node talks to the backend itself."""
    flow = established(path, v).send(end)
    syn = tcp(flow.source, flow.back, flags="S", seq=70_000)
    path.expect_untouched(syn, "tc_egress")
    path.expect_untouched(tcp(flow.back, flow.source, flags="SA", seq=5, ack=70_001))


@both_policies
def test_syn_before_the_last_ack_ends_nothing(path: Path_, v: int, which: int):
    """It may be forged: the client still waits for the end of an answer, of which a segment was
    lost. nf_conntrack ignores it, too.
    """
    flow = Flow(path, v, which).send("S <SA A A+ <A FA")
    last, syn = flow.packet("<FA"), tcp(flow.own, flow.front, flags="S", seq=99)
    path.through(last)
    with path.counted(Reason.NEW_FLOW, 0):
        path.through(syn)
    assert flow.states() == {TcpState.CLOSED}
    _, got = path.through(last)
    assert parsed(got).source == flow.front
    flow.send("A")
    with path.counted(Reason.NEW_FLOW):
        path.ingress(syn)


@pytest.mark.parametrize("flags", ["SF", "SR", "SFR"])
@pytest.mark.parametrize("before", ["", "S <A|", f"{LIVE} R", f"{LIVE} FA <FA A"])
def test_a_syn_with_fin_or_reset_begins_nothing(path: Path_, v: int, before: str, flags: str):
    """nf_conntrack calls it invalid. After the same segments, a SYN would begin a connection."""
    flow = Flow(path, v).send(before)
    known = flow.states()
    with path.counted(Reason.NEW_FLOW, 0):
        path.through(tcp(flow.own, flow.front, flags=flags, seq=99))
    assert flow.states() == known


@pytest.mark.parametrize("closed", [True, False])
def test_closed_flow_of_a_deleted_service_is_forgotten(path: Path_, v: int, closed: bool):
    """The node itself now answers at the address, and the client uses the same port."""
    flow = established(path, v).send("FA <FA A" if closed else "")
    key = pack_target(parse_addr(f"{NET[v]}{CLUSTER}"), 80, 6)
    with path.site.pinned("services") as frontends:
        value = frontends.lookup(key)
        frontends.delete(key)
        try:
            for flags in ("S", "A"):
                packet = tcp(flow.own, flow.front, flags=flags)
                assert (path.ingress(packet)[1] == packet) == closed, flags
        finally:
            frontends.update(key, value)
    assert (flow.entries() == []) == closed


def lose_entry(flow: Flow, missing: str) -> None:
    """Deletes one entry of a masqueraded flow."""
    before = len(flow.entries())
    gone = {flow.source if missing == "replies to the node" else flow.own, flow.back}
    flow.change(lambda _: b"", lambda both: {*both} == gone)
    assert len(flow.entries()) == before - 1


LOST = ["replies to the node", "packets in the stack"]


@pytest.mark.parametrize("missing", LOST)
@pytest.mark.parametrize("script", ["S", "S <SA", f"{LIVE} R", f"{LIVE} FA"])
def test_syn_of_a_flow_with_a_missing_entry_begins_again(path: Path_, v: int, script: str, missing: str):
    """Whatever deleted an entry (another CPU, an agent), the client must not wait for ever."""
    flow = Flow(path, v).send(script)
    lose_entry(flow, missing)
    with path.counted(Reason.NEW_FLOW):
        flow.talk = Talk()
        flow.send(LIVE)
    assert host_of(flow.source) == NODE[v]
    assert flow.states() == {TcpState.ESTABLISHED}


@both_policies
def test_entry_of_a_flow_that_is_gone_knows_the_window(path: Path_, v: int, which: int):
    """Only the client's own entry was deleted."""
    flow = established(path, v, which)
    flow.change(lambda _: b"", lambda both: flow.front in both)
    flow.send("<A!| <FA!| <R!| <A+ <FA")


@pytest.mark.parametrize("missing", LOST)
@pytest.mark.parametrize(("seconds", "again"), [(-60, False), (2, True)])
def test_datagram_of_a_flow_with_a_missing_entry_begins_again(
    path: Path_, v: int, seconds: int, again: bool, missing: str
):
    """Not every datagram checks for them, because some clients send forever without a reply."""
    flow = Flow(path, v).send("?")
    lose_entry(flow, missing)
    flow.age(seconds)
    with path.counted(Reason.NEW_FLOW, again):
        _, inside = path.ingress(flow.packet("?"))
        assert parsed(inside).destination == flow.back


@pytest.mark.parametrize("lives", [True, False])
def test_datagram_of_a_deleted_backend_begins_a_new_flow(path: Path_, v: int, lives: bool):
    """A client may send forever from one port, while another pod may have the address by now."""
    flow = Flow(path, v, LOCAL).send("? <!")
    (backend,) = backends_of(flow)
    if not lives:
        flow.change(of_a_deleted_backend)
    with path.counted(Reason.NEW_FLOW, not lives):
        flow.send("?")
    assert backends_of(flow) == {backend}


def test_client_whose_port_is_in_doubt_does_not_send_from_it(path: Path_, v: int):
    """The backend of its connection has stopped serving, but may still send: its next SYN finds no
    other port.
    """
    set_only_port(path)
    flow = established(path, v)
    flow.change(of_a_deleted_backend)
    for each in (flow.own, client(v)):
        with path.counted(Reason.NO_SNAT_PORT):
            assert path.ingress(tcp(each, flow.front, flags="S"))[0] == TC_ACT_SHOT
    assert flow.entries() == []
    path.expect_untouched(flow.packet("A+"))


@both_policies
@pytest.mark.parametrize(("seconds", "answered"), [(0, True), (10, False)])
def test_answer_under_way_outlives_the_frontend(path: Path_, v: int, which: int, seconds: int, answered: bool):
    """The agent cuts a flow after the client's datagram. The answer still reaches the client, who
    does not wait for it after some seconds; the next datagram begins a new flow.
    """
    flow = Flow(path, v, which).send("?")
    flow.age(seconds)
    with contextlib.ExitStack() as held:
        maps = {
            name: held.enter_context(path.site.pinned(name))
            for name in ("flows", "udp_flows", "sock_peers", "former_peers")
        }
        gone = {FLOW.unpack(raw)[2] for raw in flow.entries()}
        udp_cut.cut(maps, lambda _, frontend, __: frontend in gone, None, LastError())
    left = {raw[DIRECTION] for raw in flow.entries()}
    reserved = {FlowDirection.SNAT_REPLY} if which == CLUSTER else set()
    assert left == reserved | ({FlowDirection.REPLY} if answered else set())
    _, got = path.through(flow.packet("<!"))
    assert parsed(got).source == (flow.front if answered else flow.back)
    with path.counted(Reason.NEW_FLOW):
        path.ingress(flow.packet("?"))


def test_replies_seen_at_egress_only_end_the_flow(path: Path_, v: int):
    """Another program left the source of the client's packets as it was, so the backend's packets
    go to the client and are seen at egress only.
    """
    flow = Flow(path, v)
    for word in f"{LIVE} FA <FA A".split():
        path.run("tc_egress" if word.startswith("<") else "tc_ingress", flow.packet(word))
    assert {raw[STATE] for raw in filter(is_original, flow.entries())} == {TcpState.CLOSED}


def test_sctp_association_is_established_by_cookie_ack(path: Path_, v: int):
    flow = Flow(path, v, LOCAL)
    answered, proven, tag = TcpState.ANSWERED, TcpState.ESTABLISHED, packets.SCTP_TAG
    rows = (  # a chunk of the backend, the tag of its packet → the state
        (packets.SCTP_INIT_ACK, tag + 1, TcpState.NEW),
        (packets.chunk(11), tag + 1, TcpState.NEW),
        (packets.SCTP_INIT_ACK, tag, answered),
        (packets.chunk(6), tag, answered),
        (packets.chunk(11), tag + 1, answered),
        (packets.chunk(6, flags=1), packets.SCTP_BACK_TAG, answered),  # RFC 9260, 8.5.1
        (packets.chunk(11), tag, proven),
        (packets.chunk(0, bytes(20)), tag + 1, proven),
        (packets.SCTP_INIT, 0, proven),
    )
    for chunk, given, want in rows:
        path.ingress(sctp(flow.own, flow.front))
        verdict, _ = path.egress(sctp(flow.back, flow.own, chunk, tag=given))
        assert (verdict == TC_ACT_SHOT) == (given in (tag + 1, 0))
        assert flow.states() == {want}, chunk


def test_no_other_client_gets_data_of_an_association(path: Path_, v: int):
    """The backend has accepted the first client's cookie, and its answer is late. For lack of ports
    the second client gets the same one.
    """
    set_only_port(path)
    first, other = Flow(path, v), Flow(path, v)
    _, out = path.through(sctp(first.own, first.front))
    source = parsed(out).source
    path.through(sctp(first.back, source, packets.SCTP_INIT_ACK, tag=packets.SCTP_TAG))
    path.through(sctp(first.own, first.front, packets.chunk(10, b"cookie"), tag=packets.SCTP_BACK_TAG))
    first.age(2)
    _, out = path.through(sctp(other.own, other.front, packets.sctp_init(777)))
    assert parsed(out).source == source
    path.through(sctp(other.back, source, packets.SCTP_INIT_ACK, tag=777))
    late = sctp(first.back, source, packets.chunk(0, bytes(12) + b"secret"), tag=packets.SCTP_TAG)
    assert path.through(late)[0] == TC_ACT_SHOT


@both_policies
def test_sctp_association_is_restarted(path: Path_, v: int, which: int):
    """By the client, with another tag (RFC 9260, 5.2.2). A later INIT, which may be forged, changes
    nothing.
    """
    flow, old, new = Flow(path, v, which), packets.SCTP_TAG, 777
    data, done = packets.chunk(0, bytes(20)), packets.chunk(11)
    _, out = path.through(sctp(flow.own, flow.front))
    source = parsed(out).source
    for chunk, tag, passes in (
        (packets.SCTP_INIT_ACK, old, True),
        (done, old, True),
        (packets.sctp_init(new), 0, True),
        (data, old, True),
        (packets.SCTP_INIT_ACK, new, True),
        (data, old, True),
        (done, new, True),
        (data, old, False),
        (packets.sctp_init(new + 1), 0, True),
        (data, new, True),
        (data, new + 2, False),
    ):
        ends = (flow.back, source) if tag else (flow.own, flow.front)
        assert (path.through(sctp(*ends, chunk, tag=tag))[0] != TC_ACT_SHOT) == passes, (chunk, tag)
    assert flow.states() == {TcpState.ESTABLISHED}


def test_sctp_association_outlives_its_backend(path: Path_, v: int):
    """As a TCP connection does. Only an INIT begins one."""
    own = client(v)
    data = sctp(own, vip(v, CLUSTER), b"\0" * 8)
    path.expect_untouched(data)
    path.ingress(sctp(own, vip(v, CLUSTER)))
    with path.site.pinned("backends") as backends:
        kept = list(backends.items())
        try:
            for key, _ in kept:
                backends.delete(key)
            _, got = path.ingress(data)
            assert parsed(got).destination == pod(v)
        finally:
            for key, value in kept:
                backends.update(key, value)


def test_icmp_error_does_not_count_as_an_answer(path: Path_, v: int):
    """A router that cannot deliver the SYN sent the error; the backend has not answered."""
    flow = Flow(path, v)
    _, sent = path.through(flow.packet("S"))
    _, got = path.ingress(icmp_error("host unreachable", ROUTER[v], sent))
    assert parsed(got).destination == CLIENT[v], "it goes to the client"
    assert flow.states() == {TcpState.NEW}


@pytest.mark.parametrize("seen", [FinFlag.CLIENT, FinFlag.BACKEND, 0])
@pytest.mark.parametrize("last", ["A", "<A"])
def test_simultaneous_fins_close_the_flow(path: Path_, v: int, last: str, seen: int):
    """Two CPUs each saw one FIN, or one has overwritten what the other wrote; the next ACK of
    either side closes the entries.
    """
    flow = Flow(path, v).send(f"{LIVE} FA <FA")
    assert flow.states() == {TcpState.CLOSED}
    closing = bytes((TcpState.CLOSING, seen))
    flow.change(lambda raw: raw[:STATE] + closing + raw[STATE + 2 :])
    assert flow.send(last).states() == {TcpState.CLOSED}


SEEN = FLOW.size - NEXT_HOP.size - 40
NEXT, ACK, EDGE, _, LIMIT, _ = range(6)
"""Fields of struct tcp_side, and where it begins."""
OVERWRITTEN = {
    "the client's window": (True, EDGE, "<A+ <A+ A"),
    "the client's last number": (True, NEXT, "<A"),
    "the backend's window": (False, EDGE, "A+ A+ <A"),
    "the backend's last number": (False, NEXT, "A"),
}


@pytest.mark.parametrize("row", OVERWRITTEN)
def test_a_number_that_another_cpu_has_overwritten_ends_no_connection(path: Path_, v: int, row: str):
    """Two CPUs noted segments of one side at once, and the lower number remained."""
    of_client, field, script = OVERWRITTEN[row]
    flow = Flow(path, v).send(f"{LIVE} A+ <A <A+ A")

    def overwrite(raw: bytes) -> bytes:
        side = list(struct.unpack_from("=6I", raw, SEEN))
        if is_original(raw) is of_client:
            side[field] = side[ACK] if field == EDGE else side[field] - 500
        elif field == EDGE:
            side[LIMIT] = side[NEXT]
        return raw[:SEEN] + struct.pack("=6I", *side) + raw[SEEN + 24 :]

    flow.change(overwrite)
    assert flow.send(f"{script} FA <FA A").states() == {TcpState.CLOSED}


@both_policies
@pytest.mark.parametrize(("flags", "ahead", "behind"), [("A", 0, 70_000), ("FA", 60_000, 10_000)])
def test_an_ack_from_far_behind_does_not_count(path: Path_, v: int, which: int, flags: str, ahead: int, behind: int):
    """As for nf_conntrack: more than 66,000 behind what the client has sent. A segment that is ahead
    of missing ones counts as sent.
    """
    flow = established(path, v, which)
    now = parsed(flow.packet("A")).transport
    assert isinstance(now, Tcp)
    seq, ack = now.sequence, now.acknowledgement
    path.through(tcp(flow.own, flow.front, b"data", seq=seq + ahead, ack=ack))
    late = tcp(flow.back, flow.source, flags=flags, seq=ack, ack=(seq - behind) % (1 << 32))
    verdict, _ = path.through(late)
    assert verdict == TC_ACT_SHOT
    assert flow.states() == {TcpState.ESTABLISHED}


@pytest.mark.parametrize("answer", ["<SA", "<RA S <SA"], ids=["accepts", "refuses once"])
@pytest.mark.parametrize("last", ["A", "FA", "<FA"])
def test_a_client_may_use_the_port_of_a_connection_that_never_ended(path: Path_, v: int, last: str, answer: str):
    """At most one side's FIN was seen, and both sides have forgotten the connection since then. As
    in nf_conntrack, the backend's answer to a SYN proves that. A refusal passes, but proves nothing.
    """
    flow = Flow(path, v).send(f"{LIVE} {last}")
    flow.talk = Talk(1 << 30, 3 << 30)
    assert flow.send(f"S {answer} A A+ <A").states() == {TcpState.ESTABLISHED}


@pytest.mark.parametrize("forged", ["S <RA", "S <RA S <RA", "S <SRA|"])
@pytest.mark.parametrize(("fin", "rest"), [("FA", "<A+ A"), ("<FA", "A+ <A"), ("", "A+ <A")])
def test_a_forged_refusal_frees_no_port(path: Path_, v: int, fin: str, rest: str, forged: str):
    """Whoever forges SYNs and their refusals needs no number. Both ends still have the connection.
    Nor does the backend count as failing.
    """
    set_only_port(path)
    flow = Flow(path, v).send(f"{LIVE} {fin}")
    real, flow.talk = flow.talk, Talk(1 << 30, 3 << 30)
    with path.counted(Reason.BACKEND_RESET, 0):
        flow.send(forged)
    flow.age(11)
    assert path.ingress(tcp(client(v), flow.front, flags="S"))[0] == TC_ACT_SHOT
    flow.talk = real
    assert flow.send(rest).states() == {TcpState.CLOSING if fin else TcpState.ESTABLISHED}


@pytest.mark.parametrize("word", ["A+", "<A+"])
def test_a_syn_counts_until_either_side_has_sent(path: Path_, v: int, word: str):
    """Whoever forges a SYN and its answer needs no number. But what is in the window between the
    two proves that the connection lives.
    """
    flow = Flow(path, v).send(LIVE)
    real, forged = flow.talk, Talk(1 << 30, 3 << 30)
    for talk, script in ((forged, "S"), (real, word), (forged, "<SA|"), (real, "A+ <A <A+ A")):
        time.sleep(0.003)  # times are compared in milliseconds
        flow.talk = talk
        assert flow.send(script).states() == {TcpState.ESTABLISHED}


@pytest.mark.parametrize("quiet", ["question", "answer"])
def test_flow_lives_while_either_side_sends(path: Path_, v: int, quiet: str):
    """Datagrams in one direction for a long time do not refresh the entry of the other
    direction.
    """
    flow = Flow(path, v).send("?")
    flow.expire(lambda both: (flow.front if quiet == "question" else flow.source) in both)
    flow.send("<! ?")


def test_replies_to_the_node_keep_a_flow_alive(path: Path_, v: int):
    """With redirected packets they are all that is seen of a backend that keeps sending."""
    flow = Flow(path, v).send("?")
    flow.expire(lambda both: flow.source not in both)
    with path.counted(Reason.NEW_FLOW, 0):
        path.ingress(flow.packet("?"))


def of_a_deleted_backend(raw: bytes) -> bytes:
    had = FLOW.unpack(raw)
    return FLOW.pack(*had[:8], 0xFFFF_FFFF, *had[9:])


def backends_of(flow: Flow) -> set[int]:
    """The backends' ids in the entries."""
    return {FLOW.unpack(raw)[8] for raw in flow.entries()}
