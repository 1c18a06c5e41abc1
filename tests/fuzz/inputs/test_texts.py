# SPDX-License-Identifier: Apache-2.0
"""A short, fixed run of the campaign `texts`; its rules are in tests/fuzz/inputs/texts.py."""

import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kbpf.config import load
from kbpf.errors import ConfigErrors
from tests.fuzz.inputs.texts import TARGETS, run


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_mutated_text_is_parsed_or_refused(
    target: Callable[[random.Random, Path], None], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL, "kbpf.source")
    run(target, 1, 300)


def test_number_of_5000_digits_is_an_error_that_names_the_field():
    head = "apiVersion: kbpf.io/v1alpha1\nkind: KbpfConfiguration\n"
    text = f"{head}packetPath: {{masqueradePorts: 1024-{'9' * 5000}}}\n"
    with pytest.raises(ConfigErrors, match=r"KbpfConfiguration.packetPath.masqueradePorts"):
        load.load({}, {}, text.encode())
