# SPDX-License-Identifier: Apache-2.0
"""The versions of Kubernetes whose tests can run, and the images that their tests ask for."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.support.build import go_build
from tests.support.build.programs import CLUSTER_PROGRAMS, NODE_PROGRAMS, PREVIOUS_SUFFIX


@dataclass(frozen=True, slots=True)
class Version:
    """One version. `images` are the tags in its test/utils/image/manifest.go, and `pause` that of
    the sandbox.
    """

    name: str
    suffix: str  # of the names of its programs in tests/support/build
    images: dict[str, str]
    pause: str = "3.10.2"


VERSIONS = {
    version.name: version
    for version in (
        Version(
            "1.37.2",
            "",
            {
                "agnhost": "2.66.1",
                "busybox": "1.37.0-2",
                "glibc-dns-testing": "2.1.1",
                "nginx": "1.27.0-2",
                "regression-issue-74839": "1.5",
                "distroless-iptables": "v0.9.9",
            },
        ),
        Version(
            "1.36.3",
            PREVIOUS_SUFFIX,
            {
                "agnhost": "2.63.0",
                "busybox": "1.37.0-1",
                "glibc-dns-testing": "2.0.0",
                "nginx": "1.15-4",
                "regression-issue-74839": "1.4",
                "distroless-iptables": "v0.9.6",
            },
        ),
    )
}
NEWEST = next(iter(VERSIONS))


def programs(version: Version, cni: Iterable[str]) -> dict[str, Path]:
    """All programs of a cluster, by the names that they have there; built if necessary. `cni`: the
    CNI's programs.
    """
    names = {name: f"{name}{version.suffix}" for name in sorted(CLUSTER_PROGRAMS)}
    names |= {name: name for name in ("etcd", *cni, *NODE_PROGRAMS)}
    return {name: go_build.build(source) for name, source in names.items()}
