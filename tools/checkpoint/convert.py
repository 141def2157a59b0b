"""Import and export of models: Hugging Face folders, and files with the model's own parameter names.

Hugging Face's tensors are converted file by file: host memory for one file (`--shard_gb`), not for the model.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.models.config import LlamaConfig
from meshwright.models.hf import config_to_hf, for_every_version, hf_name
from meshwright.parallel.yaml_io import to_yaml
from meshwright.tools.load_weights import (
    checkpoint_config,
    load_full_weights,
    read_full_tensors,
    saved_weights,
)
from meshwright.train.checkpoint.commit import find_newest, list_checkpoints, write_synced
from meshwright.train.checkpoint.huggingface import (
    DTYPES,
    INDEX,
    ONE_FILE,
    HfFolder,
    make_export,
    open_folder,
)
from meshwright.train.checkpoint.initial_weights import PREFIX, match_folder
from meshwright.train.checkpoint.layout import CheckpointLayout
from meshwright.train.checkpoint.manifest import (
    CONFIG,
    GENERATION,
    JSON_BYTES,
    MANIFEST,
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
from meshwright.train.checkpoint.reader import open_checkpoint
from meshwright.train.checkpoint.shards import TensorShard, code_versions, dtype_name, write_shard_file
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.config import Config, ModelConfig
from meshwright.train.data.corpus import find_tokenizer_file
from meshwright.train.data.tokenizer import FILE
from meshwright.train.data.tokenizer import FILES as TOKENIZER_FILES
from meshwright.train.errors import CheckpointError
from meshwright.train.files import read_json, replacing
from meshwright.train.model.trained_model import HF_CONFIG

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
    names = {PREFIX + fqn: name for fqn, name in match_folder(folder, folder.config).names.items()}
    tensors = {name: folder.tensors[hf] for name, hf in names.items()}
    described = {name: SavedTensor(t.shape, dtype_name(DTYPES[t.dtype])) for name, t in tensors.items()}
    replicas = max(1, math.ceil(sum(tensor.size_bytes for tensor in described.values()) / limit_bytes))
    layout = CheckpointLayout(described, (("dp_replicate", replicas),))

    def read(name: str) -> TensorShard:
        with safe_open(tensors[name].file, framework="pt") as opened:
            return TensorShard(opened.get_tensor(names[name]), (0,) * len(tensors[name].shape))

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
        manifest = CheckpointManifest(TrainPosition(), files, described, dict(layout.mesh), code_versions())
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
    """Verify a checkpoint and write its model as a folder of transformers; return its path. Raises
    CheckpointError."""
    manifest = verify_alone(checkpoint)
    with _new_folder(checkpoint, out, force) as partial:
        for name in (*TOKENIZER_FILES, ORIGIN, GENERATION, HF_CONFIG):
            if (checkpoint / name).exists() and name not in manifest.files:
                raise CheckpointError(f"{checkpoint / name} is not a file that the manifest names: remove it")
        config = checkpoint_config(checkpoint)
        names, hf_config = _hf_form(checkpoint, manifest, config.model)
        shapes = {name: manifest.tensors[ours].shape for name, ours in names.items()}
        origin = read_origin(checkpoint)
        for name, ours in names.items():
            # the padding that no token uses is left out
            if rows := origin.padded.get(ours.removeprefix(PREFIX)):
                used = origin.tokenizer.vocab_size if origin.tokenizer else 0
                rows = min(max(rows, used), shapes[name][0])
                shapes[name], hf_config["vocab_size"] = (rows, *shapes[name][1:]), rows
        dtypes = {name: getattr(torch, dtype or manifest.tensors[ours].dtype) for name, ours in names.items()}
        sizes = {name: math.prod(shapes[name]) * dtypes[name].itemsize for name in names}
        files = open_checkpoint(checkpoint, manifest)

        def read(name: str) -> Tensor:
            tensor = read_full_tensors(files, manifest, [names[name]])[names[name]]
            return _converted(name, tensor[tuple(map(slice, shapes[name]))], dtypes[name])

        write_files(partial, sizes, read, limit_bytes)
        main_dtype = max(
            dtypes.values(), key=lambda each: sum(sizes[name] for name in names if dtypes[name] == each)
        )
        tokenizer = checkpoint / FILE if (checkpoint / FILE).is_file() else find_tokenizer_file(config.data)
        hf_config = for_every_version(hf_config, str(main_dtype).removeprefix("torch."))
        for file, content in make_export(hf_config, checkpoint, tokenizer).items():
            (partial / file).write_bytes(content)
    return out


def _hf_form(
    checkpoint: Path, manifest: CheckpointManifest, model: ModelConfig
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the name in the manifest by that of transformers, and config.json. The run of a model that a
    factory built has saved config.json beside its weights."""
    if isinstance(model, LlamaConfig):
        saved = saved_weights(checkpoint, manifest, model)
        return {hf_name(fqn): PREFIX + fqn for fqn in saved}, config_to_hf(model)
    if not (checkpoint / HF_CONFIG).is_file():
        raise CheckpointError(
            f"{checkpoint} has no {HF_CONFIG}: its model is not one of transformers, which a Hugging Face "
            "folder needs. Read its weights with meshwright.load, or from its safetensors files"
        )
    names = (name for name in manifest.tensors if name.startswith(PREFIX))
    return {name.removeprefix(PREFIX): name for name in names}, read_json(checkpoint / HF_CONFIG, JSON_BYTES)


