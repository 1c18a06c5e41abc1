# SPDX-License-Identifier: Apache-2.0
"""Random sequences on both nodes, and a short script for each unintended difference."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tests.fuzz.packets.differences import complaint, equal, row_for
from tests.fuzz.packets.node import PROTOCOLS, VARIANTS
from tests.fuzz.packets.reference import read
from tests.fuzz.packets.segments import random_script, shorter
from tests.fuzz.packets.twins import Outcome, Played, Stalled, Twins

BATCH: Final = 1_000
"""Sequences played at once: one step of all of them takes a fraction of a second."""
SEEDS: Final = (11, 12, 13)
"""Seeds of the batches that the suite plays."""
SMALLEST: Final = 50
TRIES: Final = 5
"""A batch of at most SMALLEST sequences is played up to TRIES times. A machine that is too slow
each time is too slow for the test.
"""
STALLED: Final = "batches that stalled"
SHOWN: Final = 10
"""Differences that are shortened and reported; more of them seldom have other causes."""


class Finding(NamedTuple):
    """A sequence, its outcomes on both nodes, and what is wrong with them."""

    sequence: Played
    kbpf: Outcome
    linux: Outcome
    wrong: str

    def __str__(self) -> str:
        return f"{self.wrong}: {self.sequence}: kbpf {tuple(self.kbpf)}, Linux {tuple(self.linux)}"


def random_sequences(rng: random.Random, count: int) -> list[Played]:
    """Sequences of all kinds. SCTP is never masqueraded, because its packets carry no tag."""
    made = []
    for _ in range(count):
        protocol = rng.choice(("tcp", "tcp", *PROTOCOLS))
        variant = "kept" if protocol == "sctp" else rng.choice(VARIANTS)
        made.append(Played(random_script(rng, protocol), protocol, rng.choice((4, 6)), variant))
    return made


def play(
    twins: Twins, sequences: Sequence[Played], tries: int = TRIES
) -> tuple[list[tuple[Outcome, Outcome]], int]:
    """Both nodes' outcomes of each sequence, and how many batches had to be replayed: in halves, or
    whole if they are small.

    Only the batch's own clock decides that, whatever the outcomes: the machine was too slow.
    """
    try:
        return twins.play(sequences), 0
    except Stalled:
        if len(sequences) <= SMALLEST and tries == 1:
            raise
    if len(sequences) <= SMALLEST:
        outcomes, stalls = play(twins, sequences, tries - 1)
        return outcomes, 1 + stalls
    middle = len(sequences) // 2
    (first, stalls), (second, more) = (
        play(twins, sequences[:middle]),
        play(twins, sequences[middle:]),
    )
    return [*first, *second], 1 + stalls + more


def compare(twins: Twins, sequences: Sequence[Played]) -> tuple[list[Finding], Counter[str]]:
    """The findings, and how often each row was needed ("equal": none); under STALLED, how many
    batches were replayed.
    """
    findings, tally = [], Counter[str]()
    outcomes, stalls = play(twins, sequences)
    tally[STALLED] += stalls
    for each, (kbpf, linux) in zip(sequences, outcomes, strict=True):
        reading = read(each.protocol, each.script, each.variant)
        wrong = complaint(each.protocol, reading, kbpf, linux)
        row = row_for(each.protocol, reading, kbpf, linux)
        if wrong:
            findings.append(Finding(each, kbpf, linux, wrong))
        elif equal(kbpf, linux) or row is None:
            tally[f"{each.protocol}: equal"] += 1
        else:
            tally[f"{each.protocol}: {row.name}"] += 1
    return findings, tally


def shrunk(twins: Twins, findings: Iterable[Finding]) -> list[Finding]:
    """Shortens each script, one step at a time, as long as it goes wrong in the same way."""
    return [_shrink(twins, each) for each in list(findings)[:SHOWN]]


def _shrink(twins: Twins, finding: Finding) -> Finding:
    while True:
        tries = [
            finding.sequence._replace(script=text) for text in shorter(finding.sequence.script)
        ]
        if not tries:
            return finding
        wrong, _ = compare(twins, tries)
        same = [
            each
            for each in wrong
            if (each.wrong, each.kbpf.state, each.linux.state)
            == (finding.wrong, finding.kbpf.state, finding.linux.state)
        ]
        if not same:
            return finding
        finding = min(same, key=lambda each: len(each.sequence.script))
