"""manifest.json: the contents of a checkpoint, with a checksum of every file; and the files with which a
checkpoint needs no data. Imports no torch, so that lists of checkpoints are printed at once."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from meshwright import __version__
from meshwright.parallel.structure import Count, Natural
from meshwright.train.data.tokenizer import TokenizerInfo, tokenizer_files
from meshwright.train.errors import CheckpointError, UnreadableError
from meshwright.train.files import parse_mapping, read_bounded, read_json, read_note

MANIFEST = "manifest.json"
FORMAT = "meshwright checkpoint 3"
_RANDOM_STATE = re.compile(r"random\.\w{1,32}\.[0-9]{1,9}")
_TENSOR = re.compile(r"(\w{1,32})\[((?:\d{1,18}(?:, \d{1,18}){0,63})?)\]((?: \w{1,32}:\d{1,2}){0,8})")
# of a file in the checkpoint's folder
FileName = Annotated[
    str, msgspec.Meta(pattern=rf"^(?!(\.|\.\.|{re.escape(MANIFEST)})\Z)[A-Za-z0-9_.-]{{1,255}}\Z")
]
LanePlace = Annotated[str, msgspec.Meta(pattern=r"^\d{1,18}( \d{1,18}){3}\Z")]
MOST_AXES = 8  # of a mesh, which has three
LIMIT_BYTES = 64 * 2**20  # of a manifest; a 405B model saved by 16,384 ranks has one of 5 MB


# torch's name of each dtype that is saved, with the name in safetensors and the bytes of an element
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
MODEL = "model."  # begins the names of the model's parameters and persistent buffers


@dataclass(frozen=True)
class TrainPosition:
    """The progress of a run: steps done, and samples of the data order used; and the settings that its data
    order and random state depend on. `data`: fingerprint of the data. Of streamed data `lanes`: their number,
    and `places`: where each goes on, as SOURCE/LANE -> EPOCH GROUP DOCUMENT TOKEN
    (train/data/stream/lanes.py)."""

    step: Natural = 0
    samples: Natural = 0
    seed: Natural = 0
    seq_len: Natural = 0
    world_size: Natural = 0
    data: str = ""
    lanes: Natural = 0
    places: Mapping[str, LanePlace] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedFile:
    """A committed file: its size, and its SHA-256 in hexadecimal."""

    size_bytes: Natural
    sha256: str


# The mesh axes that split a tensor, each with the dim that it splits, in the order in which they split.
Sharding = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class SavedTensor:
    """A full tensor; `dtype` is torch's name for it, such as bfloat16. Tensors with different shardings are
    equal: checkpoints saved on different meshes have the same tensors."""

    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding = field(default=(), compare=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class CheckpointManifest:
    """The contents of a checkpoint: its files by name (without the manifest), its tensors by name
    (`model.FQN`, `optim.FQN.MOMENT` and `random.DEVICE.RANK`), the mesh of the ranks that wrote it
    (axis -> degree, outermost first), the versions, and the other names of tied tensors, each with its name
    in `tensors`.

    The mesh and the tensors' shardings determine each file's contents (layout.py).
    """

    position: TrainPosition
    files: Mapping[FileName, SavedFile]
    tensors: Mapping[str, SavedTensor]
    mesh: Annotated[Mapping[str, Count], msgspec.Meta(max_length=MOST_AXES)]
    code: Mapping[str, str] = field(default_factory=lambda: {"meshwright": __version__})
    tied: Mapping[str, str] = field(default_factory=dict)


_STREAMED = ("lanes", "places")  # of a position, left out without streamed data


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def manifest_to_text(manifest: CheckpointManifest) -> str:
    """Return the file's text, which is unique for a manifest: its last key is the hash of all before it."""
    content = {
        "format": FORMAT,
        "position": {
            key: value for key, value in asdict(manifest.position).items() if value or key not in _STREAMED
        },
        "files": {name: vars(file) for name, file in manifest.files.items()},
        "tensors": {name: _tensor_to_text(tensor) for name, tensor in manifest.tensors.items()},
        "code": manifest.code,
        "mesh": manifest.mesh,
        **({"tied": manifest.tied} if manifest.tied else {}),
    }
    body = json.dumps(content, indent=1)
    return f'{body[:-2]},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """Return a checkpoint's manifest. Raises CheckpointError if it is missing or differs from what was
    written, UnreadableError if it cannot be read."""
    path = checkpoint / MANIFEST
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link, which may lead out of the checkpoint")
        content = read_bounded(path, LIMIT_BYTES)
    except (*NOT_FOUND, ValueError) as error:
        reason = f"it has no readable {MANIFEST} ({getattr(error, 'strerror', None) or error})"
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint: {reason if os.path.isdir(checkpoint) else 'no such folder'}. "
            "Name a folder such as runs/NAME/checkpoints/step-00000100"
        ) from None
    except OSError as error:
        raise make_unreadable(path, error) from None
    try:
        manifest = _manifest_from(content)
    except (ValueError, TypeError, KeyError, AttributeError):
        manifest = None
    if manifest is None or manifest_to_text(manifest).encode() != content:
        raise CheckpointError(f"{path} is damaged, or of another version: use another checkpoint")
    return manifest


def _manifest_from(content: bytes) -> CheckpointManifest:
    data = parse_mapping(content.decode())
    data["tensors"] = {name: _tensor_from(text) for name, text in data["tensors"].items()}
    # unknown keys are accepted, because the caller compares the complete text
    manifest = msgspec.convert(data, CheckpointManifest)
    if sum(t.size_bytes for t in manifest.tensors.values()) > sum(
        file.size_bytes for file in manifest.files.values()
    ):
        raise ValueError("the files are smaller than the tensors")  # which must not be allocated then
    for name, tensor in manifest.tensors.items():
        if name.startswith("random.") and not (_RANDOM_STATE.fullmatch(name) and len(tensor.shape) == 1):
            raise ValueError("a random state without a rank, or of several dims")
    if not {*manifest.tied.values()} <= manifest.tensors.keys():
        raise ValueError("a tied name of a tensor that is not there")
    _check_mesh(manifest)
    return manifest


def _check_mesh(manifest: CheckpointManifest) -> None:
    """Raise ValueError unless each rank of the mesh has a file, and the mesh each axis that splits a
    tensor."""
    world_size = math.prod(manifest.mesh.values())
    if world_size > len(manifest.files) or any(rank_file(r) not in manifest.files for r in range(world_size)):
        raise ValueError("a rank of the mesh has no file")
    for sharding, dims in {(tensor.sharding, len(tensor.shape)) for tensor in manifest.tensors.values()}:
        axes = [axis for axis, _ in sharding]
        if len({*axes}) < len(axes) or not {*axes} <= manifest.mesh.keys():
            raise ValueError("an axis that is not in the mesh, or twice")
        if any(dim >= dims for _, dim in sharding):
            raise ValueError("a tensor without a dim that is split")


def _tensor_to_text(tensor: SavedTensor) -> str:
    """Return the text of a SavedTensor, such as `float32[4096, 1024] dp_shard:0 tp:1`."""
    return " ".join((str(tensor), *(f"{axis}:{dim}" for axis, dim in tensor.sharding)))


def _tensor_from(text: str) -> SavedTensor:
    """Parse the text of a SavedTensor. Raises AttributeError or TypeError for any other text."""
    dtype, sizes, split = _TENSOR.fullmatch(text).groups()  # type: ignore[union-attr]
    if dtype not in DTYPES:
        raise TypeError(dtype)
    sharding = tuple((axis, int(dim)) for axis, dim in (pair.split(":") for pair in split.split()))
    return SavedTensor(tuple(int(size) for size in sizes.split(", ") if size), dtype, sharding)


# the only OSErrors that prove that a file does not exist
NOT_FOUND = (FileNotFoundError, NotADirectoryError)


def make_unreadable(path: Path, error: OSError) -> UnreadableError:
    """Return the error for a file or folder of a checkpoint that exists, or may exist, and cannot be read."""
    return UnreadableError(
        f"{path} cannot be read ({error.strerror or error}); it may be intact, so no checkpoint was skipped: "
        "fix the cause and start again"
    )


def hash_file(path: Path) -> SavedFile:
    """Return size and SHA-256 of a file. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        return SavedFile(file.tell(), digest.hexdigest())


