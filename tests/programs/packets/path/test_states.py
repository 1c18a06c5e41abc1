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
from kbpf.model.address import parse_addr
from tests.programs.packets.path.single_packets import (
    CLIENT,
    CLOSES,
    CLUSTER,
    LOCAL,
    NET,
    NODE,
    ROUTER,
    TALKS,
    Path_,
    age,
    ask,
    asked,
    both_policies,
    change_entries,
    client,
    delete_entry,
    end,
    ends,
    ends_of,
    entries_of,
    established,
    expect_packet,
    expire,
    parsed,
    pod,
    reply,
    segment,
    send_segments,
    set_only_port,
    states,
    vip,
)
from tests.support.packets import packets
from tests.support.packets.packets import Talk, icmp_error, sctp, tcp
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC

# ---- TCP's states --------------------------------------------------------------------------------


HANDSHAKE = "S <SA A"
LIVE = f"{HANDSHAKE} A+ <A"
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
    (original,) = [raw for raw in entries_of(path, own) if is_original(raw)]
    scale = TCP_SIDE.unpack(FLOW.unpack(original)[14])[6]
    assert scale & 15 == shift
    assert bool(scale) == bool(shift), "whether there was one"


@pytest.mark.parametrize("story", ALIVE)
def test_connection_that_may_be_alive_keeps_its_entries(path: Path_, v: int, story: str):
    """Only the two ends know whether a SYN or a RST is genuine; until they react, nothing
    changes.
    """
    with path.counted(Reason.NEW_FLOW):
        own, source = send_segments(path, v, ALIVE[story])
        assert source.startswith(end(NODE[v], 0)[:-1])
        for word in ("S", "A+") if "used again" in story else ("A+",):
            assert segment(path, v, own, word) == source, word
        segment(path, v, own, "<A", source)
    assert states(path, own) <= {TcpState.ESTABLISHED, TcpState.CLOSING}


PROVEN, UNPROVEN = TcpState.ESTABLISHED, TcpState.UNPROVEN
STATES = {
    "S": TcpState.NEW,
    # The backend has an older connection with these ports: nothing of it reaches the new client.
    **{
        f"S {old}|": TcpState.NEW
        for old in ("<A", "<A!", "<A+", "<A!+", "<FA", "<FA!+", "<SA!", "<R", "<R!", "<RA!", "<A| <SA!| <A+")
    },
    "S <A| <SA A": UNPROVEN,
    "S <SA": TcpState.ANSWERED,
    "S <RA": TcpState.CLOSED,
    "S <SA R": TcpState.CLOSED,
    # The client alone proves nothing, whether its segments are forged, damaged or genuine.
    "S <SA A! A+! FA! R!": TcpState.ANSWERED,
    "S <SA A!~": TcpState.ANSWERED,
    "S <SA A": UNPROVEN,
    "S <SA A~": UNPROVEN,
    "S <SA A A+ A+": UNPROVEN,
    # A backend that answered a SYN repeats its SYN-ACK or an ACK, whatever it receives.
    "S <SA S! <A": TcpState.ANSWERED,
    "S <SA A! <A <SA <A": TcpState.ANSWERED,
    # It may have another connection by now, or none: nothing counts before the client's ACK.
    "S <SA <A+": TcpState.ANSWERED,
    "S <SA <FA": TcpState.ANSWERED,
    "S <SA SA": TcpState.ANSWERED,
    "S <SA A <SA": UNPROVEN,
    "S <SA A <A <SA A <A": UNPROVEN,
    # Proof: the backend sends data, or acknowledges some.
    "S <SA A <A+": PROVEN,
    "S <SA A+ <A": PROVEN,
    "S <SA A+~ <A": UNPROVEN,
    # FIN and RST count if their sequence numbers are plausible.
    **{
        f"{LIVE} {forged}": PROVEN
        for forged in (
            "FA!",
            "<FA!|",
            "R!",
            "<R!|",
            "RA!",
            "<RA!|",
            "S!",
            "SA!",
            "<SA!|",
            "FA!~",
            "R!~",
            "A!",
            "A+!",
            "A+! R!",
            "R! <R!| FA! <FA!|",
            "A! <R!|",
            "A! <FA!| FA!",
            "<A!| R! <A",
        )
    },
    f"{LIVE} FA": TcpState.CLOSING,
    f"{LIVE} <FA": TcpState.CLOSING,
    f"{LIVE} FA <A <A+": TcpState.CLOSING,
    f"{LIVE} FA S! <A": TcpState.CLOSING,
    f"{LIVE} FA <SA <A": TcpState.CLOSING,  # the backend had not received the client's ACK yet
    f"{HANDSHAKE} FA": TcpState.CLOSING,
    f"{HANDSHAKE} <FA": TcpState.CLOSING,
    f"{LIVE} FA <FA A": TcpState.CLOSED,
    f"{LIVE} <FA FA <A": TcpState.CLOSED,
    f"{LIVE} FA <FA R! <R!| A": TcpState.CLOSED,
    f"{LIVE} R": TcpState.CLOSED,
    f"{LIVE} R <FA": TcpState.CLOSED,
    f"{LIVE} <R": TcpState.CLOSED,
    f"{LIVE} <RA": TcpState.CLOSED,
    f"{LIVE} A+ RA": TcpState.CLOSED,  # data was still unacknowledged
    f"{HANDSHAKE} FA <FA": TcpState.CLOSED,
    # The client uses the port again; we do not know whether its old connection is gone.
    f"{LIVE} R S": TcpState.NEW,
}
"""Segments of a connection → the state of all its entries."""


