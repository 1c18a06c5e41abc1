# SPDX-License-Identifier: Apache-2.0
"""Random sequences on both nodes, and a short script for each unintended difference."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tests.fuzz.packets.differences import complaint, equal, row_for
from tests.fuzz.packets.node import BACKEND, DEVICES, DIALS, PROTOCOLS, VARIANTS
from tests.fuzz.packets.segments import (
    genuine,
    parse_token,
    random_attack,
    random_script,
    shorter,
)
from tests.fuzz.packets.twins import Outcome, Played, Stalled, Twins

BATCH = 1_000
"""Sequences played at once: one step of all of them takes a fraction of a second."""
ATTACKS = 250
"""Attacks played at once: each is two sequences."""
SEEDS = {"stack": 11, "direct": 12}
"""Seeds of the batches that the suite plays, by forwarding."""
SMALLEST = 50
TRIES = 5
"""A batch of at most SMALLEST sequences is played up to TRIES times. A machine that is too slow
each time is too slow for the test.
"""
STALLED = "batches that stalled"
SHOWN = 10
"""Differences that are shortened and reported; more of them seldom have other causes."""


class Finding(NamedTuple):
    """A sequence, its outcomes on both nodes, and what is wrong with them."""

    sequence: Played
    kbpf: Outcome
    linux: Outcome
    wrong: str

    def __str__(self) -> str:
        return f"{self.wrong}: {self.sequence}: kbpf {tuple(self.kbpf)}, Linux {tuple(self.linux)}"


Compare = Callable[[Twins, Sequence[Played]], tuple[list[Finding], Counter[str]]]


def random_sequences(rng: random.Random, count: int) -> list[Played]:
    """Sequences of all kinds. SCTP is never masqueraded, because its packets carry no tag."""
    made = []
    for _ in range(count):
        protocol = rng.choice(("tcp", "tcp", *PROTOCOLS))
        made.append(Played(random_script(rng, protocol), protocol, rng.choice((4, 6)), *_ends(rng, protocol)))
    return made


def _ends(rng: random.Random, protocol: str) -> tuple[str, str]:
    """The Service, which has one backend, and the device of the client."""
    variant = "kept" if protocol == "sctp" else rng.choice(VARIANTS)
    return variant, rng.choice(DIALS[variant])


def random_attacks(rng: random.Random, count: int) -> list[Played]:
    """Connections, among whose packets somebody forges others, on one of the node's devices."""
    made = []
    for _ in range(count):
        protocol = rng.choice(("tcp", "tcp", "tcp", *PROTOCOLS))
        device, family = rng.choice(DEVICES), rng.choice((4, 6))
        played = Played("", protocol, family, *_ends(rng, protocol))
        knows = not any(arrives_on(device, back, played, False) for back in (False, True))
        made.append(played._replace(script=random_attack(rng, protocol, device, knows)))
    return made


def arrives_on(device: str, back: bool, played: Played, strict: bool) -> bool:
    """Whether packets of the backend, or of the client, may arrive on this device. Devices that
    lead to other machines are interchangeable, unless the reverse path filter is strict and no
    route to the sender leads there: c0 has the default route.
    """
    own = BACKEND[played.variant] if back else played.client
    return device == own or ({device, own} <= {"c0", "r0"} and (not strict or device == "c0"))


def compare_attacks(twins: Twins, attacks: Sequence[Played]) -> tuple[list[Finding], Counter[str]]:
    """As compare(), but each sequence is played with and without its forged packets. They must not
    make a difference to kbpf if they do not to Linux, nor if all come by the wrong device.
    """
    plain = [each._replace(script=genuine(each.script)) for each in attacks]
    outcomes, stalls = play(twins, [each for pair in zip(attacks, plain, strict=True) for each in pair])
    findings, tally = [], Counter[str]()
    for n, each in enumerate(attacks):
        (kbpf, linux), (kbpf_before, linux_before) = outcomes[2 * n : 2 * n + 2]
        forged = [parse_token(token) for token in each.script.split() if ":" in token]
        strict = twins.strict and each.family == 4  # Linux has no filter for IPv6
        elsewhere = not any(arrives_on(one.device, one.back, each, strict) for one in forged)
        step = kbpf_before.state, kbpf.state
        begins = step in (("none", "NEW"), ("NEW", "NEW"), ("CLOSED", "NEW")) or (
            step == ("CLOSING", "NEW") and linux_before.state == "CLOSE"
        )
        answers = step == ("NEW", "ANSWERED") and re.search(r":S\b.*:<SA\b", each.script)
        revives = step == ("CLOSED", "CLOSING")  # "segment after a reset"
        restarts = step == ("ANSWERED", "NEW") and kbpf_before.quiet
        # a genuine reset whose number is no longer the exact one, see README.md
        survives = step in (("CLOSED", "UNPROVEN"), ("CLOSED", "ESTABLISHED")) and (
            re.search(r":\S*\+\S*.* <?R", each.script) is not None
        )
        allowed_here = not elsewhere and (begins or answers or revives or restarts or survives)
        changed = _judged(each, kbpf) != _judged(each, kbpf_before) and not allowed_here
        explained = not elsewhere and (
            _judged(each, linux) != _judged(each, linux_before) or _is_as_linux(each, kbpf, linux)
        )
        tally[f"{each.protocol}: {'changed' if changed else 'unchanged'}"] += 1
        if changed and not elsewhere and not explained:
            explained, more = _is_as_linux_with_fewer(twins, each, kbpf, (kbpf_before, linux_before))
            stalls += more
        if changed and not explained:
            wrong = f"forged packets make {tuple(kbpf)} of {tuple(kbpf_before)}"
            findings.append(Finding(each, kbpf, linux, wrong))
    tally[STALLED] = stalls
    return findings, tally


