# SPDX-License-Identifier: Apache-2.0
"""States of connections compared with nf_conntrack's: known sequences, and the bounded part of the
campaign `conntrack`. segments.py explains scripts, differences.py the rows.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fuzz.packets.comparison import (
    ATTACKS,
    BATCH,
    SEEDS,
    compare,
    compare_attacks,
    play,
    random_attacks,
    random_sequences,
    shrunk,
)
from tests.fuzz.packets.differences import ROWS
from tests.fuzz.packets.node import DIALS
from tests.fuzz.packets.twins import Played, Twins
from tests.support.table import table

STATES = Path(__file__).with_name("README.md")


class Known(NamedTuple):
    """A script; kbpf's state, and whether it is kept when others need room; Linux's state."""

    protocol: str
    script: str
    state: str
    needed: bool
    linux: str


SCRIPTS = table(
    Known,
    """
tcp | S | NEW | no | SYN_SENT
tcp | S c0:S~old c0:<RA~old^old | NEW | no | SYN_SENT
tcp | S <SA | ANSWERED | no | SYN_RECV
tcp | S <SA A | UNPROVEN | no | ESTABLISHED
tcp | S <SA A!sum | UNPROVEN | no | SYN_RECV
tcp | S <SA A^far | ANSWERED | no | SYN_RECV
tcp | S+10 <SA <A+10 <A+10 A | UNPROVEN | no | ESTABLISHED
tcp | S <SA <FA~near A | UNPROVEN | no | ESTABLISHED
tcp | S <SA <A~near <FA~near A | UNPROVEN | no | ESTABLISHED
tcp | S <SA <FA A | CLOSING | no | CLOSE_WAIT
tcp | S <SA <A~near <RA~near^far | ANSWERED | no | SYN_RECV
tcp | S <SA A A+100 <A | ESTABLISHED | yes | ESTABLISHED
tcp | S <SA A <A+100 A | ESTABLISHED | yes | ESTABLISHED
tcp | S <SA A A+100 <A R~far | ESTABLISHED | yes | ESTABLISHED
tcp | S <SA A A+100 <A R~near | ESTABLISHED | yes | ESTABLISHED
tcp | S <SA A A+100 <A <R~far | ESTABLISHED | yes | ESTABLISHED
tcp | S <SA A A+100 <A F~far | ESTABLISHED | yes | ESTABLISHED
tcp | S <SA A A+100 <A S~new | ESTABLISHED | yes | ESTABLISHED
tcp | S <SA A <A+100 <SA | ESTABLISHED | yes | ESTABLISHED
tcp | S <SA A <A+100 A <SA <A+100 A | ESTABLISHED | yes | ESTABLISHED
tcp | S <SA A A+100 <A R | CLOSED | no | CLOSE
tcp | S <SA A A+100 <A <RA | CLOSED | no | CLOSE
tcp | S <SA A A+100 <A FA <FA A | CLOSED | no | TIME_WAIT
udp | U | NEW | no | DATAGRAMS
udp | U <U | ANSWERED | no | DATAGRAMS
udp | U <U U <U | ANSWERED | no | DATAGRAMS
udp | U <U . U | ESTABLISHED | yes | STREAM
udp | U . <U | ANSWERED | no | DATAGRAMS
sctp | INIT | NEW | no | CLOSED
sctp | INIT <INITACK | ANSWERED | no | COOKIE_WAIT
sctp | INIT <INITACK ECHO <ECHOACK | ESTABLISHED | yes | ESTABLISHED
""",
)
"""`S+10`: TCP Fast Open."""


@pytest.fixture(scope="module", params=SEEDS)
def twins(artifact_cache: Path, request: pytest.FixtureRequest) -> Iterator[Twins]:
    with Twins(artifact_cache, request.param) as made:
        yield made


def test_known_sequences_have_the_listed_states(twins: Twins):
    cases = [
        (Played(known.script, known.protocol, family, variant, client), known[2:])
        for known in SCRIPTS
        for family in (4, 6)
        for variant in (DIALS if known.protocol != "sctp" else ("kept",))
        for client in DIALS[variant]
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


def test_random_sequences_differ_from_conntrack_only_as_intended(twins: Twins):
    seed = SEEDS[twins.forwarding]
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


def test_each_intended_difference_is_documented():
    _, _, section = STATES.read_text().partition("## Intended differences")
    told = Counter(re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE))
    assert {row.name for row in ROWS} <= told.keys()
