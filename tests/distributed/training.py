"""The rank program of the parity tests (parity.py): train cases one after another and save their results."""

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention

import meshwright.models.llama
import meshwright.parallel.tensor_parallel
from meshwright.models.attention import block_mask
from meshwright.parallel.compile.stats import count_compiled_graphs
from meshwright.parallel.fsdp import full_tensor, local_part
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import Config
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import make_sequence_shape
from meshwright.train.data.training_data import TrainLoader
from meshwright.train.evaluation import score_sets
from meshwright.train.hooks import mean_loss
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.optim.optimizer import learning_rate, set_learning_rate
from meshwright.train.step import train_step
from tests.distributed.reference import EVALUATE_AFTER, pad_unevenly
from tests.support.sharded import build_sharded
from tests.support.stores import load_corpus


@dataclass(frozen=True)
class Case:
    """A config, the number of steps, and the name of a change (see `changed`)."""

    config: Config
    steps: int
    change: str = ""


def whole_copy(tensor: Tensor) -> Tensor:
    return full_tensor(tensor).detach().clone()


def train_case(config: Config, steps: int) -> dict[str, Any]:
    """Train as train.main does, recording results on every rank; the tests use rank 0's."""
    run, device = build_sharded(config), torch.device("cpu")
    model, optimizer, group = run.model, run.optimizer, run.group
    weights = {name: whole_copy(p) for name, p in model.named_parameters()}
    shape, corpus = run.shape, load_corpus(config.data)
    sequences = make_sequence_shape(
        config.data, corpus.tokenizer, config.train.seq_len, config.model.vocab_size
    )
    whole = replace(shape, context_parallel=1)  # the last batch is padded before it is cut
    loader = TrainLoader(
        SampleOrder(corpus.sources, sequences, config.run.seed), sequences, whole, TrainPosition(), device, 2
    )
    grads: dict[str, Tensor] = {}

    def keep_first_gradients(*_: object) -> None:
        if not grads:
            grads.update(
                {name: whole_copy(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            )

    optimizer.register_step_pre_hook(keep_first_gradients)
    losses, norms, graphs, seen, eval_loss = [], [], [], [], None
    for step in range(1, steps + 1):
        set_learning_rate(optimizer, learning_rate(config.optim, step, steps))
        batches = loader.next().micro_batches
        seen.append(torch.cat([batch.tokens for batch in batches]))
        if step == steps:
            batches = [replace(batch, targets=pad_unevenly(batch.tokens, batch.targets)) for batch in batches]
        batches = [shape.local_tokens(batch) for batch in batches]
        result = train_step(run.sharded, optimizer, batches, config.train.grad_clip, loss_of_forward)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
        if step == EVALUATE_AFTER:
            limit = config.train.eval_sequences
            eval_loss = mean_loss(
                score_sets(
                    model, corpus.evaluation_sets, sequences, shape, limit, device, group, loss_of_forward
                )
            )
        graphs.append(count_compiled_graphs())
    loader.close()
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "weights": weights,
        "graphs": graphs,
        "eval_loss": eval_loss,
        "breaks": dict(counters["graph_break"]),
        "tokens": _tokens_of_all(torch.stack(seen), shape.data_rank),
        "drifted": _drifted(model),
    }


def _tokens_of_all(own: Tensor, data_rank: int) -> Tensor:
    """Return tokens[step, sequence, token] of all data-parallel ranks; the ranks of a cp or tp group must
    have read the same."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (data_rank, own))
    parts: dict[int, Tensor] = {}
    for rank, tokens in gathered:
        assert torch.equal(parts.setdefault(rank, tokens), tokens), (
            "the ranks of a cp or tp group got different data"
        )
    return torch.cat([parts[rank] for rank in sorted(parts)], dim=1)


def _drifted(model: nn.Module) -> list[str]:
    """Return the parameters whose copies on several ranks are not bitwise equal."""
    copies = {}
    for name, p in model.named_parameters():
        shard: tuple[int, ...] = ()
        if isinstance(p, DTensor):
            place = zip(p.device_mesh.get_coordinate() or (), p.placements, strict=True)
            shard = tuple(index for index, placement in place if not placement.is_replicate())
        copies[name, shard] = local_part(p).detach()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, copies)
    first: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    drifted = set()
    for of_rank in gathered:
        for key, copy in of_rank.items():
            if not torch.equal(first.setdefault(key, copy), copy):
                drifted.add(key[0])
    return sorted(drifted)


def changed(name: str) -> contextlib.ExitStack:
    """Replace parts of the product's code: "async" returns results of collectives without waiting, as torch's
    styles do; "flex" uses FlexAttention, as on a GPU, instead of our CPU kernel (and disables torch's check
    that refuses its backward on a CPU, where it works); "roundings" rounds gradients on the last rank as if
    summed in another order, as attention on a GPU does."""
    replace_by, tensor_parallel = mock.patch.object, meshwright.parallel.tensor_parallel
    changes: list[contextlib.AbstractContextManager[Any]] = {
        "": [],
        "async": [replace_by(tensor_parallel, "_wait", _functional_collectives._maybe_wrap_tensor)],
        "flex": [
            replace_by(meshwright.models.llama, "document_mask", block_mask),
            replace_by(flex_attention, "_validate_device", lambda *_: None),
        ],
        "roundings": [_other_roundings()],
    }[name]
    stack = contextlib.ExitStack()
    for change in changes:
        stack.enter_context(change)
    return stack


@contextlib.contextmanager
def _other_roundings() -> Iterator[None]:
    factor = 1 + 2**-22 if dist.get_rank() == dist.get_world_size() - 1 else 1.0

    def hook(_module: nn.Module, _inputs: object, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda grad: grad * factor)

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def train_cases(folder: Path, cases: Mapping[str, Case]) -> None:
    """Train each case; when all ranks have finished it, rank 0 saves its result to FOLDER/CASE.

    The first case that fails ends the processes, because their state is undefined afterwards.
    """
    for name, case in cases.items():
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        with changed(case.change):
            result = train_case(case.config, case.steps)
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{name}.part")
            (folder / f"{name}.part").rename(folder / name)
        del result
        gc.collect()