@both_policies
@pytest.mark.parametrize("script", STATES)
def test_tcp_state_after_segments(path: Path_, v: int, which: int, script: str):
    own, _ = send_segments(path, v, script, which=which)
    assert states(path, own) == {STATES[script]}


@both_policies
@pytest.mark.parametrize("word", ["<A", "<A+", "<FA", "<SA!", "<RA!", "<R"])
def test_denied_answer_becomes_a_reset_of_the_client(path: Path_, v: int, which: int, word: str):
    """With number 0, it ends the handshake for conntrack, and nothing for the backend. Conntrack
    has not seen the answer to a masqueraded client, and sees its reset on its way to egress. An
    answer without ACK says nothing about a connection.
    """
    _, source = send_segments(path, v, "S", which=which)
    verdict, out = path.through(Talk().segment(word, pod(v), source))
    if word == "<R":
        assert verdict == TC_ACT_SHOT
        return
    assert verdict == (TC_ACT_REDIRECT if which == LOCAL else TC_ACT_UNSPEC)
    want = tcp(source, pod(v), bytes(10 * ("+" in word)), flags="R", seq=0)
    expect_packet(out, want)


@both_policies
def test_syn_after_both_fins_begins_a_new_flow(path: Path_, v: int, which: int):
    """The client uses its port again: the entries are replaced. Unless it is masqueraded, the
    backend sees the same port as before. Late packets of the old connection do not end the new one.
    """
    own, source = established(path, v, "tcp", which)
    send_segments(path, v, "FA <FA A", own, source, which)
    there = len(entries_of(path, own))
    with path.counted(Reason.NEW_FLOW):
        again = segment(path, v, own, "S", which=which)
        assert segment(path, v, own, "S", which=which) == again, "the SYN is repeated"
    assert (again == own) == (which == LOCAL)
    assert [FLOW.unpack(raw)[9:11] for raw in entries_of(path, own)] == [(TcpState.NEW, 0)] * there
    send_segments(path, v, "<SA A+ <A", own, again, which)
    if again != source:
        path.ingress(tcp(pod(v), source, flags="RA"))
    question = {own, vip(v, which)}
    entries = path.site.entries("flows").items()
    (raw,) = [raw for key, raw in entries if set(ends(key)) == question]
    assert FLOW.unpack(raw)[9] == TcpState.ESTABLISHED


@both_policies
def test_syn_before_the_last_ack_ends_nothing(path: Path_, v: int, which: int):
    """It may be forged: the client still waits for the end of an answer, of which a segment was
    lost. nf_conntrack ignores it, too.
    """
    own, source = send_segments(path, v, "S <SA A A+ <A FA", which=which)
    last = TALKS[own].segment("<FA", pod(v), source)
    path.through(last)
    with path.counted(Reason.NEW_FLOW, 0):
        path.through(tcp(own, vip(v, which), flags="S", seq=99))
    assert states(path, own) == {TcpState.CLOSED}
    _, got = path.through(last)
    assert parsed(got).source == vip(v, which)
    send_segments(path, v, "A", own, source, which)
    with path.counted(Reason.NEW_FLOW):
        path.ingress(tcp(own, vip(v, which), flags="S", seq=99))


