# SPDX-License-Identifier: Apache-2.0
"""Builds of the packet path without one rule, to prove that the comparison with nf_conntrack works:
the sequences of the suite must detect each of them.

A mutant replaces one line of the C code. A mutant that is not detected is a gap in differences.py;
one whose line no longer exists was written for older code.
"""

import random
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

import kbpf
from kbpf.dataplane.bpf.programs import artifact, compile
from kbpf.kernel.system import children
from tests.fuzz.packets.comparison import ATTACKS, BATCH, compare, compare_attacks, random_attacks, random_sequences
from tests.fuzz.packets.twins import Twins

PACKAGE: Final = Path(kbpf.__file__).parent


class Mutant(NamedTuple):
    """Its name, the file below kbpf/bpf, the text that is replaced, and the replacement."""

    name: str
    file: str
    old: str
    new: str


MUTANTS: Final = (
    Mutant("any reset closes", "tc/judge.h", "if (n->sequence != peer->ack && !sent)", "if (false)"),
    Mutant(
        "the window is not checked", "tc/judge.h", "if (!(flags & TCP_ACK) || !fits) {", "if (!(flags & TCP_ACK)) {"
    ),
    Mutant(
        "the client's ACK establishes",
        "tc/judge.h",
        "original->state = STATE_UNPROVEN;",
        "original->state = STATE_ESTABLISHED;",
    ),
    Mutant(
        "any segment of the backend is proof", "tc/judge.h", "(n->next != own->next || n->ack != own->ack))", "true)"
    ),
    Mutant("any SYN-ACK answers", "tc/judge.h", " ||\n\t    !answers_syn(original, n, flags)) {", ") {"),
    Mutant(
        "any device", "tc/judge.h", "if (arrival == flow->arrival || arrives_by(skb, p, arrival, &s->hop))", "if (true)"
    ),
    Mutant("any tag", "tc/judge.h", "if (own->tag && p->sctp.tag != own->tag)", "if (false)"),
    Mutant(
        "UDP is a stream when answered",
        "tc/judge.h",
        "original->state = before == STATE_NEW ? STATE_ANSWERED : STATE_ESTABLISHED;",
        "original->state = STATE_ESTABLISHED;",
    ),
    Mutant(
        "UDP is a stream from its third datagram on",
        "tc/flow.h",
        "return elapsed(flow->seen.started, now) > STREAM_SECONDS * SECOND;",
        "return true;",
    ),
    Mutant(
        "SCTP is established by the INIT ACK",
        "tc/judge.h",
        "peer->tag = announced;\n\t\toriginal->state = STATE_ANSWERED;",
        "peer->tag = announced;\n\t\toriginal->state = STATE_ESTABLISHED;",
    ),
)


def build(mutant: Mutant, folder: Path, units: tuple[str, ...] = ("tc",)) -> None:
    """Compiles the mutant into this folder, under the names of the regular builds."""
    with tempfile.TemporaryDirectory(prefix="kbpf-mutant-") as name:
        copy = Path(name) / "kbpf"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        source = copy / "bpf" / mutant.file
        text = source.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} is not as it was"
        source.write_text(text.replace(mutant.old, mutant.new))
        for unit in units:
            _compile(mutant, unit, Path(name), folder)


def _compile(mutant: Mutant, unit: str, tree: Path, folder: Path) -> None:
    out = tree / "artifact"
    subprocess.run(
        children.python_command(compile.__name__, unit, str(out)),
        env=children.child_environment() | {"PYTHONPATH": str(tree)},
        check=True,
        capture_output=True,
    )
    made = artifact.read(out)
    assert made is not None
    source_key = artifact.source_key(unit)
    assert made.source != source_key, f"{mutant.name}: not the mutant was compiled"
    artifact.store(msgspec.structs.replace(made, source=source_key), folder)


def found(mutant: Mutant, seeds: tuple[int, ...]) -> tuple[int, str]:
    """For the first seed that detects the mutant: how many sequences do, and the shortest
    of them.
    """
    with tempfile.TemporaryDirectory(prefix="kbpf-mutant-") as name:
        folder = Path(name)
        build(mutant, folder)
        with Twins(folder) as twins:
            for seed in seeds:
                rng = random.Random(seed)
                findings, _ = compare(twins, random_sequences(rng, BATCH))
                if not findings:
                    findings, _ = compare_attacks(twins, random_attacks(rng, ATTACKS))
                if findings:
                    shortest = min(findings, key=lambda each: len(each.sequence.script))
                    return len(findings), str(shortest)
    return 0, ""
