"""What a rank of the parity tests does (parity.py): trains cases one after another, and writes down what it
sees of each."""

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention

import meshwright.models.llama
import meshwright.parallel.tensor_parallel
from meshwright.models.kernels.document_blocks import block_mask
from meshwright.parallel.compile.stats import count_compiled_graphs
from meshwright.train.data.batch import Batch
from meshwright.train.data.corpus import load_corpus
from meshwright.train.data.loader import TrainLoader
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import make_sequence_shape
from meshwright.train.evaluation import mean_loss, score_sets
from meshwright.train.optim.optimizer import learning_rate, set_learning_rate
from meshwright.train.step import train_step
from tests.distributed.reference import EVALUATE_AFTER, pad_unevenly
from tests.support.sharded import build_sharded


@dataclass(frozen=True)
class Case:
    """Config overrides, how many steps, and what `changed` changes."""

    arguments: Sequence[str]
    steps: int
    change: str = ""


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_case(arguments: Sequence[str], steps: int) -> dict[str, Any]:
    """The journey of train.main, with a look at everything on the way. Every rank's result; rank 0's
    counts."""
    run, device = build_sharded(arguments), torch.device("cpu")
    config, model, optimizer, group = run.config, run.model, run.optimizer, run.group
    weights = {name: whole(p) for name, p in model.named_parameters()}
    shape, corpus = run.shape, load_corpus(config.data)
    sequences = make_sequence_shape(
        config.data, corpus.tokenizer, config.train.seq_len, config.model.vocab_size
    )
    loader = TrainLoader(
        SampleOrder(corpus.sources, sequences, config.run.seed), sequences, shape, 0, device, 2
    )
    grads: dict[str, Tensor] = {}

    def keep_first_gradients(*_: object) -> None:
        if not grads:
            grads.update({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep_first_gradients)
    losses, norms, graphs, seen, eval_loss = [], [], [], [], None
    for step in range(1, steps + 1):
        set_learning_rate(optimizer, learning_rate(config.optim, step, steps))
        batches = loader.next().micro_batches
        seen.append(torch.cat([batch.tokens for batch in batches]))
        if step == steps:
            batches = [Batch(b.tokens, pad_unevenly(b.tokens, b.targets), b.first) for b in batches]
        result = train_step(model, optimizer, batches, config.train.grad_clip, group)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
        if step == EVALUATE_AFTER:
            limit = config.train.eval_sequences
            eval_loss = mean_loss(score_sets(model, corpus.held_out, sequences, shape, limit, device, group))
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
    }


def _tokens_of_all(mine: Tensor, data_rank: int) -> Tensor:
    """tokens[step, sequence, token] that the data-parallel ranks saw together; the ranks of a tp group must
    see the same."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (data_rank, mine))
    parts: dict[int, Tensor] = {}
    for rank, tokens in every:
        assert torch.equal(parts.setdefault(rank, tokens), tokens), (
            "the ranks of one tp group saw different data"
        )
    return torch.cat([parts[rank] for rank in sorted(parts)], dim=1)


@contextlib.contextmanager
def changed(name: str) -> Iterator[None]:
    """Our code with things in it replaced: "async" hands on collectives as torch's own styles do, not waited
    for; "flex" takes FlexAttention, as on a GPU, in place of our own for a CPU (where torch lets nobody
    differentiate it, though it can)."""
    replaced: list[tuple[Any, str, Any]] = {
        "": [],
        "async": [(meshwright.parallel.tensor_parallel, "_wait", _functional_collectives._maybe_wrap_tensor)],
        "flex": [
            (meshwright.models.llama, "document_mask", block_mask),
            (flex_attention, "_validate_device", lambda *_: None),
        ],
    }[name]
    before = [getattr(where, what) for where, what, _ in replaced]
    for where, what, value in replaced:
        setattr(where, what, value)
    try:
        yield
    finally:
        for (where, what, _), value in zip(replaced, before, strict=True):
            setattr(where, what, value)


def train_cases(folder: Path, cases: Mapping[str, Case]) -> None:
    """Rank 0 writes what it saw of each case to FOLDER/CASE as soon as all ranks are through with it.

    The first case that fails ends the process group: what state it leaves behind is no ground for another.
    """
    for name, case in cases.items():
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        with changed(case.change):
            result = train_case(case.arguments, case.steps)
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{name}.part")
            (folder / f"{name}.part").rename(folder / name)
        del result
        gc.collect()
