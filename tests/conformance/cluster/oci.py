# SPDX-License-Identifier: Apache-2.0
"""Packs container images as OCI archives: a few JSON files and plain tar layers, without a
container tool.
"""

import hashlib
import io
import json
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.conformance.cluster.layout import ARCHITECTURE, program

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PLATFORM = {"architecture": ARCHITECTURE, "os": "linux"}
MEDIA_TYPES = "application/vnd.oci.image"


class Layer:
    """A layer of an image: a tar file, with one time for all files."""

    def __init__(self, path: Path, *, is_new: bool = True) -> None:
        self.path = path
        self._tar = tarfile.TarFile(path, "w", format=tarfile.GNU_FORMAT) if is_new else None

    def add(self, name: str, data: bytes | None = None, *, mode: int = 0o755, to: str = "") -> None:
        """A file with `data`, a link `to` another, or else a folder."""
        assert self._tar is not None
        info = tarfile.TarInfo(name)
        info.mode, info.mtime = mode, 1700000000
        if data is not None:
            info.size = len(data)
            self._tar.addfile(info, io.BytesIO(data))
            return
        info.type = tarfile.SYMTYPE if to else tarfile.DIRTYPE
        info.linkname = to
        self._tar.addfile(info)

    def close(self) -> None:
        if self._tar is not None:
            self._tar.close()
            self._tar = None

    def add_busybox(self, folder: str) -> None:
        """busybox with a link for each of its commands."""
        busybox = program("busybox")
        applets = subprocess.check_output([busybox, "--list"], text=True).split()
        self.add(f"{folder}/busybox", Path(busybox).read_bytes())
        for applet in applets:
            if applet != "busybox":
                self.add(f"{folder}/{applet}", to="busybox")


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    layers: list[Layer]
    config: dict[str, object] = field(default_factory=dict)


class Blobs:
    """The content of an archive by digest: layers in files, JSON in memory."""

    def __init__(self) -> None:
        self.data: dict[str, bytes | Path] = {}

    def add(self, content: Path | object, media_type: str) -> dict[str, object]:
        """The descriptor of a layer (a Path) or a JSON document."""
        if isinstance(content, Path):
            with content.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = content.stat().st_size
            self.data[digest] = content
        else:
            data = json.dumps(content).encode()
            digest, size = hashlib.sha256(data).hexdigest(), len(data)
            self.data[digest] = data
        return {
            "mediaType": f"{MEDIA_TYPES}.{media_type}",
            "digest": f"sha256:{digest}",
            "size": size,
        }


def add_manifest(blobs: Blobs, image: Image) -> dict[str, object]:
    """Adds an image; the descriptor of its manifest."""
    for layer in image.layers:
        layer.close()
    layers = [blobs.add(layer.path, "layer.v1.tar") for layer in image.layers]
    root = {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]}
    config = {"Env": [f"PATH={PATH}"], "WorkingDir": "/", **image.config}
    described = blobs.add({**PLATFORM, "config": config, "rootfs": root}, "config.v1+json")
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{MEDIA_TYPES}.manifest.v1+json",
        "config": described,
        "layers": layers,
    }
    return blobs.add(manifest, "manifest.v1+json")


def pack(archive: Path, images: list[Image]) -> None:
    """Writes an archive with several images, which share layers."""
    blobs, manifests = Blobs(), []
    for image in images:
        manifest = add_manifest(blobs, image)
        names = {"io.containerd.image.name": image.name}
        manifests.append({**manifest, "platform": PLATFORM, "annotations": names})
    index = json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()
    with tarfile.open(archive, "w") as tar:

        def put(name: str, size: int, file: IO[bytes]) -> None:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, file)

        for name, data in (
            ("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'),
            ("index.json", index),
        ):
            put(name, len(data), io.BytesIO(data))
        for digest, content in blobs.data.items():
            if isinstance(content, bytes):
                put(f"blobs/sha256/{digest}", len(content), io.BytesIO(content))
            else:
                with content.open("rb") as file:
                    put(f"blobs/sha256/{digest}", content.stat().st_size, file)
