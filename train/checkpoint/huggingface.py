"""A Hugging Face folder on disk: config.json, and safetensors files that can be read slice by slice."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.models.config import LlamaConfig
from meshwright.models.hf import config_from_hf
from meshwright.parallel.errors import first_of, one_line
from meshwright.train.checkpoint.manifest import (
    BOS_ID,
    CONFIG,
    EOS_ID,
    GENERATION,
    TOKEN_IDS,
    note_to_json,
    read_generation,
    read_hf_json,
    read_origin,
)
from meshwright.train.checkpoint.reader import StoredPart, read_headers
from meshwright.train.data.tokenizer import (
    FILE,
    TokenizerInfo,
    byte_tokenizer_json,
    name_tokens,
    tokenizer_files,
)
from meshwright.train.errors import CheckpointError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
_MAX_NAME_BYTES = 255  # the limit of common file systems


@dataclass(frozen=True)
class HfWeights:
    """A model's weights in a folder of Hugging Face's form, or in one file: its config, {} if there is none,
    and the file of each tensor."""

    path: Path
    hf_config: dict[str, Any]
    tensors: dict[str, StoredPart]


@dataclass(frozen=True)
class HfFolder(HfWeights):
    """A Llama among them, with our config."""

    config: LlamaConfig


def make_export(hf_config: Mapping[str, Any], checkpoint: Path, tokenizer: Path | None) -> dict[str, bytes]:
    """Return the files beside the weights of a Hugging Face folder: the config with the ids of special
    tokens, the generation config, and those of the tokenizer file. Raises OSError and ValueError."""
    files, info = tokenizer_files(tokenizer) if tokenizer else {}, read_origin(checkpoint).tokenizer
    generation = read_generation(checkpoint) or (read_generation(tokenizer.parent) if tokenizer else {})
    if info:
        files = name_tokens(files if info.sha256 else {FILE: byte_tokenizer_json()}, info)
        generation = _merge_ids(generation, info, hf_config.get("vocab_size", info.vocab_size))
    ids = {key: generation[key] for key in TOKEN_IDS if key in generation}
    notes = {CONFIG: {**hf_config, **ids}, **({GENERATION: generation} if generation else {})}
    return files | {name: note_to_json(note) for name, note in notes.items()}


def _merge_ids(generation: Mapping[str, Any], tokenizer: TokenizerInfo, vocab_size: int) -> dict[str, Any]:
    """Return a generation config in which a text begins as in the training data, and their separator ends it
    too. A BOS that the data do not have stays; ids that the model does not have are dropped."""
    given = {key: generation.get(key) for key in TOKEN_IDS}
    lists = {key: value if isinstance(value, list) else [value] for key, value in given.items()}
    ids = {key: [i for i in each if isinstance(i, int) and i < vocab_size] for key, each in lists.items()}
    ids[BOS_ID] = [tokenizer.start] if tokenizer.bos is not None else ids[BOS_ID] or [tokenizer.start]
    ids[EOS_ID] = list(dict.fromkeys([*ids[EOS_ID], tokenizer.eos]))
    others = {key: value for key, value in generation.items() if key not in TOKEN_IDS}
    return others | {key: each if each[1:] else each[0] for key, each in ids.items() if each}


def open_weights(path: Path) -> HfWeights:
    """Read the config, if there is one, and the tensors' headers of a folder of any model, or of one file.
    Raises CheckpointError."""
    config, files = path / CONFIG, (path,) if path.is_file() else _find_files(path)
    return HfWeights(path, read_hf_json(config) if config.is_file() else {}, read_headers(files))


def open_folder(path: Path) -> HfFolder:
    """Read a folder of a Llama. Raises CheckpointError."""
    hf_config = read_hf_json(path / CONFIG)
    try:
        config = config_from_hf(hf_config)
    except ValueError as error:
        raise CheckpointError(one_line(f"{path / CONFIG}: {error}")) from None
    folder = HfFolder(**vars(open_weights(path)), config=config)
    if config.n_layers > len(folder.tensors):  # which are not built then
        raise CheckpointError(
            f"{path} does not contain the weights of its config: {CONFIG} sets num_hidden_layers="
            f"{config.n_layers:,}, but the files contain {len(folder.tensors):,} tensors: download the "
            "folder again"
        )
    return folder


def _find_files(path: Path) -> tuple[Path, ...]:
    """Return the weight files: model.safetensors, or the files of the index, as transformers chooses them."""
    if (path / ONE_FILE).is_file():
        return (path / ONE_FILE,)
    if not (path / INDEX).is_file():
        pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        content = (
            f"only {pickles[0]}, which checkpoint.init_from takes by its name" if pickles else "no weights"
        )
        raise CheckpointError(
            f"{path} contains {content}: a folder needs {ONE_FILE}, or {INDEX} with its files. "
            "tools.checkpoint export writes them, and transformers' save_pretrained"
        )
    weight_map = read_hf_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map: download the folder again")
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
            f"{path / INDEX} lists {one_line(outside[0], 200)}, which is not a safetensors file in this "
            "folder: download the folder again"
        )
    if missing := [name for name in names if not (path / name).is_file()]:
        raise CheckpointError(
            f"{path} lacks {first_of(missing)}, which its index lists: download the folder again"
        )
    return tuple(path / name for name in names)
