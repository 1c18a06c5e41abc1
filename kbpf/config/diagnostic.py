"""What reading the settings has to say to the operator, though nothing is wrong: one line each."""

from typing import NamedTuple


class Diagnostic(NamedTuple):
    """A line for the log. `is_warning`: somebody probably wanted something else. `event`: the
    reason of the Event with this text that the agent sends when it starts; "" for none.
    """

    text: str
    is_warning: bool = False
    event: str = ""
