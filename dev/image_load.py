"""Put an image that buildah holds into the embedded cluster's containerd, moving only what is not there yet.

    image_load.py --socket SOCKET --storage FOLDER --dependencies IMAGE --name NAME IMAGE

IMAGE is DEPENDENCIES with a thin layer of our own code. DEPENDENCIES (5 GB for the workload) is imported once, uncompressed,
and stays in containerd under its own name. After that a changed IMAGE travels as an archive without those layers: its
manifest names them, and containerd finds them by digest. IMAGE is stored under both names, NAME and its own.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME_ANNOTATION = "io.containerd.image.name"
SECONDS_TO_END = 60


class LoadError(RuntimeError):
    """Something outside refused; the message is for people."""


def run(*command: str) -> bytes:
    """Output of a command. Raises LoadError with the last line that it said."""
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise LoadError(f"{command[0]} {command[-1]}: {said[-1]}")
    return done.stdout


@dataclass(frozen=True)
class Blob:
    """A layer, configuration or manifest, by content."""

    digest: str
    size: int

    @property
    def path(self) -> str:
        """Where OCI's layout keeps it."""
        algorithm, name = self.digest.split(":")
        return f"blobs/{algorithm}/{name}"


def blobs_of(manifest: dict[str, Any]) -> list[Blob]:
    """The configuration and the layers that a manifest names."""
    return [Blob(part["digest"], part["size"]) for part in (manifest["config"], *manifest["layers"])]


class Runtime:
    """The cluster's containerd, through ctr."""

    def __init__(self, socket: str) -> None:
        self._ctr = ("ctr", "--address", socket, "--namespace", "k8s.io")

    def images(self) -> dict[str, str]:
        """Name and manifest digest of each image."""
        rows = run(*self._ctr, "images", "ls").decode().splitlines()[1:]
        return {fields[0]: fields[2] for fields in (row.split() for row in rows)}

    def complete(self, *names: str) -> bool:
        """Whether all these images are there whole, and unpacked."""
        rows = run(*self._ctr, "images", "check", *(f"name=={name}" for name in names)).decode().splitlines()[1:]
        fields = [row.split() for row in rows]
        return len(fields) == len(names) and all("complete" in row and row[-1] == "true" for row in fields)

    def blobs(self) -> set[str]:
        """Digests of everything it stores."""
        return set(run(*self._ctr, "content", "ls", "--quiet").decode().split())

    def manifest(self, digest: str) -> dict[str, Any]:
        """A stored manifest."""
        manifest: dict[str, Any] = json.loads(run(*self._ctr, "content", "get", digest))
        return manifest

    def importing(self) -> tuple[str, ...]:
        """The command that imports an archive from its standard input."""
        return (*self._ctr, "images", "import", "-")

    def take(self, archive: Path) -> None:
        """Import an archive."""
        run(*self._ctr, "images", "import", str(archive))

    def forget(self, stale: Iterable[str]) -> None:
        """Delete these names, and the ids under which Kubernetes knows the same images."""
        known = self.images()
        gone = {known[name] for name in stale if name in known}
        kept = {digest for name, digest in known.items() if name not in stale and not name.startswith("sha256:")}
        names = [name for name in stale if name in known]
        names += [name for name, digest in known.items() if name.startswith("sha256:") and digest in gone - kept]
        if names:
            run(*self._ctr, "images", "rm", *names)


class Builder:
    """buildah's storage."""

    def __init__(self, folder: Path) -> None:
        where = ("--root", f"{folder}/storage", "--runroot", f"{folder}/run", "--storage-driver", "overlay")
        self._push = ("buildah", *where, "push", "--quiet", "--signature-policy", f"{folder}/policy.json")

    def pushing(self, image: str, destination: str) -> tuple[str, ...]:
        """The command that copies an image to another transport."""
        return (*self._push, image, destination)

    def push(self, image: str, destination: str) -> None:
        """Copy an image to another transport."""
        run(*self.pushing(image, destination))


