"""`python -m tools.convert_hf import HF_DIR OUT | export CHECKPOINT HF_DIR`: converts Hugging Face weights.

Tensors are converted file by file, so it needs host memory for one file (`--shard_gb`), not for the model.
"""

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.models.hf import config_to_hf, for_every_version, hf_name
from meshwright.models.llama import LlamaConfig
from meshwright.parallel.yaml_io import to_yaml
from meshwright.tools.cli import number_from, run_tool
from meshwright.tools.load_weights import (
    checkpoint_config,
    find_newest,
    read_full_tensors,
    saved_weights,
    write_weights,
)
from meshwright.train.checkpoint.commit import write_synced
from meshwright.train.checkpoint.huggingface import (
    DTYPES,
    GENERATION,
    INDEX,
    JSON_BYTES,
    ONE_FILE,
    ORIGIN,
    HfFolder,
    Origin,
    beside_weights,
    make_export,
    open_folder,
    read_origin,
)
from meshwright.train.checkpoint.initial_weights import PREFIX, check_folder, weight_shapes
from meshwright.train.checkpoint.layout import CheckpointLayout
from meshwright.train.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    SavedTensor,
    TrainPosition,
    dtype_name,
    manifest_to_text,
    rank_file,
)
from meshwright.train.checkpoint.reader import open_checkpoint
from meshwright.train.checkpoint.shards import TensorShard, write_shard_file
from meshwright.train.checkpoint.verify import hash_file, verify_alone
from meshwright.train.config import Config
from meshwright.train.data.corpus import find_tokenizer_file
from meshwright.train.data.tokenizer import FILE
from meshwright.train.data.tokenizer import FILES as TOKENIZER_FILES
from meshwright.train.errors import CheckpointError
from meshwright.train.files import read_json, user_path
from meshwright.train.model.own import HF_CONFIG