@pytest.mark.parametrize("flags", ["SF", "SR", "SFR"])
@pytest.mark.parametrize("before", ["", "S <A|", f"{LIVE} R", f"{LIVE} FA <FA A"])
def test_a_syn_with_fin_or_reset_begins_nothing(path: Path_, v: int, before: str, flags: str):
    """nf_conntrack calls it invalid. After the same segments, a SYN would begin a connection."""
    own, _ = send_segments(path, v, before)
    known = states(path, own)
    with path.counted(Reason.NEW_FLOW, 0):
        path.through(tcp(own, vip(v, CLUSTER), flags=flags, seq=99))
    assert states(path, own) == known


@pytest.mark.parametrize("closed", [True, False])
def test_closed_flow_of_a_deleted_service_is_forgotten(path: Path_, v: int, closed: bool):
    """The node itself now answers at the address, and the client uses the same port."""
    own, source = established(path, v, "tcp")
    if closed:
        send_segments(path, v, "FA <FA A", own, source)
    key = pack_target(parse_addr(f"{NET[v]}{CLUSTER}"), 80, 6)
    with path.site.pinned("services") as frontends:
        value = frontends.lookup(key)
        frontends.delete(key)
        try:
            for flags in ("S", "A"):
                packet = tcp(own, vip(v, CLUSTER), flags=flags)
                assert (path.ingress(packet)[1] == packet) == closed, flags
        finally:
            frontends.update(key, value)
    assert (entries_of(path, own) == []) == closed


@pytest.mark.parametrize(("script", "gives"), [("S", True), ("S <SA", True), ("S <SA A", False), ("S <SA A <A", False)])
def test_handshake_gives_up_its_port_when_none_is_free(path: Path_, v: int, script: str, gives: bool):
    """The range has one port, as if a flood had taken all others. A handshake gives its port to a
    new client; one that has acknowledged the backend's number keeps it until it expires.
    """
    set_only_port(path)
    own, _ = send_segments(path, v, script)
    age(path, own, -60)  # so that it stays young, however long this test takes
    syn = tcp(client(v), vip(v, CLUSTER), flags="S")
    assert path.ingress(syn)[0] == (TC_ACT_UNSPEC if gives else TC_ACT_SHOT)
    assert (entries_of(path, own) == []) == gives
    age(path, own, 70)  # no longer, since the machine may have started just now
    assert path.ingress(syn)[0] == (TC_ACT_UNSPEC if gives else TC_ACT_SHOT)


def lose_entry(path: Path_, v: int, own: str, source: str, missing: str) -> None:
    """Deletes one entry of a masqueraded flow."""
    delete_entry(path, own, (source if missing == "replies to the node" else own, pod(v)))


LOST = ["replies to the node", "packets in the stack"]


@pytest.mark.parametrize("missing", LOST)
@pytest.mark.parametrize("script", ["S", "S <SA", f"{LIVE} R", f"{LIVE} FA"])
def test_syn_of_a_flow_with_a_missing_entry_begins_again(path: Path_, v: int, script: str, missing: str):
    """Whatever deleted an entry (another CPU, an agent), the client must not wait for ever."""
    own, source = send_segments(path, v, script)
    lose_entry(path, v, own, source, missing)
    with path.counted(Reason.NEW_FLOW):
        TALKS.pop(own)
        own, source = send_segments(path, v, LIVE, own)
        assert source.startswith(end(NODE[v], 0)[:-1])
    assert states(path, own) == {TcpState.ESTABLISHED}


@pytest.mark.parametrize("missing", LOST)
@pytest.mark.parametrize(("seconds", "again"), [(-60, False), (2, True)])
def test_datagram_of_a_flow_with_a_missing_entry_begins_again(
    path: Path_, v: int, seconds: int, again: bool, missing: str
):
    """Not every datagram checks for them, because some clients send forever without a reply."""
    own, source = asked(path, v)
    lose_entry(path, v, own, source, missing)
    age(path, own, seconds)
    with path.counted(Reason.NEW_FLOW, again):
        _, inside = path.ingress(ask(own, vip(v, CLUSTER)))
        assert parsed(inside).destination == pod(v)


