# SPDX-License-Identifier: Apache-2.0
"""README.md, CHANGELOG.md, news/ and docs/: everything they name exists, and a test runs each
command (tests/lab/cluster/test_docs.py runs those that no other test does).
"""

import json
import os
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from kbpf.config.settings import SETTINGS_BY_FLAG
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.model.reasons import Reason, Verdict
from tests.support.cluster import kubeadm
from tests.support.cluster.kubectl import MANIFESTS
from tests.support.features import FEATURES
from tests.support.runtime import docs
from tests.support.table import each_pair, pairs

ROOT = docs.ROOT
NEWS = tuple(sorted(f"news/{path.name}" for path in (docs.ROOT / "news").glob("*.md")))
PAGES = (*docs.PAGES, "CHANGELOG.md", *NEWS)
OTHERS = pairs("""\
flanneld → --ip-masq-fully-random-disable
helm → --take-ownership --set
kubeadm → --skip-phases --patches
kubectl → --to-revision --context --cluster --user --as
buildah → --tag --build-arg --platform
pip → --require-hashes
pytest → --update-golden
az → --network-plugin --kube-proxy-config
tools/same.py → --only --scale
everybody → --help
""")
"""Options of other programs."""
BLOCKS = pairs("""\
README.md: make demo → tests/lab/cluster/test_docs.py
README.md: kbpf run --source → tests/lab/cluster/test_docs.py
README.md: kbpf inspect services → tests/lab/cluster/test_docs.py
docs/clusters.md: → tests/lab/cluster/test_install_doc.py
docs/configuration.md: kbpf run --config → tests/lab/cluster/test_docs.py
docs/kernels.md: kbpf check → tests/lab/cluster/test_docs.py
docs/install.md: → tests/lab/cluster/test_install_doc.py
docs/migration.md: → tests/lab/cluster/test_drop_in.py
docs/migration.md: overlays/side-by-side → tests/lab/cluster/test_side_by_side.py
docs/troubleshoot.md: → tests/lab/cluster/test_docs.py
""")
"""A page and a text of a block, no text: every block of the page → the test that runs the block."""


@pytest.mark.parametrize("page", PAGES)
def test_every_shell_block_is_run_by_a_test(page):
    tests = {where.partition(":")[2].strip(): test for where, test in BLOCKS if where.startswith(f"{page}:")}
    met = set()
    for block in docs.blocks(page):
        found = {marker for marker in tests if marker in block}
        assert found, block
        met |= found
    assert met == tests.keys()
    for test in tests.values():
        assert Path(page).name in (ROOT / test).read_text(), f"{test} does not read {page}"


@pytest.mark.parametrize("page", PAGES)
def test_yaml_and_json_blocks_can_be_parsed(page):
    for kind, load in (("yaml", yaml.safe_load_all), ("json", lambda text: [json.loads(text)])):
        for block in docs.blocks(page, kind):
            assert all(isinstance(each, dict) for each in load(block)), block
    assert docs.blocks(page, "text") == [], "commands are blocks of kind sh, which a test runs"


KUBECTL = """\
#!/bin/sh
case "$*" in
*"get pods"*) printf 'pod/ill\\npod/well\\n' ;;
*"exec pod/ill -- kbpf inspect status"*) echo "ill is not well"; exit 1 ;;
*cleanup*) echo "$*" >>calls ;;
esac
"""
"""A fake kubectl with two nodes; kbpf is not healthy on one of them."""
TAKE_OVER = [(page, block) for page in docs.PAGES for block in docs.blocks(page) if "cleanup --kube-proxy" in block]


def run_block(block: str, folder: Path, kubectl: str) -> "subprocess.CompletedProcess[str]":
    """Runs a block of a page in an ordinary shell, which continues after a failed command."""
    (folder / "kubectl").write_text(kubectl)
    (folder / "kubectl").chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", block], capture_output=True, text=True, check=False, cwd=folder, env=environ)


def test_kube_proxys_rules_stay_on_a_node_where_kbpf_is_unhealthy(tmp_path):
    ((page, block),) = TAKE_OVER
    assert page == "docs/migration.md"
    assert "ill is not well" in run_block(block, tmp_path, KUBECTL).stdout
    calls = (tmp_path / "calls").read_text()
    assert calls == "-n kube-system exec pod/well -- kbpf cleanup --kube-proxy\n"


