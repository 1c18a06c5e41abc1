# SPDX-License-Identifier: Apache-2.0
"""Renders rows and pages as a table, JSON or YAML, with the same data in each format.

Output is never coloured or truncated, so it can be piped. JSON and YAML do not go through rich,
which would wrap lines. Unprintable characters are escaped in the way of each format, because names
and messages from objects must not be able to control the terminal.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from kbpf.cli.options import Output
from kbpf.errors import escape_unprintable
from kbpf.views.columns import Column
from kbpf.views.page import Page
from kbpf.views.text import GAP, format_table

SEPARATOR = "\0"
"""Separates the packed cells of a row. escape_unprintable() removes it from texts."""
CHUNK_ROWS = 512
"""Number of rows that are formatted and measured at a time."""


def format_document(value: Any, output: Output) -> str:
    """A value or a list of rows as JSON or YAML, with fields in the order of their declaration."""
    plain = msgspec.to_builtins(value)
    if output is Output.YAML:
        from kbpf import bounded_yaml

        def dump(allow_unicode: bool) -> str:
            return bounded_yaml.dump(
                plain, default_flow_style=False, allow_unicode=allow_unicode, width=1 << 20
            )

        # Readable text stays readable; with one unprintable character everything is escaped, since
        # the library cannot escape only that.
        text = dump(allow_unicode=True)
        if not all(map(str.isprintable, text.split("\n"))):
            text = dump(allow_unicode=False)
        return text.rstrip("\n")
    return _escape_json(json.dumps(plain, indent=2, ensure_ascii=False))


def _escape_json(text: str) -> str:
    """Escapes unprintable characters in JSON text, which does not change its value: they can only
    occur in strings. json.dumps() itself escapes only the control characters below U+0020.
    """
    if all(map(str.isprintable, text.split("\n"))):
        return text
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


def format_rows(
    values: Sequence[Any], columns: Sequence[Column], output: Output, titles: bool = True
) -> str:
    """A list of rows in the given format; of a table with or without the line of `titles`."""
    if output in (Output.JSON, Output.YAML):
        return format_document(values, output)
    return format_table(values, columns, output is Output.WIDE, titles)


def stream_rows(
    values: Iterable[Any],
    columns: Sequence[Column],
    output: Output,
    header: Any = None,
    titles: bool = True,
) -> Iterator[str]:
    """As format_rows(), but yields pieces of text to write one after the other.

    For lists of a hundred thousand rows. JSON and YAML are written row by row. A table keeps its
    cells, packed, until the column widths are known.

    `header` (JSON and YAML only): the rows become the last field, `rows`, of this value.
    """
    if output is Output.JSON:
        yield from _stream_json(values, header)
    elif output is Output.YAML:
        yield from _stream_yaml(values, header)
    else:
        yield from _stream_table(values, columns, output is Output.WIDE, titles)


def _stream_table(
    values: Iterable[Any], columns: Sequence[Column], wide: bool, titles: bool
) -> Iterator[str]:
    visible = [c for c in columns if wide or not c.wide]
    widths = [len(c.title) for c in visible]
    texts = [c.text for c in visible]
    packed = [SEPARATOR.join(c.title for c in visible)]
    rows = iter(values)
    while chunk := [
        [escape_unprintable(text(row)) for text in texts] for row in islice(rows, CHUNK_ROWS)
    ]:
        chunk_widths = [max(map(len, cells)) for cells in zip(*chunk, strict=True)]
        widths = list(map(max, widths, chunk_widths))
        packed.extend(map(SEPARATOR.join, chunk))
    line_format = GAP.join(
        f"{{:{'>' if c.right else '<'}{w}}}" for c, w in zip(visible, widths, strict=True)
    )
    for line in packed[not titles :]:
        yield line_format.format(*line.split(SEPARATOR)).rstrip() + "\n"


def _stream_json(values: Iterable[Any], header: Any) -> Iterator[str]:
    outer = "" if header is None else "  "
    pad = outer + "  "
    if header is None:
        opening = "["
    else:
        # the header's object without its closing brace, continued with the field `rows`
        opening = format_document(header, Output.JSON).removesuffix("\n}") + ',\n  "rows": ['
    has_rows = False
    for row in values:
        text = _escape_json(msgspec.json.format(msgspec.json.encode(row), indent=2).decode())
        yield (",\n" if has_rows else f"{opening}\n") + pad + text.replace("\n", f"\n{pad}")
        has_rows = True
    end = "\n" if header is None else "\n}\n"
    yield f"\n{outer}]{end}" if has_rows else f"{opening}]{end}"


def _stream_yaml(values: Iterable[Any], header: Any) -> Iterator[str]:
    if header is not None:
        yield format_document(header, Output.YAML) + "\n"
    has_rows = False
    for row in values:
        if not has_rows and header is not None:
            yield "rows:\n"
        yield format_document([row], Output.YAML) + "\n"
        has_rows = True
    if not has_rows:
        yield "[]\n" if header is None else "rows: []\n"


def render_page(page: Page, output: Output, titles: bool = True) -> Iterator[str]:
    """Yields pieces of text to write one after the other. `titles`: see format_rows()."""
    is_document = output in (Output.JSON, Output.YAML)
    if page.text is not None and not is_document:
        yield page.text(output is Output.WIDE) + ("\n\n" if page.columns else "\n")
    if not page.columns:
        if is_document:
            yield format_document(page.summary, output) + "\n"
    elif isinstance(page.rows, Sequence):
        if text := format_rows(page.rows, page.columns, output, titles):
            yield text + "\n"
    else:
        yield from stream_rows(page.rows, page.columns, output, page.summary, titles)


WATCH_SECONDS: Final = 2.0


def watch(page: Callable[[], str], seconds: float = WATCH_SECONDS) -> None:
    """Shows the page again and again until Ctrl-C: in place on a terminal, otherwise appended."""
    if not sys.stdout.isatty():
        while True:
            print(page(), end="\n\n", flush=True)
            time.sleep(seconds)
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            text = f"{time.strftime('%H:%M:%S')}  every {seconds:g} s, Ctrl-C to quit\n\n{page()}"
            live.update(Text(text, overflow="fold"), refresh=True)
            time.sleep(seconds)
