# SPDX-License-Identifier: Apache-2.0
"""The table of the agent's states."""

import pytest

from kbpf.agent.states import TRANSITIONS, Outcome, State

AFTER_AN_APPLY = {Outcome.APPLIED, Outcome.APPLIED_PARTLY, Outcome.FAILED}


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_properties_agree_with_the_table(state: State):
    """Only listing leads out of WAITING, and only an apply out of the others."""
    expected = {Outcome.LISTED} if state is State.WAITING else AFTER_AN_APPLY
    assert TRANSITIONS[state].keys() == expected
    for outcome, after in TRANSITIONS[state].items():
        succeeded = outcome in (Outcome.APPLIED, Outcome.APPLIED_PARTLY)
        assert after.is_retrying is (outcome is Outcome.FAILED)
        assert after.last_apply_succeeded is succeeded
        assert after.has_applied is (state.has_applied or succeeded)
        assert after.is_complete is (state.is_complete or outcome is Outcome.APPLIED)
