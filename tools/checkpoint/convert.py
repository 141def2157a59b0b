"""Import and export of models: Hugging Face folders, and files with the names of the model's state_dict.

An import needs host memory for one file (`--shard_gb`), an export for one tensor, not for the model.
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.models.config import LlamaConfig
from meshwright.models.hf import config_to_hf, for_every_version, hf_name
from meshwright.parallel.errors import first_of
from meshwright.parallel.yaml_io import to_yaml
from meshwright.train.checkpoint.commit import find_newest, list_checkpoints, write_synced
from meshwright.train.checkpoint.huggingface import INDEX, ONE_FILE, HfFolder, make_export, open_folder
from meshwright.train.checkpoint.initial_weights import Weights, find_weights, match_files
from meshwright.train.checkpoint.layout import CheckpointLayout
from meshwright.train.checkpoint.manifest import (
    CONFIG,
    GENERATION,
    JSON_BYTES,
    MANIFEST,
    MODEL,
    ORIGIN,
    CheckpointManifest,
    Origin,
    SavedTensor,
    TrainPosition,
    beside_weights,
    hash_file,
    manifest_to_text,
    rank_file,
    read_origin,
)
from meshwright.train.checkpoint.reader import open_checkpoint, read_full, read_headers
from meshwright.train.checkpoint.shards import (
    TensorShard,
    code_versions,
    file_pieces,
    tied_names,
    write_shard_file,
)
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.config import Config, ModelConfig
from meshwright.train.config_parser import load_config
from meshwright.train.data.corpus import find_tokenizer_file
from meshwright.train.data.tokenizer import FILE
from meshwright.train.data.tokenizer import FILES as TOKENIZER_FILES
from meshwright.train.errors import CheckpointError, ConfigError
from meshwright.train.files import read_json, replacing
from meshwright.train.model.trained_model import HF_CONFIG, model_of

# checkpoint.every (optimizer steps) in the config of an imported model, as in the shipped configs of its
# size: the default is only at the end
SAVE_EVERY = 500
HEAD = (  # of that config
    "# The model of {folder}, by tools.checkpoint. Position tables have model.max_seq_len rows:\n"
    "# the key may be lowered, down to train.seq_len.\n"
)


def import_model(source: Path, out: Path, force: bool, limit_bytes: int) -> Path:
    """Write a Hugging Face Llama as a checkpoint at step 0: as of so many replicas that each writes about
    `limit_bytes`. Return its path. Raises CheckpointError."""
    if (source / MANIFEST).is_file() or (source / "checkpoints").is_dir() or list_checkpoints(source):
        raise CheckpointError(
            f"{source} is a checkpoint or the folder of a run, which needs no import: train from it with "
            "--checkpoint.init_from, or write a Hugging Face folder of it with tools.checkpoint export"
        )
    folder = open_folder(source)
    names = {MODEL + fqn: name for fqn, name in match_files(folder, folder.config).names.items()}
    tensors = {name: folder.tensors[hf] for name, hf in names.items()}
    described = {name: stored.tensor for name, stored in tensors.items()}
    replicas = max(1, math.ceil(sum(tensor.size_bytes for tensor in described.values()) / limit_bytes))
    layout = CheckpointLayout(described, (("dp_replicate", replicas),))

    def read(name: str) -> TensorShard:
        with safe_open(tensors[name].file, framework="pt") as opened:
            return TensorShard(opened.get_tensor(names[name]), (0,) * len(described[name].shape))

    with _new_folder(source, out, force) as partial:
        for rank in range(replicas):
            write_shard_file(
                partial / rank_file(rank), {name: read(name) for name in layout.written_by(rank)}
            )
        beside = beside_weights(Origin(), folder.path / FILE, [folder.path])
        for name, content in beside.items():
            (partial / name).write_bytes(content)
        config = to_yaml(imported_config(folder, str(out.resolve()) if FILE in beside else None))
        head = HEAD.format(folder=folder.path)
        (partial / "config.yaml").write_text(head + config, encoding="utf-8")
        files = {file.name: hash_file(file) for file in sorted(partial.iterdir())}
        versions, tied = code_versions(), tied_names(model_of(folder.config).module)
        manifest = CheckpointManifest(TrainPosition(), files, described, dict(layout.mesh), versions, tied)
        write_synced(partial / MANIFEST, manifest_to_text(manifest))
    return out


def imported_config(folder: HfFolder, tokenizer: str | None) -> dict[str, Any]:
    """Return the sections of a config for `--config`: the model, its tokenizer if it has one, and other keys
    that must differ from the defaults."""
    sections: dict[str, Any] = {"model": asdict(folder.config)}
    if tokenizer:
        sections["data"] = {"tokenizer": tokenizer}
    if folder.config.max_seq_len < Config().train.seq_len:
        sections["train"] = {"seq_len": folder.config.max_seq_len}
    sections["checkpoint"] = {"every": SAVE_EVERY}
    return sections


def find_exported(source: Path) -> Path:
    """Return the checkpoint, or the newest of a run. Raises CheckpointError."""
    if (source / CONFIG).is_file() and not (source / MANIFEST).is_file():
        raise CheckpointError(
            f"{source} is a Hugging Face folder, not a checkpoint or the folder of a run: make a checkpoint "
            "of it with tools.checkpoint import, or use it as it is"
        )
    return find_newest(source)


def export_model(checkpoint: Path, out: Path, force: bool, limit_bytes: int, dtype: str | None) -> Path:
    """Verify a checkpoint and write its model: as a folder of transformers if it is a Llama of ours or has a
    config.json, else as a folder of safetensors with the names of the model's state_dict. Runs no code of the
    model. Returns the folder's path. Raises CheckpointError."""
    manifest = verify_alone(checkpoint)
    with _new_folder(checkpoint, out, force) as partial:
        for name in (*TOKENIZER_FILES, ORIGIN, GENERATION, HF_CONFIG):
            if (checkpoint / name).exists() and name not in manifest.files:
                raise CheckpointError(f"{checkpoint / name} is not a file that the manifest names: remove it")
        has_config = (checkpoint / "config.yaml").is_file()  # mw.save writes none
        config = checkpoint_config(checkpoint) if has_config else None
        names, hf_config = _hf_form(checkpoint, manifest, config)
        origin, rows = read_origin(checkpoint), dict[str, int]()
        for name, ours in names.items() if hf_config else ():
            # the padding that no token uses is left out
            if unpadded := origin.padded.get(ours.removeprefix(MODEL)):
                used = origin.tokenizer.vocab_size if origin.tokenizer else 0
                rows[name] = min(max(unpadded, used), manifest.tensors[ours].shape[0])
                hf_config["vocab_size"] = rows[name]
        tensors, read = _open_model(checkpoint, manifest, names, dtype, rows)
        write_files(partial, tensors, read, limit_bytes)
        if hf_config:
            sizes = Counter[str]()
            for tensor in tensors.values():
                sizes[tensor.dtype] += tensor.size_bytes
            hf_config = for_every_version(hf_config, max(sizes, key=sizes.__getitem__))
            kept = checkpoint / FILE
            tokenizer = kept if kept.is_file() or not config else find_tokenizer_file(config.data)
            for file, content in make_export(hf_config, checkpoint, tokenizer).items():
                (partial / file).write_bytes(content)
    return out


