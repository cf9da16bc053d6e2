"""Print what images an archive holds, one a line: NAME CONFIG_DIGEST.

    archive_images.py ARCHIVE

Reads docker archives (manifest.json) and OCI archives (index.json), without unpacking them. The digest of the configuration
is the image's identity for the container runtime, so it tells whether an import is needed.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

NAME_ANNOTATIONS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


def read_json(archive: tarfile.TarFile, name: str) -> Any:
    """A JSON file of the archive, or None when it has no such file."""
    for candidate in (name, f"./{name}"):
        try:
            file = archive.extractfile(candidate)
        except KeyError:
            continue
        if file is not None:
            return json.load(file)
    return None


def docker_images(manifest: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Names and digests of a docker archive: the configuration's file is called like its digest."""
    for image in manifest:
        digest = image["Config"].split("/")[-1].removesuffix(".json")
        for name in image.get("RepoTags") or []:
            yield name, f"sha256:{digest}"


def oci_images(archive: tarfile.TarFile, index: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and digests of an OCI archive; an index inside the index (several platforms) is left out."""
    for entry in index.get("manifests", []):
        algorithm, digest = entry["digest"].split(":")
        manifest = read_json(archive, f"blobs/{algorithm}/{digest}")
        annotations = entry.get("annotations") or {}
        name = next((annotations[key] for key in NAME_ANNOTATIONS if key in annotations), None)
        if name and manifest and "config" in manifest:
            yield name, manifest["config"]["digest"]


def main(path: str) -> int:
    """Print the images; 1 with a message when the file is no image archive."""
    try:
        with tarfile.open(path, "r:*") as archive:
            manifest = read_json(archive, "manifest.json")
            index = read_json(archive, "index.json")
            images = docker_images(manifest) if manifest else oci_images(archive, index or {})
            for name, digest in images:
                print(name, digest)
            if not manifest and not index:
                print(f"{path} holds no image: neither manifest.json nor index.json is in it", file=sys.stderr)
                return 1
    except (OSError, tarfile.TarError) as error:
        print(f"{path} cannot be read as an image archive: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
