"""What a run changes since its checkpoint: every key of the config is refused, described or of no effect."""

import copy
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.models.config import LlamaConfig, RopeScaling
from meshwright.train.checkpoint import changes as changes_module
from meshwright.train.checkpoint.resume import Start, compare_configs
from meshwright.train.config import Config, FactoryConfig
from meshwright.train.config_keys import keys_of
from meshwright.train.config_parser import config_to_yaml
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import ConfigError
from tests.support.launch import EAGER, TINY, read_status, run
from tests.support.plans import plan_of

ALONE, PLAN = RankInfo(0, 1, 0, 1, False), plan_of(1)
WITHOUT_EFFECT = (
    *(
        "checkpoint.",
        "metrics.",
        "parallel.",
        "profile.",
        "data.cache_dir",
        "data.prefetch",
        "data.validation",
    ),
    *(
        "data.verify",
        "train.eval_",
        "train.gc_every_steps",
        "train.max_skipped_steps",
        "train.micro_batch_size",
    ),
    *("run.device", "run.dir", "run.expandable_segments", "run.grace_s", "run.max_hours", "run.threads"),
    *("run.timeouts", "train.global_batch_size"),  # the plan has the resolved one
)


def change(config: Config, key: str, rng: random.Random) -> None:
    """Set a key to another value, which the parser may refuse."""
    *path, name = key.split(".")
    section: Any = config
    for part in path:
        section = getattr(section, part)
    old, new = getattr(section, name), "other"
    if isinstance(old, int | float):
        new = not old if isinstance(old, bool) else old + rng.choice((1, 0.5, 1e-6))
    object.__setattr__(section, name, {"other": 0.5} if isinstance(old, dict) else new)


def test_every_key_of_the_config_has_its_effect(group: None, tmp_path: Path) -> None:
    """Drawn keys are changed in a run that resumes."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng, before = random.Random(seed), Config(model=LlamaConfig(rope_scaling=RopeScaling()))
    (tmp_path / "config.yaml").write_text(config_to_yaml(before))
    keys = [
        key.removeprefix(".")
        for key, _ in keys_of(before, "")
        if not key.endswith("checkpoint.changed_model")
    ]
    for count in (3, 6, 6):
        chosen, config = rng.sample(keys, count), copy.deepcopy(before)
        for key in chosen:
            change(config, key, rng)
        if model := {key for key in chosen if key.startswith("model.")}:
            with pytest.raises(ConfigError, match=r"^checkpoint\.resume=.* or set .*changed_model=true") as e:
                compare_configs(Start(tmp_path), config, PLAN, ALONE)
            assert {*re.findall(r"(\S+)=\S+ \(saved", str(e.value))} == model, (chosen, str(e.value))
            object.__setattr__(config.checkpoint, "changed_model", True)
        changes = compare_configs(Start(tmp_path), config, PLAN, ALONE).changes
        described = {key for key in chosen if not key.startswith(WITHOUT_EFFECT)}
        assert {line.split()[0] for line in changes} == described, chosen


def test_a_shorter_context_is_the_same_model_and_another_argument_of_a_factory_is_not(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(saved: Any, model: Any) -> None:
        (tmp_path / "config.yaml").write_text(config_to_yaml(Config(model=saved)))
        compare_configs(Start(tmp_path), Config(model=model), PLAN, ALONE)

    factory = "tests.support.factories:mixer"
    compare(LlamaConfig(max_seq_len=4096), LlamaConfig(max_seq_len=2048))
    with pytest.raises(ConfigError, match=r"model\.args=\{'width': 32\} \(saved: \{'width': 64\}\)"):
        compare(FactoryConfig(factory, {"width": 64}), FactoryConfig(factory, {"width": 32}))
    with pytest.raises(ConfigError, match=rf"model\.factory={factory} \(saved: None\)"):
        compare(LlamaConfig(), FactoryConfig(factory))
    # the folder of the factory was changed
    config = SimpleNamespace(
        from_dict=dict, to_json_string=lambda use_diff: '{"rope_theta": 2.0, "use_cache": true}'
    )
    built = SimpleNamespace(module=SimpleNamespace(config=config))
    monkeypatch.setattr(changes_module, "model_of", lambda model: built)
    (tmp_path / "hf_config.json").write_text('{"rope_theta": 1.0, "use_cache": false}')
    with pytest.raises(ConfigError, match=r"another model: rope_theta=2.0 \(saved: 1.0\)\. Use"):
        compare(FactoryConfig(factory), FactoryConfig(factory))


def test_a_resume_describes_all_changes_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a line of a text\n" * 800)
    data = [f"--data.source={tmp_path / 'a.txt'}", f"--data.cache_dir={tmp_path / 'cache'}"]
    same = [*TINY, *EAGER, *data, "--checkpoint.every=2", f"--run.dir={tmp_path / 'run'}"]
    assert run(1, *same, "--train.steps=2", "--train.global_batch_size=-1").returncode == 0
    other = [*same, "--train.steps=3", "--model.n_heads=2", "--model.n_kv_heads=1", "--model.rope_theta=1e6"]
    changes = ["--run.seed=3", "--optim.lr=1e-3", "--checkpoint.changed_model=true", "--metrics.every=5"]
    done = run(1, *other, *changes)
    (line,) = re.findall(r"changed since the checkpoint: (.*)", done.stdout)
    assert "model.n_heads 4 -> 2, model.n_kv_heads 2 -> 1" in line
    assert (
        "run.seed 0 -> 3, optim.lr 0.003 -> 0.001, train.steps 2 -> 3, train.global_batch_size 2 -> 8" in line
    )
    assert line.endswith("data order (by seed, length or text), which restarts from the beginning")
    assert read_status(tmp_path / "run")["state"] == "finished"