@pytest.mark.parametrize("lives", [True, False])
def test_datagram_of_a_deleted_backend_begins_a_new_flow(path: Path_, v: int, lives: bool):
    """A client may send forever from one port, while another pod may have the address by now."""
    own, front, back = ends_of(v, LOCAL)
    question = ask(own, front)
    path.go_in(question, ask(own, back))
    path.go_out(reply(back, own), reply(front, own))
    (backend,) = backends_of(path, own)
    if not lives:
        change_entries(path, own, of_a_deleted_backend)
    with path.counted(Reason.NEW_FLOW, not lives):
        path.go_in(question, ask(own, back))
    assert backends_of(path, own) == {backend}


def test_client_whose_port_is_in_doubt_does_not_send_from_it(path: Path_, v: int):
    """The backend of its connection has stopped serving, but may still send: its next SYN finds no
    other port.
    """
    set_only_port(path)
    own, _ = established(path, v, "tcp")
    change_entries(path, own, of_a_deleted_backend)
    for each in (own, client(v)):
        with path.counted(Reason.NO_SNAT_PORT):
            assert path.ingress(tcp(each, vip(v, CLUSTER), flags="S"))[0] == TC_ACT_SHOT
    assert entries_of(path, own) == []
    path.expect_untouched(TALKS[own].segment("A+", own, vip(v, CLUSTER)))


@both_policies
@pytest.mark.parametrize(("seconds", "answered"), [(0, True), (10, False)])
def test_answer_under_way_outlives_the_frontend(path: Path_, v: int, which: int, seconds: int, answered: bool):
    """The agent cuts a flow after the client's datagram. The answer still reaches the client, who
    does not wait for it after some seconds; the next datagram begins a new flow.
    """
    own, front, back = ends_of(v, which)
    _, asked = path.ingress(ask(own, front))
    source = parsed(path.egress(asked)[1]).source
    age(path, own, seconds)
    with contextlib.ExitStack() as held:
        maps = {
            name: held.enter_context(path.site.pinned(name))
            for name in ("flows", "udp_flows", "sock_peers", "former_peers")
        }
        gone = {FLOW.unpack(raw)[2] for raw in entries_of(path, own)}
        udp_cut.cut(maps, lambda _, frontend, __: frontend in gone, count_flows=False)
    assert not any(is_original(raw) for raw in entries_of(path, own))
    left = {raw[DIRECTION] for raw in entries_of(path, own)}
    reserved = {FlowDirection.SNAT_REPLY} if which == CLUSTER else set()
    assert left == reserved | ({FlowDirection.REPLY} if answered else set())
    _, got = path.through(reply(back, source))
    assert parsed(got).source == (front if answered else back)
    with path.counted(Reason.NEW_FLOW):
        path.ingress(ask(own, front))


def test_replies_seen_at_egress_only_end_the_flow(path: Path_, v: int):
    """Another program left the source of the client's packets as it was, so the backend's packets
    go to the client and are seen at egress only.
    """
    own, talk = client(v), Talk()
    for word in f"{LIVE} FA <FA A".split():
        back = word.startswith("<")
        packet = talk.segment(word, *((pod(v), own) if back else (own, vip(v, CLUSTER))))
        path.run("tc_egress" if back else "tc_ingress", packet)
    question = {own, vip(v, CLUSTER)}
    found = {raw[STATE] for key, raw in path.site.entries("flows").items() if set(ends(key)) == question}
    assert found == {TcpState.CLOSED}


def test_sctp_association_is_established_by_cookie_ack(path: Path_, v: int):
    own = client(v)
    answered, tag = TcpState.ANSWERED, packets.SCTP_TAG
    rows = (  # a chunk of the backend, the tag of its packet → the state
        (packets.SCTP_INIT_ACK, tag + 1, TcpState.NEW),
        (packets.chunk(11), tag + 1, TcpState.NEW),
        (packets.SCTP_INIT_ACK, tag, answered),
        (packets.chunk(6), tag, answered),
        (packets.chunk(11), tag + 1, answered),
        (packets.chunk(6, flags=1), packets.SCTP_BACK_TAG, answered),  # RFC 9260, 8.5.1
        (packets.chunk(11), tag, PROVEN),
        (packets.chunk(0, bytes(20)), tag + 1, PROVEN),
        (packets.SCTP_INIT, 0, PROVEN),
    )
    for chunk, given, want in rows:
        path.ingress(sctp(own, vip(v, LOCAL)))
        verdict, _ = path.egress(sctp(pod(v), own, chunk, tag=given))
        assert (verdict == TC_ACT_SHOT) == (given in (tag + 1, 0))
        assert states(path, own) == {want}, chunk


