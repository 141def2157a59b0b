"""The parity matrix: the factors of a run, the rules for legal combinations, and the cases that cover
them."""

import os
import random
from collections.abc import Mapping
from math import prod
from typing import Any, TypeVar

from tests.distributed.pairwise import Case, Rule, cover_pairs

T = TypeVar("T")
STEPS = 5  # including an evaluation, warm-up and an uneven last batch; enough to learn the data
# Degrees up to 4 divide all sizes; 16 sequences are one per rank for 8 ranks with accumulation 2.
SHAPE = [
    "--model.dim=32",
    "--model.n_layers=3",
    "--model.n_heads=8",
    "--model.n_kv_heads=4",
    "--model.ffn_dim=64",
    "--train.seq_len=32",
    "--train.global_batch_size=16",
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
# The first value is the cheapest or simplest: it is used unless a pair needs another.
FACTORS: dict[str, list[Any]] = {
    "ranks": [4, 2, 1, 8],
    "tp": [1, 2, 4],
    "dp_shard": [2, 1, 4],
    "dp_replicate": [1, 2, 4],
    "cp": [1, 2, 4],
    "exchange": ["heads", "gather"],
    "recompute": ["none", "full", "matmul", "half_matmul", "every:2", "budget"],
    "backend": ["eager", "aot_eager", "inductor"],
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
}
RULES = [
    Rule(("ranks", "tp", "dp_shard", "dp_replicate", "cp"), lambda ranks, *degrees: ranks == prod(degrees)),
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
    # at least one sequence per micro batch
    Rule(
        ("accumulation", "dp_shard", "dp_replicate"),
        lambda micro_batches, *degrees: micro_batches * degrees[0] * degrees[1] <= 16,
    ),
    # With one micro batch these have no effect.
    Rule(("accumulation", "reduce"), lambda micro_batches, reduce: micro_batches > 1 or reduce == "every"),
    Rule(("accumulation", "keep"), lambda micro_batches, keep: micro_batches > 1 or not keep),
    # Without tensor parallelism these have no effect; without a split head loss_parallel has none.
    Rule(("tp", "parts"), lambda tp, parts: tp > 1 or parts == "all"),
    Rule(("tp", "sequence_parallel"), lambda tp, on: tp > 1 or on),
    Rule(("tp", "loss_parallel"), lambda tp, on: tp > 1 or on),
    Rule(("parts", "loss_parallel"), lambda parts, on: on or "head" in PARTS[parts]),
    # gathered logits are computed without chunks
    Rule(("loss_chunk", "loss_parallel"), lambda chunk, on: on or not chunk),
    Rule(
        ("parts", "tied"),
        lambda parts, tied: not tied or ("head" in PARTS[parts]) == ("embedding" in PARTS[parts]),
    ),
]


def case(ranks: int, degrees: tuple[int, int, int], backend: str, recompute: str, **others: Any) -> Case:
    """Return a hand-written case: degrees are (dp_replicate, dp_shard, tp); other factors default to their
    first value."""
    plain = {name: values[0] for name, values in FACTORS.items()}
    mesh = dict(zip(("dp_replicate", "dp_shard", "tp"), degrees, strict=True))
    return {**plain, **mesh, "ranks": ranks, "backend": backend, "recompute": recompute, **others}


# Hand-written cases for every test run, except for inductor's: the most used ones, and those that found bugs.
# Compilation takes most of the time, so few ranks compile: two for each axis, four for FSDP with tensor
# parallelism; inductor, whose kernels other tests run too, once.
FAST = [
    case(1, (1, 1, 1), "aot_eager", "none"),
    case(2, (1, 2, 1), "inductor", "budget", documents=True, loss_chunk=64),
    case(2, (1, 2, 1), "eager", "every:2", forward_prefetch=2, backward_prefetch=2, accumulation=2),
    case(2, (1, 2, 1), "eager", "full", accumulation=4, reduce="last", keep=True, documents=True),
    case(
        2,
        (1, 1, 2),
        "aot_eager",
        "half_matmul",
        tied=True,
        sequence_parallel=False,
        reshard=False,
        loss_chunk=64,
    ),
    case(4, (1, 2, 2), "aot_eager", "full", accumulation=4, reduce="last", documents=True, loss_chunk=64),
    case(4, (1, 2, 2), "eager", "none", loss_parallel=False, parts="ffn+head", forward_prefetch=0),
    case(4, (1, 4, 1), "eager", "full", reshard=2, backward_prefetch=2),
    case(4, (1, 1, 4), "eager", "matmul", tied=True, loss_parallel=False, forward_prefetch=2, documents=True),
    case(4, (2, 2, 1), "eager", "every:2", tied=True, backward_prefetch=0, accumulation=4, keep=True),
    case(8, (2, 2, 2), "eager", "none", loss_chunk=64),
    case(2, (1, 1, 1), "aot_eager", "full", cp=2, documents=True),
    case(2, (1, 1, 1), "aot_eager", "matmul", cp=2, exchange="gather", tied=True),
    case(4, (1, 2, 1), "eager", "none", cp=2, accumulation=2, reduce="last", keep=True),
    case(4, (1, 1, 1), "eager", "every:2", cp=4, exchange="gather", reshard=2, documents=True),
    case(4, (1, 1, 2), "eager", "none", cp=2, exchange="gather", loss_chunk=64),
    case(4, (1, 1, 2), "eager", "full", cp=2, accumulation=4, documents=True),
    case(2, (1, 1, 1), "inductor", "none", cp=2, loss_chunk=64),
    case(4, (1, 1, 2), "inductor", "full", cp=2, documents=True),
    case(2, (1, 1, 1), "inductor", "full", cp=2, exchange="gather", documents=True),
    case(4, (1, 2, 1), "inductor", "matmul", cp=2, exchange="gather", accumulation=2),
]
SLOW = cover_pairs(FACTORS, RULES, FAST)
PARITY_PARTS = 16


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
    """Return the short, unique name of a case."""
    mesh = "x".join(str(case[axis]) for axis in ("dp_replicate", "dp_shard", "tp"))
    labels = [
        str(case["ranks"]),
        mesh,
        case["backend"],
        case["recompute"],
        f"reshard:{str(case['reshard']).lower()}",
        f"ahead:{case['forward_prefetch']}{case['backward_prefetch']}",
        f"accumulate:{case['accumulation']}",
    ]
    labels += [f"cp:{case['cp']}-{case['exchange']}"] * (case["cp"] > 1)
    labels += ["reduce_last"] * (case["reduce"] == "last") + ["keep"] * case["keep"]
    labels += ["chunked"] * bool(case["loss_chunk"])
    labels += ["tied"] * case["tied"] + ["documents"] * case["documents"] + [case["parts"]] * (case["tp"] > 1)
    labels += [f"no_{key}" for key in ("loss_parallel", "sequence_parallel") if not case[key]]
    return "-".join(labels)


def arguments(case: Case) -> list[str]:
    """Return the case as config overrides."""
    recompute, backend = case["recompute"], case["backend"]
    if recompute in ("none", "full", "budget"):
        chosen = {"activation_checkpoint": recompute}
    else:
        chosen = {"activation_checkpoint": "selective", "selective_policy": recompute}
    keys = (
        "dp_replicate",
        "dp_shard",
        "cp",
        "tp",
        "loss_parallel",
        "sequence_parallel",
        "forward_prefetch",
        "backward_prefetch",
    )
    chosen |= {key: case[key] for key in keys}
    chosen |= {"cp_exchange": case["exchange"]} if case["cp"] > 1 else {}
    chosen |= {"reshard_after_forward": case["reshard"], "reshard_after_backward": not case["keep"]}
    chosen |= {"reduce_gradients": f"{case['reduce']}_micro_batch", "loss_chunk_tokens": case["loss_chunk"]}
    chosen |= {"tp_modules": f"[{', '.join(PARTS[case['parts']])}]", "compile.enabled": backend != "eager"}
    if backend != "eager":
        partitions = recompute == "budget" and backend == "aot_eager"
        chosen["compile.backend"] = "aot_eager_decomp_partition" if partitions else backend
    data_parallel = case["dp_replicate"] * case["dp_shard"]
    overrides = [f"--parallel.{key}={_text(value)}" for key, value in chosen.items()]
    overrides.append(f"--train.micro_batch_size={16 // data_parallel // case['accumulation']}")
    overrides += ["--model.n_layers=2"] * (case["ranks"] == 8)  # layers of eager tensor parallelism are slow
    return (
        overrides
        + ["--model.tie_embeddings=true"] * case["tied"]
        + ["--data.document_mask=true"] * case["documents"]
    )


def graphs(case: Case) -> int:
    """Return the number of compiled graphs of a case: one for each kind of block, one for the head."""
    if case["backend"] == "eager":
        return 0
    return (2 if case["recompute"] == "every:2" else 1) + 1


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