def export_file(checkpoint: Path, target: Path, force: bool, dtype: str | None) -> Path:
    """Verify a checkpoint and write its model, with the names of its state_dict, into one safetensors file,
    which appears by one rename; return its path. Raises CheckpointError, also if the file exists and not
    `force`."""
    if target.exists() and not force:
        raise CheckpointError(f"{target} exists: name another file, or add --force to replace it")
    manifest = verify_alone(checkpoint)
    opened = _open_model(checkpoint, manifest, state_dict_names(manifest), dtype, {})
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            write_weights(partial, *opened)
    except OSError as error:
        raise CheckpointError(f"cannot write {target} ({_reason(error)}): name another path") from None
    return target


def checkpoint_config(checkpoint: Path) -> Config:
    """Read the config of the run that saved a checkpoint. Raises CheckpointError."""
    path = checkpoint / "config.yaml"
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} has no config.yaml, so its model is unknown: copy the run's config.yaml into it"
        )
    try:
        return load_config(path)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def own_weights(checkpoint: Path, model: ModelConfig) -> Weights:
    """Return the weights of a checkpoint for the model of its config. Raises CheckpointError."""
    weights = find_weights(str(checkpoint), model, changed_model=True, strict=False)
    if weights.missing:
        raise CheckpointError(
            f"{checkpoint} does not contain the model of its config.yaml: {first_of(weights.missing)} is not "
            "in it: use another checkpoint"
        )
    return weights


def state_dict_names(manifest: CheckpointManifest) -> dict[str, str]:
    """Return the name in the manifest by that in the model's state_dict, where a tied tensor has all of its
    names; of a checkpoint of an older version its first name only."""
    stored = {name: name for name in manifest.tensors if name.startswith(MODEL)}
    return {name.removeprefix(MODEL): ours for name, ours in {**stored, **manifest.tied}.items()}


