# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts use only series, labels and values that an agent exports.

`page` is the metrics page of test_metrics.py, made by the agent's code, with the data plane's
reasons and maps.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import typer
import yaml

from kbpf.cli.app import typer_app
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.model.metrics import CHOICE_COUNTERS, FAILURE_COUNTERS
from kbpf.model.reasons import Reason, Verdict
from kbpf.serve.kbpf_metrics import FAILURES
from tests.support.prometheus import Family
from tests.support.runtime import docs
from tests.values.serve.test_metrics import COUNTS, busy
from tests.values.serve.test_metrics import page as page_of_metrics

FOLDER = Path(__file__).parents[3] / "manifests" / "monitoring"
DOCS = Path(__file__).parents[3] / "docs" / "observe.md"
ADDED = frozenset(("job", "instance", "le"))
"""Labels added by Prometheus, and the label of buckets."""

SELECTOR = re.compile(r"\b([a-z_:]+)\b(?:\{([^}]*)\})?")
OURS = ("kbpf_", "kubeproxy_", "rest_client_", "process_", "up")
MATCHER = re.compile(r'([a-z_]+)(=~|!=|!~|=)"([^"]*)"')
KNOWN_VALUES = {
    "reason": {reason.name.lower() for reason in Reason},
    "verdict": set(Verdict),
    "state": {"on", "off", "failed"},
    "source": {"services", "endpointslices", "nodes", "pods"},
    "map": set(MAPS),
}


FAILED = ("kbpf_service_failures_total", "kbpf_backend_failures_total")
FEW = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
"""A gauge, in spite of its name in kube-proxy: its value is a number of Services."""
COUNTED = ("counter", "histogram", "summary")
OF_FAILURES = {"reason": set(FAILURES)}


class Query(NamedTuple):
    where: str
    text: str


def rules() -> list[dict[str, Any]]:
    read = yaml.safe_load((FOLDER / "rules.yaml").read_text())
    return [rule for group in read["groups"] for rule in group["rules"]]


DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("grafana-*.json"))}


def panels() -> list[dict[str, Any]]:
    return [panel for board in DASHBOARDS.values() for panel in board["panels"]]


def queries() -> Iterator[Query]:
    for rule in rules():
        yield Query(f"alert {rule['alert']}", rule["expr"])
    for name, board in DASHBOARDS.items():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield Query(f"{name}, panel {panel['title']}", target["expr"])
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield Query(f"{name}, variable {variable['name']}", variable["query"])


@pytest.fixture(scope="module")
def page() -> dict[str, Family]:
    return page_of_metrics(proxy_metrics=busy())


def family_of(page: dict[str, Family], name: str) -> Family | None:
    for base in (name, *(name.removesuffix(s) for s in ("_bucket", "_sum", "_count"))):
        if base in page:
            return page[base]
    return None


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: query.where)
def test_a_query_uses_what_is_exported(query: Query, page: dict[str, Family]):
    """Its series, with their labels and values; the labels that it keeps; rates of counters only."""
    assert all(query.text.count(pair[0]) == query.text.count(pair[1]) for pair in ("()", "{}", "[]"))
    named = [row for row in SELECTOR.findall(query.text) if row[0].startswith(OURS)]
    assert named, query.text
    families = {name: family_of(page, name) for name, _ in named if name != "up"}
    assert None not in families.values(), families
    for name, inside in named:
        for label, how, value in MATCHER.findall(inside):
            assert label in ADDED or label in families[name].label_names, f"{name} has no label {label}"
            known = {**KNOWN_VALUES, **OF_FAILURES} if name in FAILED else KNOWN_VALUES
            if label in known and how in ("=", "=~", "!="):
                assert set(value.split("|")) <= known[label], f"{label}={value}"
    labels = ADDED.union(*(family.label_names for family in families.values()))
    for kept in re.findall(r"by \(([^)]*)\)", query.text):
        assert set(re.split(r",\s*", kept)) <= labels, kept
    for name, family in families.items():
        assert (family.kind in ("histogram", "summary")) is name.endswith(("_bucket", "_sum", "_count"))
    counters = {name for name, family in families.items() if family.kind in COUNTED and name != FEW}
    assert counters == families.keys() & re.findall(r"(?:rate|increase)\(([a-z_]+)", query.text)


