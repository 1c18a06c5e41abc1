# SPDX-License-Identifier: Apache-2.0
"""YAML of users: all three readers give a scalar the same meaning, and refuse input that would
exhaust a parser's memory, time or stack, with a one-line error and within seconds.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kbpf import bounded_yaml
from kbpf.bounded_yaml import CONFIGURATION, KUBECONFIG, MANIFESTS, Limits
from kbpf.config import documents as config_documents
from kbpf.errors import ConfigError, KbpfError, ObjectError
from kbpf.source.api import kubeconfig
from kbpf.source.api.kubeconfig import read_kubeconfig
from kbpf.source.folder import documents
from tests.support.table import each_case, pairs


def bomb(levels: int) -> str:
    """Nine references to nine references and so on: under 600 bytes at nine levels."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]")
    return "\n".join(lines) + "\n"


def merges(levels: int) -> str:
    """The same with merge keys, which are expanded while mappings are built."""
    lines = ["a0: &a0 {x: y}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{<<: [{','.join([f'*a{level - 1}'] * 9)}]}}")
    return "\n".join(lines) + "\n"


HOSTILE = {
    "a list in itself": ("spec: {ports: &a [*a]}\n", "contains it"),
    "a mapping in itself": ("spec: &a\n  ports: *a\n", "contains it"),
    "a key that contains itself": ("? &a [*a]\n: x\n", "contains it"),
    "a merge of itself": ("a: &a\n  <<: *a\n", "contains it"),
    "references that multiply": (bomb(9), "nodes"),
    "merges that multiply": (merges(9), "nodes"),
    "lists in lists, flow": ("[" * 100_000, "64 levels"),
    "lists in lists, closed": ("[" * 100_000 + "]" * 100_000, "64 levels"),
    "lists in lists, block": ("- " * 100_000 + "x\n", "64 levels"),
    "mappings in mappings": ("".join(" " * n + "a:\n" for n in range(900)), "64 levels"),
    "keys in keys": ("? " * 100_000 + "x\n", "64 levels"),
    "too many nodes": ("a: [" + "x," * MANIFESTS.nodes + "]\n", "nodes"),
}
"""A text, and words of the error."""
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
    return documents.parse_documents("a.yaml", f"kind: Service\n{text}".encode())


def read_manifest_as_json(text: str, folder: Path) -> object:
    return documents.parse_documents("a.json", text.encode())


def read_configuration(text: str, folder: Path) -> object:
    head = "apiVersion: kbpf.io/v1alpha1\nkind: KbpfConfiguration\n"
    return config_documents.parse(f"{head}{text}".encode(), "the file")


def read_config_of_kubectl(text: str, folder: Path) -> object:
    (folder / "kubeconfig").write_text(text)
    return read_kubeconfig(folder / "kubeconfig")


READERS = [read_manifest, read_configuration, read_config_of_kubectl]


@pytest.mark.parametrize("read", READERS)
@each_case("document, complaint", HOSTILE)
def test_unbounded_yaml_is_refused_with_a_one_line_error(
    read: Callable[[str, Path], object], document, complaint, tmp_path
):
    text = document
    # A reader puts lines before the text. Unless it is a mapping, it must be its own document.
    if not document.startswith(("a", "s")):
        text = f"---\n{document}"
    begun = time.process_time()
    with pytest.raises(KbpfError, match=complaint) as caught:
        read(text, tmp_path)
    assert time.process_time() - begun < 10.0
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
def test_too_long_file_is_refused(
    read: Callable[[str, Path], object], limits: Limits, error: type[KbpfError], tmp_path
):
    with pytest.raises(error, match=r"limit|larger than"):
        read("# " + "x" * limits.size, tmp_path)


def test_anchors_and_merge_keys_are_accepted():
    (document,) = list(documents._load_yaml("a.yaml", f"kind: Service\n{FINE}".encode(), []))
    spec = document[3]["spec"]
    assert spec["ports"] == spec["other"] == [{"name": "http", "port": 80}]
    assert spec["sessionAffinity"] == "None"


def test_deeply_nested_json_value_is_one_problem():
    """Line numbers in JSON are found with a YAML parser, which must not get deeply nested input."""
    deep = "[" * 900 + "]" * 900
    bad = '{"kind":"Service","metadata":{"name":"x"},"spec":{"clusterIP":7,"portz":' + deep + "}}"
    contents = documents.parse_documents("a.json", bad.encode())
    assert len(contents.objects) == 1
    assert any("portz" in line for line in contents.problems)


def test_problems_of_one_file_are_limited():
    fields = "".join(f"  f{n}: 1\n" for n in range(20_000))
    text = f"kind: Service\nmetadata: {{name: a}}\nspec:\n  clusterIP: 10.0.0.1\n{fields}"
    begun = time.process_time()
    contents = documents.parse_documents("a.yaml", text.encode())
    assert len(contents.problems) == documents.MAX_PROBLEMS_PER_FILE + 1
    assert "only the first 100 problems" in contents.problems[-1]
    assert time.process_time() - begun < 5.0


