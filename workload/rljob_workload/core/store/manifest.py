"""`MANIFEST.json`: what a checkpoint consists of, where it comes from and which spec wrote it.

Version 2. Version 1 (sizes only, everything in `state`) is still read. A file that is no manifest of these versions is refused
by field; a newer version is not guessed at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from rljob_workload.core.store.errors import CheckpointError, InvalidCheckpointError
from rljob_workload.core.store.fence import Owner, Strict, Text, Whole
from rljob_workload.core.store.filesystem import Files, components
from rljob_workload.core.store.lineage import Name

MANIFEST = "MANIFEST.json"
MANIFEST_VERSION = 2
MAX_BYTES = 2**26

#: Values of spec fields by path, such as {"spec.model.shape.layers": 2}.
Facts = Mapping[str, str | int | bool | None]


class File(Strict):
    """One file of a checkpoint."""

    size: Whole
    """Bytes."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Hexadecimal; None in version 1."""


class Manifest(Strict):
    """What a checkpoint consists of."""

    version: int = MANIFEST_VERSION
    step: Whole
    token: Whole
    writer: Owner = Owner()
    parent: Text | None = None
    """The checkpoint that the weights descend from; of another run when it is a path."""
    files: dict[Annotated[str, Field(max_length=4096)], File]
    """By path below the checkpoint, the manifest itself left out."""
    facts: dict[str, str | int | bool | None] = Field(default_factory=dict)
    """What of the spec a resume depends on."""
    fingerprint: dict[str, Any] | None = None
    """Of the data."""
    weight_digest: Text | None = None
    """Of the weights as they were in memory; equal digests of two checkpoints mean that training changed nothing."""
    state: dict[str, Any] = Field(default_factory=dict)
    """What the trainer needs to go on, apart from weights and collector."""

    @field_validator("files")
    @classmethod
    def _below(cls, files: dict[str, File]) -> dict[str, File]:
        for path in files:
            try:
                inside = bool(components(path)) and path != MANIFEST
            except OSError:
                inside = False
            if not inside:
                raise ValueError(f"{path!r} is not the path of a file below the checkpoint")
        return files

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def encode(manifest: Manifest) -> bytes:
    """As it is written. Raises CheckpointError for state that JSON cannot hold."""
    try:
        data = manifest.model_dump(by_alias=True)
        return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, TypeError) as err:
        raise CheckpointError(f"{MANIFEST} cannot be written: {err}") from err


def read_manifest(files: Files, checkpoint: str) -> Manifest:
    """The manifest in a directory. Raises InvalidCheckpointError."""
    try:
        text = files.read(f"{checkpoint}/{MANIFEST}" if checkpoint else MANIFEST, MAX_BYTES)
    except OSError as err:
        raise InvalidCheckpointError(checkpoint, MANIFEST, err.strerror or str(err)) from err
    return parse(checkpoint, text)


def parse(checkpoint: str, text: bytes) -> Manifest:
    """The manifest in a text; `checkpoint` is the directory's name, which has to be its step and token."""
    try:
        data = json.loads(text, parse_constant=_no_constant)
        version = data["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        problem = "no field 'version'" if isinstance(err, KeyError | TypeError) else f"not JSON: {err}"
        raise InvalidCheckpointError(checkpoint, MANIFEST, f"is malformed: {problem}") from err
    if version not in (1, MANIFEST_VERSION) or isinstance(version, bool):
        newer = " (a newer release wrote it)" if isinstance(version, int) and version > MANIFEST_VERSION else ""
        problem = f"manifest version {version!r} is not {MANIFEST_VERSION}, which this build reads{newer}"
        raise InvalidCheckpointError(checkpoint, MANIFEST, problem, "version")
    try:
        manifest = Manifest.model_validate(_upgrade(data) if version == 1 else data, by_alias=True, by_name=False)
    except ValidationError as err:
        detail = err.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, detail["loc"]))
        raise InvalidCheckpointError(checkpoint, MANIFEST, f"is malformed: {detail['msg']}", field) from None
    named = Name.parse(checkpoint)
    if named is not None and (named.step, named.token) != (manifest.step, manifest.token):
        field = "step" if named.step != manifest.step else "token"
        problem = f"{getattr(manifest, field)} is not what the directory is named after"
        raise InvalidCheckpointError(checkpoint, MANIFEST, problem, field)
    return manifest


def _upgrade(data: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest of version 1 in today's form; what it does not fit is left for the model to refuse."""
    files, state = data.get("files"), data.get("state")
    if isinstance(files, dict):
        files = {path: {"size": size} for path, size in files.items()}
    writer = {}
    if isinstance(state, dict):
        kinds = {"namespace": str, "name": str, "uid": str, "attempt": int}
        writer = {key: state[key] for key, kind in kinds.items() if isinstance(state.get(key), kind)}
    return {**data, "files": files, "writer": writer}


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
