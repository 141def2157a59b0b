"""What train/ asks of a model of others: transformers' Llama has the figures of ours, and a model that cannot
be trained by train.main is refused in words."""

import importlib
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import local_part
from meshwright.train.config import Config
from meshwright.train.config_parser import parse_config
from meshwright.train.data.sequences import Batch
from meshwright.train.errors import ConfigError
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.trace_model import code_of, kinds_of, model_workload
from meshwright.train.training import build_training
from tests.support.factories import RUN, VOCABULARY, causal_lm
from tests.support.launch import EAGER
from tests.support.sharded import sharded_alone
from tests.support.tables import try_each

OURS = [
    "--train.seq_len=32",
    *("--model.dim=32", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2"),
    *("--model.ffn_dim=48", "--model.vocab_size=264", "--model.max_seq_len=64"),
]
SUPPORT = "--model.factory=tests.support.factories"


def test_transformers_llama_has_the_figures_of_ours() -> None:
    ours, theirs = (model_of(parse_config(keys).model) for keys in (OURS, causal_lm("llama")))
    assert theirs.parameters == ours.parameters
    tied = model_of(parse_config([*OURS, "--model.tie_embeddings=true"]).model)
    assert tied.parameters == ours.parameters - 264 * 32
    assert (theirs.vocab_size, theirs.max_seq_len) == (ours.vocab_size, ours.max_seq_len) == (264, 64)
    assert theirs.attention == ours.attention
    assert {*theirs.linears} == {*ours.linears}
    assert theirs.forward_flops(32) == pytest.approx(ours.forward_flops(32), rel=1e-3)
    kinds = kinds_of(theirs.config, 32)
    assert [kinds[name] for name in theirs.units.modules if "layers" in name] == ["model.layers.0"] * 2


def test_what_a_model_publishes_counts() -> None:
    """Its initial values, its loss, its sizes: of equal logits the loss is that of a guess."""
    keys = [*RUN, f"{SUPPORT}:Publishing", *EAGER, "--run.seed=3"]
    with sharded_alone(keys) as run:
        assert all((parameter == torch.tensor(0.03)).all() for parameter in run.model.parameters())
        ids, model = torch.arange(64).view(2, 32), model_of(run.config.model)
        loss = model.loss(run.plan, 0.0)(run.model, Batch(ids, ids), torch.tensor(64.0))
        assert loss.item() == pytest.approx(math.log(VOCABULARY))
    assert (model.vocab_size, model.max_seq_len) == (VOCABULARY, 48)
    traced = model_workload(model.config, run.plan, 32).modules["scores"].forward.operations
    assert "_log_softmax" in [operation.name for operation in traced]


def test_what_no_checkpoint_has_is_the_same_after_a_start_and_for_a_load() -> None:
    weights = []
    for factory, init in (("features", "auto"), ("features", "modules"), ("anchored", "auto")):
        keys = [*RUN, f"{SUPPORT}:{factory}", *EAGER, "--run.seed=3", f"--model.init={init}"]
        with sharded_alone(keys) as run:
            loaded = build_training(run.config, run.plan, run.mesh, loaded=True).sharded.model
            alone = model_of(run.config.model).unsharded(torch.device("cpu"), 3)
            for found in (loaded, alone):
                assert all(map(torch.equal, found.offsets[:2], run.model.offsets))
                assert found.offsets[2:] in ([], [found[1]])
                assert torch.equal(found.waves, run.model.waves)
            weights.append(local_part(run.model[1].up.weight).clone())
    assert not torch.equal(*weights[:2])
    with (
        pytest.raises(PlanError, match="offsets has no value"),
        sharded_alone([*keys, "--model.init=modules"]),
    ):
        pass


def test_blocks_of_two_kinds_are_traced_twice() -> None:
    keys = causal_lm(
        "gemma3_text",
        num_hidden_layers=4,
        layer_types="[sliding_attention,full_attention,sliding_attention,full_attention]",
        sliding_window=8,
    )
    kinds = kinds_of(parse_config(keys).model, 32)
    assert [kinds[f"model.layers.{i}"] for i in range(4)] == ["model.layers.0", "model.layers.1"] * 2


REFUSED: list[tuple[list[str], list[str]]] = [
    ([f"{SUPPORT}:regression"], ["example has no tokens", "docs/your-model.md"]),
    (
        [f"{SUPPORT}:loss_only", "--model.blocks=inner.[12]"],
        ["shape ()", "logits[samples, tokens, ids]", "a loss of the model's own"],
    ),
    ([*causal_lm("llama"), "--train.seq_len=128"], ["train.seq_len=128", "64 positions"]),
    ([f"{SUPPORT}:Nano"], ["logits[2, 1, 264]", "all tokens", "'targets': ids"]),
    ([f"{SUPPORT}:nano", "--train.seq_len=64"], ["train.seq_len=64", "64 tokens are too many"]),
    ([*causal_lm("llama"), "--data.document_mask=true"], ["data.document_mask", "use false"]),
]


def test_a_model_that_train_main_cannot_train_is_refused_in_words() -> None:
    def check(keys: list[str], facts: list[str]) -> None:
        config: Config = parse_config([*RUN, *keys])
        with pytest.raises(ConfigError) as refused:
            model_of(config.model).check(config.job)
        assert [fact for fact in facts if fact not in str(refused.value)] == [], refused.value

    try_each(REFUSED, check)


def test_what_is_installed_beside_a_model_is_not_its_code(tmp_path: Path, monkeypatch: Any) -> None:
    """As the packages of a .venv in the folder of mine.py, of which some name files that do not exist."""
    mine, installed = tmp_path / "beside_a_venv.py", tmp_path / ".venv/lib/site-packages/other.py"
    mine.write_text("from torch import nn\nclass Mine(nn.Linear): pass\n")
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("beside_a_venv").Mine(2, 2)
    before = code_of(model)
    for number, file in enumerate((installed, installed.parent / "nowhere.py", tmp_path / "nowhere.py")):
        module = types.ModuleType(f"other_of_a_venv_{number}")
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert code_of(model) == before
    mine.write_text("changed")
    assert code_of(model) != before
