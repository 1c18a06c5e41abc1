# SPDX-License-Identifier: Apache-2.0
"""The socket hooks: the program, link and cgroup of each, and whether they are pinned."""

from typing import Final

import msgspec

from kbpf.model.config import SocketLb
from kbpf.model.inspection import HookEntry, Inspection, Part
from kbpf.views.page import Column, Kind, Page, same_fields

NEEDS: Final = Part.HOOKS


class ProgramRow(msgspec.Struct, frozen=True):
    """A hook.

    `state`: ``attached``; ``missing``: no link is pinned; ``detached``: its cgroup was removed;
    ``off``: the hook is not needed. A hook is not needed with --socket-lb off, or if it only counts
    and --accounting does not ask for it or the kernel does not support it.

    `cgroup` is "" if its folder is not visible in this mount namespace, and for hooks at a
    tracepoint. `pinned`: the program, apart from its link, is pinned.
    """

    hook: str
    serves: str
    required: bool
    state: str
    program: int | None
    tag: str
    instructions: int | None
    link: int | None
    cgroup: str
    cgroup_id: int | None
    pinned: bool
    tracepoint: str


def build_rows(inspection: Inspection) -> tuple[ProgramRow, ...]:
    """One row per hook, including missing ones."""
    return tuple(
        ProgramRow(
            hook=hook.name,
            serves=hook.purpose,
            state=hook_state(hook, inspection.socket_lb),
            **same_fields(ProgramRow, hook),
        )
        for hook in inspection.hooks
    )


def hook_state(hook: HookEntry, mode: SocketLb) -> str:
    """One of the states of ProgramRow."""
    if hook.link is None:
        return "off" if mode is SocketLb.OFF or hook.only_counts else "missing"
    return "attached" if hook.attached else "detached"


def _format_place(row: ProgramRow) -> str:
    if row.state != "attached":
        return "-"
    if row.tracepoint:
        return f"tracepoint {row.tracepoint}"
    return row.cgroup or f"id {row.cgroup_id}, not visible here"


COLUMNS: Final = (
    Column("HOOK", "hook"),
    Column("STATE", "state"),
    Column("PROGRAM", "program", right=True),
    Column("TAG", "tag"),
    Column("INSTRUCTIONS", "instructions", right=True),
    Column("LINK", "link", right=True),
    Column("PINNED", "pinned"),
    Column("CGROUP", _format_place),
    Column("SERVES", "serves", wide=True),
)


KIND: Final = Kind("ProgramList", ProgramRow, item_name=lambda row: row.hook)


def build_page(inspection: Inspection) -> Page:
    return Page(KIND, build_rows(inspection), COLUMNS)
