# SPDX-License-Identifier: Apache-2.0
"""Lists that come page by page."""

from collections.abc import Callable
from typing import Final

import msgspec

from kbpf.errors import SourceError
from kbpf.source.api.resource import html_page_error, is_html
from kbpf.source.decode import wire
from kbpf.source.decode.fields import format_json_error

COUNT_ITEMS_FROM_BYTES: Final = 1 << 20
"""The items of a page larger than this many bytes are counted before they are decoded."""
_PAGE_DECODER: Final = msgspec.json.Decoder(wire.ListPage)


def process_pages(process_page: Callable[[str], wire.ListMeta]) -> wire.ListMeta:
    """Calls `process_page` with the token of each page in turn, which returns the page's metadata;
    returns that of the last one. Raises SourceError if the server repeats a page.
    """
    token = ""
    while True:
        meta = process_page(token)
        previous, token = token, meta.continue_ or ""
        if not token:
            return meta
        if token == previous:
            raise SourceError("the server repeats the same page")


def decode_page(body: bytearray) -> wire.ListPage:
    """Raises SourceError."""
    try:
        if len(body) > COUNT_ITEMS_FROM_BYTES:
            wire.check_items(body)
        return _PAGE_DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if is_html(body):
            raise html_page_error() from error
        hint = "is this a Kubernetes API server?"
        raise SourceError(
            f"the response is not a list: {format_json_error(error)}", hint=hint
        ) from error
