# SPDX-License-Identifier: Apache-2.0
"""Lists that come page by page."""

import time
from collections.abc import Callable
from typing import Final

import msgspec

from kbpf.errors import SourceError
from kbpf.source.api.credentials import MAX_PAGES_BYTES, Cluster
from kbpf.source.api.resource import HttpStatusError, Resource, html_page_error, is_html, make_status_error
from kbpf.source.api.transport import ApiConnection
from kbpf.source.decode import wire
from kbpf.source.decode.fields import format_json_error

COUNT_ITEMS_FROM_BYTES: Final = 1 << 20
"""The items of a page larger than this many bytes are counted before they are decoded."""
MAX_LIST_S: Final = 120.0
PAGE_TIMEOUT_S: Final = 20.0
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
        raise SourceError(f"the response is not a list: {format_json_error(error)}", hint=hint) from error


def list_once(
    connection: ApiConnection, cluster: Cluster, resource: Resource, handle: Callable[[msgspec.Raw], None]
) -> None:
    """Calls `handle` with each object, for a command that needs them once. Raises SourceError."""
    deadline = time.monotonic() + MAX_LIST_S

    def list_page(token: str) -> wire.ListMeta:
        if time.monotonic() > deadline:
            raise SourceError(f"the {resource.name} are not complete after {MAX_LIST_S:.0f} s", cluster.url)
        response = connection.request(resource.page_query(token), accept=resource.accept(False))
        if response.status != 200:
            raise make_status_error(
                resource, response.status, response.reason, response.read_error_body(), cluster.access.where
            )
        what = f"a page of {resource.name}"
        page = decode_page(response.read(MAX_PAGES_BYTES, PAGE_TIMEOUT_S, what))
        for raw in page.items or ():
            handle(raw)
        return page.metadata

    try:
        process_pages(list_page)
    except HttpStatusError as error:
        if "field label not supported" not in error.server_message:
            raise
        resource = resource.without_field_selector()
        process_pages(list_page)
