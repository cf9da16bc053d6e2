#!/usr/bin/env python3
"""Write a container image from plain files, as a docker archive, without a daemon, a registry or a Dockerfile.

    mkimage.py OUT.tar NAME:TAG [--entrypoint A,B] [--cmd A,B] [--env K=V]... [--user U] [--workdir D] LAYER...

A LAYER is a tar file, or SRC=DEST: a file or a folder of this machine, put at DEST in the image. The image belongs to root,
and carries no date, so that the same files give the same image and need no second import.
"""

from __future__ import annotations  # the machine's own Python may be older than the project's

import argparse
import hashlib
import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

DEFAULT_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def sha256(path: Path) -> str:
    """The digest of a file, read in pieces: a layer may be larger than the memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Drop the building user: in the image everything is root's."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def write_layer(source: Path, destination: str, layer: Path) -> None:
    """Pack a file or folder as one layer, with the folders that lead to it."""
    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as tar:
        parts = destination.strip("/").split("/")
        for depth in range(1, len(parts)):
            folder = tarfile.TarInfo("/".join(parts[:depth]))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)

        def dateless(info: tarfile.TarInfo) -> tarfile.TarInfo:
            info.mtime = 0
            return owned_by_root(info)

        tar.add(source, destination.strip("/"), filter=dateless)


def image_config(options: argparse.Namespace, diff_ids: list[str]) -> dict[str, Any]:
    """The image's configuration, as docker and containerd read it."""

    def words(text: str) -> list[str] | None:
        return text.split(",") if text else None

    env = list(options.env)
    if not any(setting.startswith("PATH=") for setting in env):
        env.insert(0, DEFAULT_PATH)
    return {
        "architecture": "amd64",
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Env": env,
            "WorkingDir": options.workdir,
            "User": options.user,
            "Entrypoint": words(options.entrypoint),
            "Cmd": words(options.cmd),
        },
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
        # buildah refuses an image without one entry for each layer
        "history": [{"created_by": "mkimage"} for _ in diff_ids],
    }


def add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file that exists only in memory."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def write_image(options: argparse.Namespace) -> None:
    """Write the whole archive: layers, configuration, manifest."""
    out = Path(options.out).resolve()
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch, tarfile.open(out, "w") as archive:
        digests: list[str] = []
        for number, layer in enumerate(options.layer):
            path = Path(layer)
            if "=" in layer:
                source, destination = layer.split("=", 1)
                path = Path(scratch) / f"{number}.tar"
                write_layer(Path(source), destination, path)
            digests.append(sha256(path))
            archive.add(path, f"{digests[-1]}/layer.tar", filter=owned_by_root)
        config = json.dumps(image_config(options, [f"sha256:{digest}" for digest in digests])).encode()
        config_name = f"{hashlib.sha256(config).hexdigest()}.json"
        layers = [f"{digest}/layer.tar" for digest in digests]
        manifest = [{"Config": config_name, "RepoTags": [options.name], "Layers": layers}]
        add_bytes(archive, config_name, config)
        add_bytes(archive, "manifest.json", json.dumps(manifest).encode())


def main() -> None:
    """Read the command line and write the image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("name")
    parser.add_argument("layer", nargs="+")
    parser.add_argument("--entrypoint", default="")
    parser.add_argument("--cmd", default="")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--user", default="")
    parser.add_argument("--workdir", default="/")
    write_image(parser.parse_args())


if __name__ == "__main__":
    main()