def test_no_other_client_gets_data_of_an_association(path: Path_, v: int):
    """The backend has accepted the first client's cookie, and its answer is late. For lack of ports
    the second client gets the same one.
    """
    set_only_port(path)
    first, other = client(v), client(v)
    _, out = path.through(sctp(first, vip(v, CLUSTER)))
    source = parsed(out).source
    path.through(sctp(pod(v), source, packets.SCTP_INIT_ACK, tag=packets.SCTP_TAG))
    path.through(sctp(first, vip(v, CLUSTER), packets.chunk(10, b"cookie"), tag=packets.SCTP_BACK_TAG))
    age(path, first, 2)
    _, out = path.through(sctp(other, vip(v, CLUSTER), _init(777)))
    assert parsed(out).source == source
    path.through(sctp(pod(v), source, packets.SCTP_INIT_ACK, tag=777))
    late = sctp(pod(v), source, packets.chunk(0, bytes(12) + b"secret"), tag=packets.SCTP_TAG)
    assert path.through(late)[0] == TC_ACT_SHOT


@both_policies
def test_sctp_association_is_restarted(path: Path_, v: int, which: int):
    """By the client, with another tag (RFC 9260, 5.2.2). A later INIT, which may be forged, changes
    nothing.
    """
    own, front, old, new = client(v), vip(v, which), packets.SCTP_TAG, 777
    data, done = packets.chunk(0, bytes(20)), packets.chunk(11)
    _, out = path.through(sctp(own, front))
    source = parsed(out).source
    for chunk, tag, passes in (
        (packets.SCTP_INIT_ACK, old, True),
        (done, old, True),
        (_init(new), 0, True),
        (data, old, True),
        (packets.SCTP_INIT_ACK, new, True),
        (data, old, True),
        (done, new, True),
        (data, old, False),
        (_init(new + 1), 0, True),
        (data, new, True),
        (data, new + 2, False),
    ):
        ends = (pod(v), source) if tag else (own, front)
        assert (path.through(sctp(*ends, chunk, tag=tag))[0] != TC_ACT_SHOT) == passes, (chunk, tag)
    assert states(path, own) == {PROVEN}


def _init(tag: int) -> bytes:
    return packets.chunk(1, struct.pack("!IIHHI", tag, 65536, 10, 10, 1))


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
    own = client(v)
    _, sent = path.through(tcp(own, vip(v, CLUSTER), flags="S"))
    _, got = path.ingress(icmp_error("host unreachable", ROUTER[v], sent))
    assert parsed(got).destination == CLIENT[v], "it goes to the client"
    assert states(path, own) == {TcpState.NEW}


@pytest.mark.parametrize("seen", [FinFlag.CLIENT, FinFlag.BACKEND, 0])
@pytest.mark.parametrize("last", ["A", "<A"])
def test_simultaneous_fins_close_the_flow(path: Path_, v: int, last: str, seen: int):
    """Two CPUs each saw one FIN, or one has overwritten what the other wrote; the next ACK of
    either side closes the entries.
    """
    own, source = send_segments(path, v, f"{LIVE} FA <FA")
    assert states(path, own) == {TcpState.CLOSED}
    ends = bytes((TcpState.CLOSING, seen))
    change_entries(path, own, lambda raw: raw[:STATE] + ends + raw[STATE + 2 :])
    segment(path, v, own, last, source)
    assert states(path, own) == {TcpState.CLOSED}


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
    own, source = send_segments(path, v, f"{LIVE} A+ <A <A+ A")

    def overwrite(raw: bytes) -> bytes:
        side = list(struct.unpack_from("=6I", raw, SEEN))
        if is_original(raw) is of_client:
            side[field] = side[ACK] if field == EDGE else side[field] - 500
        elif field == EDGE:
            side[LIMIT] = side[NEXT]
        return raw[:SEEN] + struct.pack("=6I", *side) + raw[SEEN + 24 :]

    change_entries(path, own, overwrite)
    send_segments(path, v, f"{script} {' '.join(CLOSES['both close, the client first'])}", own, source)
    assert states(path, own) == {TcpState.CLOSED}


