"""`checkpoint.init_from`: start a run at step 0 from existing weights.

The weights are a Hugging Face folder or one of our checkpoints, without its optimizer state and position.
Each rank reads the slices of its own shards directly into its parameters, converted to their dtype: no rank
holds the full model or sends weights to another.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.models.config import LlamaConfig
from meshwright.models.hf import hf_name, is_ignored
from meshwright.parallel.errors import first_of
from meshwright.train.checkpoint.changes import Change, config_changes, hf_changes, refuse_other_model
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.huggingface import DTYPES, HfFolder, HfWeights, open_folder, open_weights
from meshwright.train.checkpoint.manifest import CONFIG, MANIFEST, read_manifest
from meshwright.train.checkpoint.reader import StoredPart, open_checkpoint, open_full, read_tensors
from meshwright.train.checkpoint.verify import find_damage, raise_damage, verify_together
from meshwright.train.config import ModelConfig, VerifyMode
from meshwright.train.config_parser import load_config
from meshwright.train.distributed.agreement import on_all_ranks
from meshwright.train.errors import CheckpointError
from meshwright.train.files import user_path
from meshwright.train.model.trained_model import model_of

INIT_FROM = "checkpoint.init_from"
PREFIX = "model."  # of the weights' names in our checkpoints


@dataclass(frozen=True)
class Weights:
    """The folder that contains a model's weights, each parameter's name in it by our fqn, and its tensors if
    it is one of Hugging Face and not our checkpoint. `padded`: the rows of each name that has fewer than the
    parameter, because the model's vocabulary is larger."""

    folder: Path
    names: dict[str, str]
    tensors: Mapping[str, StoredPart] | None = None
    padded: Mapping[str, int] = field(default_factory=dict)


def find_weights(init_from: str, model: ModelConfig, changed_model: bool = False) -> Weights:
    """Return the weights that `checkpoint.init_from` names, checked against the model by name and shape.

    Raises CheckpointError, and ConfigError for weights of a model with another config, unless
    `changed_model`.
    """
    path = user_path(init_from, "checkpoint.init_from", CheckpointError)
    if (path / MANIFEST).is_file():
        return _of_checkpoint(path, model, changed_model)
    if (path / CONFIG).is_file():
        if isinstance(model, LlamaConfig):
            return _of_folder(open_folder(path), model, changed_model)
        return _of_own_folder(open_weights(path), model, changed_model)
    saved = [] if not path.is_dir() else [*list_checkpoints(path), *list_checkpoints(path / "checkpoints")]
    hint = f", such as {saved[-1]}" if saved else ""
    problem = f" has neither {CONFIG} nor {MANIFEST}" if path.is_dir() else ": no such folder"
    raise CheckpointError(
        f"checkpoint.init_from={init_from}{problem}: name the folder of a Hugging Face model, or a "
        f"checkpoint{hint}"
    )


def load_weights(weights: Weights, model: nn.Module, verify: VerifyMode = "full") -> None:
    """Read each rank's slices into its parameters, in place, on any mesh; all ranks call it. Raises
    CheckpointError, also if the weights are those of a checkpoint that fails verification."""
    if weights.tensors is None:
        files = open_checkpoint(weights.folder, verify_together(weights.folder, verify))
    else:
        files = open_full(weights.folder, weights.tensors)
    into = {weights.names[fqn]: parameter for fqn, parameter in model.named_parameters()}
    on_all_ranks(lambda: read_tensors(files, into, weights.padded))


def check_folder(folder: HfFolder, model: LlamaConfig, grown: tuple[int, ...] = ()) -> dict[str, int]:
    """Raise CheckpointError unless a Hugging Face folder contains exactly the tensors of this model, in
    dtypes that we read. `grown` and result: as of `_check_tensors`."""
    saved = {
        name: t.shape for name, t in folder.tensors.items() if not is_ignored(name, model.tie_embeddings)
    }
    names = {hf_name(fqn): shape for fqn, shape in weight_shapes(model).items()}
    padded = _check_tensors(folder.path, names, saved, grown)
    _check_dtypes(folder, names)
    return padded


def _check_dtypes(folder: HfWeights, names: Iterable[str]) -> None:
    unsupported = [
        f"{name} ({folder.tensors[name].dtype})" for name in names if folder.tensors[name].dtype not in DTYPES
    ]
    if unsupported:
        raise CheckpointError(
            f"{folder.path}: {first_of(unsupported)} is stored in an unsupported dtype (supported: "
            f"{', '.join(DTYPES)}): save the model without quantization"
        )


def weight_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return each parameter's shape by fqn, a tied weight once. Allocates nothing."""
    built = model_of(model).module
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


