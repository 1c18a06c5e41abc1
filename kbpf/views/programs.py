# SPDX-License-Identifier: Apache-2.0
"""The socket hooks: the program, link and cgroup of each, and whether they are pinned."""

from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.hooks import HookFacts
from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.model.config import SocketLb
from kbpf.views.columns import Column, format_bool, format_number

NEEDS: Final = Part.HOOKS


class ProgramRow(msgspec.Struct, frozen=True):
    """A hook.

    `state`: ``attached``; ``missing``: no link is pinned; ``detached``: its cgroup was removed;
    ``off``: the hook is not needed. A hook is not needed with --socket-lb off, or if it only counts
    and --accounting is not full or the kernel does not support it.

    `cgroup` is "" if its folder is not visible in this mount namespace. `pinned`: the program,
    apart from its link, is pinned.
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


def build_rows(snapshot: Snapshot) -> tuple[ProgramRow, ...]:
    """One row per hook, including missing ones."""
    return tuple(_build_row(facts, snapshot.socket_lb) for facts in snapshot.hooks)


def hook_state(facts: HookFacts, mode: SocketLb) -> str:
    """One of the states of ProgramRow."""
    if facts.link is None:
        return "off" if mode is SocketLb.OFF or facts.hook.only_counts else "missing"
    return "attached" if facts.attached else "detached"


def _build_row(facts: HookFacts, mode: SocketLb) -> ProgramRow:
    link, program = facts.link, facts.program
    return ProgramRow(
        hook=facts.hook.name,
        serves=facts.hook.purpose,
        required=facts.hook.required,
        state=hook_state(facts, mode),
        program=link.program_id if link else None,
        tag=program.tag if program else "",
        instructions=program.insns if program else None,
        link=link.id if link else None,
        cgroup=str(facts.cgroup) if facts.cgroup else "",
        cgroup_id=link.cgroup_id if link else None,
        pinned=facts.program_pinned,
    )


def _format_cgroup(row: ProgramRow) -> str:
    if row.state != "attached":
        return "-"
    return row.cgroup or f"id {row.cgroup_id}, not visible here"


COLUMNS: Final = (
    Column("HOOK", lambda p: p.hook),
    Column("STATE", lambda p: p.state),
    Column("PROGRAM", lambda p: format_number(p.program), right=True),
    Column("TAG", lambda p: p.tag or "-"),
    Column("INSTRUCTIONS", lambda p: format_number(p.instructions), right=True),
    Column("LINK", lambda p: format_number(p.link), right=True),
    Column("PINNED", lambda p: format_bool(p.pinned)),
    Column("CGROUP", _format_cgroup),
    Column("SERVES", lambda p: p.serves, wide=True),
)
