"""`checkpoint.init_from`: start a run at step 0 from existing weights.

The weights are a safetensors file, a folder of such files, a file of torch.save, or one of our checkpoints,
without its optimizer state and position. Each rank reads the slices of its own shards directly into its
tensors, converted to their dtype: no rank holds the full model or sends weights to another.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.models.config import LlamaConfig
from meshwright.models.hf import hf_name
from meshwright.parallel.errors import first_of
from meshwright.train.checkpoint.changes import Change, config_changes, hf_changes, refuse_other_model
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.huggingface import HfWeights, open_folder, open_weights
from meshwright.train.checkpoint.manifest import CONFIG, MANIFEST, MODEL, SavedTensor, read_manifest
from meshwright.train.checkpoint.reader import StoredPart, is_copy, open_checkpoint, open_full, read_tensors
from meshwright.train.checkpoint.shards import describe_tensor, state_names
from meshwright.train.checkpoint.verify import find_damage, raise_damage, verify_together
from meshwright.train.config import ModelConfig, VerifyMode
from meshwright.train.config_parser import load_config
from meshwright.train.distributed.agreement import on_all_ranks
from meshwright.train.errors import CheckpointError
from meshwright.train.files import user_path
from meshwright.train.model.trained_model import model_of

INIT_FROM = "checkpoint.init_from"
FLOATS = {"float64", "float32", "bfloat16", "float16"}  # any of which is converted to any other
WRAPPERS = re.compile(r"(module\.|_orig_mod\.)+")  # of names, by DDP and torch.compile
# tables that older versions of transformers saved among the weights
COMPUTED = r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$"
NAMED = 20  # tensors that a line about missing ones names


@dataclass(frozen=True)
class Weights:
    """A model's weights in a file, a folder or one of our checkpoints.

    Args:
        names: the name in it of each parameter and persistent buffer, by our fqn
        tensors: its tensors by name; None if it is a checkpoint
        padded: the rows of each name that has fewer than the parameter, because the model's vocabulary is
            larger
        missing: names that it does not have: the model's tensors keep their initial values
        unexpected: names that the model does not have
    """

    path: Path
    names: dict[str, str]
    tensors: Mapping[str, StoredPart] | None = None
    padded: Mapping[str, int] = field(default_factory=dict)
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()

    def describe(self) -> Iterator[str]:
        """Yield a line about everything that is not taken as it is, by its name."""
        wrapper = _wrapper(self.tensors or ())
        if wrapper and not any(fqn.startswith(wrapper) for fqn in self.names):
            yield f"weights: the names in {self.path} begin with {wrapper}, which is left out"
        for name, rows in self.padded.items():
            yield f"weights: {name} has {rows} rows, and is padded with their mean"
        for names, problem in (
            (self.missing, "of the model are not in {}, and keep their initial values"),
            (self.unexpected, "of {} are not in the model, and are left out"),
        ):
            if names:
                listed = first_of(names, most=NAMED)
                yield f"warning: weights: {len(names)} tensors {problem.format(self.path)}: {listed}"


def find_weights(
    init_from: str, model: ModelConfig, changed_model: bool = False, strict: bool = True
) -> Weights:
    """Return the weights that `checkpoint.init_from` names, checked against the model by name and shape.
    `strict`: names must be exactly the model's.

    Raises CheckpointError, and ConfigError for weights of a model with another config, unless
    `changed_model`.
    """
    path = user_path(init_from, INIT_FROM, CheckpointError)
    if (path / MANIFEST).is_file():
        return _of_checkpoint(path, model, changed_model, strict)
    if not path.exists():
        raise CheckpointError(
            f"{INIT_FROM}={init_from}: no such file or folder: name a safetensors file, a folder of them, a "
            "state_dict of torch.save, or a checkpoint"
        )
    if saved := [*list_checkpoints(path), *list_checkpoints(path / "checkpoints")] if path.is_dir() else []:
        raise CheckpointError(
            f"{INIT_FROM}={init_from} is a folder of checkpoints: name one, such as {saved[-1]}"
        )
    return _of_files(path, model, changed_model, strict)


def load_weights(weights: Weights, model: nn.Module, verify: VerifyMode = "full") -> None:
    """Read each rank's slices into its tensors, in place, on any mesh; all ranks call it. Raises
    CheckpointError, also if the weights are those of a checkpoint that fails verification."""
    if weights.tensors is None:
        files = open_checkpoint(weights.path, verify_together(weights.path, verify))
    else:
        files = open_full(weights.path, weights.tensors)
    own = {first: tensor for tensor, (first, *_) in state_names(model).items()}
    into = {name: own[fqn] for fqn, name in weights.names.items()}
    on_all_ranks(lambda: read_tensors(files, into, weights.padded))


def _of_files(path: Path, model: ModelConfig, meant: bool, strict: bool) -> Weights:
    if isinstance(model, LlamaConfig) and (path / CONFIG).is_file():
        folder: HfWeights = (llama := open_folder(path))
        changes = config_changes(llama.config, model, "model")
        way_out = f"`python -m tools.checkpoint import {path} OUT` writes a config.yaml for --config"
    else:
        folder = open_weights(path)
        changes = _factory_changes(folder, model_of(model).module)
        way_out = "Give the factory the same: models.from_transformers:causal_lm takes model.args.folder"
    grown = refuse_other_model(INIT_FROM, path / CONFIG, changes, way_out, meant)
    return match_files(folder, model, grown, strict)


def match_files(
    folder: HfWeights, model: ModelConfig, grown: Sequence[int] = (), strict: bool = True
) -> Weights:
    """Return the weights in files of full tensors. Raises CheckpointError as `_match` does.

    Names may begin with the wrappers of DDP and torch.compile. Those of our Llama are Hugging Face's or its
    own; those of any other model its own, but for a `base_model_prefix` that one of them may lack.
    """
    built: Any = model_of(model).module
    wrapper, base = _wrapper(folder.tensors), f"{getattr(built, 'base_model_prefix', '')}."

    def spell(fqn: str) -> list[str]:
        is_llama = isinstance(model, LlamaConfig)
        names = [hf_name(fqn), fqn] if is_llama else [fqn, fqn.removeprefix(base), f"{base}{fqn}"]
        return [*names, *(f"{wrapper}{name}" for name in names)]

    saved = {name: stored.tensor for name, stored in folder.tensors.items()}
    return _match(Weights(folder.path, {}, folder.tensors), built, saved, spell, grown, strict)


def _wrapper(names: Collection[str]) -> str:
    """Return the prefix of all names that is none of the model's."""
    found = WRAPPERS.match(min(names, default=""))
    return found[0] if found and all(name.startswith(found[0]) for name in names) else ""


