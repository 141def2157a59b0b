"""The rank program of test_nonfinite_mesh.py: train with an injected fault under the loop's non-finite
guard."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import make_sequence_shape
from meshwright.train.data.training_data import TrainLoader
from meshwright.train.errors import NonFiniteError
from meshwright.train.fault_tolerance.nonfinite import NonFiniteGuard
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.step import train_step
from tests.support.sharded import build_sharded
from tests.support.steps import step_done
from tests.support.stores import load_corpus

STEPS, FAULTY_STEP, FAULTY_RANK = 3, 2, 1
Now = dict[str, int]


@dataclass(frozen=True)
class Case:
    """Config overrides and the injected fault."""

    arguments: Sequence[str]
    fault: str


def faulty(now: Now) -> bool:
    return now["step"] >= FAULTY_STEP and dist.get_rank() == FAULTY_RANK


def nan_output(model: nn.Module, now: Now) -> None:
    """Put NaN into the output of layers.1."""
    model.layers[1].register_forward_hook(lambda _m, _i, x: x + math.nan if faulty(now) else None)


def nan_once(model: nn.Module, now: Now) -> None:
    """Put NaN into the output of layers.1 once."""

    def hook(_module: nn.Module, _inputs: object, x: Tensor) -> Tensor | None:
        now["times"] = now.get("times", 0) + faulty(now)
        return x + math.nan if faulty(now) and now["times"] == 1 else None

    model.layers[1].register_forward_hook(hook)


def inf_gradient(model: nn.Module, now: Now) -> None:
    """Put Inf into the gradient of layers.1's input; the loss stays finite."""

    def hook(_module: nn.Module, grads: tuple[Tensor | None, ...], _of_output: object) -> Any:
        return (grads[0] + math.inf, *grads[1:]) if faulty(now) and grads[0] is not None else None

    model.layers[1].register_full_backward_hook(hook)


def inf_loss(model: nn.Module, now: Now) -> None:
    """Make the loss Inf; all gradients stay finite."""
    model.head.loss.register_forward_hook(lambda _m, _i, x: x + math.inf if faulty(now) else None)


def huge_gradient(model: nn.Module, now: Now) -> None:
    """Scale the loss so that it and the gradients are finite, but the squares exceed float32."""
    model.head.loss.register_forward_hook(lambda _m, _i, x: x * 1e25 if faulty(now) else None)


def nan_parameter(model: nn.Module, now: Now) -> None:
    """Put NaN into one rank's shard of a weight before the faulty step."""

    def hook(_module: nn.Module, _inputs: object) -> None:
        if faulty(now):
            local(model.layers[1].attention.wq.weight).view(-1)[0] = math.nan

    model.register_forward_pre_hook(hook, prepend=True)


FAULTS: dict[str, Callable[[nn.Module, Now], None]] = {
    "nan_output": nan_output,
    "nan_once": nan_once,
    "inf_gradient": inf_gradient,
    "inf_loss": inf_loss,
    "huge_gradient": huge_gradient,
    "nan_parameter": nan_parameter,
}


def local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the bits of this rank's parameters and optimizer state, so that NaN compares equal to itself."""
    tensors = [
        *model.parameters(),
        *(value for state in optimizer.state.values() for value in state.values()),
    ]
    return [local(x).clone().contiguous().view(torch.int32) for x in tensors]


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def train(case: Case) -> dict[str, Any]:
    """Train with the guard as the loop does, until it raises."""
    torch._dynamo.reset()
    run, fault = build_sharded(case.arguments), case.fault
    config, model, optimizer = run.config, run.model, run.optimizer
    shape, corpus = run.shape, load_corpus(config.data)
    sequences = make_sequence_shape(
        config.data, corpus.tokenizer, config.train.seq_len, config.model.vocab_size
    )
    order = SampleOrder(corpus.sources, sequences, config.run.seed)
    loader = TrainLoader(order, sequences, shape, 0, torch.device("cpu"), 2)
    lines, repeated = list[str](), (run.sharded, order, shape, loss_of_forward)
    guard = NonFiniteGuard(config.train.max_skipped_steps, *repeated, lines.append)
    now: Now = {"step": 0}
    FAULTS[fault](model, now)
    hooks = count_hooks(model)
    seen: dict[str, Any] = {"steps": [], "lines": lines, "error": None}
    try:
        for step in range(1, STEPS + 1):
            now["step"] = step
            data = loader.next()
            seen["tokens"] = torch.cat([batch.tokens for batch in data.micro_batches]).tolist()
            damaged = fault == "nan_parameter" and step == FAULTY_STEP  # the fault itself changes the weight
            before = bits(model, optimizer)
            batches, grad_clip = data.micro_batches, config.train.grad_clip
            result = train_step(run.sharded, optimizer, batches, grad_clip, loss_of_forward)
            after = bits(model, optimizer)
            changed = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) - (
                damaged and faulty(now)
            )
            seen["steps"].append(
                [result.loss.item(), result.grad_norm.item(), result.skipped.item(), changed]
            )
            guard.after_step(step_done(step, result, data, (step - 1) * shape.global_batch_size))
        guard.finish()
    except NonFiniteError as error:
        seen["error"] = str(error)
    seen["gradients_left"] = sum(p.grad is not None for p in model.parameters())
    seen["hooks_left"] = count_hooks(model) - hooks
    loader.close()
    return seen | {"skipped": guard.skipped}


def train_all(cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """Return this rank's results of each case."""
    return {name: train(case) for name, case in cases.items()}
