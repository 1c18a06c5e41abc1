# SPDX-License-Identifier: Apache-2.0
"""The container images that the tests ask for, as archives for containerd. kbpf's own image is
built by tests/support/build/image.py.

Their programs are those of the Kubernetes module, over a Debian root file system.
"""

import fcntl
import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.conformance.cluster.layout import program
from tests.conformance.cluster.oci import PATH, Blobs, Image, Layer, add_manifest, pack
from tests.conformance.versions import Version
from tests.support.build import go_build
from tests.support.build.image import MIRROR, SUITE
from tests.support.cluster.certs import Authority

TESTS = "registry.k8s.io/e2e-test-images"
PACKAGES = (
    "bash,curl,wget,netcat-openbsd,iproute2,bind9-dnsutils,iperf,util-linux,procps,iptables,"
    "nftables,conntrack,ca-certificates,hostname,iputils-ping,tcpdump"
)
DEBSTRAP = (
    "mmdebstrap",
    "--quiet",
    "--variant=essential",
    f"--include={PACKAGES}",
    "--dpkgopt=path-exclude=/usr/share/{doc,man,locale,info}/*",
    SUITE,
)


class _Packer:
    """Makes the images of one version from the built programs."""

    def __init__(self, programs: dict[str, Path], version: Version, folder: Path) -> None:
        self._programs, self._version, self._folder = programs, version, folder
        self._layers = 0
        self._userland = Layer(userland(), is_new=False)

    def archives(self) -> dict[str, list[Image]]:
        """Archive → its images, which share layers."""
        tag = self._version.images
        return {
            "userland": [
                self._agnhost(),
                Image(f"{TESTS}/glibc-dns-testing:{tag['glibc-dns-testing']}", [self._userland]),
                # For its command conntrack.
                Image(
                    f"registry.k8s.io/build-image/distroless-iptables:{tag['distroless-iptables']}",
                    [self._userland],
                    {"Cmd": ["bash"]},
                ),
            ],
            "small": [
                busybox := self._busybox(),
                self._web(busybox),
                self._program(f"{TESTS}/regression-issue-74839", "regression-issue-74839"),
                self._pause(),
                self._program("registry.k8s.io/coredns/coredns", "cluster-coredns", "etc", "tmp"),
            ],
        }

    def _layer(self) -> Layer:
        self._layers += 1
        return Layer(self._folder / f"layer-{self._layers}.tar")

    def _agnhost(self) -> Image:
        layer = self._layer()
        layer.add("agnhost", self._programs["agnhost"].read_bytes())
        layer.add("agnhost-2", to="agnhost")
        layer.add("coredns", self._programs["cluster-coredns"].read_bytes())
        layer.add("uploads", mode=0o777)
        # The original's commands are busybox's: here those that Debian's packages lack.
        layer.add("busybox")
        layer.add_busybox("busybox")
        layer.add("etc")
        layer.add("etc/wgetrc", b"tries = 1\n", mode=0o644)  # as busybox's wget
        served = Authority(self._folder).issue("localhost", ["localhost", "example.com"])
        for file in (served.crt, served.key):
            layer.add(file.name, file.read_bytes(), mode=0o644)
        self._add_registry(layer)
        config = {"Env": [f"PATH={PATH}:/busybox"], "Entrypoint": ["/agnhost"], "Cmd": ["pause"]}
        tag = self._version.images["agnhost"]
        return Image(f"{TESTS}/agnhost:{tag}", [self._userland, layer], config)

    def _add_registry(self, layer: Layer) -> None:
        """What `agnhost fake-registry-server` serves: the image pause:testing."""
        blobs = Blobs()
        manifest = str(add_manifest(blobs, self._pause())["digest"])
        layer.add("var/registry/pause/manifests/testing", manifest.encode(), mode=0o644)
        for digest, content in blobs.data.items():
            data = content.read_bytes() if isinstance(content, Path) else content
            kind = "manifests" if manifest == f"sha256:{digest}" else "blobs"
            path = f"var/registry/pause/{kind}/sha256/{digest[:2]}/{digest}/data"
            layer.add(path, data, mode=0o644)

    def _busybox(self) -> Image:
        layer = self._layer()
        for name in ("bin", "etc", "home", "root", "usr", "usr/bin", "var", "var/run"):
            layer.add(name)
        layer.add("tmp", mode=0o1777)
        layer.add_busybox("bin")
        users = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
        layer.add("etc/passwd", users, mode=0o644)
        layer.add("etc/group", b"root:x:0:\nnogroup:x:65534:\n", mode=0o644)
        tag = self._version.images["busybox"]
        return Image(f"{TESTS}/busybox:{tag}", [layer], {"Cmd": ["sh"]})

    def _web(self, busybox: Image) -> Image:
        """A stand-in for nginx: the tests only want an answer on port 80."""
        layer = self._layer()
        layer.add("www")
        layer.add("www/index.html", b"<title>Welcome to nginx!</title>\n", mode=0o644)
        server = ["/bin/httpd", "-f", "-p", "80", "-h", "/www"]
        name = f"{TESTS}/nginx:{self._version.images['nginx']}"
        return Image(name, [*busybox.layers, layer], {"Entrypoint": server})

    def _pause(self) -> Image:
        """A stand-in for pause, which holds a pod's namespaces: a process that sleeps."""
        layer = self._layer()
        layer.add("busybox", Path(program("busybox")).read_bytes())
        name = f"registry.k8s.io/pause:{self._version.pause}"
        return Image(name, [layer], {"Entrypoint": ["/busybox", "sleep", "2147483647"]})

    def _program(self, name: str, binary: str, *folders: str) -> Image:
        """An image that has only one program."""
        layer = self._layer()
        for folder in folders:
            layer.add(folder, mode=0o1777 if folder == "tmp" else 0o755)
        layer.add(binary, self._programs[binary].read_bytes())
        tag = self._version.images.get(binary, "conformance")
        return Image(f"{name}:{tag}", [layer], {"Entrypoint": [f"/{binary}"]})


def archives(programs: dict[str, Path], version: Version) -> list[Path]:
    """The archives of a version, built if necessary."""
    inputs = [str(programs[name]) for name in ("agnhost", "cluster-coredns", "regression-issue-74839")]
    sources = [Path(__file__), Path(__file__).with_name("oci.py"), Path(__file__).parents[1] / "versions.py"]
    text = " ".join([*inputs, *DEBSTRAP, *(path.read_text() for path in sources)])
    folder = go_build.cache() / "conformance" / _digest(text)

    def make(new: Path) -> None:
        for name, images in _Packer(programs, version, new).archives().items():
            pack(new / f"{name}.oci", images)
        for path in new.iterdir():
            if path.suffix != ".oci":
                path.unlink()

    return sorted(_made_once(folder, make).iterdir())


def userland() -> Path:
    """A root file system with the commands that the tests run in their containers."""

    def make(new: Path) -> None:
        subprocess.run([*DEBSTRAP, str(new / "userland.tar"), MIRROR], check=True, stdout=2)

    folder = go_build.cache() / "conformance" / f"userland-{_digest(' '.join(DEBSTRAP))}"
    return _made_once(folder, make) / "userland.tar"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, which is complete or absent, however this process ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = folder.with_suffix(".new")
            subprocess.run(["rm", "-rf", str(new)], check=True)
            new.mkdir()
            make(new)
            new.rename(folder)
    return folder
