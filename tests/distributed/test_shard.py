"""`mw.shard`: a script for DistributedDataParallel, with one call changed, trains the same model."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import meshwright as mw
from tests.support.worlds import run_ranks

EAGER = mw.CompileConfig(enabled=False)
Own = Callable[[Tensor], Tensor]  # a rank's rows


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(self.norm(x)).relu())
        return x + self.scale * down


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(16, 16), nn.ModuleList(Scaling() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.shift, x  # the second is an input of the first


def loss_of(outputs: Any) -> Tensor:
    first, second = outputs
    loss: Tensor = first.square().mean() + 0.1 * second.abs().mean()
    return loss


def rows_of(step: int) -> Tensor:
    return torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(step))


def one_backward(model: nn.Module, own: Own) -> None:
    loss_of(model(own(rows_of(1)))).backward()


def two_backwards(model: nn.Module, own: Own) -> None:
    one_backward(model, own)
    loss_of(model(own(rows_of(2)))).backward()


def two_forwards(model: nn.Module, own: Own) -> None:
    (loss_of(model(own(rows_of(3)))) + loss_of(model(own(rows_of(4))))).backward()


def one_output_after_the_other(model: nn.Module, own: Own) -> None:
    first, second = model(own(rows_of(5)))
    first.square().mean().backward(retain_graph=True)
    second.abs().mean().backward()


def of_a_part(model: nn.Module, own: Own) -> None:
    """A loss of modules that the model's forward has not called."""
    model.head(model.stem(own(rows_of(8)))).square().mean().backward()  # type: ignore[operator]
    model.stem(own(rows_of(9))).square().mean().backward()  # type: ignore[operator]


def after_zeros(model: nn.Module, own: Own) -> None:
    one_backward(model, own)
    outputs = model(own(rows_of(11)))
    model.zero_grad()
    loss_of(outputs).backward()


def with_a_penalty(model: nn.Module, own: Own) -> None:
    penalty = sum(mw.full_tensor(parameter).square().mean() for parameter in model.parameters())
    (loss_of(model(own(rows_of(10)))) + penalty).backward()


WAYS = (
    one_backward,
    two_backwards,
    two_forwards,
    one_output_after_the_other,
    after_zeros,
    with_a_penalty,
    of_a_part,
)
STYLES = {"blocks.*.up": "own_colwise", "blocks.*.down": "rowwise"}
SCALES = ["blocks.*.scale"]
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"dp_replicate": 2}, {"unsharded": SCALES}),
    ({"activation_checkpoint": "full"}, {"unsharded": [*SCALES, "head.bias"]}),
    ({"tp": 2}, {"styles": STYLES, "unsharded": SCALES}),
]


def compare() -> None:
    for parallel, described in CASES:
        torch.manual_seed(dist.get_rank())  # rank 0's values count, as in DDP
        model = Net()
        config = mw.ParallelConfig(compile=EAGER, **parallel)
        sharded = mw.shard(model, (rows_of(0)[:4],), parallel=config, **described)
        torch.manual_seed(0)
        plain = Net()
        parts = sharded.plan.mesh.data_parallel

        def own(rows: Tensor, parts: int = parts, rank: int = sharded.data_rank) -> Tensor:
            return rows.chunk(parts)[rank]

        def micro_batches(model: nn.Module, own: Own, sharded: mw.ShardedModel = sharded) -> None:
            rows = [own(rows_of(6)), own(rows_of(7))]
            whole = [(each, 2.0) for each in rows]
            for part, count in sharded.micro_batches(rows) if model is sharded.model else whole:
                (loss_of(model(part)) / count).backward()

        for way in (*WAYS, micro_batches, one_backward):
            way(model, own)
            way(plain, lambda rows: rows)
            for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                grad, wanted = mw.full_tensor(found.grad), expected.grad
                wanted = torch.zeros_like(expected) if wanted is None else wanted
                assert (grad - wanted).norm() <= 1e-5 * wanted.norm(), (name, way.__name__, parallel)
            model.zero_grad()
            plain.zero_grad()
        assert str(sharded.plan) == mw.plan_to_table(sharded.plan)
    with pytest.raises(mw.PlanError, match="the model has values on some ranks only"):
        mw.shard(Net().to("meta" if dist.get_rank() else "cpu"), (rows_of(0)[:4],))


