# SPDX-License-Identifier: Apache-2.0
"""Fixtures of commands on a real data plane."""

import pytest

from kbpf.cli import app
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.model.status import encode
from tests.programs.node.commands.world import WORLD, Run, agent_status
from tests.support.plane import Site


@pytest.fixture
def written(site: Site) -> BpfPlane:
    """A data plane to which WORLD was applied."""
    opened = site.start(WORLD)
    opened.write_status(encode(agent_status()))
    return opened


@pytest.fixture
def run(site: Site, capsys) -> Run:
    """Runs a command on the site's pin folder; returns exit code, stdout and stderr. `more`: words that contain
    blanks.
    """

    def call(line: str, *more: str) -> tuple[int, str, str]:
        code = app.call([*line.split(), *more, "--pin-dir", str(site.pins)])
        return code, *capsys.readouterr()

    return call
