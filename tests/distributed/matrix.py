"""The parity matrix: the factors of a run, the rules for legal combinations, and the cases that cover
them."""

import functools
import os
import random
from collections.abc import Mapping
from math import prod
from typing import Any, TypeVar

from tests.distributed.pairwise import Case, Rule, cover_pairs

T = TypeVar("T")
STEPS = 3  # including an evaluation, warm-up and an uneven last batch; enough to learn the data
LAYERS, SEQUENCES = 2, 32
# Degrees up to 4 divide all sizes.
SHAPE = [
    "--model.dim=32",
    f"--model.n_layers={LAYERS}",
    "--model.n_heads=8",
    "--model.n_kv_heads=4",
    "--model.ffn_dim=64",
    "--train.seq_len=16",
    f"--train.global_batch_size={SEQUENCES}",
    "--train.eval_sequences=13",
    "--optim.warmup_steps=2",
    "--optim.lr=1e-2",
]
# For inexact comparisons: the data is still learned, and no step is so large that it amplifies roundings.
GENTLE = ["--optim.lr=5e-3", "--optim.warmup_steps=1"]
PARTS = {
    "all": ("embedding", "attention", "feed_forward", "head"),
    "attention": ("attention",),
    "ffn+head": ("feed_forward", "head"),
    "emb+att+head": ("embedding", "attention", "head"),
}
# Three kinds of blocks: frozen, with a frozen weight and an input that needs no gradient, and trained.
FROZEN, FROZEN_LAYERS = "[tok_embeddings.*, layers.0.*, layers.1.attention.wq.*]", 3
JOINED, JOINED_LAYERS = 10_000, 4  # a block has 9,280 parameters: two make a unit
MESH = ("dp_replicate", "dp_shard", "tp")
# The first value is the cheapest or simplest: it is used unless a pair needs another.
FACTORS: dict[str, list[Any]] = {
    "ranks": [4, 2, 1, 8],
    "tp": [1, 2, 4],
    "dp_shard": [2, 1, 4],
    "dp_replicate": [1, 2, 4],
    "cp": [1, 2, 4],
    "exchange": ["heads", "gather"],
    "backend": ["eager", "aot_eager", "inductor"],
    "recompute": ["none", "full", "matmul", "half_matmul", "every:2", "budget", "offload"],
    "reshard": [True, False, 2],
    "parts": list(PARTS),
    "tied": [False, True],
    "loss_parallel": [True, False],
    "sequence_parallel": [True, False],
    "forward_prefetch": [1, 0, 2],
    "backward_prefetch": [1, 0, 2],
    "accumulation": [1, 2, 4],
    "reduce": ["every", "last"],
    "keep": [False, True],
    "documents": [False, True],
    "loss_chunk": [0, 64],
    "fused": [False, True],
    "cpu_offload": [False, True],
    "frozen": [False, True],
    "joined": [False, True],
    "optimizer": ["adamw", "muon"],
}
RULES = [
    Rule(("ranks", "tp", "dp_shard", "dp_replicate", "cp"), lambda ranks, *degrees: ranks == prod(degrees)),
    # Compilation takes most of the time, and is the same on more ranks.
    Rule(("ranks", "backend"), lambda ranks, on: ranks <= {"eager": 8, "aot_eager": 4, "inductor": 2}[on]),
    # Without context parallelism nothing is exchanged; there are 4 key-value heads.
    Rule(("cp", "exchange"), lambda cp, exchange: cp > 1 or exchange == "heads"),
    Rule(("cp", "exchange", "tp"), lambda cp, exchange, tp: exchange == "gather" or cp * tp <= 4),
    # A budget needs the compiler. aot_eager has no partitioner with budgets: aot_eager_decomp_partition
    # replaces it.
    Rule(("recompute", "backend"), lambda recompute, backend: recompute != "budget" or backend != "eager"),
    # Groups of 2 need more than 2 shards. Together with tp they hang in torch (test_torch_faults.py), and
    # such a plan is refused.
    Rule(
        ("reshard", "dp_shard", "cp", "tp"),
        lambda reshard, shard, cp, tp: isinstance(reshard, bool) or (shard * cp > reshard and tp == 1),
    ),
    # With one micro batch these have no effect.
    Rule(("accumulation", "reduce"), lambda micro_batches, reduce: micro_batches > 1 or reduce == "every"),
    Rule(("accumulation", "keep"), lambda micro_batches, keep: micro_batches > 1 or not keep),
    # Without tensor parallelism these have no effect; without a split head loss_parallel has none.
    Rule(("tp", "parts"), lambda tp, parts: tp > 1 or parts == "all"),
    Rule(("tp", "sequence_parallel"), lambda tp, on: tp > 1 or on),
    Rule(("tp", "loss_parallel"), lambda tp, on: tp > 1 or on),
    Rule(("parts", "loss_parallel"), lambda parts, on: on or "head" in PARTS[parts]),
    # Gathered logits are computed without chunks, and fewer tokens than a chunk have no effect.
    Rule(("loss_chunk", "loss_parallel"), lambda chunk, on: on or not chunk),
    Rule(
        ("loss_chunk", "accumulation", "dp_shard", "dp_replicate", "cp"),
        lambda chunk, *divisors: not chunk or SEQUENCES * 16 // prod(divisors) > chunk,
    ),
    Rule(
        ("parts", "tied"),
        lambda parts, tied: not tied or ("head" in PARTS[parts]) == ("embedding" in PARTS[parts]),
    ),
    Rule(("frozen", "tied"), lambda frozen, tied: not (frozen and tied)),  # a frozen head
]
PLAIN: Case = {name: values[0] for name, values in FACTORS.items()}


