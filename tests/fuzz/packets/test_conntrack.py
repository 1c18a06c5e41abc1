# SPDX-License-Identifier: Apache-2.0
"""States of connections compared with nf_conntrack's: known sequences, and the bounded part of the
campaign `conntrack`. segments.py explains scripts, differences.py the rows.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fuzz.packets.comparison import (
    ATTACKS,
    BATCH,
    SEEDS,
    TRIES,
    compare,
    compare_attacks,
    play,
    random_attacks,
    random_sequences,
    shrunk,
)
from tests.fuzz.packets.differences import ROWS, complaint
from tests.fuzz.packets.mutants import MUTANTS, PACKAGE
from tests.fuzz.packets.node import VARIANTS
from tests.fuzz.packets.twins import LONGEST_PHASE, NOTHING, Outcome, Played, Stalled, Twins

STATES = Path(__file__).with_name("README.md")

SCRIPTS = [
    # script, kbpf's state, whether it is needed, Linux's state
    ("tcp", "S", "NEW", False, "SYN_SENT"),
    ("tcp", "S c0:S~old c0:<RA~old^old", "NEW", False, "SYN_SENT"),
    ("tcp", "S <SA", "ANSWERED", False, "SYN_RECV"),
    ("tcp", "S <SA A", "UNPROVEN", False, "ESTABLISHED"),
    ("tcp", "S <SA A!sum", "UNPROVEN", False, "SYN_RECV"),
    ("tcp", "S <SA A^far", "ANSWERED", False, "SYN_RECV"),
    ("tcp", "S+10 <SA <A+10 <A+10 A", "UNPROVEN", False, "ESTABLISHED"),  # TCP Fast Open
    ("tcp", "S <SA <FA~near A", "UNPROVEN", False, "ESTABLISHED"),
    ("tcp", "S <SA <A~near <FA~near A", "UNPROVEN", False, "ESTABLISHED"),
    ("tcp", "S <SA <FA A", "CLOSING", False, "CLOSE_WAIT"),
    ("tcp", "S <SA <A~near <RA~near^far", "ANSWERED", False, "SYN_RECV"),
    ("tcp", "S <SA A A+100 <A", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A <A+100 A", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A R~far", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A R~near", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A <R~far", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A F~far", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A S~new", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A <A+100 <SA", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A <A+100 A <SA <A+100 A", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A R", "CLOSED", False, "CLOSE"),
    ("tcp", "S <SA A A+100 <A <RA", "CLOSED", False, "CLOSE"),
    ("tcp", "S <SA A A+100 <A FA <FA A", "CLOSED", False, "TIME_WAIT"),
    ("udp", "U", "NEW", False, "DATAGRAMS"),
    ("udp", "U <U", "ANSWERED", False, "DATAGRAMS"),
    ("udp", "U <U U <U", "ANSWERED", False, "DATAGRAMS"),
    ("udp", "U <U . U", "ESTABLISHED", True, "STREAM"),
    ("udp", "U . <U", "ANSWERED", False, "DATAGRAMS"),
    ("sctp", "INIT", "NEW", False, "CLOSED"),
    ("sctp", "INIT <INITACK", "ANSWERED", False, "COOKIE_WAIT"),
    ("sctp", "INIT <INITACK ECHO <ECHOACK", "ESTABLISHED", True, "ESTABLISHED"),
]


DAY = 86_400
OPEN = Outcome("ESTABLISHED", True, DAY)
ESTABLISHED = Outcome("ESTABLISHED", True, DAY)
UNPROVEN = Outcome("UNPROVEN", False, DAY)
ANSWERED = Outcome("ANSWERED", False, 60)
CLOSING = Outcome("CLOSING", False, 3600)
CLOSED = Outcome("CLOSED", False, 120)


@pytest.fixture(scope="module")
def twins(artifact_cache: Path) -> Iterator[Twins]:
    with Twins(artifact_cache) as made:
        yield made


def test_known_sequences_have_the_listed_states(twins: Twins):
    cases = [
        (Played(script, protocol, family, variant), (state, needed, linux))
        for protocol, script, state, needed, linux in SCRIPTS
        for family in (4, 6)
        for variant in (VARIANTS if protocol != "sctp" else ("kept",))
    ]
    outcomes, _ = play(twins, [sequence for sequence, _ in cases])
    wrong = [
        f"{sequence}: {got}, want {want}"
        for (sequence, want), (kbpf, linux) in zip(cases, outcomes, strict=True)
        if (got := (kbpf.state, kbpf.needed, linux.state)) != want
    ]
    assert wrong == []


def test_reply_with_ttl_1_counts_once(twins: Twins):
    """A packet whose TTL ends here passes the stack, so another entry is written for it first."""
    sequences = [Played("U . <U!ttl", "udp", family, "past") for family in (4, 6)]
    outcomes, _ = play(twins, sequences)
    assert [kbpf.state for kbpf, _ in outcomes] == ["ANSWERED"] * 2


@pytest.mark.parametrize("seed", SEEDS)
def test_random_sequences_differ_from_conntrack_only_as_intended(twins: Twins, seed: int):
    findings, tally = compare(twins, random_sequences(random.Random(seed), BATCH))
    print(tally)
    assert [str(each) for each in shrunk(twins, findings)] == [], f"seed {seed}: {len(findings)}"
    for protocol in ("tcp", "udp", "sctp"):
        assert tally[f"{protocol}: equal"] > 0


@pytest.mark.parametrize("strict", [False, True], ids=["any path", "strict rp_filter"])
def test_forged_packets_change_nothing_that_they_do_not_change_in_conntrack(twins: Twins, strict: bool):
    twins.check_reverse_path(strict)
    findings, tally = compare_attacks(twins, random_attacks(random.Random(14 + strict), ATTACKS))
    print(tally)
    assert [str(each) for each in shrunk(twins, findings, compare_attacks)] == []
    assert tally["tcp: unchanged"] > ATTACKS // 4
    twins.check_reverse_path(False)


WRONG = [
    # script, a possible outcome of kbpf, Linux's outcome, and why that must be a finding
    ("S <SA A A+100 <A F~far A", CLOSING, OPEN, "a difference that no row has"),
    ("S <SA A <A", ESTABLISHED, OPEN, "established without proof by the backend"),
    ("S <SA A A+100 <A", NOTHING, OPEN, "a connection that Linux needs is forgotten"),
    ("S <SA <A+100~old A A+100", ANSWERED, OPEN, "not ended by anybody, and not kept as long"),
]


@pytest.mark.parametrize(("script", "kbpf", "linux", "why"), WRONG, ids=str)
def test_wrong_outcome_is_a_finding(script: str, kbpf: Outcome, linux: Outcome, why: str):
    assert complaint("tcp", script, kbpf, linux).endswith(why)


class SlowTwins(Twins):
    """Two nodes on a machine that takes 0.01 s for each sequence of a batch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def play(self, sequences: Sequence[Played]) -> list[tuple[Outcome, Outcome]]:
        self.sizes.append(len(sequences))
        if len(sequences) * 0.01 > LONGEST_PHASE:
            raise Stalled("too slow")
        return [(NOTHING, NOTHING)] * len(sequences)


