"""What reading the settings has to say to the operator, though nothing is wrong: one line each."""

from typing import NamedTuple


class Note(NamedTuple):
    """A line for the log. `is_warning`: somebody probably wanted something else."""

    text: str
    is_warning: bool = False