# checkpoint.every (optimizer steps) in the config of an imported model, as in the shipped configs of its
# size: the default is only at the end
SAVE_EVERY = 500
EXPORT_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the subcommand. Raises CheckpointError."""
    options = make_parser().parse_args(arguments)
    source = user_path(options.source, "SOURCE", CheckpointError)
    out = user_path(options.out, "OUT", CheckpointError)
    limit_bytes = int(options.shard_gb * 1e9)
    if options.command == "import":
        folder = open_folder(source)
        check_folder(folder, folder.config)
        with _new_folder(source, out, options.force) as partial:
            import_folder(folder, partial, out.resolve(), limit_bytes)
    else:
        checkpoint = find_newest(source)
        manifest = verify_alone(checkpoint)
        with _new_folder(checkpoint, out, options.force) as partial:
            export_checkpoint(checkpoint, manifest, partial, options.dtype, limit_bytes)
    written = describe(out)
    print(
        json.dumps(written, indent=2)
        if options.json
        else "{path}: {parameters:,} parameters, {dtype}, {size_gb:.3f} GB in "
        "{files} file{s}; other files: {beside}".format(**written, s="s" * (written["files"] > 1))
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's subcommands and options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert_hf",
        description="Convert a Hugging Face Llama to a checkpoint, or a checkpoint to a Hugging Face folder.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="subcommands (-h after one explains its options):\n"
        "  import HF_DIR OUT             a checkpoint at step 0, with a config.yaml for train.main --config\n"
        "  export CHECKPOINT HF_DIR      a folder for transformers' AutoModelForCausalLM.from_pretrained",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export")
    imports = commands.add_parser("import", help="Hugging Face folder to checkpoint", allow_abbrev=False)
    imports.add_argument(
        "source", metavar="HF_DIR", help="folder with config.json and *.safetensors of a Llama"
    )
    imports.add_argument("out", metavar="OUT", help="the checkpoint to write; dtypes do not change")
    exports = commands.add_parser("export", help="checkpoint to Hugging Face folder", allow_abbrev=False)
    exports.add_argument(
        "source", metavar="CHECKPOINT", help="a checkpoint, or a run, whose newest checkpoint is used"
    )
    exports.add_argument("out", metavar="HF_DIR", help="the folder to write")
    exports.add_argument("--dtype", choices=EXPORT_DTYPES, help="dtype of the weights (default: as saved)")
    for command in (imports, exports):
        command.add_argument(
            "--shard_gb",
            type=number_from(1e-9),
            default=5.0,
            metavar="GB",
            help="size of a file in gigabytes (default 5); one tensor may exceed it",
        )
        command.add_argument(
            "--force", action="store_true", help="replace an existing folder and everything in it"
        )
        command.add_argument(
            "--json", action="store_true", help="print one JSON document that describes the result"
        )
    return parser


def import_folder(folder: HfFolder, partial: Path, final: Path, limit_bytes: int) -> None:
    """Write a Hugging Face model into `partial` as a checkpoint at step 0, whose final path is `final`: as of
    so many replicas that each writes about `limit_bytes`."""
    names = {PREFIX + fqn: hf_name(fqn) for fqn in weight_shapes(folder.config)}
    tensors = {name: folder.tensors[hf] for name, hf in names.items()}
    described = {name: SavedTensor(t.shape, dtype_name(DTYPES[t.dtype])) for name, t in tensors.items()}
    replicas = max(1, math.ceil(sum(tensor.size_bytes for tensor in described.values()) / limit_bytes))
    layout = CheckpointLayout(described, (("dp_replicate", replicas),))

    def read(name: str) -> TensorShard:
        with safe_open(tensors[name].file, framework="pt") as opened:
            return TensorShard(opened.get_tensor(names[name]), (0,) * len(tensors[name].shape))

    for rank in range(replicas):
        write_shard_file(partial / rank_file(rank), {name: read(name) for name in layout.written_by(rank)})
    beside = beside_weights(Origin(), folder.path / FILE, [folder.path])
    for name, content in beside.items():
        (partial / name).write_bytes(content)
    has_tokenizer = FILE in beside
    (partial / "config.yaml").write_text(
        config_text(folder, str(final) if has_tokenizer else None), encoding="utf-8"
    )
    files = {file.name: hash_file(file) for file in sorted(partial.iterdir())}
    manifest = CheckpointManifest(TrainPosition(), files, described, mesh=dict(layout.mesh))
    write_synced(partial / MANIFEST, manifest_to_text(manifest))


def config_text(folder: HfFolder, tokenizer: str | None) -> str:
    """Return the text of a config.yaml for `--config`: the model, its tokenizer if it has one, and other keys
    that must differ from the defaults."""
    sections: dict[str, Any] = {"model": asdict(folder.config)}
    if tokenizer:
        sections["data"] = {"tokenizer": tokenizer}
    if folder.config.max_seq_len < Config().train.seq_len:
        sections["train"] = {"seq_len": folder.config.max_seq_len}
    sections["checkpoint"] = {"every": SAVE_EVERY}
    head = (
        f"# The model of {folder.path}, by tools.convert_hf. Position tables have model.max_seq_len rows:\n"
        "# the key may be lowered, down to train.seq_len.\n"
    )
    return head + to_yaml(sections)


def export_checkpoint(
    checkpoint: Path, manifest: CheckpointManifest, partial: Path, dtype: str | None, limit_bytes: int
) -> None:
    """Write the model of a verified checkpoint into the folder `partial`, in the format of transformers."""
    for name in (*TOKENIZER_FILES, ORIGIN, GENERATION, HF_CONFIG):
        if (checkpoint / name).exists() and name not in manifest.files:
            raise CheckpointError(f"{checkpoint / name} is not a file that the manifest names: remove it")
    config, origin = checkpoint_config(checkpoint), read_origin(checkpoint)
    files = open_checkpoint(checkpoint, manifest)
    if isinstance(config.model, LlamaConfig):
        weights = saved_weights(checkpoint, manifest, config.model)
        saved = {hf_name(fqn): (PREFIX + fqn, tensor) for fqn, tensor in weights.items()}
        written = config_to_hf(config.model)
    else:  # transformers' own module, whose names are those of the folder
        saved = {
            name.removeprefix(PREFIX): (name, tensor)
            for name, tensor in manifest.tensors.items()
            if name.startswith(PREFIX)
        }
        written = _own_hf_config(checkpoint)
    shapes = {name: tensor.shape for name, (_, tensor) in saved.items()}
    for name, (ours, _) in saved.items():
        if rows := origin.padded.get(ours.removeprefix(PREFIX)):  # the padding that no token uses is left out
            used = origin.tokenizer.vocab_size if origin.tokenizer else 0
            rows = min(max(rows, used), shapes[name][0])
            shapes[name], written["vocab_size"] = (rows, *shapes[name][1:]), rows
    dtypes = {name: getattr(torch, dtype or tensor.dtype) for name, (_, tensor) in saved.items()}
    sizes = {name: math.prod(shapes[name]) * dtypes[name].itemsize for name in saved}

    def read(name: str) -> Tensor:
        tensor = read_full_tensors(files, manifest, [saved[name][0]])[saved[name][0]]
        return _converted(name, tensor[tuple(map(slice, shapes[name]))], dtypes[name])

    places = write_files(partial, sizes, read, limit_bytes)
    if len(set(places.values())) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    main_dtype = max(
        dtypes.values(), key=lambda each: sum(sizes[name] for name in saved if dtypes[name] == each)
    )
    tokenizer = checkpoint / FILE if (checkpoint / FILE).is_file() else find_tokenizer_file(config.data)
    written = for_every_version(written, str(main_dtype).removeprefix("torch."))
    for file, content in make_export(written, checkpoint, tokenizer).items():
        (partial / file).write_bytes(content)


def _own_hf_config(checkpoint: Path) -> dict[str, Any]:
    """Return the config.json of a model that a factory built, which the run has saved beside its weights."""
    if not (checkpoint / HF_CONFIG).is_file():
        raise CheckpointError(
            f"{checkpoint} has no {HF_CONFIG}: its model is not one of transformers, which a Hugging Face "
            "folder needs. Read its weights with meshwright.load, or from its safetensors files"
        )
    return read_json(checkpoint / HF_CONFIG, JSON_BYTES)


def write_files(
    folder: Path, sizes: Mapping[str, int], read: Callable[[str], Tensor], limit_bytes: int
) -> dict[str, str]:
    """Write tensors of these sizes in bytes, in order, into as few files as the limit allows. Return the file
    of each tensor."""
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
    return places


def describe(folder: Path) -> dict[str, Any]:
    """Return parameters, dtypes, size and files of an imported or exported folder, read from the headers of
    its safetensors files."""
    parameters, size_bytes, dtypes = 0, 0, set()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        size_bytes += file.stat().st_size
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                parameters += math.prod(opened.get_slice(name).get_shape())
                dtypes.add(str(DTYPES[opened.get_slice(name).get_dtype()]).removeprefix("torch."))
    others = sorted(file.name for file in folder.iterdir() if file not in files)
    return {
        "path": str(folder),
        "parameters": parameters,
        "dtype": ", ".join(sorted(dtypes)),
        "size_gb": size_bytes / 1e9,
        "files": len(files),
        "beside": ", ".join(others),
    }


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if dtype == torch.float16 and bool((converted.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(
            f"{name} has values beyond {torch.finfo(dtype).max:g}, the largest value of float16: "
            "use --dtype bfloat16 or float32"
        )
    return converted


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
    partial, old = (
        out.resolve().with_name(f".{out.resolve().name}.{os.getpid()}.{kind}") for kind in ("partial", "old")
    )
    try:
        partial.mkdir(parents=True)
        yield partial
        _replace(out.resolve(), partial, old)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {out} ({error}): use another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(out: Path, new: Path, old: Path) -> None:
    """Rename `new` to `out`. An existing `out` is deleted after the rename."""
    if out.exists():
        os.rename(out, old)
    try:
        os.rename(new, out)
    except BaseException:
        if old.exists():
            os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    run_tool(main)
