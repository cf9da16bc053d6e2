"""Loading an image into the cluster: only what is missing travels, and what is out of date is forgotten."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from dev.image_load import NAME_ANNOTATION, Blob, Builder, Runtime, blobs_of, load_thin, write_archive


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def manifest_of(*layers: bytes, config: bytes = b"{}") -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"digest": digest(config), "size": len(config)},
        "layers": [{"digest": digest(layer), "size": len(layer)} for layer in layers],
    }


def members(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened.getmembers()}  # type: ignore[union-attr]


class FakeRuntime(Runtime):
    """Holds the base image; remembers the archives that it was given."""

    def __init__(self, base: dict[str, Any], *stored: bytes) -> None:
        self._base = base
        self._stored = {digest(data) for data in stored}
        self.taken: list[bytes] = []

    def blobs(self) -> set[str]:
        return self._stored

    def manifest(self, _digest: str) -> dict[str, Any]:
        return self._base

    def take(self, archive: Path) -> None:
        self.taken.append(archive.read_bytes())


class FakeBuilder(Builder):
    """Writes an OCI layout as buildah does: a blob that lies there already is left alone."""

    def __init__(self, *layers: bytes, config: bytes) -> None:
        self._layers, self._config = layers, config
        self.written: list[bytes] = []

    def push(self, image: str, destination: str) -> None:
        folder = Path(destination.removeprefix("oci:").removesuffix(":latest"))
        manifest = json.dumps(manifest_of(*self._layers, config=self._config)).encode()
        for data in (*self._layers, self._config, manifest):
            path = folder / Blob(digest(data), len(data)).path
            if path.exists():
                assert path.stat().st_size == len(data)
                continue
            path.write_bytes(data)
            self.written.append(data)
        index = {"manifests": [{"digest": digest(manifest), "size": len(manifest)}]}
        (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


BASE, DEPENDENCIES, CODE = b"base layer", b"dependencies" * 100, b"our code"


def test_layers_that_the_cluster_has_neither_are_written_nor_travel(tmp_path: Path) -> None:
    runtime = FakeRuntime(manifest_of(BASE, DEPENDENCIES), BASE, DEPENDENCIES)
    builder = FakeBuilder(BASE, DEPENDENCIES, CODE, config=b'{"new": 1}')
    size = load_thin(runtime, builder, "localhost/x:1", ["localhost/x:dev", "localhost/x:1"], "sha256:base", tmp_path)
    (archive,) = runtime.taken
    sent = set(members(archive).values())
    assert {CODE, b'{"new": 1}'} <= sent
    assert not {BASE, DEPENDENCIES} & sent
    assert not {BASE, DEPENDENCIES} & set(builder.written)
    assert size == len(CODE) + len(b'{"new": 1}')
    assert list(tmp_path.iterdir()) == []


def test_layer_that_the_cluster_lost_travels_again(tmp_path: Path) -> None:
    runtime = FakeRuntime(manifest_of(BASE, DEPENDENCIES), BASE)
    builder = FakeBuilder(BASE, DEPENDENCIES, CODE, config=b"{}")
    load_thin(runtime, builder, "localhost/x:1", ["localhost/x:dev"], "sha256:base", tmp_path)
    assert DEPENDENCIES in members(runtime.taken[0]).values()


def test_archive_names_the_image_under_each_name(tmp_path: Path) -> None:
    manifest = json.dumps(manifest_of(CODE)).encode()
    layer = tmp_path / "layer"
    layer.write_bytes(CODE)
    archive = tmp_path / "archive.tar"
    write_archive(archive, ["localhost/x:dev", "localhost/x:1"], manifest, [(Blob(digest(CODE), len(CODE)), layer)])
    found = members(archive.read_bytes())
    entries = json.loads(found["index.json"])["manifests"]
    assert [entry["annotations"][NAME_ANNOTATION] for entry in entries] == ["localhost/x:dev", "localhost/x:1"]
    assert {entry["digest"] for entry in entries} == {digest(manifest)}
    for name, data in found.items():
        if name.startswith("blobs/"):
            assert digest(data) == f"sha256:{name.rpartition('/')[2]}"


def test_configuration_counts_as_a_part_of_the_image() -> None:
    assert [blob.digest for blob in blobs_of(manifest_of(BASE, config=b"c"))] == [digest(b"c"), digest(BASE)]


class Listing(Runtime):
    """Knows some images; remembers what it was told to delete."""

    def __init__(self, known: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("socket")
        self._known = known
        self.deleted: list[str] = []
        monkeypatch.setattr("dev.image_load.run", lambda *command: self.deleted.extend(command[7:]) or b"")

    def images(self) -> dict[str, str]:
        return self._known


def test_forgetting_an_image_forgets_its_id_too_but_no_shared_one(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"x:old": "m1", "sha256:c1": "m1", "x:dev": "m2", "sha256:c2": "m2", "x:older": "m2"}
    runtime = Listing(known, monkeypatch)
    runtime.forget({"x:old", "x:older", "x:unknown"})
    assert sorted(runtime.deleted) == ["sha256:c1", "x:old", "x:older"]
