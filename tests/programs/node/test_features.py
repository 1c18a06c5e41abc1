# SPDX-License-Identifier: Apache-2.0
"""The tests' table of kernel features is right, and `kbpf check` agrees with it."""

import re
from pathlib import Path

import pytest

from kbpf.checks import bpf as bpf_checks
from kbpf.checks import ipvs as ipvs_checks
from kbpf.checks import packet_path
from kbpf.checks.row import Check, CheckRow
from kbpf.cli.check import compute_verdict
from tests.support.features import FEATURES, lacking

SETTINGS = {
    Check.SNAT_PORTS,
    Check.IP_FORWARDING,
    *map(Check.IP_FORWARDING.of, ("IPv4", "IPv6")),
    Check.FORWARDING_MODE,
    Check.FORWARD_CHAINS,
    Check.PRE_DNAT_RULES,
    Check.RP_FILTER,
}
"""Checks of the node, not of its kernel."""
NOT_OF_THE_KERNEL = SETTINGS | {Check.COMPILER}
"""The compiler is installed or not."""


@pytest.mark.parametrize("name", FEATURES)
def test_feature_table_matches_this_kernel(name: str):
    assert bool(FEATURES[name].tried()) is not bool(lacking(name))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> tuple[CheckRow, ...]:
    for name in ("sctp", "conntrack_nat"):
        FEATURES[name].tried()  # loads the modules, which `kbpf check` does not
    pins, cache = Path("/sys/fs/bpf/kbpf-no-pins"), tmp_path_factory.mktemp("cache")
    return (*bpf_checks.rows(None, pins, cache), *packet_path.check_packet_path(pins))


def test_check_rows_report_exactly_the_lacking_features(rows: tuple[CheckRow, ...]):
    about_kernel = [row for row in rows if row.name not in NOT_OF_THE_KERNEL]
    assert {row.name for row in about_kernel if row.result == "unknown"} == set()
    lacks = {feature.check for name, feature in FEATURES.items() if lacking(name)} - {""}
    assert {row.name for row in about_kernel if row.result == "no"} == lacks
    verdict = compute_verdict(rows)
    assert (verdict.usable, verdict.missing) == (True, ())
    assert (verdict.packet_path, verdict.packets_missing) == (True, ())


def test_check_reports_whether_mode_ipvs_is_usable():
    """The check does not load IPVS on every kernel, so the test of the feature loads it first."""
    rows = tuple(ipvs_checks.rows())
    made = compute_verdict([CheckRow(Check.BPF_SYSCALL, "no", "", needed=True), *rows])
    lacks = bool(lacking("ipvs"))
    assert made.mode == ("none" if lacks else "ipvs")
    assert made.usable is not lacks
    assert ("IPVS" in made.ipvs_missing) is lacks
    assert [row.result for row in rows if row.name == Check.NF_TABLES] == ["yes"]
    assert [row.name for row in rows if row.result == "no" and not row.advice] == []


def test_lacking_features_have_advice(rows: tuple[CheckRow, ...]):
    silent = NOT_OF_THE_KERNEL | {Check.SCTP}
    lacks = [row for row in rows if row.result == "no" and row.name not in silent]
    assert [row.name for row in lacks if not re.search("Linux|CONFIG_", row.advice)] == []