CONFIG_MAPS = """\
#!/bin/sh
echo "$*" >>calls
case "$*" in
*jsonpath*) cat before ;;
*"get configmap"*) cat map.yaml ;;
*replace*) cat >replaced.yaml ;;
esac
"""
"""A fake kubectl whose ConfigMap kube-proxy is map.yaml."""
BIT = docs.section("docs/migration.md", "## Back to kube-proxy")[0]


def change_bit(folder: Path, config: str) -> "subprocess.CompletedProcess[str]":
    """Runs the block that changes kbpf's mark bit, with this config.conf."""
    (folder / "before").write_text(config)
    made = {"kind": "ConfigMap", "data": {"config.conf": config}}
    (folder / "map.yaml").write_text(yaml.safe_dump(made, default_style="|"))
    return run_block(BIT, folder, CONFIG_MAPS)


def shipped() -> dict[str, str]:
    """Every config.conf in manifests/, by its file."""
    made = {}
    for path in sorted(MANIFESTS.rglob("*")):
        if path.name == "config.conf":
            made[str(path.relative_to(MANIFESTS))] = path.read_text()
        elif path.match("chart/values*.yaml"):
            files = yaml.safe_load(path.read_text())["config"].get("files")
            made |= {path.name: files["config.conf"]} if files else {}
    assert len(made) == 4
    return made


@pytest.mark.parametrize("name", [*shipped(), "kubeadm's own"])
def test_the_documented_block_changes_the_bit_in_each_config(name, tmp_path):
    config = (shipped() | {"kubeadm's own": kubeadm.config("10.244.0.0/16")})[name]
    done = change_bit(tmp_path, config)
    assert done.returncode == 0, done.stderr
    map_ = yaml.safe_load((tmp_path / "replaced.yaml").read_text())
    before, after = (yaml.safe_load(text) for text in (config, map_["data"]["config.conf"]))
    for mode in ("iptables", "nftables"):
        assert before[mode].pop("masqueradeBit") is None
        assert after[mode].pop("masqueradeBit") == 13
    assert before == after
    assert "rollout restart" in (tmp_path / "calls").read_text()


def test_the_documented_block_fails_without_a_bit_to_change(tmp_path):
    """The block fails and changes nothing."""
    done = change_bit(tmp_path, "kind: KubeProxyConfiguration\n")
    assert done.returncode == 1
    assert "has no masqueradeBit" in done.stderr
    assert not (tmp_path / "replaced.yaml").exists()
    assert "rollout" not in (tmp_path / "calls").read_text()


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes for the headings."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_link_targets_exist(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_every_page_is_listed():
    """In docs/README.md, which says who reads what, and which README.md names."""
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()
    assert "(../docs/security.md)" in (ROOT / ".github/SECURITY.md").read_text()
    text = (ROOT / "docs" / "README.md").read_text()
    pages = [page for page in docs.PAGES[1:] if not page.startswith("docs/runbooks/")]
    pages.remove("docs/README.md")
    assert [page for page in pages if f"({page.removeprefix('docs/')})" not in text] == []


def test_contributing_names_existing_files_and_tables():
    """Paths are below kbpf/ or the root; names in capitals are in the code."""
    spans = docs.spans("docs/contributing.md")
    paths = [span for span in spans if re.fullmatch(r"[\w-]+/[\w./-]+", span)]
    assert len(paths) > 40
    assert [p for p in paths if not any((top / p).exists() for top in (ROOT, ROOT / "kbpf"))] == []
    files = [path for top in ("kbpf", "tests") for path in (ROOT / top).rglob("*.py")]
    known = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", "\n".join(path.read_text() for path in files)))
    assert {span for span in spans if re.fullmatch(r"[A-Z][A-Z_]{3,}", span)} <= known


FILE = re.compile(r"(?:tests|manifests|kbpf|benchmarks|vagrant|tools|docs)/[\w./{},*-]*\w|\btest_\w+\.py")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    for span in docs.spans(page):
        if not FILE.fullmatch(span):
            continue
        where = [ROOT] if "/" in span else [ROOT / "tests" / "lab", ROOT / "tests" / "programs"]
        names = re.sub(r"\{[^}]*\}", "*", span)
        pattern = names if "/" in span else f"**/{names}"
        assert any(list(folder.glob(pattern)) for folder in where), span