def test_every_alert_has_a_summary_and_documentation():
    text = DOCS.read_text()
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 8
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["for"]
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        page = f"runbooks/{rule['alert']}.md"
        assert rule["annotations"]["runbook_url"] == f"docs/{page}"
        assert f"[`{rule['alert']}`]({page})" in text


@pytest.mark.parametrize("alert", [rule["alert"] for rule in rules()])
def test_every_runbook_begins_with_a_command_of_kbpf(alert):
    page = f"docs/runbooks/{alert}.md"
    assert (docs.ROOT / page).read_text().startswith(f"# {alert}\n")
    (block,) = docs.blocks(page, "")
    (command,) = block.splitlines()
    name, *words = command.split()
    assert name == "kbpf"
    subcommand: Any = typer.main.get_command(typer_app())
    while hasattr(subcommand, "commands"):
        subcommand = subcommand.commands[words.pop(0)]
    known = {option for parameter in subcommand.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


def test_every_runbook_is_about_an_alert():
    pages = {path.stem for path in (docs.ROOT / "docs" / "runbooks").iterdir()}
    assert pages == {rule["alert"] for rule in rules()}


def test_every_series_is_documented(page: dict[str, Family]):
    text = DOCS.read_text()
    for name in page:
        assert f"`{name}`" in text, name


KNOWN = CHOICE_COUNTERS | FAILURE_COUNTERS


@cache
def default_page() -> dict[str, Family]:
    """The metrics of an agent with the default accounting."""
    counted = msgspec.structs.replace(COUNTS.traffic, counted_fields=KNOWN, latencies=())
    return page_of_metrics(plane=COUNTS._replace(traffic=counted), proxy_metrics=busy())


def needs(text: str, page: dict[str, Family]) -> set[str]:
    """The settings that an agent needs to export all series of this expression."""
    exported, needed = default_page(), set()
    for match in SELECTOR.finditer(text):
        chosen = {label: value for label, _, value in MATCHER.findall(match[2] or "")}
        missing = family_of(page, match[1]) and not family_of(exported, match[1])
        reasons = chosen["reason"].split("|") if "reason" in chosen else FAILURES
        if missing or (match[1] in FAILED and not KNOWN.issuperset(reasons)):
            needed.add("--accounting full")
        if match[1].startswith("kbpf_backend_"):
            needed.add("--metrics-backends")
        if match[1].endswith(("_connect_duration_seconds_bucket", "_round_trip_duration_seconds_bucket")):
            needed.add("--accounting full")
    return needed


def test_panels_that_are_empty_by_default_name_their_setting(page: dict[str, Family]):
    said = {panel["title"]: needs(target["expr"], page) for panel in panels() for target in panel.get("targets", ())}
    for panel in panels():
        for word in said.get(panel["title"], ()):
            assert word in panel["description"], panel["title"]
    assert {title for title, needed in said.items() if needed} == {
        "Bytes of Services",
        "Round trips to backends",
        "Retransmitted segments",
        "Failures of backends",
        "Failures by backend",
        "New connections by backend",
        "Bytes",
        "Connect times",
        "Round-trip times",
    }


def test_no_alert_is_silent_by_default(page: dict[str, Family]):
    assert [rule["alert"] for rule in rules() if needs(rule["expr"], page)] == []


def test_the_scrape_jobs_name_matches_the_alerts():
    """tests/lab/agent/test_observe.py tests the targets of the job."""
    written = yaml.safe_load((FOLDER / "scrape.yaml").read_text())
    (job,) = written["scrape_configs"]
    (down,) = [rule for rule in rules() if rule["alert"] == "KbpfDown"]
    ((label, how, names),) = MATCHER.findall(down["expr"])
    assert (label, how) == ("job", "=~")
    assert job["job_name"] in names.split("|")
    assert all(f"`{name}`" in DOCS.read_text() for name in names.split("|"))
    assert written["rule_files"] == ["rules.yaml"]
