"""manifest.json: what a checkpoint says of itself, and by which every byte of it is checked."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from meshwright import __version__
from meshwright.parallel.structure import Natural
from meshwright.train.errors import CheckpointError, UnreadableError
from meshwright.train.files import parse_mapping, read_bounded

MANIFEST, FORMAT = "manifest.json", "meshwright checkpoint 2"
_TENSOR = re.compile(r"(\w{1,32})\[((?:\d{1,18}(?:, \d{1,18}){0,63})?)\]")
# of a file in the folder of the checkpoint
FileName = Annotated[
    str, msgspec.Meta(pattern=rf"^(?!(\.|\.\.|{re.escape(MANIFEST)})\Z)[A-Za-z0-9_.-]{{1,255}}\Z")
]
LIMIT_BYTES = 64 * 2**20  # of a manifest; that of a 405B model saved by 16,384 ranks has 5 MB


@dataclass(frozen=True)
class TrainPosition:
    """How far a run is: steps done, samples of the data order used; and what that order and the random state
    hang on: seed, tokens per sequence, the number of processes, and the fingerprint of the data."""

    step: Natural = 0
    samples: Natural = 0
    seed: Natural = 0
    seq_len: Natural = 0
    world_size: Natural = 0
    data: str = ""


@dataclass(frozen=True)
class SavedFile:
    """A file as it was committed: its size, and its SHA-256 in hexadecimal."""

    size_bytes: Natural
    sha256: str


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor; `dtype` is torch's word for it, such as bfloat16."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def describe_tensor(tensor: torch.Tensor) -> SavedTensor:
    """Shape and dtype of a whole tensor."""
    return SavedTensor(tuple(tensor.shape), dtype_word(tensor.dtype))


def dtype_word(dtype: torch.dtype) -> str:
    """bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class CheckpointManifest:
    """All that a checkpoint consists of: its files but for the manifest by name, and its tensors,
    `model.FQN`, `optim.FQN.MOMENT` and `random.DEVICE.RANK`; and with which versions it was written."""

    position: TrainPosition
    files: Mapping[FileName, SavedFile]
    tensors: Mapping[str, SavedTensor]
    code: Mapping[str, str] = field(
        default_factory=lambda: {"meshwright": __version__, "torch": str(torch.__version__)}
    )


def manifest_to_text(manifest: CheckpointManifest) -> str:
    """The file's text, the only one there is for this manifest: its last key is the hash of all that stands
    before."""
    tensors = {name: str(tensor) for name, tensor in manifest.tensors.items()}
    body = json.dumps({"format": FORMAT, **asdict(manifest), "tensors": tensors}, indent=1)
    return f'{body[:-2]},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """A checkpoint's manifest. Raises CheckpointError unless it is there and exactly as it was written,
    UnreadableError if nobody can tell."""
    path = checkpoint / MANIFEST
    try:
        if path.is_symlink():
            raise ValueError("it is a link, which may lead anywhere")
        content = read_bounded(path, LIMIT_BYTES)
    except (*GONE, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint: it has no {MANIFEST} that can be read "
            f"({getattr(error, 'strerror', None) or error}). Name a folder such as "
            "runs/NAME/checkpoints/step-00000100"
        ) from None
    except OSError as error:
        raise make_unreadable(path, error) from None
    try:
        manifest = _manifest_from(content)
    except (ValueError, TypeError, KeyError, AttributeError):
        manifest = None
    if manifest is None or manifest_to_text(manifest).encode() != content:
        raise CheckpointError(f"{path} is damaged, or not of this version: use another checkpoint")
    return manifest


def _manifest_from(content: bytes) -> CheckpointManifest:
    data = parse_mapping(content.decode())
    data["tensors"] = {name: _tensor_from(text) for name, text in data["tensors"].items()}
    # lenient with further keys, because the whole text is compared afterwards
    manifest = msgspec.convert(data, CheckpointManifest)
    if sum(t.size_bytes for t in manifest.tensors.values()) > sum(
        file.size_bytes for file in manifest.files.values()
    ):
        raise ValueError("the files cannot hold the tensors")  # nobody allocates what is not there
    return manifest


def _tensor_from(text: str) -> SavedTensor:
    """The tensor that str(tensor) describes. AttributeError or TypeError if it describes none."""
    dtype, sizes = _TENSOR.fullmatch(text).groups()  # type: ignore[union-attr]
    if not isinstance(getattr(torch, dtype), torch.dtype):
        raise TypeError(dtype)
    return SavedTensor(tuple(int(size) for size in sizes.split(", ") if size), dtype)


# what says for certain that a file is not there; no other OSError does
GONE = (FileNotFoundError, NotADirectoryError)


def make_unreadable(path: Path, error: OSError) -> UnreadableError:
    """The error for a file or folder of a checkpoint that is there, or may be, and cannot be read."""
    return UnreadableError(
        f"{path} cannot be read ({error.strerror or error}), which does not mean that it is damaged; nothing "
        "was passed over: mend that and start again"
    )