@cache
def all_tests() -> set[str]:
    """The names of all tests, alone and as FILE::NAME."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)
        found |= {*names, *(f"{path.relative_to(ROOT)}::{name}" for name in names)}
    return found


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page):
    named = [span for span in docs.spans(page) if re.fullmatch(r"(tests/[\w/]+\.py::)?test_\w+", span)]
    assert [name for name in named if name not in all_tests()] == []


PROMISES = ("can and cannot do", "What each right is for", "What is not defended")


def test_every_promise_of_the_security_page_names_a_test():
    sections = re.split(r"^## ", (ROOT / "docs/security.md").read_text(), flags=re.M)[1:]
    chosen = [text for text in sections if any(p in text.splitlines()[0] for p in PROMISES)]
    assert len(chosen) == 8
    for section in chosen:
        promises = re.split(r"^- ", section, flags=re.M)[1:]
        assert promises
        assert [each for each in promises if "`tests/" not in each] == []


def options() -> set[str]:
    """All options of kbpf: of `run` from its table, of other commands and of the plugin of kubectl
    from their declarations, and those that typer adds.
    """
    files = (*(ROOT / "kbpf" / "cli").glob("*.py"), ROOT / "kubectl" / "kubectl-kbpf")
    declared = "".join(path.read_text() for path in files)
    completion = {"--install-completion", "--show-completion"}
    return {*SETTINGS_BY_FLAG, *completion, *re.findall(r"--[a-z][a-z0-9-]+", declared)}


@pytest.mark.parametrize("page", PAGES)
def test_named_options_exist(page):
    """`--max-...` and `--conntrack-*` stand for all options with that prefix."""
    known = options() | {option for _, others in OTHERS for option in others.split()}
    for span in docs.spans(page):
        if span.startswith(("kbpf ", "--")):
            for option, more in re.findall(r"(?<![\w-])(--[a-z0-9-]+)(\*|\.\.\.)?", span):
                assert any(each == option or (more and each.startswith(option)) for each in known)


def test_kernels_doc_lists_all_missing_features():
    """docs/kernels.md lists the features of tests/support/features.py that operators can see."""
    text = (ROOT / "docs" / "kernels.md").read_text().replace("`", "")
    brought, lacked = (
        {row.split("|")[1].strip(): row for row in part.splitlines() if row.startswith("|")}
        for part in text.split("## Tested kernels")
    )
    for feature in FEATURES.values():
        if feature.check and feature.since > (0, 0):
            # Several rows may be about one version; the dictionary has its last one.
            row = brought[".".join(map(str, feature.since))]
            assert re.sub(r"^TCX.*", "TCX", feature.what) in row, feature
        for release in feature.unbuilt:
            assert feature.what.split()[0] in lacked[".".join(map(str, release))], feature


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


class MapRow(NamedTuple):
    """A row of the table of shared maps: which clients can fill the maps, and the consequences."""

    maps: tuple[str, ...]
    filled_by: str
    then: str


def map_rows() -> list[MapRow]:
    """The rows of the table, without the one about memory, which names no map."""
    text = (ROOT / "docs" / "limits.md").read_text().partition("## Shared maps")[2]
    rows = [cells(row) for row in text.splitlines() if row.startswith("| `")]
    return [MapRow(tuple(re.findall(r"`(\w+)`", row[0])), *row[1:]) for row in rows if row[0].endswith("`")]


def maps_in_c() -> set[str]:
    table = r"^BPF_(?:F_)?TABLE\((?:[^,;]+,){3} (\w+)|^BPF_SK_STORAGE\((\w+)"
    sources = [path.read_text() for path in (ROOT / "kbpf" / "bpf").rglob("*.[ch]")]
    found = [match for text in sources for match in re.findall(table, text, re.MULTILINE)]
    return {table or storage for table, storage in found}


def test_each_map_has_one_row_about_its_limit():
    in_c = maps_in_c()
    assert len(in_c) > 30
    assert Counter(name for row in map_rows() for name in row.maps) == Counter(set(MAPS) | in_c)


@pytest.mark.parametrize("row", map_rows(), ids=lambda row: row.maps[0])
def test_each_map_that_clients_can_fill_names_a_test(row: MapRow):
    """Maps that no client can fill need no test."""
    named = re.findall(r"`(test_\w+)`", row.then)
    assert named or row.filled_by.startswith("no client")


def test_the_table_of_verdicts_has_all_reasons():
    """A note is described below the table, or next to the verdict that it accompanies."""
    section = (ROOT / "docs/design/sets.md").read_text().partition("\n## Verdicts\n")[2]
    section = section.partition("\n## ")[0]
    rows = [cells(line) for line in section.splitlines() if line.startswith("| ")][1:]
    verdicts = {
        name: re.split(r"\W", verdict)[0]
        for verdict, _, counted_as in rows
        for name in re.findall(r"`([A-Z_]+)`", counted_as)
    }
    notes = {reason.name for reason in Reason if reason.verdict is Verdict.NOTE}
    assert {name: verdict for name, verdict in verdicts.items() if name not in notes} == {
        reason.name: reason.verdict for reason in Reason if reason.name not in notes
    }
    assert notes <= set(re.findall(r"`([A-Z_]+)`", section))


DESIGN = [page for page in PAGES if page.startswith("docs/design/")]


def test_functions_that_the_design_pages_name_exist():
    code = [path for path in (ROOT / "kbpf").rglob("*") if path.suffix in (".py", ".c", ".h")]
    words = set(re.findall(r"\w+", " ".join(path.read_text() for path in code)))
    named = [re.fullmatch(r"([\w.]+)\(\)", span) for page in DESIGN for span in docs.spans(page)]
    assert {name for match in named if match for name in match[1].split(".")} <= words


def test_the_table_of_threads_is_complete():
    """The threads of the watches are named after their resource, those of namespaces by number."""
    text = (ROOT / "docs/design/architecture.md").read_text().partition("\n## Threads\n")[2]
    rows = [cells(line) for line in text.partition("\n## ")[0].splitlines() if line[:3] == "| `"]
    listed = {name for row in rows for name in re.findall(r"`([\w*-]+)`", row[0])}
    code = " ".join(path.read_text() for path in (ROOT / "kbpf").rglob("*.py"))
    started = set(re.findall(r'(?:threads\.start|SupervisedThread)\(\s*"([\w-]+)"', code))
    assert listed - started == {"services", "endpointslices", "nodes", "pods", "netns-*"}
    assert started <= listed


# ---- figures -------------------------------------------------------------------------------------


def tables(page: str) -> list[list[list[str]]]:
    """All tables of a page as rows of cells, without the line below the heading."""
    found = re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE)
    return [[cells(row) for row in table.splitlines() if "---" not in row] for table in found]


@each_pair(
    "named, where",
    """\
