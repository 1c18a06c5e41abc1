# SPDX-License-Identifier: Apache-2.0
"""The image's components: locked, hashed, and listed."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from pip._vendor.packaging.requirements import Requirement

from kbpf import __version__
from tests.support.runtime.docs import ROOT

CONTAINERFILE = (ROOT / "Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


WANTED = {
    "requirements.lock": PROJECT["dependencies"],
    "requirements-dev.lock": PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"],
}
"""File → the requirements of pyproject.toml that it is for."""


def locked(lock: str = "requirements.lock") -> dict[str, tuple[str, list[str]]]:
    """Package name → its locked version and hashes."""
    text = (ROOT / lock).read_text()
    rows = re.findall(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=\S+)+)$", text, re.M)
    assert len(rows) == text.count("==")
    return {name: (found, re.findall(r"sha256:([0-9a-f]{64})\b", text)) for name, found, text in rows}


@pytest.mark.parametrize("lock", WANTED)
def test_everything_is_locked_with_hashes(lock):
    """All requirements of pyproject.toml are locked in an allowed version; each line has a hash."""
    found = locked(lock)
    assert all(hashes for _, hashes in found.values())
    for text in [*WANTED[lock], "setuptools>=68"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(found[wanted.name.lower().replace("_", "-")][0]), text


def test_platform_wheels_have_a_hash_for_each_platform():
    """Wheels for amd64 and arm64, Python 3.11 and 3.13."""
    assert {len(locked()[name][1]) for name in ("msgspec", "pyyaml")} == {4}


def test_tests_use_the_images_versions():
    own, dev = locked(), locked("requirements-dev.lock")
    assert {name: dev[name] for name in own} == own


def test_make_venv_installs_locked_packages():
    installs = re.findall(r"pip install((?:\\\n|[^\n])*)", (ROOT / "Makefile").read_text())
    first, second, check = (re.sub(r"\\\n\s*", "", text) for text in installs)
    assert "--require-hashes --only-binary=:all: --no-deps" in check
    assert "--require-hashes --only-binary=:all: --no-deps" in first
    assert first.endswith("--requirement requirements-dev.lock")
    assert "--no-deps --no-build-isolation -e ." in second, "kbpf itself"


def test_the_image_installs_locked_packages():
    installs = re.findall(r"pip install((?:[^&]|\\\n)*)", CONTAINERFILE)
    assert len(installs) == 2
    assert "--require-hashes --only-binary=:all: --no-deps" in installs[0]
    assert "--requirement /src/requirements.lock" in installs[0]
    assert "--no-deps --no-build-isolation /src" in installs[1], "kbpf itself"


BASES = [
    ("", "debian:bookworm-slim", True),
    ("true", "debian:bookworm-slim", False),
    ("true", "debian@sha256:" + "0" * 64, True),
]


@pytest.mark.parametrize(("release", "base", "builds"), BASES)
def test_a_release_names_its_base_by_digest(release, base, builds):
    """Runs the Containerfile's own check in a shell."""
    (script,) = re.findall(r"^RUN (case .*?esac)$", CONTAINERFILE, re.M | re.S)
    done = subprocess.run(
        ["sh", "-c", script.replace("\\\n", " ")],
        env={"RELEASE": release, "BASE": base},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is builds
    assert ("by digest" in done.stderr) is not builds


def test_the_sbom_lists_all_components_once():
    """Made for this machine: it has Debian's packages and pip's distributions, once each."""
    folders = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run([str(ROOT / "tools" / "sbom"), *folders], capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.5")
    urls = [each["purl"] for each in made["components"]]
    assert len(urls) == len(set(urls))
    assert f"pkg:pypi/msgspec@{version('msgspec')}" in urls
    assert any(url.startswith("pkg:deb/debian/libbpf1@") for url in urls)


NAMES_THE_VERSION = {
    "docs/install.md": r"REGISTRY/kbpf:(\S+)",
    "manifests/base/kustomization.yaml": r"newTag: (\S+)",
    "manifests/chart/Chart.yaml": r"(?:appVersion|version): (\S+)",
    "vagrant/kubeadm/provision/node.sh": r"library/kbpf:(\S+)",
}
"""Files that cannot use kbpf.__version__, and the pattern of the version in them."""


@pytest.mark.parametrize("name", NAMES_THE_VERSION)
def test_files_name_the_version_of_the_package(name):
    assert set(re.findall(NAMES_THE_VERSION[name], (ROOT / name).read_text())) == {__version__}


SOURCES = ("kbpf", "tests", "benchmarks", "manifests", "tools", "vagrant", ".ci")
ABOVE_THE_FOLDERS = ("Makefile", "Containerfile", "pyproject.toml", ".pre-commit-config.yaml")
CODE = {".py", ".c", ".h", ".go", ".sh", ".yaml", ".apparmor"}


def source_files() -> list[Path]:
    """All files of code that are not empty; a program without a suffix begins with #!."""
    below = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*"))]
    return [
        path
        for path in (*below, *(ROOT / name for name in ABOVE_THE_FOLDERS))
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.stat().st_size
        and (
            path.suffix in CODE
            or path.name in ABOVE_THE_FOLDERS
            or (not path.suffix and path.read_bytes()[:2] == b"#!")
        )
    ]


def test_every_source_file_names_its_licence():
    files = source_files()
    assert len(files) > 500
    line = re.compile(r"SPDX-License-Identifier: (Apache-2\.0|.*GPL-2\.0.*)")
    assert [path for path in files if not line.search(path.read_text()[:300])] == []
