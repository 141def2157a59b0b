"""A Hugging Face folder on disk: config.json, and safetensors files of which any slice can be read. Never
pickle."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata

from meshwright.models.hf import EMBEDDING, OUTPUT, config_from_hf
from meshwright.models.llama import LlamaConfig
from meshwright.parallel.errors import first_of, one_line
from meshwright.train.errors import CheckpointError
from meshwright.train.files import read_json

CONFIG, ONE_FILE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
JSON_BYTES = 2**24  # of a config or an index; that of 126 blocks in 191 files has 100 KB
PICKLES = ("*.bin", "*.pt", "*.pth")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAX_NAME_BYTES = 255  # of a file, as file systems have it
_ROWS = 4096  # of a matrix compared at a time: 128 MB where a row has 8,192 channels in float32


@dataclass(frozen=True)
class StoredTensor:
    """One whole tensor in a safetensors file; `dtype` in that format's words, such as BF16."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class HfFolder:
    """A Llama that Hugging Face's libraries have saved: our config of it, its own, and where each tensor
    is."""

    path: Path
    config: LlamaConfig
    hf_config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]


class FilesReader(HuggingFaceStorageReader):
    """Reads the files given, where torch's own reader takes every *.safetensors of a folder; their headers
    only once."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(str(files[0].parent))
        self.fs = _TheseFiles(files)
        self._metadata = super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self._metadata


class _TheseFiles(FileSystem):
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [str(file) for file in files]

    def ls(self, path: Any) -> list[str]:
        return self._files


def open_folder(path: Path) -> HfFolder:
    """Look at config and headers; no weights are read, but to compare the copies of a tied one. Raises
    CheckpointError."""
    hf_config = _read_json(path / CONFIG)
    try:
        config = config_from_hf(hf_config)
    except ValueError as error:
        raise CheckpointError(one_line(f"{path / CONFIG}: {error}")) from None
    files = _find_files(path)
    folder = HfFolder(path, config, hf_config, files, _read_headers(files))
    _check_blocks(folder)
    if config.tie_embeddings and OUTPUT in folder.tensors and EMBEDDING in folder.tensors:
        _check_copies(folder)
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        return read_json(path, JSON_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): name the folder of a Hugging Face model"
        ) from None


def _find_files(path: Path) -> tuple[Path, ...]:
    """The files with the weights: the one, or those of the index, as transformers chooses them."""
    if (path / ONE_FILE).is_file():
        return (path / ONE_FILE,)
    if not (path / INDEX).is_file():
        pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        found = (
            f"only {pickles[0]}, and unpickling runs whatever code is in a file" if pickles else "no weights"
        )
        raise CheckpointError(
            f"{path} has {found}: {ONE_FILE} is needed, or {INDEX} with its files. transformers writes them: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map: fetch the folder again")
    names = sorted({str(name) for name in weight_map.values()})
    if outside := [
        name
        for name in names
        if Path(name).name != name
        or not name.endswith(".safetensors")
        or not name.isprintable()
        or len(name.encode()) > _MAX_NAME_BYTES
    ]:
        raise CheckpointError(
            f"{path / INDEX} names {one_line(outside[0], 200)}, which is no safetensors file of this folder"
        )
    if missing := [name for name in names if not (path / name).is_file()]:
        raise CheckpointError(
            f"{path} lacks {first_of(missing)}, which its index names: fetch the folder again"
        )
    return tuple(path / name for name in names)


def _read_headers(files: Sequence[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    if name in tensors:
                        raise CheckpointError(
                            f"{name} is in {file} and in {tensors[name].file.name}: fetch the folder again"
                        )
                    part = opened.get_slice(name)
                    tensors[name] = StoredTensor(file, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}): fetch it again") from None
    return tensors


def _check_blocks(folder: HfFolder) -> None:
    """CheckpointError if the config has more blocks than the files have tensors, before so many are built."""
    if folder.config.n_layers > len(folder.tensors):
        raise CheckpointError(
            f"{folder.path} does not hold the weights of its config: {CONFIG} says num_hidden_layers="
            f"{folder.config.n_layers:,}, but all its files have {len(folder.tensors):,} tensors: fetch the "
            "folder again"
        )


def _check_copies(folder: HfFolder) -> None:
    """CheckpointError if a tied weight was saved twice with different values, of which a model can have only
    one."""
    one, other = folder.tensors[EMBEDDING], folder.tensors[OUTPUT]
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    with safe_open(one.file, framework="pt") as first, safe_open(other.file, framework="pt") as second:
        a, b = first.get_slice(EMBEDDING), second.get_slice(OUTPUT)
        starts = range(0, one.shape[0] if same else 0, _ROWS)
        same = same and all(torch.equal(a[row : row + _ROWS], b[row : row + _ROWS]) for row in starts)
    if not same:
        raise CheckpointError(
            f"{folder.path}: {OUTPUT} and {EMBEDDING} differ, but {CONFIG} says tie_word_embeddings=true: "
            "set it to false there"
        )
