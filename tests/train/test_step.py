"""The training step: nothing in it waits for the device."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.mesh import build_mesh, data_parallel_group
from tests.launch import EAGER, TINY
from train.config import parse_config
from train.main import build_model
from train.optim import build_optimizer
from train.planning import plan_run
from train.runtime import Place, start_process
from train.step import Batch, count_targets, evaluate, train_step


class CountHostReads(TorchDispatchMode):
    """Counts what makes the host wait: reading a value (.item()) and shapes that depend on values."""

    READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).startswith(self.READS)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def trainer():
    config = parse_config([*TINY, *EAGER])
    start_process(config.run, Place(0, 1, 0, 1, False), torch.device("cpu"))
    plan = plan_run(config, 1)
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, torch.device("cpu"))
    yield model, build_optimizer(model, config.optim), data_parallel_group(mesh)
    dist.destroy_process_group()


def make_batches(count: int) -> list[Batch]:
    tokens = torch.randint(0, 257, (count, 2, 33))
    return [Batch(row[:, :-1], row[:, 1:]) for row in tokens]


def test_a_step_never_reads_a_value_back(trainer):
    model, optimizer, group = trainer
    batches = make_batches(2)
    train_step(model, optimizer, batches, 1.0, group)
    with CountHostReads() as reads:
        result = train_step(model, optimizer, batches, 1.0, group)
        assert reads.count == 0
        result.loss.item()
        assert reads.count == 1, "the counter must see a read"


def test_an_evaluation_changes_neither_weights_nor_gradients_and_reads_nothing_back(trainer):
    model, _, group = trainer
    before = [p.full_tensor().clone() for p in model.parameters()]
    with CountHostReads() as reads:
        loss = evaluate(model, make_batches(3), group)
    assert reads.count == 0
    assert 5 < loss.item() < 7
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_ignored_targets_are_not_counted():
    targets = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert count_targets([Batch(targets, targets), Batch(targets, targets)]).item() == 6