def test_gradients_are_complete_after_each_backward_as_with_ddp() -> None:
    run_ranks(2, compare)


class Choosing(Net):
    """Each rank uses another of two layers of a block."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        for block in self.blocks:
            block.choices = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
            block.register_forward_hook(lambda block, _, x: block.choices[self.chosen](x))


def different_parameters() -> None:
    torch.manual_seed(0)
    model, plain = Choosing(dist.get_rank()), Choosing(0)
    mw.shard(model, (rows_of(0)[:4],), parallel=mw.ParallelConfig(compile=EAGER))
    plain.load_state_dict({name: mw.full_tensor(value) for name, value in model.state_dict().items()})
    loss_of(model(rows_of(1).chunk(2)[dist.get_rank()])).backward()
    for plain.chosen in range(2):
        (loss_of(plain(rows_of(1).chunk(2)[plain.chosen])) / 2).backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mw.full_tensor(found.grad), expected.grad, atol=1e-6), name  # type: ignore[arg-type]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="FSDP2 adds up those of torch 2.13 only",
)
def test_ranks_may_use_different_parameters_of_a_unit() -> None:
    run_ranks(2, different_parameters)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        raise ValueError("a fault of mine")


class Sealed(Net):
    """The gradients of its scalars come first, and nothing can see that of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.share = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(content=super().forward(x)[0] * self.gain)


def scalars() -> None:
    """Used at the end of a forward, after it from the second step on, and in a backward of their own."""
    torch.manual_seed(0)
    model = Sealed()
    plain = copy.deepcopy(model)
    mw.shard(model, (rows_of(0)[:4],), parallel=mw.ParallelConfig(compile=EAGER))
    for step in range(3):
        for each, rows in (model, rows_of(step).chunk(2)[dist.get_rank()]), (plain, rows_of(step)):
            (0.1 * each.gain.square()).backward()
            loss = each(rows).content.square().mean()
            (loss * each.share.exp() if step else loss).backward()
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            wanted = torch.zeros_like(expected) if expected.grad is None else expected.grad
            assert torch.allclose(mw.full_tensor(found.grad), wanted, rtol=1e-4, atol=1e-6), (name, step)
        model.zero_grad(set_to_none=step == 0)
        plain.zero_grad(set_to_none=step == 0)


def test_scalars_have_complete_gradients_wherever_they_are_used() -> None:
    run_ranks(2, scalars)


def refusals() -> list[str]:
    example, eager = (rows_of(0)[:4],), mw.ParallelConfig(compile=EAGER)
    refused, model, trained = [], Net(), Net()
    optimizer = torch.optim.SGD(trained.parameters())
    sharded = mw.shard(model, example, parallel=eager)
    hook = model.blocks[1].register_forward_hook(lambda *call: Failing.apply(call[-1]))
    with pytest.raises(ValueError, match="a fault of mine"):
        loss_of(model(*example)).backward()
    hook.remove()
    for call in (
        lambda: model(*example),
        lambda: sharded.clip_grad_norm(1.0),
        lambda: mw.shard(Net(), example, parallel=eager, loss=lambda outputs, _: outputs[0].sum()),
        lambda: mw.shard(trained, example, parallel=eager),
    ):
        with pytest.raises(mw.PlanError) as error:
            call()
        refused.append(str(error.value))
    with pytest.raises(mw.PlanError, match="the model has a plan already"):
        mw.shard(model, example, parallel=eager)
    del optimizer, error  # whose traceback has the optimizer
    mw.shard(trained, example, parallel=eager, loss=lambda outputs, _: outputs[0].mean())
    return refused


def test_what_would_not_be_complete_is_refused() -> None:
    ((again, clipped, total, untrained),) = run_ranks(1, refusals)
    assert "a backward has failed before" in again
    assert again == clipped
    assert "gradients='mean_of_ranks': the loss is a sum over rows" in total
    assert "SGD has the model's parameters" in untrained
