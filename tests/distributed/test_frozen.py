"""Any part of a model may be frozen, in any order, also after its description: random patterns on two ranks
beside plain torch, which trains it on one process."""

import copy
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from tests.support.worlds import run_ranks

WIDTH, STEPS = 8, 2
STEM = ("stem", "more", "places", "kinds", "choice", "fixed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Parts(nn.Module):
    """A stem whose modules run in any `order`, blocks with two modules after the first, and two outputs.

    The output of `choice` is integers, that of `fixed` has no gradient, and weights may be shared."""

    def __init__(self, order: Sequence[str], shared: tuple[str, str] | None) -> None:
        super().__init__()
        self.order = order
        self.stem, self.more, self.choice, self.fixed = (nn.Linear(WIDTH, WIDTH) for _ in STEM[:4])
        self.places, self.kinds = nn.Embedding(WIDTH, WIDTH), nn.Embedding(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.between, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.last, self.side, self.head = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        if shared:
            self.get_submodule(shared[0]).weight = self.get_submodule(shared[1]).weight
        self.choice.register_forward_hook(lambda _, __, x: x.argmax(-1, keepdim=True))
        self.fixed.register_forward_hook(lambda _, __, x: x.detach())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.shape[1])
        given = {"places": places, "kinds": places % 2}
        for name in self.order:
            x = x + self.get_submodule(name)(given.get(name, x))
        x = self.norm(self.between(self.blocks[0](x)).relu())
        x = self.last(self.blocks[1](x))
        return self.head(x), self.side(x)


def freeze(model: nn.Module, frozen: frozenset[str]) -> None:
    for name, module in model.named_modules():
        for parameter in module.parameters() if name in frozen else ():
            parameter.requires_grad_(False)


@dataclass(frozen=True)
class Case:
    """What is frozen, and what differs otherwise. `outputs`: the one that the loss is of, by step."""

    order: Sequence[str] = STEM
    shared: tuple[str, str] | None = None
    outputs: Sequence[int] = (0,)
    frozen: frozenset[str] = frozenset(STEM[2:])
    keys: Mapping[str, Any] = field(default_factory=dict)


def draw(rng: random.Random) -> Case:
    often = rng.choice([0.3, 0.7])
    names = [name for name, _ in Parts(STEM, None).named_modules() if name not in ("", "blocks")]
    keys = {
        "reshard_after_forward": rng.choice([True, False]),
        "activation_checkpoint": rng.choice(["none", "full"]),
        "reduce_gradients": rng.choice(["every_micro_batch", "last_micro_batch"]),
        "backward_prefetch": rng.choice([0, 1, 2]),
    }
    return Case(
        rng.sample(STEM, len(STEM)),
        rng.choice([None, ("last", "places"), ("last", "stem")]),
        rng.choice([(0,), (0, 1), (1, 0)]),
        frozenset(name for name in names if rng.random() < often) - {"head", "side"},
        keys,
    )


def train_beside_plain_torch(case: Case) -> None:
    """Raises AssertionError for a gradient that differs."""
    torch.manual_seed(0)
    plain = Parts(case.order, case.shared)
    model = copy.deepcopy(plain)
    config = mw.ParallelConfig(compile=mw.CompileConfig(enabled=False), **case.keys)
    units = mw.describe(model, (torch.zeros(1, 4, WIDTH),))
    plan = mw.make_plan(config, units, mw.RunShape(2, 2, seq_len=4))
    freeze(model, case.frozen)
    freeze(plain, case.frozen)
    sharded = mw.apply_plan(model, plan, mw.build_mesh(plan.mesh, "cpu"), gradients="mean_of_ranks")
    for step in range(STEPS):
        output = case.outputs[step % len(case.outputs)]
        batches = torch.randn(2, 2, 1, 4, WIDTH)  # ranks, micro batches
        for batch, divisor in sharded.micro_batches([*batches[dist.get_rank()]]):
            (model(batch)[output].square().mean() / divisor).backward()
        plain(batches.flatten(0, 2))[output].square().mean().backward()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            got, expected = (
                torch.zeros_like(other) if p.grad is None else p.grad for p in (parameter, other)
            )
            got = mw.full_tensor(got)
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")
            if parameter.grad is not None and other.grad is not None:
                parameter.data -= 0.1 * parameter.grad
                other.data -= 0.1 * other.grad
        model.zero_grad()
        plain.zero_grad()


def train_each(cases: list[Case]) -> None:
    for case in cases:
        try:
            train_beside_plain_torch(case)
        except Exception as error:
            raise AssertionError(str(case)) from error


@pytest.mark.parametrize("draws", [5, pytest.param(120, marks=[pytest.mark.slow, pytest.mark.sampled(6)])])
def test_frozen_parts_leave_the_gradients_of_the_others_as_they_are(draws: int) -> None:
    rng = random.Random(os.environ["MESHWRIGHT_TESTS_SEED"])
    run_ranks(2, train_each, [Case(), *(draw(rng) for _ in range(draws))])
