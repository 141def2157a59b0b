"""What a run changes in the config of the checkpoint that it starts from: another model is refused, other
changes are described."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import PlanError, first_of
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import load_plan
from meshwright.train.config import Config, ModelConfig
from meshwright.train.config_keys import keys_of
from meshwright.train.config_parser import load_config
from meshwright.train.errors import ConfigError
from meshwright.train.model.trained_model import model_of, texts_of

# keys that do not change what is trained
FREE_KEYS = re.compile(
    r"(checkpoint|metrics|parallel|profile)\..*|run\.(?!seed$).*|model\.(blocks|init|units|unsharded|styles)|"
    r"data\.(cache_dir|prefetch|validation.*|verify)|"
    r"train\.(eval_.*|gc_every_steps|max_skipped_steps|micro_batch_size)"
)
# the same in a config.json of transformers
FREE_HF_KEYS = re.compile(
    r"architectures|.*version|_.*|(torch_)?dtype|use_cache|.*_token_id|.*dropout.*|.*_pdrop|initializer_range|"
    r"max_position_embeddings"
)
Change = tuple[str, Any, Any]  # a key, its saved value and the run's; None: no such key


def hf_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """Return the keys of a saved config of transformers with other values; later versions may have more."""
    keys = [key for key in saved if not FREE_HF_KEYS.fullmatch(key)]
    return [(key, saved[key], current.get(key)) for key in keys if saved[key] != current.get(key)]


def config_changes(saved: Config | ModelConfig, current: Config | ModelConfig, name: str) -> list[Change]:
    """Return the keys of two configs, or of two sections `name`, whose change has an effect. A model with a
    max_seq_len below the saved one is the same, because its weights do not depend on it."""
    old, new = (dict(keys_of(each, name)) for each in (saved, current))
    keys = [key for key in {**new, **old} if old.get(key) != new.get(key) and not FREE_KEYS.fullmatch(key)]
    shorter = 0 < new.get("model.max_seq_len", 0) <= old.get("model.max_seq_len", 0)
    return [(k, old.get(k), new.get(k)) for k in keys if not (shorter and k == "model.max_seq_len")]


def refuse_other_model(
    setting: str, source: Path, changes: Sequence[Change], way_out: str, meant: bool, pads: bool = True
) -> tuple[int, ...]:
    """Raise ConfigError with the keys of the model that differ from those in the file `source`, unless that
    is meant (checkpoint.changed_model): weights of equal shapes would compute something else. Return the
    saved vocabulary and the model's if that is larger, which is no other model if it `pads` weights."""
    grown = [
        (was, now) for key, was, now in changes if key.endswith("vocab_size") and 0 < (was or 0) < (now or 0)
    ]
    other = [change for change in changes if change[1:] not in grown or not pads]
    if other and not meant:
        different = first_of([f"{key}={value} (saved: {saved})" for key, saved, value in other], "; ", 6)
        raise ConfigError(
            f"{setting}: {source} describes another model: {different}. {way_out}; or set "
            "checkpoint.changed_model=true, if the change is meant and leaves all shapes as they are"
        )
    return grown[0] if grown else ()


def changes_since(checkpoint: Path, config: Config, plan: Plan) -> tuple[str, ...]:
    """Return what a run trains otherwise than a checkpoint, as `key old -> new`. Raises ConfigError for
    another model, and for other dtypes of its state."""
    source, batch = checkpoint / "config.yaml", "train.global_batch_size"
    try:
        saved = load_config(source)
    except ConfigError as error:
        return (f"the version of config.yaml, which is not compared ({error})",)
    model = config_changes(saved.model, config.model, "model")
    for name, text in () if model else texts_of(model_of(config.model).module).items():
        if (checkpoint / name).is_file():
            built = json.loads((checkpoint / name).read_text(encoding="utf-8"))
            model += hf_changes(built, json.loads(text))
    setting, way_out = f"checkpoint.resume={config.checkpoint.resume}", f"Use the model section of {source}"
    refuse_other_model(setting, source, model, way_out, config.checkpoint.changed_model, pads=False)
    others = [c for c in config_changes(saved, config, "") if c[0] != batch and not c[0].startswith("model.")]
    with suppress(PlanError):  # there is none, or one of another version
        saved_plan = load_plan(checkpoint / "plan.yaml")
        _refuse_other_state(setting, (saved, saved_plan), (config, plan))
        batches = saved_plan.global_batch_size, plan.global_batch_size
        others += [(batch, *batches)] if batches[0] != batches[1] else []
    return tuple(f"{key} {was} -> {value}" for key, was, value in (*model, *others))


def _refuse_other_state(setting: str, saved: tuple[Config, Plan], current: tuple[Config, Plan]) -> None:
    """Raise ConfigError if the saved state is of another optimizer, or of other dtypes."""
    was, now = (
        {
            "optim.name": config.optim.name,
            "optim.state_dtype": config.optim.state_dtype,
            "parallel.storage_dtype": plan.storage_dtype,
        }
        for config, plan in (saved, current)
    )
    if different := [f"{key}={was[key]}, not {now[key]}" for key in was if was[key] != now[key]]:
        raise ConfigError(f"{setting}: it was saved with {' and '.join(different)}: use the same")
