# SPDX-License-Identifier: Apache-2.0
"""Tables of texts: a row a line, `what goes in → what comes out`."""


def table(text: str) -> list[tuple[str, str]]:
    return [(before, after) for line in text.splitlines() for before, _, after in [line.partition(" → ")]]