def export_plain_names(checkpoint: Path, target: Path, force: bool, dtype: str) -> Path:
    """Write the full model under its own parameter names into one safetensors file, which appears by one
    rename; return its path. Raises CheckpointError, also if the file exists and not `force`."""
    if target.exists() and not force:
        raise CheckpointError(f"{target} exists: name another file, or add --force to replace it")
    saved = load_full_weights(checkpoint)
    weights = {name: _converted(name, tensor, getattr(torch, dtype)) for name, tensor in saved.items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            write_weights(partial, weights)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target} ({_reason(error)}): name another path") from None
    return target


def write_files(
    folder: Path, sizes: Mapping[str, int], read: Callable[[str], Tensor], limit_bytes: int
) -> None:
    """Write tensors of these sizes in bytes, in order, into as few files as the limit allows, and the index
    of several."""
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(sizes[other] for other in files[-1]) + size > limit_bytes:
            files.append([])
        files[-1].append(name)
    places: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = folder / (ONE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors")
        write_weights(file, {name: read(name) for name in names})
        places |= dict.fromkeys(names, file.name)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_weights(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and sync it to disk. Raises OSError and SafetensorError."""
    file.touch()
    # the mode of the user's umask: safetensors makes the file readable only by its owner
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(mode)
    with open(file, "rb") as written:
        os.fsync(written.fileno())


def describe(path: Path) -> dict[str, Any]:
    """Return parameters, dtypes, size and files of an imported or exported folder, or of one file, read from
    the headers of its safetensors files."""
    parameters, size_bytes, dtypes = 0, 0, set()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        size_bytes += file.stat().st_size
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                parameters += math.prod(opened.get_slice(name).get_shape())
                dtypes.add(str(DTYPES[opened.get_slice(name).get_dtype()]).removeprefix("torch."))
    others = sorted(file.name for file in path.iterdir() if file not in files) if path.is_dir() else []
    return {
        "path": str(path),
        "parameters": parameters,
        "dtype": ", ".join(sorted(dtypes)),
        "size_gb": size_bytes / 1e9,
        "files": len(files),
        "beside": others,
    }


def description_text(described: dict[str, Any]) -> str:
    """Return a description as a line."""
    line = "{path}: {parameters:,} parameters, {dtype}, {size_gb:.3f} GB in {files} file{s}"
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