def _hf_form(
    checkpoint: Path, manifest: CheckpointManifest, config: Config | None
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the name in the manifest by that in the folder, and config.json, {} if the model has none. The
    run of a model that a factory built has saved config.json beside its weights; transformers writes a tied
    weight once."""
    if config and isinstance(config.model, LlamaConfig):
        names = own_weights(checkpoint, config.model).names
        return {hf_name(fqn): ours for fqn, ours in names.items()}, config_to_hf(config.model)
    names = state_dict_names(manifest)
    if not (checkpoint / HF_CONFIG).is_file():
        return names, {}
    once = {name: ours for name, ours in names.items() if ours == MODEL + name}
    return once, read_json(checkpoint / HF_CONFIG, JSON_BYTES)


def _open_model(
    checkpoint: Path,
    manifest: CheckpointManifest,
    names: Mapping[str, str],
    dtype: str | None,
    rows: Mapping[str, int],
) -> tuple[dict[str, SavedTensor], Callable[[str], Tensor]]:
    """Return the tensors to write by name, floats in `dtype` (None: all as saved), of those in `rows` so many
    rows only; and a function that reads one of them."""
    files, tensors = open_checkpoint(checkpoint, manifest), dict[str, SavedTensor]()
    for name, ours in names.items():
        saved = manifest.tensors[ours]
        shape = (rows[name], *saved.shape[1:]) if name in rows else saved.shape
        is_float = getattr(torch, saved.dtype).is_floating_point
        tensors[name] = SavedTensor(shape, dtype if dtype and is_float else saved.dtype)

    def read(name: str) -> Tensor:
        full = read_full(files, manifest, names[name])
        first_rows = full[tuple(map(slice, tensors[name].shape))]
        return _converted(name, first_rows, getattr(torch, tensors[name].dtype))

    return tensors, read


def write_files(
    folder: Path, tensors: Mapping[str, SavedTensor], read: Callable[[str], Tensor], limit_bytes: int
) -> None:
    """Write tensors, in order, into as few files as the limit allows, and the index of several."""
    files: list[dict[str, SavedTensor]] = [{}]
    for name, tensor in tensors.items():
        if files[-1] and sum(t.size_bytes for t in files[-1].values()) + tensor.size_bytes > limit_bytes:
            files.append({})
        files[-1][name] = tensor
    places: dict[str, str] = {}
    for number, content in enumerate(files, 1):
        file = folder / (ONE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors")
        write_weights(file, content, read)
        places |= dict.fromkeys(content, file.name)
    if len(files) > 1:
        total = sum(tensor.size_bytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_weights(file: Path, tensors: Mapping[str, SavedTensor], read: Callable[[str], Tensor]) -> None:
    """Write a safetensors file with one tensor in memory at a time, and sync it to disk. Raises OSError."""
    with open(file, "wb") as written:
        written.writelines(file_pieces(tensors, read))
        written.flush()
        os.fsync(written.fileno())


def describe(path: Path) -> dict[str, Any]:
    """Return elements, dtypes, size and files of an imported or exported folder, or of one file, read from
    the headers of its safetensors files."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    others = sorted(file.name for file in path.iterdir() if file not in files) if path.is_dir() else []
    tensors = read_headers(files).values()
    return {
        "path": str(path),
        "elements": sum(stored.part.numel for stored in tensors),
        "dtype": ", ".join(sorted({stored.dtype for stored in tensors})),
        "size_gb": sum(file.stat().st_size for file in files) / 1e9,
        "files": len(files),
        "beside": others,
    }


def description_text(described: dict[str, Any]) -> str:
    line = "{path}: {elements:,} elements, {dtype}, {size_gb:.3f} GB in {files} file{s}"
    others = f"; other files: {', '.join(described['beside'])}" if described["beside"] else ""
    return line.format(**described, s="s" * (described["files"] > 1)) + others


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if dtype == torch.float16 and bool((converted.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(
            f"{name} has values beyond {torch.finfo(dtype).max:g}, the largest value of float16: "
            "use --dtype bfloat16 or float32"
        )
    return converted


def _reason(error: Exception) -> str:
    """Return the error without the temporary file's name."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def _new_folder(source: Path, out: Path, force: bool) -> Iterator[Path]:
    """A hidden folder next to `out` to write into, renamed to `out` at the end; deleted on an error."""
    if out.resolve() in (source.resolve(), *source.resolve().parents):
        raise CheckpointError(f"{out} is or contains the source {source}: use another folder")
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file: use a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise CheckpointError(
            f"{out} is not empty: use another folder, or add --force to replace it and everything in it"
        )
    final = out.resolve()
    partial, old = (final.with_name(f".{final.name}.{os.getpid()}.{kind}") for kind in ("partial", "old"))
    try:
        partial.mkdir(parents=True)
        yield partial
        if final.exists():
            os.rename(final, old)
        os.rename(partial, final)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {out} ({_reason(error)}): use another folder") from None
    finally:
        if old.exists() and not final.exists():  # not renamed
            os.rename(old, final)
        shutil.rmtree(partial, ignore_errors=True)