DIALECT = pairs("""\
1e6 → 1000000
1E5 → 100000
12e03 → 12000
1.0 → 1
1.5 → 1.5
1. → 1
.5 → 0.5
-.5 → -0.5
.5e3 → 500
.5_0 → 0.5
.5e → ".5e"
. → "."
08 → 8
-08 → -8
09.5 → 9.5
010 → 8
0o17 → 15
0O17 → 15
0o8 → "0o8"
00 → 0
0x1F → 31
0X1f → 31
+0x10 → 16
0x → "0x"
0x_1F → 31
0x1p3 → "0x1p3"
0b101 → 5
0B1 → 1
-0b11 → -3
0b2 → "0b2"
+5 → 5
-5 → -5
+ → "+"
--1 → "--1"
-0 → 0
-0.0 → 0
1_000 → 1000
1_ → 1
_1 → "_1"
1__0 → 10
123_456.5 → 123456.5
1e1_0 → 10000000000
1e → "1e"
1e+ → "1e+"
1e999 → "1e999"
-1e999 → "-1e999"
1e21 → 1e+21
0x8000000000000000 → 9223372036854775808
0xFFFFFFFFFFFFFFFFF → "0xFFFFFFFFFFFFFFFFF"
9223372036854775807 → 9223372036854775807
-9223372036854775808 → -9223372036854775808
18446744073709551615 → 18446744073709551615
1:30 → "1:30"
190:20:30 → "190:20:30"
2001:10:1:2:3:4:5:6 → "2001:10:1:2:3:4:5:6"
2001-01-01 → "2001-01-01"
2001-12-14t21:59:43.10-05:00 → "2001-12-14t21:59:43.10-05:00"
\u0661 → "\\u0661"
1,000 → "1,000"
yes → true
Yes → true
YES → true
yEs → "yEs"
no → false
on → true
OFF → false
y → true
Y → true
n → false
N → false
true → true
True → true
TRUE → true
tRue → "tRue"
false → false
~ → null
null → null
Null → null
NULL → null
nULL → "nULL"
 → null
.inf → ".inf"
-.Inf → "-.Inf"
.nan → ".nan"
= → "="
<< → "<<"
"80" → "80"
'yes' → "yes"
!!str 80 → "80"
!!str → ""
! 80 → "80"
!!int 80 → "80"
!!bool "yes" → "yes"
!!null x → "x"
!!timestamp 2001-01-01 → "2001-01-01"
!!binary aGk= → "aGk="
!custom x → "x"
!!python/name:os.system x → "x"
!!set {a} → {"a": null}
!!omap [a: 1] → [{"a": 1}]
!custom {a: 1} → {"a": 1}
!!str {a: 1} → {"a": 1}
!custom [1] → [1]
{80: a} → {"80": "a"}
{08: a} → {"8": "a"}
{yes: a} → {"true": "a"}
{0.1: a} → {"0.1": "a"}
{-0: a} → {"0": "a"}
{2001-01-01: a} → {"2001-01-01": "a"}
{null: a} → refused
{? [a] : b} → refused
{? {a: 1} : b} → refused
{a: 1, a: 2} → {"a": 2}
{80: a, "80": b} → {"80": "b"}
{a,b: 1} → {"a": null, "b": 1}
{p: 0, <<: {p: 1, q: 2}} → {"p": 1, "q": 2}
{<<: {p: 1, q: 2}, p: 0} → {"p": 0, "q": 2}
{<<: [{p: 1}, {p: 2, q: 3}]} → {"p": 1, "q": 3}
{<<: {p: 1}, <<: {p: 2}} → {"p": 2}
{<<: 3} → refused
{<<: [3]} → refused
{<<: [[3]]} → refused
{<<: ~} → refused
{"<<": {a: 1}} → {"<<": {"a": 1}}
[&a {p: 1}, &b {<<: *a, p: 7}, {<<: *b}] → [{"p": 1}, {"p": 7}, {"p": 7}]
[&a 5, &a 6, *a] → [5, 6, 6]
*b → refused
@y → refused
"\\u0041" → "A"
""")
"""YAML → JSON, as sigs.k8s.io/yaml 1.6.0 converts it, except for tags, which it honours,
and .inf and .nan, which it refuses. kube-proxy, kubectl and the client libraries read their YAML
with it."""


def value_in_a_manifest(text: str, folder: Path) -> object:
    (document,) = documents._load_yaml("a.yaml", f"kind: Service\nx: {text}\n".encode(), [])
    return document[3]["x"]


def value_in_a_configuration(text: str, folder: Path) -> object:
    head = "apiVersion: kbpf.io/v1alpha1\nkind: KbpfConfiguration\n"
    own = config_documents.parse(f"{head}x: {text}\n".encode(), "the file").kbpf
    assert own is not None
    return own["x"]


def value_in_a_kubeconfig(text: str, folder: Path) -> object:
    (folder / "kubeconfig").write_text(f"users:\n- name: u\n  user:\n    exec: {text}\n")
    users = kubeconfig._load_file(folder / "kubeconfig").users
    assert users is not None
    return users[0].user.exec


VALUES = [value_in_a_manifest, value_in_a_configuration, value_in_a_kubeconfig]


@pytest.mark.parametrize("read", VALUES)
@pytest.mark.parametrize(("text", "value"), DIALECT, ids=[text for text, _ in DIALECT])
def test_scalar_has_the_same_value_in_all_readers(read: Callable[[str, Path], object], text, value, tmp_path):
    if value == "refused":
        with pytest.raises(KbpfError, match=r"not YAML|not a kubeconfig"):
            read(text, tmp_path)
        return
    found, wanted = read(text, tmp_path), json.loads(value)
    assert (found, type(found)) == (wanted, type(wanted))


@pytest.mark.parametrize("text", [text for text, _ in DIALECT])
def test_dumped_text_is_read_as_text(text):
    written = bounded_yaml.dump({"x": text, text or "name": 1})
    (read,) = bounded_yaml.load_all(written.encode(), CONFIGURATION)
    assert read == {"x": text, text or "name": 1}
