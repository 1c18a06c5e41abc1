# SPDX-License-Identifier: Apache-2.0
"""What docs/contributing.md, "How to add", asks for in two places is in both."""

import re

import msgspec

from kbpf.dataplane.bpf.maps.layout import MAPS, MONITOR_RINGS, OUTER_MAPS
from kbpf.source.decode.wire import Annotations
from kbpf.source.folder.documents import KNOWN_ANNOTATIONS
from tests.support.runtime import docs


def test_a_folder_knows_the_annotations_that_are_read():
    assert {field.encode_name for field in msgspec.structs.fields(Annotations)} == set(KNOWN_ANNOTATIONS)


def test_programs_find_each_map_that_grows_through_its_outer_map():
    """One that they used directly would stay the small one."""
    text = "\n".join(path.read_text() for path in (docs.ROOT / "kbpf/bpf").rglob("*.[ch]"))
    declared = set(re.findall(r'^BPF_F_TABLE\("hash", [^;]*?, (\w+), \d+,', text, re.MULTILINE))
    growing = {name for name, spec in MAPS.items() if spec.grows}
    outer = [*OUTER_MAPS.values(), MONITOR_RINGS]
    assert declared & growing == {spec.inner for spec in OUTER_MAPS.values()}
    assert dict(re.findall(r'^BPF_ARRAY_OF_MAPS\((\w+), "(\w+)"', text, re.MULTILINE)) == {
        spec.name: spec.inner for spec in outer
    }
    assert re.findall(rf"\b(?:{'|'.join(growing)})\.\w+\(", text) == []