def _is_as_linux(each: Played, kbpf: Outcome, linux: Outcome) -> bool:
    return equal(each.protocol, kbpf, linux) and kbpf.needed <= linux.needed


def _is_as_linux_with_fewer(
    twins: Twins, each: Played, kbpf: Outcome, before: tuple[Outcome, Outcome]
) -> tuple[bool, int]:
    """Whether, with only one of the forged packets or all but one, Linux has kbpf's outcome, or
    counts a packet if that is all that kbpf does: it keeps notes about packets that it ignores, and
    later they decide about others. `before`: both without forged packets. Then how many batches
    stalled.
    """
    tokens = each.script.split()
    forged = [i for i, token in enumerate(tokens) if ":" in token]
    fewer = [
        " ".join(token for i, token in enumerate(tokens) if i not in forged or (i == one) is alone)
        for one in forged
        for alone in (True, False)
    ]
    outcomes, stalls = play(twins, [each._replace(script=script) for script in fewer])
    counts = tuple(one._replace(quiet=False) for one in before)
    return any(_is_as_linux(each, kbpf, linux) or (kbpf, linux) == counts != before for _, linux in outcomes), stalls


def _judged(each: Played, outcome: Outcome) -> Outcome:
    """Linux has one name for a UDP flow with or without an answer."""
    return outcome._replace(state="") if each.protocol == "udp" else outcome


def play(twins: Twins, sequences: Sequence[Played], tries: int = TRIES) -> tuple[list[tuple[Outcome, Outcome]], int]:
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
    (first, stalls), (second, more) = play(twins, sequences[:middle]), play(twins, sequences[middle:])
    return [*first, *second], 1 + stalls + more


def compare(twins: Twins, sequences: Sequence[Played]) -> tuple[list[Finding], Counter[str]]:
    """The findings, and how often each row was needed ("equal": none); under STALLED, how many
    batches were replayed.
    """
    findings, tally = [], Counter[str]()
    outcomes, stalls = play(twins, sequences)
    tally[STALLED] += stalls
    for each, (kbpf, linux) in zip(sequences, outcomes, strict=True):
        wrong = complaint(each.protocol, each.script, kbpf, linux)
        row = row_for(each.protocol, each.script, kbpf, linux)
        if wrong:
            findings.append(Finding(each, kbpf, linux, wrong))
        elif equal(each.protocol, kbpf, linux) or row is None:
            tally[f"{each.protocol}: equal"] += 1
        else:
            tally[f"{each.protocol}: {row.name}"] += 1
    return findings, tally


def shrunk(twins: Twins, findings: Iterable[Finding], judge: Compare = compare) -> list[Finding]:
    """Shortens each script, one step at a time, as long as it goes wrong in the same way."""
    return [_shrink(twins, each, judge) for each in list(findings)[:SHOWN]]


def _kind(finding: Finding) -> tuple[str, str, str]:
    return finding.wrong, finding.kbpf.state, finding.linux.state


def _shrink(twins: Twins, finding: Finding, judge: Compare) -> Finding:
    while True:
        tries = [finding.sequence._replace(script=text) for text in shorter(finding.sequence.script)]
        if not tries:
            return finding
        wrong, _ = judge(twins, tries)
        same = [each for each in wrong if _kind(each) == _kind(finding)]
        if not same:
            return finding
        finding = min(same, key=lambda each: len(each.sequence.script))