def _of_folder(folder: HfFolder, model: LlamaConfig, meant: bool) -> Weights:
    way_out = f"`python -m tools.checkpoint import {folder.path} OUT` writes a config.yaml for --config"
    changes = config_changes(folder.config, model, "model")
    grown = refuse_other_model(INIT_FROM, folder.path / CONFIG, changes, way_out, meant)
    padded = check_folder(folder, model, grown)
    return Weights(folder.path, {fqn: hf_name(fqn) for fqn in weight_shapes(model)}, folder.tensors, padded)


def _of_own_folder(folder: HfWeights, model: ModelConfig, meant: bool) -> Weights:
    """Return the weights of a model that a factory builds, which has the folder's names, but for a prefix
    that one of them may lack, and a tied weight, which may be there under any of its names."""
    built = model_of(model).module
    way_out = "Give the factory the same: models.from_transformers:causal_lm takes model.args.folder"
    grown = refuse_other_model(INIT_FROM, folder.path / CONFIG, _own_changes(folder, built), way_out, meant)
    names_of: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in built.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(fqn)
    prefix = f"{getattr(built, 'base_model_prefix', '')}."
    known = {*folder.tensors}
    names, used = {}, set[str]()
    for fqns in names_of.values():
        spelled = [other for fqn in fqns for other in (fqn, fqn.removeprefix(prefix), f"{prefix}{fqn}")]
        found = [name for name in dict.fromkeys(spelled) if name in known]
        names[fqns[0]] = found[0] if found else fqns[0]
        used.update(found)
    patterns = getattr(built, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = re.compile("|".join((*patterns, COMPUTED)))
    padded = _check_tensors(
        folder.path,
        {names[fqns[0]]: tuple(parameter.shape) for parameter, fqns in names_of.items()},
        {
            name: tensor.shape
            for name, tensor in folder.tensors.items()
            if name in names.values() or not (name in used or ignored.search(name))
        },
        grown,
    )
    _check_dtypes(folder, names.values())
    return Weights(folder.path, names, folder.tensors, padded)


def _own_changes(folder: HfWeights, built: Any) -> list[Change]:
    """Return every key of a folder's config.json that a model of transformers has otherwise."""
    own: Any = getattr(built, "config", None)
    if not (hasattr(own, "to_dict") and hasattr(own, "from_dict")):
        return []
    # through the class, which fills in defaults and rewrites old keys
    saved, asked = type(own).from_dict(dict(folder.hf_config)).to_dict(), own.to_dict()
    saved["model_type"] = folder.hf_config.get("model_type")
    return hf_changes(saved, asked)


# tables that older versions of transformers saved among the weights
COMPUTED = r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$"


def _of_checkpoint(path: Path, model: ModelConfig, meant: bool) -> Weights:
    manifest = read_manifest(path)
    raise_damage(
        path, find_damage(path, manifest, "full", [name for name in manifest.files if name == "config.yaml"])
    )
    if not (path / "config.yaml").is_file():
        raise CheckpointError(f"{path} has no config.yaml, so its model is unknown: use another checkpoint")
    changes = config_changes(load_config(path / "config.yaml").model, model, "model")
    way_out = f"Use the model section of {path}/config.yaml"
    grown = refuse_other_model(INIT_FROM, path / "config.yaml", changes, way_out, meant)
    shapes = weight_shapes(model)
    names = {fqn: f"{PREFIX}{fqn}" for fqn in shapes}
    padded = _check_tensors(
        path,
        {names[fqn]: shape for fqn, shape in shapes.items()},
        {name: tensor.shape for name, tensor in manifest.tensors.items() if name.startswith(PREFIX)},
        grown,
    )
    return Weights(path, names, None, padded)


def _check_tensors(
    path: Path, wanted: Mapping[str, Sequence[int]], saved: Mapping[str, Sequence[int]], grown: Sequence[int]
) -> dict[str, int]:
    """Raise CheckpointError if names or shapes differ, but for rows of a vocabulary that has `grown` from a
    size to another; return the saved rows of each such tensor."""
    sizes = {name: (*shape[:1], *wanted.get(name, ())[:1]) for name, shape in saved.items()}
    padded = {
        name: grown[0] for name in saved if grown == sizes[name] and saved[name][1:] == wanted[name][1:]
    }
    shapes = [
        f"{name} is {saved[name]}, not {wanted[name]}"
        for name in wanted.keys() & saved.keys() - padded.keys()
        if saved[name] != wanted[name]
    ]
    kinds = {
        "missing": wanted.keys() - saved.keys(),
        "unexpected": saved.keys() - wanted.keys(),
        "with another shape": shapes,
    }
    problems = [f"{kind}: {first_of(sorted(names))}" for kind, names in kinds.items() if names]
    if problems:
        raise CheckpointError(f"{path} does not contain the weights of its config. {'. '.join(problems)}")
    return padded
