# SPDX-License-Identifier: Apache-2.0
"""The pictures and the output of commands in README.md and docs/ are rows of tests/screens.py,
which records them from a real run.
"""

import re
import xml.etree.ElementTree as ET

import pytest

from tests.screens import BROWSER_PICTURES, FOLDER, OTHER_SCENES, SCREENS, Screen, block_of
from tests.support.runtime import docs

IMAGE = re.compile(r"!\[([^\]]+)\]\(([^)\s]+)\)")


def images(page: str) -> list[str]:
    """The names of the pictures that a page shows, from docs/screens."""
    paths = [((docs.ROOT / page).parent / path).resolve() for _, path in IMAGE.findall((docs.ROOT / page).read_text())]
    return [path.stem for path in paths if path.parent == FOLDER]


def blocks(page: str) -> list[str]:
    """The commands whose output a page has."""
    lines = [block.partition("\n")[0] for block in docs.blocks(page, "")]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.mark.parametrize("page", docs.PAGES)
def test_page_has_the_screens_that_the_table_names(page):
    drawn = [name for name in images(page) if f"{name}.png" not in BROWSER_PICTURES]
    assert sorted(drawn) == sorted(s.name for s in SCREENS if page in s.pages)
    recorded = [command for command in blocks(page) if command not in OTHER_SCENES]
    assert sorted(recorded) == sorted(s.command for s in SCREENS if page in s.blocks)
    text = (docs.ROOT / page).read_text()
    assert all(block_of(screen).search(text) for screen in SCREENS if page in screen.blocks)


def test_folder_has_the_pictures_of_the_table_and_no_others():
    drawn = {f"{screen.name}.svg" for screen in SCREENS if screen.pages}
    assert {path.name for path in FOLDER.iterdir()} == drawn | BROWSER_PICTURES.keys()
    for picture, test in BROWSER_PICTURES.items():
        assert picture in (docs.ROOT / test).read_text(), f"{test} does not record {picture}"
    assert len({screen.name for screen in SCREENS}) == len(SCREENS)
    assert all(screen.pages or screen.blocks for screen in SCREENS)


def test_commands_of_other_scenes_are_in_a_page_and_in_a_test():
    assert OTHER_SCENES.keys() <= {command for page in docs.PAGES for command in blocks(page)}
    assert all((docs.ROOT / test).exists() for test in OTHER_SCENES.values())


@pytest.mark.parametrize("screen", [s for s in SCREENS if s.pages], ids=lambda screen: screen.name)
def test_picture_shows_its_command_and_refers_to_nothing_outside(screen: Screen):
    svg = (FOLDER / f"{screen.name}.svg").read_text()
    assert f"$ {screen.command}" in "".join(ET.fromstring(svg).itertext()).replace("\xa0", " ")
    assert [name for name in ("@font-face", "<script", "<image", "@import") if name in svg] == []
    assert [url for url in re.findall(r'(?:url\(|href=")([^)"]*)', svg) if url[0] != "#"] == []
    lines = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL).count("<text ")
    assert lines > 3, "the picture shows no output"
