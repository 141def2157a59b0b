"""The training step: nothing in it waits for the device."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.mesh import build_mesh, data_parallel_group
from tests.launch import EAGER, TINY
from train.build import build_model
from train.config import ConfigError, parse_config
from train.evaluation import evaluate
from train.optim import build_optimizer
from train.planning import plan_run
from train.runtime import Place, start_process
from train.step import Batch, count_targets, train_step

# What makes the host wait: reading a value (.item()) and shapes that depend on values.
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal")


class Count(TorchDispatchMode):
    """Counts the operators whose names begin with one of these."""

    def __init__(self, *names: str):
        super().__init__()
        self.names, self.count = names, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).startswith(self.names)
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
    with Count(*READS) as reads:
        result = train_step(model, optimizer, batches, 1.0, group)
        assert reads.count == 0
        result.loss.item()
        assert reads.count == 1, "the counter must see a read"


def test_a_step_reduces_three_scalars_over_the_ranks_however_many_parameters_there_are(trainer):
    model, optimizer, group = trainer
    train_step(model, optimizer, make_batches(2), 1.0, group)
    with Count("c10d.allreduce_") as reductions:
        train_step(model, optimizer, make_batches(2), 1.0, group)
    assert reductions.count == 3, "tokens of the global batch, gradient norm, loss"


def test_frozen_parameters_stay_and_have_no_gradient_nor_moments(trainer):
    config = parse_config([*TINY, *EAGER, "--train.freeze=[tok_embeddings.*, layers.0.*]"])
    plan = plan_run(config, 1)
    model = build_model(config, plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
    optimizer = build_optimizer(model, config.optim)
    frozen = {name: p for name, p in model.named_parameters() if name.startswith(("tok_embeddings.", "layers.0."))}
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == list(frozen)
    assert not optimizer.state.keys() & set(frozen.values())
    train_step(model, optimizer, make_batches(2), 1.0, trainer[2])
    changed = [name for name, p in model.named_parameters() if not torch.equal(p.full_tensor(), before[name])]
    assert set(changed) == before.keys() - frozen.keys()


@pytest.mark.parametrize(("pattern", "words"), [("layer.0.*", "layer.0.* matches no parameter"), ("*", "nothing to train")])
def test_a_freeze_that_means_nothing_is_refused(trainer, pattern, words):
    config = parse_config([*TINY, *EAGER, f'--train.freeze=["{pattern}"]'])
    plan = plan_run(config, 1)
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_model(config, plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))


def test_an_evaluation_changes_neither_weights_nor_gradients_and_reads_nothing_back(trainer):
    model, _, group = trainer
    before = [p.full_tensor().clone() for p in model.parameters()]
    with Count(*READS) as reads:
        total, tokens = evaluate(model, make_batches(3), group)
    assert reads.count == 0
    assert tokens.item() == 3 * 2 * 32
    assert 5 < (total / tokens).item() < 7
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_ignored_targets_are_not_counted():
    targets = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert count_targets([Batch(targets, targets), Batch(targets, targets)]).item() == 6


def test_a_global_batch_without_a_target_leaves_loss_and_weights_numbers(trainer):
    model, optimizer, group = trainer
    batch = make_batches(1)[0]
    result = train_step(model, optimizer, [Batch(batch.tokens, torch.full_like(batch.targets, -100))], 1.0, group)
    assert (result.loss.item(), result.grad_norm.item()) == (0.0, 0.0)
    assert all(p.full_tensor().isfinite().all() for p in model.parameters())
