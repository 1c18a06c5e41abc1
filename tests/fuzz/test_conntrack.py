"""The states of connections beside nf_conntrack's: known sequences, and the bounded part of the
campaign `conntrack`. See segments.py for how scripts are read, and differences.py for the rows.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.comparison import BATCH, compare, random_sequences, shrunk
from tests.fuzz.differences import ROWS
from tests.fuzz.node import VARIANTS
from tests.fuzz.twins import Played, Twins

SEEDS = (11, 12, 13)
DATAPATH = Path(__file__).parents[2] / "docs" / "datapath.md"

SCRIPTS = [
    # script, kbpf's state, whether it is needed, Linux's state
    ("tcp", "S", "NEW", False, "SYN_SENT"),
    ("tcp", "S <SA", "ANSWERED", False, "SYN_RECV"),
    ("tcp", "S <SA A", "UNPROVEN", False, "ESTABLISHED"),
    ("tcp", "S <SA A!sum", "UNPROVEN", False, "SYN_RECV"),
    ("tcp", "S <SA A^far", "ANSWERED", False, "SYN_RECV"),
    ("tcp", "S <SA A A+100 <A", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A <A+100 A", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A R~far", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A R~near", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A <R~far", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A F~far", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A S~new", "ESTABLISHED", True, "ESTABLISHED"),
    ("tcp", "S <SA A A+100 <A R", "CLOSED", False, "CLOSE"),
    ("tcp", "S <SA A A+100 <A <RA", "CLOSED", False, "CLOSE"),
    ("tcp", "S <SA A A+100 <A FA <FA A", "CLOSED", False, "TIME_WAIT"),
    ("udp", "U", "NEW", False, "DATAGRAMS"),
    ("udp", "U <U", "ANSWERED", False, "DATAGRAMS"),
    ("udp", "U <U U <U", "ANSWERED", False, "DATAGRAMS"),
    ("udp", "U <U . U", "ESTABLISHED", True, "STREAM"),
    ("sctp", "INIT", "NEW", False, "CLOSED"),
    ("sctp", "INIT <INITACK", "ANSWERED", False, "COOKIE_WAIT"),
    ("sctp", "INIT <INITACK ECHO <ECHOACK", "ESTABLISHED", True, "ESTABLISHED"),
]


@pytest.fixture(scope="module")
def twins(artifact_cache: Path) -> Iterator[Twins]:
    with Twins(artifact_cache) as made:
        yield made


def test_known_sequences_come_to_what_is_written(twins: Twins):
    cases = [
        (Played(script, protocol, family, variant), (state, needed, linux))
        for protocol, script, state, needed, linux in SCRIPTS
        for family in (4, 6)
        for variant in (VARIANTS if protocol != "sctp" else ("kept",))
    ]
    outcomes = twins.play([sequence for sequence, _ in cases])
    wrong = [
        f"{sequence}: {got}, want {want}"
        for (sequence, want), (kbpf, linux) in zip(cases, outcomes, strict=True)
        if (got := (kbpf.state, kbpf.needed, linux.state)) != want
    ]
    assert wrong == []


@pytest.mark.parametrize("seed", SEEDS)
def test_random_sequences_come_to_what_conntrack_makes_of_them(twins: Twins, seed: int):
    findings, tally = compare(twins, random_sequences(random.Random(seed), BATCH))
    print(tally)
    assert [str(each) for each in shrunk(twins, findings)] == [], f"seed {seed}: {len(findings)}"
    for protocol in ("tcp", "udp", "sctp"):
        assert tally[f"{protocol}: equal"] > 0


def test_each_intended_difference_has_its_reason_in_the_documents():
    _, _, section = DATAPATH.read_text().partition("## States beside conntrack's")
    told = Counter(re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE))
    assert {row.name for row in ROWS} <= told.keys()
