"""YAML of users that would cost a parser its memory, its time or its process: each of the three
readers refuses it with a line, within a second, and reads what is everyday.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.bounded_yaml import CONFIGURATION, KUBECONFIG, MANIFESTS, Limits
from kbpf.config import documents as config_documents
from kbpf.errors import ConfigError, KbpfError, ObjectError
from kbpf.source import documents
from kbpf.source.kubeconfig import read_kubeconfig


def bomb(levels: int) -> str:
    """Nine references to nine references to ...: under 600 bytes at nine levels."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]")
    return "\n".join(lines) + "\n"


def merges(levels: int) -> str:
    """The same by merge keys, which are expanded while mappings are built."""
    lines = ["a0: &a0 {x: y}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{<<: [{','.join([f'*a{level - 1}'] * 9)}]}}")
    return "\n".join(lines) + "\n"


class Hostile(NamedTuple):
    """A text, and what the complaint about it says."""

    name: str
    text: str
    complaint: str


HOSTILE = [
    Hostile("a list in itself", "spec: {ports: &a [*a]}\n", "contains it"),
    Hostile("a mapping in itself", "spec: &a\n  ports: *a\n", "contains it"),
    Hostile("a key that contains itself", "? &a [*a]\n: x\n", "contains it"),
    Hostile("a merge of itself", "a: &a\n  <<: *a\n", "contains it"),
    Hostile("references that multiply", bomb(9), "nodes"),
    Hostile("merges that multiply", merges(9), "nodes"),
    Hostile("lists in lists, flow", "[" * 100_000, "64 levels"),
    Hostile("lists in lists, closed", "[" * 100_000 + "]" * 100_000, "64 levels"),
    Hostile("lists in lists, block", "- " * 100_000 + "x\n", "64 levels"),
    Hostile("mappings in mappings", "".join(" " * n + "a:\n" for n in range(900)), "64 levels"),
    Hostile("keys in keys", "? " * 100_000 + "x\n", "64 levels"),
    Hostile("too many nodes", "a: [" + "x," * MANIFESTS.nodes + "]\n", "nodes"),
]  # fmt: skip
FINE = """\
x-ports: &ports
- {name: http, port: 80}
defaults: &defaults
  sessionAffinity: None
spec:
  <<: *defaults
  ports: *ports
  other: *ports
"""


def read_manifest(text: str, folder: Path) -> object:
    return documents.parse("a.yaml", f"kind: Service\n{text}".encode())


def read_manifest_as_json(text: str, folder: Path) -> object:
    return documents.parse("a.json", text.encode())


def read_configuration(text: str, folder: Path) -> object:
    head = "apiVersion: kbpf.io/v1alpha1\nkind: KbpfConfiguration\n"
    return config_documents.parse(f"{head}{text}".encode(), "the file")


def read_config_of_kubectl(text: str, folder: Path) -> object:
    (folder / "kubeconfig").write_text(text)
    return read_kubeconfig(folder / "kubeconfig")


READERS = [read_manifest, read_configuration, read_config_of_kubectl]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("row", HOSTILE, ids=lambda row: row.name)
def test_what_has_no_end_is_refused_with_a_line(
    read: Callable[[str, Path], object], row: Hostile, tmp_path: Path
) -> None:
    text = row.text
    if not row.text.startswith(("a", "s")):  # a document of its own: a head would be no YAML
        text = f"---\n{row.text}"
    begun = time.process_time()
    with pytest.raises(KbpfError, match=row.complaint) as caught:
        read(text, tmp_path)
    assert time.process_time() - begun < 2.0
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("read", "limits", "error"),
    [
        (read_manifest, MANIFESTS, ObjectError),
        (read_manifest_as_json, MANIFESTS, ObjectError),
        (read_configuration, CONFIGURATION, ConfigError),
        (read_config_of_kubectl, KUBECONFIG, ConfigError),
    ],
)
def test_what_is_too_long_is_refused(
    read: Callable[[str, Path], object],
    limits: Limits,
    error: type[KbpfError],
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=r"limit|larger than"):
        read("# " + "x" * limits.size, tmp_path)


def test_a_few_anchors_and_merges_are_everyday() -> None:
    (document,) = list(documents._load_yaml("a.yaml", f"kind: Service\n{FINE}".encode()))
    spec = document[3]["spec"]
    assert spec["ports"] == spec["other"] == [{"name": "http", "port": 80}]
    assert spec["sessionAffinity"] == "None"


def test_json_that_is_deep_spoils_only_itself_though_its_lines_are_looked_for() -> None:
    """Places in JSON are found by a YAML parser, which deep nesting must not reach."""
    deep = "[" * 900 + "]" * 900
    bad = '{"kind":"Service","metadata":{"name":"x"},"spec":{"clusterIP":7,"portz":' + deep + "}}"
    contents = documents.parse("a.json", bad.encode())
    assert len(contents.found) == 1
    assert any("portz" in line for line in contents.problems)


def test_complaints_about_one_file_end() -> None:
    fields = "".join(f"  f{n}: 1\n" for n in range(20_000))
    text = f"kind: Service\nmetadata: {{name: a}}\nspec:\n  clusterIP: 10.0.0.1\n{fields}"
    begun = time.process_time()
    contents = documents.parse("a.yaml", text.encode())
    assert len(contents.problems) == documents.MOST_PROBLEMS + 1
    assert "only 100 problems" in contents.problems[-1]
    assert time.process_time() - begun < 5.0
