"""The training step: it never waits for the device, skips updates that are not finite, and averages over
tokens."""

import gc
import math
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models.config import LlamaConfig
from meshwright.models.llama import Llama
from meshwright.parallel.fsdp import full_tensor
from meshwright.parallel.grad_norm import clip_divisor, gradient_norm
from meshwright.train.config_parser import parse_config
from meshwright.train.data.sequences import Batch
from meshwright.train.errors import ConfigError
from meshwright.train.evaluation import evaluate
from meshwright.train.model.trained_model import loss_of_forward, model_of
from meshwright.train.step import train_step, update
from meshwright.train.training import freeze
from tests.support.launch import EAGER, TINY
from tests.support.sharded import build_sharded, sharded_alone
from tests.support.steps import bits, make_batches

# Operators that make the host wait: reading a value (.item()), and shapes that depend on values.
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal")


class Count(TorchDispatchMode):
    """Counts the operators whose names begin with one of `names`."""

    def __init__(self, *names: str):
        super().__init__()
        self.names, self.count = names, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).startswith(self.names)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def trainer():
    with sharded_alone([*TINY, *EAGER]) as run:
        yield run.model, run.sharded, run.optimizer, run.group


def spoil(model, factor: float) -> None:
    """Multiply the loss, and therefore every gradient."""
    model.head.loss.register_forward_hook(lambda _module, _inputs, loss: loss * factor)


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e30], ids=["nan", "inf", "too large for its norm"])
def test_a_step_that_is_not_finite_changes_no_bit_of_weights_moments_and_step_count(trainer, factor):
    model, sharded, optimizer, _group = trainer
    train_step(sharded, optimizer, make_batches(2), 1.0, loss_of_forward)
    spoil(model, factor)
    before = bits(model, optimizer)
    result = train_step(sharded, optimizer, make_batches(2), 1.0, loss_of_forward)
    assert result.skipped.item() == 1
    assert not math.isfinite(result.grad_norm.item()), "the norm is reported unchanged"
    assert all(torch.equal(a, b) for a, b in zip(bits(model, optimizer), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_step_reduces_three_scalars_over_the_ranks_however_many_parameters_there_are(trainer):
    _model, sharded, optimizer, _group = trainer
    train_step(sharded, optimizer, make_batches(2), 1.0, loss_of_forward)
    with Count("c10d.allreduce_") as reductions:
        train_step(sharded, optimizer, make_batches(2), 1.0, loss_of_forward)
    assert reductions.count == 3, "tokens of the global batch, gradient norm, loss"


def test_frozen_parameters_stay_and_have_no_gradient_nor_moments(trainer):
    run = build_sharded([*TINY, *EAGER, "--train.freeze=[tok_embeddings.*, layers.0.*]"])
    model, optimizer = run.model, run.optimizer
    frozen = {
        name: p for name, p in model.named_parameters() if name.startswith(("tok_embeddings.", "layers.0."))
    }
    before = {name: full_tensor(p).clone() for name, p in model.named_parameters()}
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == list(frozen)
    assert not optimizer.state.keys() & set(frozen.values())
    train_step(run.sharded, optimizer, make_batches(2), 1.0, loss_of_forward)
    changed = [name for name, p in model.named_parameters() if not torch.equal(full_tensor(p), before[name])]
    assert set(changed) == before.keys() - frozen.keys()


def test_a_tied_weight_is_frozen_by_either_name():
    for pattern in ("tok_embeddings.*", "head.*"):
        model = Llama(
            LlamaConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=64, tie_embeddings=True)
        )
        freeze(model, [pattern])
        assert not model.tok_embeddings.weight.requires_grad


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (
            "layer.0.*",
            "layer.0.* matches no parameter of the model: use patterns such as tok_emb",
        ),
        ("*", "nothing to train"),
    ],
)
def test_a_freeze_that_means_nothing_is_refused(trainer, pattern, words):
    with pytest.raises(ConfigError, match=f"train.freeze.*{re.escape(words)}"):
        build_sharded([*TINY, *EAGER, f'--train.freeze=["{pattern}"]'])


