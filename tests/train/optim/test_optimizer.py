"""The learning-rate schedules at their corners, and which parameters have weight decay."""

import copy
import dataclasses
from typing import Any

import pytest
import torch

from meshwright.models.config import LlamaConfig
from meshwright.models.llama import Llama
from meshwright.parallel.model.kinds import kinds_of
from meshwright.train.checkpoint.shards import set_numbers, training_tensors
from meshwright.train.config import GroupConfig, MuonConfig, OptimConfig
from meshwright.train.errors import ConfigError
from meshwright.train.optim.groups import describe_groups, make_groups
from meshwright.train.optim.optimizer import (
    Several,
    build_optimizer,
    describe_short_run,
    learning_rate,
    set_learning_rate,
)
from meshwright.train.optim.optimizer import optimizer as own_optimizer
from meshwright.train.user_code import allow

CONFIG = OptimConfig(lr=1e-2, warmup_steps=10, schedule="cosine", min_lr_ratio=0.1, decay_ratio=0.2)
SCHEDULES = ["constant", "linear", "cosine", "wsd"]
MODEL = LlamaConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=97, max_seq_len=16)


def rates(schedule: str, total: int = 110, **keys: float) -> list[float]:
    """Learning rates of steps 0 .. total, as fractions of the peak."""
    config = dataclasses.replace(CONFIG, schedule=schedule, **keys)
    return [0.0, *(learning_rate(config, step, total) / config.lr for step in range(1, total + 1))]


@pytest.mark.parametrize(
    ("schedule", "corners"),
    [
        ("constant", {10: 1.0, 11: 1.0, 60: 1.0, 110: 1.0}),
        ("linear", {10: 1.0, 11: 0.991, 60: 0.55, 110: 0.1}),
        (
            "cosine",
            {
                10: 1.0,
                35: 0.1 + 0.9 * (1 + 0.5**0.5) / 2,
                60: 0.55,
                85: 0.1 + 0.9 * (1 - 0.5**0.5) / 2,
                110: 0.1,
            },
        ),
        ("wsd", {10: 1.0, 50: 1.0, 88: 1.0, 99: 0.55, 110: 0.1}),  # the last 22 of 110 steps decay
    ],
)
def test_a_schedule_passes_through_its_corners(schedule: str, corners: dict[int, float]) -> None:
    got = rates(schedule)
    assert {step: got[step] for step in corners} == pytest.approx(corners)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("total", "warmup"), [(110, 10), (110, 0), (110, 109), (7, 3)])
def test_the_rate_rises_to_the_peak_and_never_again(schedule: str, total: int, warmup: int) -> None:
    got = rates(schedule, total, warmup_steps=warmup)
    assert got[: warmup + 1] == sorted(got[: warmup + 1])
    after = got[max(warmup, 1) :]
    assert after == sorted(after, reverse=True)
    assert max(got) <= 1
    assert got[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_shorter_than_its_warm_up_only_warms_up(schedule: str) -> None:
    warm_up = [step / 10 for step in range(11)]
    assert rates(schedule)[:11] == pytest.approx(warm_up)
    assert rates(schedule, total=5) == pytest.approx(warm_up[:6])


def test_wsd_decays_over_no_more_than_what_follows_the_warm_up() -> None:
    assert rates("wsd", total=20, decay_ratio=1.0)[10:] == pytest.approx(
        [1 - 0.9 * i / 10 for i in range(11)]
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_matrices_decay_and_norms_and_embeddings_do_not(tied: bool) -> None:
    model = Llama(dataclasses.replace(MODEL, tie_embeddings=tied))
    optimizer = build_optimizer(model, CONFIG)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert (
        len(decay)
        == sum(len(group["params"]) for group in optimizer.param_groups)
        == len(list(model.parameters()))
    )
    for fqn, parameter in model.named_parameters():
        free = "norm" in fqn or fqn.startswith("tok_embeddings")
        assert decay[id(parameter)] == (0.0 if free else CONFIG.weight_decay), fqn
    assert decay[id(model.head.output.weight)] == (0.0 if tied else CONFIG.weight_decay)


def test_moments_exist_before_the_first_step_and_leave_it_as_adamw_has_it() -> None:
    """Compared with a plain AdamW that creates its moments at its first step."""
    ours, plain = Llama(MODEL), Llama(MODEL)
    for model in (ours, plain):
        model.initialise(0)
    optimizer = build_optimizer(ours, CONFIG)
    assert {len(state) for state in optimizer.state.values()} == {3}
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())
    groups = [
        {
            "params": [p for p in plain.parameters() if p.dim() > 1 and p is not plain.tok_embeddings.weight],
            "weight_decay": CONFIG.weight_decay,
        },
        {
            "params": [p for p in plain.parameters() if p.dim() == 1 or p is plain.tok_embeddings.weight],
            "weight_decay": 0.0,
        },
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=CONFIG.betas, eps=CONFIG.eps, foreach=False)
    tokens = torch.arange(32).reshape(2, 16)
    for step in (1, 2, 3):
        for model, adamw in ((ours, optimizer), (plain, reference)):
            set_learning_rate(adamw, learning_rate(CONFIG, step, 3))
            (model(tokens, tokens + 1) / 32).backward()
            adamw.step()
            adamw.zero_grad()
    for (fqn, weight), expected in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            weight, expected, rtol=1e-5, atol=1e-6, msg=lambda text, fqn=fqn: f"{fqn}: {text}"
        )


