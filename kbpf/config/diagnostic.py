# SPDX-License-Identifier: Apache-2.0
"""Remarks about the settings that are not errors, one line each."""

from typing import NamedTuple


class Diagnostic(NamedTuple):
    """A line for the log. `is_warning`: the setting is probably not what the operator wanted.
    `event`: the reason of the Event with this text that the agent sends when it starts; "" for
    none.
    """

    text: str
    is_warning: bool = False
    event: str = ""