def test_an_evaluation_changes_neither_weights_nor_gradients_and_reads_nothing_back(trainer):
    model, _, _, group = trainer
    before = [full_tensor(p).clone() for p in model.parameters()]
    with Count(*READS) as reads:
        total, tokens = evaluate(model, make_batches(3), group, loss_of_forward)
    assert reads.count == 0
    assert tokens.item() == 3 * 2 * 32
    assert 5 < (total / tokens).item() < 7
    assert all(torch.equal(full_tensor(p), b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.sampled(3)
def test_a_transformers_model_does_not_look_for_sequences_in_positions():
    one = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict.fromkeys(("hidden_size", "head_dim", "intermediate_size", "vocab_size"), 32)
    args = [f"--model.args.{key}={value}" for key, value in (dict.fromkeys(one, 1) | sizes).items()]
    model = model_of(parse_config(["--config=mistral_7b.yaml", *args]).job.model)
    with Count(*READS) as reads:
        model.logits_of_batch(model.unsharded(torch.device("cpu")), Batch(*torch.ones(2, 1, 8).long()))
    assert reads.count == 0


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_nothing_is_kept_for_a_backward_that_an_evaluation_does_not_make(trainer, z_loss):
    """Autograd stays on, only saved tensors are dropped. Training works as before afterwards."""
    model, _, _, group = trainer
    batches, losses = make_batches(1), []
    plain = evaluate(model, batches, group, loss_of_forward)[0].item()
    model.head.loss.z_loss = z_loss
    hook = model.register_forward_hook(lambda _model, _inputs, loss: losses.append(loss))
    assert evaluate(model, batches, group, loss_of_forward)[0].item() == plain, "the z-loss does not count"
    hook.remove()
    assert losses[0].requires_grad
    loss = model(batches[0].tokens, batches[0].targets)
    loss.backward()
    assert (loss.item() > plain) == bool(z_loss)
    assert all(p.grad is not None for p in model.parameters())
    # last, because FSDP2 (2.11 to 2.13) does not reduce all gradients after a backward that has failed
    with pytest.raises(RuntimeError, match=r"mw.evaluating.*no activations"):
        losses[0].backward()


def test_loss_and_gradients_are_those_of_the_mean_over_all_tokens_of_the_global_batch(trainer):
    """With micro batches of different numbers of tokens."""
    model, sharded, optimizer, group = trainer
    batches = make_batches(2)
    batches[1] = Batch(batches[1].tokens, batches[1].targets.masked_fill(torch.arange(32) < 20, -100))
    total, tokens = evaluate(model, batches, group, loss_of_forward)
    (sum(model(b.tokens, b.targets) for b in batches) / tokens).backward()
    expected = [full_tensor(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(full_tensor(p.grad) for p in model.parameters()))
    result = train_step(sharded, optimizer, batches, math.inf, loss_of_forward)
    assert tokens.item() == 2 * 32 + 2 * 12
    assert result.loss.item() == pytest.approx((total / tokens).item(), rel=1e-6)
    for grad, reference in zip(seen, expected, strict=True):
        torch.testing.assert_close(grad, reference)


def test_a_global_batch_without_a_target_leaves_loss_and_weights_numbers(trainer):
    model, sharded, optimizer, _group = trainer
    batch = make_batches(1)[0]
    empty = [Batch(batch.tokens, torch.full_like(batch.targets, -100))]
    result = train_step(sharded, optimizer, empty, 1.0, loss_of_forward)
    assert (result.loss.item(), result.grad_norm.item()) == (0.0, 0.0)
    assert all(full_tensor(p).isfinite().all() for p in model.parameters())


def test_steps_leave_no_tensor_in_a_cycle(trainer):
    """A tensor in a cycle keeps its memory until the next garbage collection, train.gc_every_steps later."""
    _model, sharded, optimizer, _group = trainer
    train_step(sharded, optimizer, make_batches(2), 1.0, loss_of_forward)
    gc.collect()
    gc.disable()
    gc.freeze()  # excludes existing objects, such as tensors of other tests
    gc.garbage.clear()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            train_step(sharded, optimizer, make_batches(2), 1.0, loss_of_forward)
        gc.collect()
        assert [type(item) for item in gc.garbage if isinstance(item, torch.Tensor)] == []
        cycle = [torch.zeros(1)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert any(isinstance(item, torch.Tensor) for item in gc.garbage), "the search must see one"
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def test_the_norm_of_bfloat16_gradients_is_float32_and_exact_to_more_than_their_8_bits(trainer):
    """The divisor of the gradients is float32 too: a GPU kernel accepts only that."""
    parameters = [torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in range(3)]
    for p in parameters:
        p.grad = torch.randn(1000).to(torch.bfloat16)
    norm = gradient_norm(parameters, torch.tensor(1.0))
    assert norm.dtype == clip_divisor(norm, 1.0).dtype == torch.float32
    assert norm.item() == pytest.approx(
        torch.cat([p.grad.double() for p in parameters]).norm().item(), rel=1e-5
    )


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_an_optimizer_that_knows_no_scale_gets_clipped_gradients_and_is_skipped(skipped: float) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 8.0 if not skipped else torch.nan)
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.9)
    update(optimizer, torch.tensor(4.0), torch.tensor(skipped))
    assert p.tolist() == ([1.0] * 3 if skipped else [-1.0] * 3)
    assert bool(optimizer.state) == (not skipped)
