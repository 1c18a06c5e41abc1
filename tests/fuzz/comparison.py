"""Random sequences on both nodes, and a short script for each difference that is not intended."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tests.fuzz.differences import complaint, equal, row_for
from tests.fuzz.node import PROTOCOLS, VARIANTS
from tests.fuzz.segments import random_script, shorter
from tests.fuzz.twins import Outcome, Played, Twins

BATCH: Final = 1_000
"""Sequences that are played at once: a step of all of them takes a fraction of a second."""
SHOWN: Final = 10
"""Differences that are shortened and told; more are seldom more than these."""


class Finding(NamedTuple):
    """A sequence, what the nodes made of it, and what is wrong with that."""

    sequence: Played
    kbpf: Outcome
    linux: Outcome
    wrong: str

    def __str__(self) -> str:
        return f"{self.wrong}: {self.sequence}: kbpf {tuple(self.kbpf)}, Linux {tuple(self.linux)}"


def random_sequences(rng: random.Random, count: int) -> list[Played]:
    """Of all kinds. A masqueraded client of SCTP would not be known by its packets."""
    made = []
    for _ in range(count):
        protocol = rng.choice(("tcp", "tcp", *PROTOCOLS))
        variant = "kept" if protocol == "sctp" else rng.choice(VARIANTS)
        made.append(Played(random_script(rng, protocol), protocol, rng.choice((4, 6)), variant))
    return made


def compare(twins: Twins, sequences: Sequence[Played]) -> tuple[list[Finding], Counter[str]]:
    """What is wrong, and how often each row was needed ("equal": none)."""
    findings, tally = [], Counter[str]()
    for each, (kbpf, linux) in zip(sequences, twins.play(sequences), strict=True):
        wrong = complaint(each.protocol, each.script, kbpf, linux)
        row = row_for(each.protocol, each.script, kbpf, linux)
        if wrong:
            findings.append(Finding(each, kbpf, linux, wrong))
        elif equal(kbpf, linux) or row is None:
            tally[f"{each.protocol}: equal"] += 1
        else:
            tally[f"{each.protocol}: {row.name}"] += 1
    return findings, tally


def shrunk(twins: Twins, findings: Iterable[Finding]) -> list[Finding]:
    """The shortest that goes wrong in the same way, as far as one step at a time leads there."""
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
            each for each in wrong
            if (each.wrong, each.kbpf.state, each.linux.state)
            == (finding.wrong, finding.kbpf.state, finding.linux.state)
        ]  # fmt: skip
        if not same:
            return finding
        finding = min(same, key=lambda each: len(each.sequence.script))