@pytest.mark.parametrize("answer", ["<SA", "<RA S <SA"], ids=["accepts", "refuses once"])
@pytest.mark.parametrize("last", ["A", "FA", "<FA"])
def test_a_client_may_use_the_port_of_a_connection_that_never_ended(path: Path_, v: int, last: str, answer: str):
    """At most one side's FIN was seen, and both sides have forgotten the connection since then. As
    in nf_conntrack, the backend's answer to a SYN proves that. A refusal passes, but proves nothing.
    """
    own, source = send_segments(path, v, f"{LIVE} {last}")
    TALKS[own] = Talk(1 << 30, 3 << 30)
    send_segments(path, v, f"S {answer} A A+ <A", own, source)
    assert states(path, own) == {TcpState.ESTABLISHED}


@pytest.mark.parametrize("forged", ["S <RA", "S <RA S <RA", "S <SRA|"])
@pytest.mark.parametrize(("fin", "rest"), [("FA", "<A+ A"), ("<FA", "A+ <A"), ("", "A+ <A")])
def test_a_forged_refusal_frees_no_port(path: Path_, v: int, fin: str, rest: str, forged: str):
    """Whoever forges SYNs and their refusals needs no number. Both ends still have the connection.
    Nor does the backend count as failing.
    """
    set_only_port(path)
    own, source = send_segments(path, v, f"{LIVE} {fin}")
    real, TALKS[own] = TALKS[own], Talk(1 << 30, 3 << 30)
    with path.counted(Reason.BACKEND_RESET, 0):
        send_segments(path, v, forged, own, source)
    age(path, own, 11)
    assert path.ingress(tcp(client(v), vip(v, CLUSTER), flags="S"))[0] == TC_ACT_SHOT
    TALKS[own] = real
    send_segments(path, v, rest, own, source)
    assert states(path, own) == {TcpState.CLOSING if fin else TcpState.ESTABLISHED}


@pytest.mark.parametrize("word", ["A+", "<A+"])
def test_a_syn_counts_until_either_side_has_sent(path: Path_, v: int, word: str):
    """Whoever forges a SYN and its answer needs no number. But what is in the window between the
    two proves that the connection lives.
    """
    own, source = send_segments(path, v, LIVE)
    real, forged = TALKS[own], Talk(1 << 30, 3 << 30)
    for talk, script in ((forged, "S"), (real, word), (forged, "<SA|"), (real, "A+ <A <A+ A")):
        time.sleep(0.003)  # times are compared in milliseconds
        TALKS[own] = talk
        send_segments(path, v, script, own, source)
        assert states(path, own) == {TcpState.ESTABLISHED}


@pytest.mark.parametrize("quiet", ["question", "answer"])
def test_flow_lives_while_either_side_sends(path: Path_, v: int, quiet: str):
    """Datagrams in one direction for a long time do not refresh the entry of the other
    direction.
    """
    own, source = asked(path, v)
    end_of_it = vip(v, CLUSTER) if quiet == "question" else source
    expire(path, own, lambda found: end_of_it in found)
    inside = path.go_in(reply(pod(v), source), reply(pod(v), own))
    path.go_out(inside, reply(vip(v, CLUSTER), own))
    assert parsed(path.through(ask(own, vip(v, CLUSTER)))[1]).source == source, "the same flow"


def test_replies_to_the_node_keep_a_flow_alive(path: Path_, v: int):
    """With redirected packets they are all that is seen of a backend that keeps sending."""
    own, source = asked(path, v)
    expire(path, own, lambda found: source not in found)
    with path.counted(Reason.NEW_FLOW, 0):
        path.ingress(ask(own, vip(v, CLUSTER)))


def of_a_deleted_backend(raw: bytes) -> bytes:
    had = FLOW.unpack(raw)
    return FLOW.pack(*had[:8], 0xFFFF_FFFF, *had[9:])


def backends_of(path: Path_, own: str) -> set[int]:
    """The backends' ids in the entries of this client's flow."""
    return {FLOW.unpack(raw)[8] for raw in entries_of(path, own)}