CONFIG, GENERATION, ORIGIN = "config.json", "generation_config.json", "origin.json"
JSON_BYTES = 2**24  # limit of a config or an index; the index of 126 blocks in 191 files has 100 KB
BOS_ID, EOS_ID, PAD_ID = TOKEN_IDS = "bos_token_id", "eos_token_id", "pad_token_id"


@dataclass(frozen=True)
class Origin:
    """What is not in the config of a checkpoint's model: the tokenizer of the data that trained it, None if
    unknown; and the rows of weights before their vocabulary was padded, by parameter."""

    tokenizer: TokenizerInfo | None = None
    padded: Mapping[str, Natural] = field(default_factory=dict)


def read_origin(checkpoint: Path) -> Origin:
    """Return the origin of a checkpoint, which older ones do not have."""
    return read_note(Origin, checkpoint / ORIGIN, JSON_BYTES) or Origin()


def read_generation(folder: Path) -> dict[str, Any]:
    """Return a folder's generation_config.json, with ids of special tokens that only its config.json has; {}
    without either. Raises CheckpointError."""
    files = [folder / name for name in (CONFIG, GENERATION)]
    config, generation = (read_hf_json(file) if file.is_file() else {} for file in files)
    return {key: config[key] for key in TOKEN_IDS if config.get(key) is not None} | generation


def beside_weights(origin: Origin, tokenizer: Path | None, folders: Sequence[Path]) -> dict[str, bytes]:
    """Return the files with which a checkpoint needs no data: its origin, the tokenizer whose file is at
    `tokenizer`, and the first generation config in `folders`. Raises OSError and ValueError."""
    files = tokenizer_files(tokenizer) if tokenizer else {}
    generation = next(filter(None, map(read_generation, folders)), None)
    notes = {ORIGIN: asdict(origin) if origin != Origin() else None, GENERATION: generation}
    return files | {name: note_to_json(note) for name, note in notes.items() if note}


def note_to_json(note: Mapping[str, Any]) -> bytes:
    return (json.dumps(note, indent=2) + "\n").encode()


def read_hf_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, JSON_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): fix it, or name the folder of a Hugging Face model"
        ) from None