def test_stalled_batch_is_replayed_in_halves_and_counted():
    twins = SlowTwins()
    outcomes, stalls = play(twins, [Played("U", "udp", 4, "kept")] * 400)
    assert (len(outcomes), stalls, twins.sizes) == (400, 3, [400, 200, 100, 100, 200, 100, 100])


def test_small_batch_is_replayed_a_few_times(monkeypatch: pytest.MonkeyPatch):
    twins = SlowTwins()
    monkeypatch.setattr("tests.fuzz.packets.test_conntrack.LONGEST_PHASE", 0.0)
    with pytest.raises(Stalled):
        play(twins, [Played("U", "udp", 4, "kept")] * 2)
    assert twins.sizes == [2] * TRIES


def test_slow_batch_raises_stalled(twins: Twins, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.fuzz.packets.twins.LONGEST_PHASE", 0.0)
    with pytest.raises(Stalled, match=r"phase 0 took .* s, and may take 0.0 s"):
        twins.play([Played("U <U", "udp", 4, "kept")])


def test_each_intended_difference_is_documented():
    _, _, section = STATES.read_text().partition("## Intended differences")
    told = Counter(re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE))
    assert {row.name for row in ROWS} <= told.keys()


def test_mutants_apply_to_the_current_code():
    for mutant in MUTANTS:
        text = (PACKAGE / "bpf" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant.name