short connections to a ClusterIP → kbpf |: short connections
short connections to a NodePort → kbpf `stack` |: short connections
requests on a kept connection to a NodePort → kbpf `stack` |: requests
""",
)
def test_readme_has_the_measured_figures(named, where):
    """The first words of a row of README.md → a text in the heading of its table in performance.md: the first words of
    the rows there.
    """
    heading, _, measured = where.partition(": ")
    (readme,) = [row for table in tables("README.md") for row in table if row[0].startswith(named)]
    (table,) = [t for t in tables("docs/performance.md") if heading in " | ".join(t[0])]
    columns = [
        next(at for at, name in enumerate(table[0]) if name.startswith(word))
        for word in ("iptables", "kube-proxy nftables", "kbpf")
    ]
    rows = {row[0]: row for row in table if row[1].startswith(measured)}
    wanted = [", ".join(rows[where][at].split(" / ")[0] for where in ("local", "remote")) for at in columns]
    assert [cell.strip("*") for cell in readme[1:]] == wanted


def test_readme_has_the_measured_times_and_memory():
    measured = {row[0]: row[1] for table in tables("docs/performance.md") for row in table}
    text = (ROOT / "README.md").read_text()
    p50, p99 = next(v for k, v in measured.items() if "map written" in k).split(" / ")
    assert f"after {p50} ms in the agent; 99 % after {p99}" in text
    start, memory = (
        next(v for k, v in measured.items() if k.startswith(word)).split(" / ")[-1]
        for word in ("process start", "resident memory")
    )
    assert f"in force after {start}; {memory}" in text
