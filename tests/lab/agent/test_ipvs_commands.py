# SPDX-License-Identifier: Apache-2.0
"""The commands that look into a node, on one whose agent is in mode ipvs: each shows what IPVS has,
or says in one line that this mode does not have it.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.features import needs
from tests.support.lab.field import Field, at, split
from tests.support.lab.lab import PATIENCE
from tests.support.table import table

pytestmark = needs("ipvs")


KEPT = (("outside", at("NodePort", 81)), ("a2", at("ClusterIP", 81)))
"""Connections that stay open: client, and the frontend it dials."""


class IpvsField(Field):
    """A field whose agents are in mode ipvs, whatever the suite runs with."""

    def bring_up(self) -> None:
        for agent in self.agents:
            agent.mode = "ipvs"
        super().bring_up()


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with IpvsField(name="ic", pods=(2,)) as made:
        made.create(*made.all_of("81 -> a1\n84 ->"))
        made.settle()
        for client, to in KEPT:
            assert "name" in made[client].tcp(*split(to), keep="kept")
        yield made
        for client, _ in KEPT:
            assert "name" in made[client].ask("talk", keep="kept")


class Row(NamedTuple):
    """A command, its exit code, and patterns that its output has."""

    words: str
    code: int
    shows: str


ABSENT = r"^kbpf: the agent of this node is in mode ipvs, which does not have this \(.*\)[^\n]*\n\Z"
FRONTEND, BACKEND = (
    r"10\.96\.0\.81:80/TCP +ClusterIP +1/1 +2 +- +-",
    r"10\.244\.1\.2:8080 .* ready +100\.0% +2 +2 +- +- +-",
)
ROWS = table(
    Row,
    rf"""
inspect status                     | 0 | mode +ipvs
inspect services                   | 0 | 10\.96\.0\.81:80 ; 10\.96\.0\.84:80
inspect service 10.96.0.81         | 0 | {FRONTEND} ; {BACKEND} ; not counted in mode ipvs:
top --once                         | 0 | default/web-81 +0 +- +- +2  ; mode ipvs counts connections and bytes only
trace host 10.96.0.81:80           | 0 | IPVS
trace outside 198.18.0.1:30081     | 0 | IPVS
trace host 10.96.0.84:80           | 0 | IPVS ; no endpoints
trace --confirm host 10.96.0.81:80 | 1 | IPVS cannot be tried without packets: use --connect
trace --connect host 10.96.0.81:80 | 0 | connect
verify                             | 1 | ^kbpf: .* in mode ipvs, which `kbpf verify` does not know .*\n\Z
inspect failures                   | 1 | {ABSENT}
monitor --for 1s                   | 1 | {ABSENT}
top --once --by clients            | 1 | {ABSENT}
page                               | 0 | 10\.96\.0\.81 ; </html>
""",
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.words)
def test_commands(field: Field, row: Row):
    done = field.agent.kbpf(*row.words.split())
    said = done.stdout + done.stderr
    assert done.returncode == row.code, (done.stdout, done.stderr)
    missing = [pattern for pattern in row.shows.split(" ; ") if not re.search(pattern, said, re.MULTILINE)]
    assert missing == [], said


def test_sysdump_has_what_the_mode_has(field: Field, tmp_path):
    path = tmp_path / "dump.tar.gz"
    done = field.agent.kbpf("sysdump", str(path), "--time-limit", f"{2 * PATIENCE:.0f}s")
    assert done.returncode == 0, done.stderr
    with tarfile.open(path) as tar:
        names = {member.name.partition("/")[2] for member in tar}
        index_file = next(member for member in tar if member.name.endswith("/index.json"))
        index = json.load(tar.extractfile(index_file) or pytest.fail("index.json is no file"))
    assert {"inspect/status.json", "inspect/services.json"} <= names
    own = ("inspect/", "check", "verify", "page", "version")  # not what the machine lacks
    errors = {item["path"]: item["error"] for item in index["items"] if item["error"] and item["path"].startswith(own)}
    assert errors != {}
    assert {path: text for path, text in errors.items() if "mode ipvs" not in text} == {}