def write_archive(target: Path, names: Iterable[str], manifest: bytes, blobs: Iterable[tuple[Blob, Path]]) -> None:
    """Write an OCI archive: an index with one entry per name, the manifest, and those blobs that are given."""
    digest = Blob(f"sha256:{hashlib.sha256(manifest).hexdigest()}", len(manifest))
    media_type = json.loads(manifest).get("mediaType", "application/vnd.oci.image.manifest.v1+json")
    entries = [
        {"mediaType": media_type, "digest": digest.digest, "size": digest.size, "annotations": {NAME_ANNOTATION: name}}
        for name in names
    ]
    with tarfile.open(target, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": entries}).encode())
        _add(archive, digest.path, manifest)
        for blob, path in blobs:
            info = tarfile.TarInfo(blob.path)
            info.size = blob.size
            with path.open("rb") as file:
                archive.addfile(info, file)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def load_whole(runtime: Runtime, builder: Builder, image: str) -> None:
    """Import everything, as a stream: no copy of 5 GB on the way, and `docker-archive:` leaves layers uncompressed."""
    source, sink = os.pipe()
    with tempfile.TemporaryFile() as errors:
        importer = subprocess.Popen(runtime.importing(), stdin=source, stdout=subprocess.DEVNULL, stderr=errors)
        os.close(source)
        command = builder.pushing(image, f"docker-archive:/dev/fd/{sink}:{image}")
        pusher = subprocess.Popen(command, pass_fds=(sink,), stdout=subprocess.DEVNULL, stderr=errors)
        os.close(sink)
        imported = importer.wait()
        try:
            pushed = pusher.wait(timeout=0 if imported else SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            pusher.kill()  # it holds both ends of the pipe, so without a reader it would wait for ever
            pushed = pusher.wait()
        if pushed or imported:
            errors.seek(0)
            raise LoadError(f"containerd did not import {image}: {errors.read().decode(errors='replace').strip()}")


def load_thin(runtime: Runtime, builder: Builder, image: str, names: list[str], base: str, scratch: Path) -> int:
    """Import what `base`, a manifest that containerd holds, does not bring; how many bytes that were.

    buildah skips each blob that the target folder has already, by name. So a file of the right name and size, but without
    content (sparse), keeps it from writing the large layers again; the archive leaves those out.
    """
    stored = runtime.blobs()
    present = [blob for blob in blobs_of(runtime.manifest(base)) if blob.digest in stored]
    with tempfile.TemporaryDirectory(dir=scratch) as temporary:
        folder = Path(temporary)
        (folder / "blobs/sha256").mkdir(parents=True)
        for blob in present:
            with (folder / blob.path).open("wb") as placeholder:
                placeholder.truncate(blob.size)
        builder.push(image, f"oci:{folder}:latest")
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        described = index["manifests"][0]
        manifest = (folder / Blob(described["digest"], described["size"]).path).read_bytes()
        known = {blob.digest for blob in present}
        files = [(blob, folder / blob.path) for blob in blobs_of(json.loads(manifest)) if blob.digest not in known]
        archive = folder / "thin.tar"
        write_archive(archive, names, manifest, files)
        runtime.take(archive)
        return sum(blob.size for blob, _ in files)


def main() -> int:
    """Entry point: 0 when the runtime has the image under both names."""
    parser = argparse.ArgumentParser(prog="image_load.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--socket", required=True)
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--dependencies", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("image")
    options = parser.parse_args()
    try:
        load(options)
    except LoadError as error:
        print(f"ERROR: {options.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def load(options: argparse.Namespace) -> None:
    """Bring containerd up to date, say what was moved, and forget what it had of earlier contents."""
    runtime, builder, scratch = Runtime(options.socket), Builder(options.storage), options.storage / "tmp"
    names = [options.name, options.image]
    known = runtime.images()
    if known.get(options.name) and known.get(options.name) == known.get(options.image) and runtime.complete(*names):
        print(f"images: {options.name}: the cluster has it already", flush=True)
        return
    began = time.monotonic()
    if not runtime.complete(options.dependencies):
        print(f"images: {options.name}: importing the dependencies into the cluster (once per lock file) ...", flush=True)
        load_whole(runtime, builder, options.dependencies)
    base = runtime.images()[options.dependencies]
    size = load_thin(runtime, builder, options.image, names, base, scratch)
    if not runtime.complete(*names):
        raise LoadError("containerd took the image but does not have all of it; delete it there and try again")
    keep = {*names, options.dependencies}
    families = tuple(f"{image.rpartition(':')[0]}:" for image in (options.image, options.dependencies))
    runtime.forget({name for name in runtime.images() if name.startswith(families)} - keep)
    print(f"images: {options.name}: loaded, {size / 1e3:.0f} kB of our code, in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
