# SPDX-License-Identifier: Apache-2.0
"""Renders rows and pages as a table, JSON or YAML, with the same data in each format.

Output is never truncated. Only on a terminal is it coloured and folded (terminal.py). JSON
and YAML do not go through rich, which would wrap lines. Unprintable characters are escaped in the
way of each format, because names and messages from objects must not be able to control the
terminal.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, Final

import msgspec
import typer

from kbpf.cli import terminal
from kbpf.cli.options import Output
from kbpf.errors import escape_unprintable
from kbpf.views.page import API_VERSION, Page, stream_table


def format_document(value: Any, output: Output) -> str:
    """A value as JSON or YAML, with fields in the order of their declaration."""
    plain = msgspec.to_builtins(value)
    if output is Output.YAML:
        from kbpf import bounded_yaml

        def dump(allow_unicode: bool) -> str:
            return bounded_yaml.dump(plain, default_flow_style=False, allow_unicode=allow_unicode, width=1 << 20)

        # Readable text stays readable; with one unprintable character everything is escaped, since
        # the library cannot escape only that.
        text = dump(allow_unicode=True)
        if not all(map(str.isprintable, text.split("\n"))):
            text = dump(allow_unicode=False)
        return text.rstrip("\n")
    return escape_json(json.dumps(plain, indent=2, ensure_ascii=False))


def escape_json(text: str) -> str:
    """Escapes unprintable characters in JSON text, which does not change its value: they can only
    occur in strings. json.dumps() itself escapes only the control characters below U+0020.
    """
    if all(map(str.isprintable, text.split("\n"))):
        return text
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


def render_page(page: Page, output: Output, titles: bool = True, limit: int = 0) -> Iterator[str]:
    """Yields pieces of text to write one after the other, because a list may have a hundred
    thousand rows: JSON and YAML are written row by row; a table keeps its cells, packed, until the
    widths of its columns are known. `titles`: whether the table has the line with its titles.
    `limit`: the width of the terminal, which tables try to keep to; 0: none.
    """
    if output in (Output.JSON, Output.YAML):
        yield from _render_document(page, output)
    elif output == Output.NAME:
        yield from _render_names(page)
    else:
        if page.text is not None:
            yield page.text(output == Output.WIDE) + ("\n\n" if page.columns else "\n")
        if page.columns:
            wide = output == Output.WIDE
            yield from stream_table(page.rows, page.columns, wide, titles, limit)


def show(page: Page, output: Output, titles: bool = True) -> None:
    """Prints the page to stdout, and its notes to stderr. Raises typer.Exit(1) if it is not ok."""
    texts = render_page(page, output, titles, terminal.width())
    coloured = output.is_text and terminal.uses_colour()
    sys.stdout.writelines(map(terminal.colour, texts) if coloured else texts)
    sys.stdout.flush()
    if page.empty and output.is_text:
        print(page.empty, file=sys.stderr)
    for note in filter(None, page.notes):
        print(f"kbpf: {note}", file=sys.stderr)
    if not page.ok:
        raise typer.Exit(1)


def show_or_watch(read: Callable[[], Page], output: Output, repeat: bool, titles: bool) -> None:
    """Prints the page that `read` returns; with `repeat` again and again until Ctrl-C."""
    if repeat:
        if not output.is_text:
            raise typer.BadParameter("it requires -o table or wide", param_hint="--watch")
        limit = terminal.width
        watch(lambda: "".join(render_page(read(), output, titles, limit())).rstrip("\n"))
    show(read(), output, titles)


def _render_document(page: Page, output: Output) -> Iterator[str]:
    summary = {} if page.summary is None else msgspec.to_builtins(page.summary)
    fields = {"apiVersion": API_VERSION, "kind": page.kind.name, **summary}
    if page.kind.item is None:
        yield format_document(fields, output) + "\n"
    elif output is Output.JSON:
        yield from _stream_json(fields, page.rows)
    else:
        yield from _stream_yaml(fields, page.rows)


def _stream_json(fields: dict[str, Any], items: Iterable[Any]) -> Iterator[str]:
    # the object without its closing brace, continued with the field `items`
    yield format_document(fields, Output.JSON).removesuffix("\n}") + ',\n  "items": ['
    has_items = False
    for item in items:
        text = escape_json(msgspec.json.format(msgspec.json.encode(item), indent=2).decode())
        yield (",\n    " if has_items else "\n    ") + text.replace("\n", "\n    ")
        has_items = True
    yield "\n  ]\n}\n" if has_items else "]\n}\n"


def _stream_yaml(fields: dict[str, Any], items: Iterable[Any]) -> Iterator[str]:
    yield format_document(fields, Output.YAML) + "\n"
    has_items = False
    for item in items:
        yield ("" if has_items else "items:\n") + format_document([item], Output.YAML) + "\n"
        has_items = True
    if not has_items:
        yield "items: []\n"


def _render_names(page: Page) -> Iterator[str]:
    """The name of each item. The ports of a Service have one name, which is printed once."""
    if page.kind.item_name is None:
        raise typer.BadParameter(f"the items of {page.kind.name} have no names", param_hint="-o")
    for name, _ in groupby(map(page.kind.item_name, page.rows)):
        if name:
            yield escape_unprintable(name) + "\n"


WATCH_SECONDS: Final = 2.0


def watch(page: Callable[[], str], seconds: float = WATCH_SECONDS, takes_time: bool = False) -> None:
    """Shows the page again and again until Ctrl-C: in place on a terminal, otherwise appended.
    `takes_time`: page() itself takes these seconds.
    """
    pause = 0.0 if takes_time else seconds
    if not sys.stdout.isatty():
        while True:
            print(page(), end="\n\n", flush=True)
            time.sleep(pause)
    from rich.live import Live
    from rich.text import Text

    # The page asks sys.stdout what it can show, and rich's stand-in has no encoding.
    with Live(screen=True, auto_refresh=False, redirect_stdout=False) as live:
        while True:
            text = f"{time.strftime('%H:%M:%S')}  every {seconds:g} s, Ctrl-C to quit\n\n{page()}"
            coloured = terminal.colour(text) if terminal.uses_colour() else text
            live.update(Text.from_ansi(coloured, overflow="fold"), refresh=True)
            time.sleep(pause)