def test_a_run_that_is_too_short_for_warm_up_decay_or_epoch_is_told_so():
    config = dataclasses.replace(CONFIG, schedule="wsd", decay_ratio=0.5)
    assert describe_short_run(config, 20, 8, 8) == []
    (decay,), (warm_up, epoch) = describe_short_run(config, 12, 8, 8), describe_short_run(CONFIG, 3, 7, 8)
    assert all(fact in decay for fact in ("optim.decay_ratio=0.5", "6 of 12 steps", "only 2 "))
    reached = f"{rates('cosine', 3)[-1]:.0%} of optim.lr"
    assert all(fact in warm_up for fact in ("optim.warmup_steps=10", "3 steps", reached))
    assert all(fact in epoch for fact in ("7 sequences", "a step of 8"))


MUON = dataclasses.replace(CONFIG, name="muon", weight_decay=0.2)
BLOCKS = ("layers.0", "layers.1")


def test_kinds_and_patterns_have_rates_and_decays_of_their_own_which_follow_the_schedule() -> None:
    groups = {"*.wq.*": GroupConfig(lr=0.02, weight_decay=0.0), "layers.1.*": GroupConfig(kind="other")}
    config = dataclasses.replace(MUON, muon=MuonConfig(other_lr=0.001), groups=groups)
    model = Llama(MODEL)
    optimizer = build_optimizer(model, config, blocks=BLOCKS)
    set_learning_rate(optimizer, 0.005)  # half of optim.lr
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found["layers.0.attention.wk.weight"] == (0.005, 0.2)
    assert found["layers.0.attention.wq.weight"] == (pytest.approx(0.01), 0.0)
    assert found["layers.1.attention.wq.weight"] == (pytest.approx(0.01), 0.0)  # by both patterns
    assert found["layers.1.attention.wk.weight"] == (pytest.approx(0.0005), 0.2)
    assert found["head.output.weight"] == (pytest.approx(0.0005), 0.2)
    assert found["tok_embeddings.weight"] == (pytest.approx(0.0005), 0.0)
    orthogonalised = {names[p] for p, state in optimizer.state.items() if "momentum_buffer" in state}
    assert {name.partition(".attention.")[0] for name in orthogonalised if "attention" in name} == {
        "layers.0"
    }


@pytest.mark.parametrize(
    "groups",
    [
        {"layers.7.*": GroupConfig(lr=1.0)},
        {"*.wq.*": GroupConfig(parts=(16, 15))},
        {"tok_embeddings.*": GroupConfig(parts=(96, 1))},
        {"*norm*": GroupConfig(kind="matrix")},
    ],
    ids=["no match", "not the size", "parts of no matrix", "a vector"],
)
def test_what_cannot_be_so_is_refused(groups: dict[str, GroupConfig]) -> None:
    with pytest.raises(ConfigError, match=r"optim\.groups"):
        build_optimizer(Llama(MODEL), dataclasses.replace(MUON, groups=groups), blocks=BLOCKS)


def test_several_optimizers_go_on_as_one_after_loading_the_state_of_all() -> None:
    models = [Llama(MODEL), Llama(MODEL)]
    for model in models:
        model.initialise(0)
    first, again = (build_optimizer(model, MUON, blocks=BLOCKS) for model in models)
    assert isinstance(first, Several)

    def step(number: int) -> None:
        torch.manual_seed(number)
        for name, p in models[number > 0].named_parameters():
            p.grad = torch.randn_like(p)
            if number > 0:
                models[0].get_parameter(name).grad = p.grad.clone()
        first.step()

    step(0)
    models[1].load_state_dict(models[0].state_dict())
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    step(1)
    again.step()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


def of_all(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=0.5)


def of_one_group(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups[:1])


def of_several_losses(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for group in groups for p in group["params"]])


def of_no_kind(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return groups


def raising(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=-1.0)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (of_one_group, "has not all"),
        (of_several_losses, "a loop of your own"),
        (of_no_kind, "returned list"),
        (raising, rf"Invalid momentum.*{__name__.rpartition('.')[2]}\.py:\d+"),
    ],
)
def test_a_function_that_makes_no_optimizer_of_all_parameters_is_refused(function: Any, said: str) -> None:
    allow([name := f"{__name__}:{function.__name__}"])
    with pytest.raises(ConfigError, match=said):
        build_optimizer(Llama(MODEL), OptimConfig(name=name))


def test_a_function_gets_groups_of_one_kind_and_numbers_of_its_groups_are_saved() -> None:
    allow([name := f"{__name__}:of_all"])
    model = Llama(MODEL)
    optimizer = build_optimizer(model, OptimConfig(name=name), blocks=BLOCKS)
    assert {group["kind"] for group in optimizer.param_groups} == {"matrix", "head", "embedding", "vector"}
    optimizer.param_groups[1]["momentum"] = 0.25  # as one that adapts it
    saved = training_tensors(model, optimizer)
    optimizer.param_groups[1]["momentum"] = 0.5
    set_numbers(model, optimizer, saved)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.25, 0.5, 0.5]


def test_muon_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trained parameter is a matrix inside a block"):
        build_optimizer(Llama(MODEL), MUON)


def test_what_is_stored_together_is_told_below_the_table() -> None:
    config = dataclasses.replace(MUON, muon=MuonConfig(per_head=True))
    text = describe_groups(make_groups(kinds_of(Llama(MODEL), BLOCKS, per_head=True), config), config)
    assert "layers.*.attention.wq.weight: matrices of 4 x 8 outputs" in text.splitlines()


@pytest.mark.parametrize("wrong", [{"muon": {"heads": True}}, {"nothing": 1}, {"lr": -1.0}, {"name": "moun"}])
def test_what_an_own_loop_cannot_set_is_one_message(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"mw\.optimizer"):
        own_optimizer(None, **wrong)  # type: ignore[arg-type]  # not looked at before the values
