"""Muon on ranks that have parts of matrices, also of those that are stored together or turned around, is Muon
on one process; what it saves is loaded on any mesh; a step that is skipped changes nothing."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.fsdp import copy_shard, full_tensor, local_part
from meshwright.train.checkpoint.shards import training_tensors
from meshwright.train.config import OptimConfig
from meshwright.train.errors import SaveError
from meshwright.train.optim.optimizer import build_optimizer
from tests.support.worlds import run_ranks

BLOCKS, WIDTH, HIDDEN, EXPERTS, RATE = 3, 10, 14, 3, 0.1  # none is a multiple of 4
LARGEST = 1e-5  # difference over the size of an update


class Conv1D(nn.Module):
    """As in transformers' GPT-2: inputs x outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs)),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Experts(nn.Module):
    """Stacked, as in transformers: gate and up of each expert are stored together."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        gate, up = torch.einsum("bd,efd->bef", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("bef,edf,be->bd", gate.sigmoid() * up, self.down_proj, shares)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.c_attn = nn.LayerNorm(WIDTH), Conv1D(WIDTH, 3 * WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.norm(x)).chunk(3, -1)
        return x + self.experts(q * k + v, self.router(x).softmax(-1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(7, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gradients(step: int) -> dict[str, Tensor]:
    """Return gradients of the whole model, with rows of different sizes."""
    generator = torch.Generator().manual_seed(step)
    shapes = {name: p.shape for name, p in Model().named_parameters()}
    return {
        name: torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)
        for name, shape in shapes.items()
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for name, gradient in gradients(number).items():
        p = model.get_parameter(name)
        p.grad = torch.zeros_like(p)
        copy_shard(p.grad, gradient)
    optimizer.step()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of all weights and of the optimizer's state, whole."""
    found = {name: full_tensor(p).detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state = optimizer.state[p].items()
        found |= {f"{name}/{key}": full_tensor(value).clone() for key, value in state}
    return found


def on_ranks(folder: Path) -> dict[str, object]:
    """Do a step on FSDP over 4 ranks, save it; do the second step there, and on HSDP from what was saved."""
    example = torch.arange(4)
    found: dict[str, object] = {}
    for name, degrees in (("fsdp", {}), ("hsdp", {"dp_replicate": 2})):
        parallel = ParallelConfig(**degrees, compile=mw.CompileConfig(enabled=False))
        sharded = mw.shard(Model(), (example,), parallel=parallel)
        optimizer = mw.optimizer(sharded, "muon", lr=RATE)
        if name == "fsdp":
            step(sharded.model, optimizer, 1)
            mw.save(folder, sharded, optimizer, 1)
        else:
            assert mw.load(folder, sharded, optimizer) == (1, {})
        found[f"{name} 1"] = values(sharded.model, optimizer)
        with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanges:
            step(sharded.model, optimizer, 2)
        found[f"{name} exchanges"] = exchanges.call_count
        found[f"{name} 2"] = values(sharded.model, optimizer)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
        with mock.patch(f"{__name__}.torch.rand", return_value=torch.tensor(torch.nan)):
            step(sharded.model, optimizer, 3)
        found[f"{name} skipped"] = values(sharded.model, optimizer)
    p = sharded.model.get_parameter("blocks.0.c_attn.weight")
    optimizer.state[p]["own"] = torch.zeros_like(local_part(p))
    with pytest.raises(SaveError, match="no DTensor"):  # of the shard
        training_tensors(sharded.model, optimizer)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return run_ranks(4, on_ranks, tmp_path_factory.mktemp("muon"))[0]


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Tensor]]:
    """The values at the start and after each of two steps, on one process."""
    model = Model()
    blocks = [f"blocks.{i}" for i in range(BLOCKS)]
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=RATE), blocks=blocks)
    seen = [values(model, optimizer)]
    for number in (1, 2):
        step(model, optimizer, number)
        seen.append(values(model, optimizer))
    return seen


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp"])
def test_every_mesh_does_the_steps_of_one_process(mesh, found, alone) -> None:
    for number in (1, 2):
        got = found[f"{mesh} {number}"]
        for name, expected in alone[number].items():
            size = (expected - alone[0][name]).norm()
            assert (got[name] - expected).norm() <= LARGEST * size, name


def test_what_is_saved_on_one_mesh_is_loaded_on_another_to_the_bit(found) -> None:
    assert all(torch.equal(value, found["hsdp 1"][name]) for name, value in found["fsdp 1"].items())


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp"])
def test_a_skipped_step_with_gradients_that_are_not_finite_changes_nothing(mesh, found) -> None:
    assert all(
        torch.equal(value, found[f"{mesh} skipped"][name]) for name, value in found[f"{mesh} 2"].items()
    )


def test_a_step_takes_two_exchanges_for_as_many_blocks_as_keep_all_ranks_busy(found) -> None:
    assert found["fsdp exchanges"] == found["hsdp exchanges"] <= 2 * BLOCKS


def test_each_matrix_is_orthogonal_alone(alone) -> None:
    """The update of each expert's gate, and of each of query, key and value, has singular values near 1."""
    before, after = alone[0], alone[1]
    stored = "blocks.0.experts.gate_up_proj", "blocks.0.c_attn.weight"
    updates = [(before[name] * (1 - 0.1 * RATE) - after[name]) / RATE for name in stored]
    matrices = [*updates[0].view(EXPERTS * 2, HIDDEN, WIDTH), *updates[1].mT.reshape(3, WIDTH, WIDTH)]
    for matrix in matrices:
        values = torch.linalg.svdvals(matrix / (0.2 * max(matrix.shape) ** 0.5))
        assert values.min() > 0.4
        assert values.max() < 1.4
