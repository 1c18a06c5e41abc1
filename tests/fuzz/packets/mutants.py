# SPDX-License-Identifier: Apache-2.0
"""Changes of the packet path, each of which takes a rule away. `make mutants only=conntrack` proves
that the sequences of test_conntrack.py notice each of them: one that is not noticed is a gap in
differences.py.
"""

from pathlib import Path
from typing import NamedTuple

import kbpf

PACKAGE = Path(kbpf.__file__).parent


class Mutant(NamedTuple):
    """Its name, the file below kbpf/bpf, the text that is replaced, and the replacement."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
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