def case(ranks: int, degrees: tuple[int, int, int], **others: Any) -> Case:
    """Return a hand-written case: degrees are (dp_replicate, dp_shard, tp); other factors default to their
    first value."""
    mesh = dict(zip(MESH, degrees, strict=True))
    return {**PLAIN, **mesh, "ranks": ranks, **others}


# Hand-written cases for every test run: the most used pairs, and those that found bugs. Compilation takes
# most of the time, so two ranks compile, each axis once.
EVERYDAY = [
    case(2, (1, 1, 2), backend="aot_eager", recompute="full", tied=True, loss_chunk=64, documents=True),
    case(2, (1, 1, 1), backend="aot_eager", cp=2, exchange="gather", recompute="matmul", documents=True),
    case(1, (1, 1, 1), backend="aot_eager", recompute="half_matmul", accumulation=2, fused=True),
    case(2, (1, 2, 1), recompute="full", accumulation=4, reduce="last", keep=True, documents=True),
    case(2, (1, 2, 1), joined=True, recompute="every:2", backward_prefetch=2, optimizer="muon"),
    case(2, (1, 1, 2), parts="attention", sequence_parallel=False, accumulation=2, forward_prefetch=2),
    case(4, (1, 2, 2), frozen=True, recompute="full", accumulation=2, cpu_offload=True, optimizer="muon"),
    case(4, (1, 2, 2), loss_parallel=False, parts="ffn+head", recompute="offload", forward_prefetch=0),
    case(4, (1, 1, 4), tied=True, sequence_parallel=False, parts="emb+att+head", optimizer="muon"),
    case(4, (2, 2, 1), tied=True, accumulation=4, reduce="last", backward_prefetch=0, optimizer="muon"),
    case(4, (1, 2, 1), cp=2, reshard=2, accumulation=2, keep=True, recompute="offload", documents=True),
    case(4, (1, 1, 2), cp=2, exchange="gather", loss_chunk=64, reshard=False, optimizer="muon"),
    case(8, (2, 2, 2), loss_chunk=64, optimizer="muon"),
]
PARITY_PARTS = 24


