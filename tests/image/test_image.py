# SPDX-License-Identifier: Apache-2.0
"""The image: built from the Containerfile as docs/install.md describes, started as the DaemonSet
starts it, and its size.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.build.image import MIRROR, SUITE, TARGETS, Built, image
from tests.support.cluster.daemonset import PodAgent, PodCluster
from tests.support.cluster.kubectl import call
from tests.support.lab.dial import Dial, check
from tests.support.lab.lab import Agent, Node, run
from tests.support.runtime.pods import Image

ROOT = Path(__file__).parents[2]
MOST_MB = {"kbpf": 460, "slim": 220}
"""docs/install.md states the sizes; a larger image has to be examined."""
PACKAGES = ("python3", "python3-venv", "python3-bpfcc", "python3-nftables", "libbpf1", "ca-certificates")


class ImageAgent(PodAgent):
    """A pod with the image, on a node without compiled programs."""

    def __init__(self, home: Node, built: Built) -> None:
        super().__init__(home)
        self._built = built
        self.use_cache(self.folder / "cache")

    def image(self, rootfs: Path) -> Image:
        """The image with its own environment variables."""
        env = {**self._built.env, "KBPF_CGROUP": "/host/sys/fs/cgroup"}
        return Image(self._built.root, env=env)


class ImageCluster(PodCluster):
    """A cluster whose agents run in pods with the image."""

    def __init__(self, kubectl: Path, built: Built, name: str) -> None:
        super().__init__(kubectl, 2, name)
        self._built = built

    def agent_on(self, home: Node, *arguments: str) -> Agent:
        """A pod with the image on this node."""
        self.pod_agents.append(ImageAgent(home, self._built))
        return self.pod_agents[-1]


pytestmark = pytest.mark.timeout(3600)  # the first build takes some minutes


@pytest.fixture(scope="module", params=TARGETS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Built]]:
    with image(request.param, tmp_path_factory.mktemp("image")) as made:
        yield request.param, made


def test_image_size_is_within_its_limit(built: tuple[str, Built]):
    target, made = built
    megabytes = made.size / 1e6
    print(f"size of {target}: {megabytes:.0f} MB")
    assert 50 < megabytes < MOST_MB[target]


def test_image_serves_as_the_daemonset_starts_it(built: tuple[str, Built], programs: None, kubectl: Path):
    target, made = built
    with ImageCluster(kubectl, made, "i" + target[0]) as cluster:
        objects = cluster.web(20, "a1", dual=True)
        cluster.create(*objects)
        cluster.settle(cluster.pod_agents[0])
        for client in ("a2", "host-1"):
            check(cluster, Dial("now", client, "10.96.0.20:80", "a1"))
            check(cluster, Dial("now", client, "[fd00:10:96::20]:80", "a1"))
        compiled = list((cluster.pod_agents[0].folder / "cache").iterdir())
        assert bool(compiled) == (target == "kbpf"), "the slim image contains compiled programs"
        has_bcc = any(made.root.glob("usr/lib/*/libbcc.so*"))
        assert has_bcc == (target == "kbpf")


def test_packages_of_the_image_exist_for_arm64(tmp_path: Path):
    """Debian's by a simulated installation, PyPI's by their wheels. test_arm64.py builds the image
    in an emulator.
    """
    none = f"{tmp_path}/none"
    debian = "mmdebstrap --quiet --simulate --variant=apt --skip=check/qemu --architectures=arm64"
    call([*debian.split(), f"--include={','.join(PACKAGES)}", SUITE, none, MIRROR], tmp_path)
    pypi = "-m pip install --quiet --dry-run --only-binary=:all: --python-version=3.11"
    platforms = "--platform=manylinux_2_28_aarch64 --platform=manylinux2014_aarch64"
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    run(sys.executable, *pypi.split(), *platforms.split(), f"--target={none}", *wanted)
