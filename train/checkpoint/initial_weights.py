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
from meshwright.models.hf import hf_name
from meshwright.parallel.errors import first_of
from meshwright.train.checkpoint.changes import Change, config_changes, hf_changes, refuse_other_model
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.huggingface import DTYPES, HfWeights, open_folder, open_weights
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
        return _of_folder(path, model, changed_model)
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


def _of_folder(path: Path, model: ModelConfig, meant: bool) -> Weights:
    if isinstance(model, LlamaConfig):
        folder: HfWeights = (llama := open_folder(path))
        changes = config_changes(llama.config, model, "model")
        way_out = f"`python -m tools.checkpoint import {path} OUT` writes a config.yaml for --config"
    else:
        folder = open_weights(path)
        changes = _factory_changes(folder, model_of(model).module)
        way_out = "Give the factory the same: models.from_transformers:causal_lm takes model.args.folder"
    grown = refuse_other_model(INIT_FROM, path / CONFIG, changes, way_out, meant)
    return match_folder(folder, model, grown)


def match_folder(folder: HfWeights, model: ModelConfig, grown: tuple[int, ...] = ()) -> Weights:
    """Return the weights of a Hugging Face folder. Raises CheckpointError unless it contains exactly the
    tensors of this model, in dtypes that we read. `grown`: as of `_check_tensors`.

    A model that a factory builds has the folder's names, but for a prefix that one of them may lack; a tied
    weight may be there under any of its names.
    """
    built = model_of(model).module
    prefix = f"{getattr(built, 'base_model_prefix', '')}."
    spellings: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in built.named_parameters(remove_duplicate=False):
        of_factory = fqn, fqn.removeprefix(prefix), f"{prefix}{fqn}"
        spelled = [hf_name(fqn)] if isinstance(model, LlamaConfig) else of_factory
        spellings.setdefault(parameter, []).extend(spelled)
    names = {
        fqn: next((name for name in spellings[parameter] if name in folder.tensors), spellings[parameter][0])
        for fqn, parameter in built.named_parameters()
    }
    patterns = getattr(built, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = re.compile("|".join((*patterns, COMPUTED)))
    others = {name for spelled in spellings.values() for name in spelled} - set(names.values())
    saved = {
        name: tensor.shape
        for name, tensor in folder.tensors.items()
        if name in names.values() or not (name in others or ignored.search(name))
    }
    wanted = {names[fqn]: tuple(parameter.shape) for fqn, parameter in built.named_parameters()}
    padded = _check_tensors(folder.path, wanted, saved, grown)
    _check_dtypes(folder, names.values())
    return Weights(folder.path, names, folder.tensors, padded)


def _factory_changes(folder: HfWeights, built: Any) -> list[Change]:
    """Return every key of a folder's config.json that a model of transformers has otherwise."""
    config: Any = getattr(built, "config", None)
    if not (hasattr(config, "to_dict") and hasattr(config, "from_dict")):
        return []
    # through the class, which fills in defaults and rewrites old keys
    saved, asked = type(config).from_dict(dict(folder.hf_config)).to_dict(), config.to_dict()
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