def _factory_changes(folder: HfWeights, built: Any) -> list[Change]:
    """Return every key of a folder's config.json that a model of transformers has otherwise."""
    config: Any = getattr(built, "config", None)
    if not (folder.hf_config and hasattr(config, "to_dict") and hasattr(config, "from_dict")):
        return []
    # through the class, which fills in defaults and rewrites old keys
    saved, asked = type(config).from_dict(dict(folder.hf_config)).to_dict(), config.to_dict()
    saved["model_type"] = folder.hf_config.get("model_type")
    return hf_changes(saved, asked)


def _of_checkpoint(path: Path, model: ModelConfig, meant: bool, strict: bool) -> Weights:
    manifest, config = read_manifest(path), path / "config.yaml"
    raise_damage(
        path, find_damage(path, manifest, "full", [name for name in manifest.files if name == config.name])
    )
    grown: tuple[int, ...] = ()
    if config.is_file():  # mw.save writes none
        changes = config_changes(load_config(config).model, model, "model")
        grown = refuse_other_model(INIT_FROM, config, changes, f"Use the model section of {config}", meant)
    saved = {name: tensor for name, tensor in manifest.tensors.items() if name.startswith(MODEL)}
    built = model_of(model).module
    return _match(Weights(path, {}), built, saved, lambda fqn: [f"{MODEL}{fqn}"], grown, strict)


def _match(
    source: Weights,
    built: nn.Module,
    saved: Mapping[str, SavedTensor],
    spell: Callable[[str], list[str]],
    grown: Sequence[int],
    strict: bool,
) -> Weights:
    """Return the source with the name of each tensor of the model: the first that is `saved` of the spellings
    of its fqns. Raises CheckpointError for names that only one of them has, if `strict`; if no name is of the
    model; for another shape, but for rows of a vocabulary that has `grown` from a size to another; for dtypes
    that are not converted; and for copies of a tied tensor that differ."""
    wanted, names, missing, known = dict[str, SavedTensor](), dict[str, str](), list[str](), set[str]()
    for tensor, fqns in state_names(built).items():
        spelled = dict.fromkeys(name for fqn in fqns for name in spell(fqn))
        known.update(spelled)
        if found := [name for name in spelled if name in saved]:
            names[fqns[0]], wanted[found[0]] = found[0], describe_tensor(tensor)
            # a checkpoint of ours has a tied tensor once
            tensors = source.tensors
            if others := [n for n in found[1:] if tensors is None or not is_copy(tensors, found[0], n)]:
                raise CheckpointError(
                    f"{source.path}: {others[0]} and {found[0]} differ, but are one tensor of the model: use "
                    "one that does not tie them (of transformers: tie_word_embeddings=false)"
                )
        else:
            missing.append(next(iter(spelled)))
    patterns: Any = getattr(built, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = re.compile("|".join((*patterns, COMPUTED)))
    unexpected = [name for name in saved if not (name in known or ignored.search(name))]
    padded = {
        name: grown[0]
        for name, own in wanted.items()
        if grown and (*saved[name].shape[:1], *own.shape[:1]) == tuple(grown)
    }
    problems = {
        "missing": [_with_near(name, unexpected) for name in missing[:3]] + missing[3:],
        "unexpected": unexpected,
        "of another shape, or of a dtype that is not converted": [
            f"{name} is {saved[name]}, not {own}"
            for name, own in wanted.items()
            if not _fits(saved[name], own, name in padded)
        ],
    }
    if names and not strict:
        problems |= {"missing": [], "unexpected": []}
    if any(problems.values()):
        listed = [f"{kind}: {first_of(each)}" for kind, each in problems.items() if each]
        if names and (problems["missing"] or problems["unexpected"]):
            listed.append("checkpoint.init_strict=false takes only what both have")
        raise CheckpointError(f"{source.path} does not contain the model's weights. {'. '.join(listed)}")
    return replace(source, names=names, padded=padded, missing=missing, unexpected=unexpected)


def _with_near(name: str, others: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, others, 1)
    return f"{name} (there is {near[0]})" if near else name


def _fits(saved: SavedTensor, own: SavedTensor, is_padded: bool) -> bool:
    """Whether a tensor of the model can have the values of a saved one, converted to its dtype."""
    same_dtype = saved.dtype == own.dtype or {saved.dtype, own.dtype} <= FLOATS
    return same_dtype and saved.shape[is_padded:] == own.shape[is_padded:]
