"""The bounded part of the campaign `texts`, whose rules are in tests/fuzz/texts.py."""

import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.texts import TARGETS, run


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_whatever_comes_is_read_or_refused(
    target: Callable[[random.Random, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "kbpf.source")
    run(target, 1, 300)
