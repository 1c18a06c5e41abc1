# SPDX-License-Identifier: Apache-2.0
"""Tables of texts: a row a line, `what goes in → what comes out`."""


def table(text: str) -> list[tuple[str, str]]:
    rows = [line.partition(" →") for line in text.splitlines()]
    return [(before, after.removeprefix(" ")) for before, _, after in rows]