@functools.cache
def slow_cases() -> list[Case]:
    """Return the cases that with EVERYDAY contain every legal pair; it takes seconds."""
    return cover_pairs(FACTORS, RULES, EVERYDAY)


def sample(
    cases: Mapping[str, T], parts: int, seed: str = os.environ["MESHWRIGHT_TESTS_SEED"]
) -> dict[str, T]:
    """Return one of `parts` parts of the cases; consecutive seeds cover all of them. The seed "all" selects
    all cases."""
    if seed == "all":
        return dict(cases)
    names = list(cases)
    # shuffled, because the long cases are the first ones and would concentrate in a few parts
    random.Random(0).shuffle(names)
    return {name: cases[name] for name in names[int(seed) % parts :: parts]}


def name(case: Case) -> str:
    """Return the name of a case: its ranks, its mesh, and the factors that do not have their first value."""
    labels = [str(case["ranks"]), "x".join(str(case[axis]) for axis in MESH)]
    for factor in [name for name in FACTORS if name not in ("ranks", *MESH)]:
        value = case[factor]
        if value != PLAIN[factor]:
            labels.append(factor if value is True else f"{factor}:{str(value).lower()}")
    return "-".join(labels)


def arguments(case: Case) -> list[str]:
    """Return the case as config overrides."""
    recompute, backend = case["recompute"], case["backend"]
    same = (
        *("dp_replicate", "dp_shard", "cp", "tp", "cpu_offload"),
        *("loss_parallel", "sequence_parallel", "forward_prefetch", "backward_prefetch"),
    )
    parallel = {key: case[key] for key in same} | {
        "activation_checkpoint": "selective" if recompute in SELECTIVE else recompute,
        "reshard_after_forward": case["reshard"],
        "reshard_after_backward": not case["keep"],
        "reduce_gradients": f"{case['reduce']}_micro_batch",
        "loss_chunk_tokens": case["loss_chunk"],
        "fused_projections": case["fused"],
        "tp_modules": f"[{', '.join(PARTS[case['parts']])}]",
        "compile.enabled": backend != "eager",
    }
    if recompute in SELECTIVE:
        parallel["selective_policy"] = recompute
    if case["cp"] > 1:
        parallel["cp_exchange"] = case["exchange"]
    if case["joined"]:
        parallel["unit_min_params"] = JOINED
    if backend != "eager":
        partitions = recompute == "budget" and backend == "aot_eager"
        parallel["compile.backend"] = "aot_eager_decomp_partition" if partitions else backend
    overrides = [f"--parallel.{key}={str(value).lower()}" for key, value in parallel.items()]
    micro_batches = case["dp_replicate"] * case["dp_shard"] * case["accumulation"]
    return [
        *overrides,
        f"--train.micro_batch_size={SEQUENCES // micro_batches}",
        f"--model.n_layers={layers(case)}",
        *["--model.tie_embeddings=true"] * case["tied"],
        *["--data.document_mask=true"] * case["documents"],
        *[f"--train.freeze={FROZEN}"] * case["frozen"],
        *["--optim.name=muon"] * (case["optimizer"] == "muon"),
    ]


SELECTIVE = ("matmul", "half_matmul", "every:2")


def layers(case: Case) -> int:
    """Return the number of layers that a case needs."""
    return JOINED_LAYERS if case["joined"] else FROZEN_LAYERS if case["frozen"] else LAYERS


def graphs(case: Case) -> int:
    """Return the number of compiled graphs of a case: one for each kind of block, one for the head."""
    if case["backend"] == "eager":
        return 0
    kinds = set()
    for block in range(layers(case)):
        unit = block // 2 if case["joined"] else block
        frozen = min(block, 2) if case["frozen"] else 2
        kinds.add((frozen, case["recompute"] == "every:2" and unit % 2))
    return len(kinds) + 1
