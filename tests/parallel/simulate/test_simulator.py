"""Collectives and memory of a simulated rank, compared with orders and sizes derived by hand from shapes."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.simulate.collectives import Collective
from meshwright.parallel.simulate.simulator import Simulation
from tests.support.simulated import TINY, describe_collective, simulated

TP = "--parallel.tp=2"  # its collectives show when a unit computes
HSDP3 = ("--parallel.dp_replicate=2", "--train.global_batch_size=12")  # accumulation 3 on 4 ranks
KEEP = "--parallel.reshard_after_forward=false"
BFLOAT16 = "--parallel.param_dtype=bfloat16"
REPLICAS = "--parallel.dp_replicate=2"


def slow(*values: object) -> object:
    """A case that only combines other cases."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.sampled(8)])


def prefetch(k: int) -> tuple[str, str]:
    return f"--parallel.forward_prefetch={k}", f"--parallel.backward_prefetch={k}"


PLAIN = (*TINY, BFLOAT16, *prefetch(1))


def checkpoint(kind: str) -> str:
    return f"--parallel.activation_checkpoint={kind}"


def of_axis(collectives, *axes: str) -> list[Collective]:
    return [c for c in collectives if c.axis in axes]


# Order


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("k", "forward", "backward"),
    [
        (0, "tok ~tok 0 ~0 1 ~1 2 ~2 head ~head", "~head -head 2 ~2 -2 1 ~1 -1 0 ~0 -0 ~tok -tok"),
        (1, "tok 0 ~tok 1 ~0 2 ~1 head ~2 ~head", "2 ~head -head 1 ~2 -2 0 ~1 -1 ~0 -0 ~tok -tok"),
        (2, "tok 0 1 ~tok 2 ~0 head ~1 ~2 ~head", "2 1 ~head -head 0 ~2 -2 ~1 -1 ~0 -0 ~tok -tok"),
    ],
)
def test_units_are_gathered_as_far_ahead_as_the_plan_says(k, forward, backward):
    collectives = simulated(4, *TINY, TP, *prefetch(k)).collectives
    assert describe_collective(collectives, ["forward"]) == forward
    assert describe_collective(collectives, ["backward"]) == backward


@pytest.mark.sampled(3, day=1)
def test_without_tp_a_unit_has_fsdps_collectives_and_no_others():
    collectives = simulated(4, *PLAIN).collectives
    assert describe_collective(collectives) == "tok 0 1 2 head 2 -head 1 -2 0 -1 -0 -tok"
    assert {c.axis for c in collectives if c.unit} == {"dp_shard"}
    assert outside_of_units(collectives) == [  # tokens of the batch; norm of the gradient; loss
        ("all_reduce", "world", "forward", 4),
        ("all_reduce", "world", "optimizer", 4),
        ("all_reduce", "world", "optimizer", 4),
    ]
    of_tp = simulated(8, *TINY, TP, BFLOAT16, REPLICAS).collectives
    axes = [axis for _, axis, _, _ in outside_of_units(of_tp)]
    assert axes == ["data_parallel", "tp", "world", "data_parallel"], "tp: copies of the norms are made equal"


def outside_of_units(collectives) -> list[tuple[str, str, str, int]]:
    return [(c.op, c.axis, c.phase, c.bytes) for c in collectives if not c.unit]


def test_what_stays_gathered_is_not_gathered_again():
    collectives = simulated(4, *TINY, BFLOAT16, KEEP, *prefetch(0)).collectives
    assert describe_collective(collectives) == "tok 0 1 2 head -head -2 -1 -0 -tok"


def test_resharding_to_a_smaller_group_gathers_as_often_and_as_much():
    full = simulated(4, *TINY, BFLOAT16, *prefetch(0))
    partial = simulated(4, *TINY, BFLOAT16, *prefetch(0), "--parallel.reshard_after_forward=2")
    assert full.collectives == partial.collectives
    # each rank keeps a half after the forward, not a quarter
    assert partial.memory.unsharded > full.memory.unsharded


def test_hsdp_all_reduces_once_per_step_and_reduce_scatters_every_micro_batch():
    collectives = simulated(4, *TINY, *HSDP3, *prefetch(0)).collectives
    forward, reduced = "tok 0 1 2 head ", "-head 2 -2 1 -1 0 -0 -tok"
    last = "-head =head 2 -2 =2 1 -1 =1 0 -0 =0 -tok =tok"
    assert describe_collective(collectives) == " ".join(
        [forward + reduced, forward + reduced, forward + last]
    )


def test_replication_alone_all_reduces_and_gathers_nothing():
    assert (
        describe_collective(simulated(4, *TINY, "--parallel.strategy=ddp").collectives)
        == "=head =2 =1 =0 =tok"
    )


def test_tied_embeddings_are_one_unit_gathered_first_and_reduced_last():
    collectives = simulated(4, *TINY, "--model.tie_embeddings=true", *prefetch(1)).collectives
    assert describe_collective(collectives) == "tok+head 0 1 2 2 1 -2 0 -1 -0 -tok+head"


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputing_gathers_nothing_more_over_dp_shard(kind):
    plain = simulated(4, *TINY, TP, *prefetch(1)).collectives
    recomputed = simulated(4, *TINY, TP, *prefetch(1), checkpoint(kind)).collectives
    assert of_axis(recomputed, "dp_shard") == of_axis(plain, "dp_shard")
    assert "recompute" not in {c.phase for c in plain}
    again = [c.op for c in recomputed if c.phase == "recompute"]
    # Each block has two gathers and two sums over tp. Full recomputes them until the last saved tensor
    # exists, before the last sum; selective keeps the sums.
    assert (
        again
        == {"full": ["all_gather", "reduce_scatter", "all_gather"], "selective": ["all_gather"] * 2}[kind] * 3
    )


# Bytes, at the shape of an 8B

BATCH, TOKENS, DIM, FFN, VOCAB, KV_DIM = 1, 8192, 4096, 14336, 128256, 1024
NORMS = 2 * DIM
MATRICES = 2 * DIM * DIM + 2 * KV_DIM * DIM + 3 * DIM * FFN
EMBEDDING = VOCAB * DIM
BF16, FP32 = 2, 4
LLAMA_8B = ("--config=llama_8b.yaml", "--model.n_layers=2", "--train.micro_batch_size=1")


def sizes(collectives, **fields: str) -> dict[str, list[int]]:
    """Bytes by unit of the collectives with these fields."""
    by_unit: dict[str, list[int]] = {}
    for c in collectives:
        if c.unit and all(getattr(c, name) == value for name, value in fields.items()):
            by_unit.setdefault(c.unit, []).append(c.bytes)
    return by_unit


def per_unit(block: int, embedding: int, head: int) -> dict[str, int]:
    return {"tok_embeddings": embedding, "layers.0": block, "layers.1": block, "head": head}


def simulated_8b(replicate: int, shard: int, tp: int) -> Simulation:
    keys = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp}
    return simulated(replicate * shard * tp, *LLAMA_8B, *(f"--parallel.{k}={v}" for k, v in keys.items()))


@pytest.mark.parametrize(("replicate", "tp"), [(1, 1), (4, 8), slow(4, 1), slow(1, 8)])
def test_bytes_of_sharding_at_8b(replicate, tp):
    shard = 8
    got = simulated_8b(replicate, shard, tp).collectives
    # A tp rank has its share of the matrices and all of the norms.
    parameters = per_unit(MATRICES // tp + NORMS, EMBEDDING // tp, EMBEDDING // tp + DIM)
    gathered = {unit: [BF16 * n] * (2 if "layers" in unit else 1) for unit, n in parameters.items()}
    assert sizes(got, op="all_gather", axis="dp_shard") == gathered
    assert sizes(got, op="reduce_scatter", axis="dp_shard") == {
        unit: [FP32 * n] for unit, n in parameters.items()
    }
    all_reduced = {unit: [FP32 * n // shard] for unit, n in parameters.items()} if replicate > 1 else {}
    assert sizes(got, op="all_reduce", axis="dp_replicate") == all_reduced
    assert {(c.op, c.axis) for c in got if c.axis.startswith("dp_")} <= {
        ("all_gather", "dp_shard"),
        ("reduce_scatter", "dp_shard"),
        ("all_reduce", "dp_replicate"),
    }


HIDDEN = BATCH * TOKENS * DIM * BF16  # x[B, T, D]
LOGITS = BATCH * TOKENS * VOCAB * BF16
CHUNKS = 4  # of the loss; each has two small all-reduces
LARGEST, SUMS = BATCH * TOKENS * FP32 // CHUNKS, 2 * BATCH * TOKENS * FP32 // CHUNKS
NORM_GRAD = DIM * BF16  # with sequence parallelism each rank has the gradient of its own tokens


@pytest.mark.parametrize(
    ("sequence_parallel", "loss_parallel"),
    [("true", "true"), ("false", "false"), slow("true", "false"), slow("false", "true")],
)
def test_bytes_of_tp_at_8b(sequence_parallel, loss_parallel):
    keys = [f"--parallel.sequence_parallel={sequence_parallel}", f"--parallel.loss_parallel={loss_parallel}"]
    got = of_axis(simulated(16, *LLAMA_8B, "--parallel.tp=8", *keys).collectives, "tp")
    # In the head's forward the split loss needs two small sums, gathered logits need a gather.
    if loss_parallel == "true":
        loss_op, loss_bytes = "all_reduce", [LARGEST, SUMS] * CHUNKS
    else:
        loss_op, loss_bytes = "all_gather", [LOGITS]
    twice = {"layers.0": [HIDDEN] * 2, "layers.1": [HIDDEN] * 2}
    if sequence_parallel == "true":
        # Tokens are gathered before each part and scattered after it: two parts in a block, one in the head.
        norms = {"layers.0": [NORM_GRAD] * 2, "layers.1": [NORM_GRAD] * 2, "head": [NORM_GRAD]}
        expected = {
            ("all_gather", "forward"): {**twice, "head": [HIDDEN]},
            ("reduce_scatter", "forward"): {**twice, "tok_embeddings": [HIDDEN]},
            ("all_gather", "backward"): {**twice, "tok_embeddings": [HIDDEN]},
            ("reduce_scatter", "backward"): {**twice, "head": [HIDDEN]},
            ("all_reduce", "backward"): norms,
        }
    else:
        expected = {
            ("all_reduce", "forward"): {**twice, "tok_embeddings": [HIDDEN]},
            ("all_reduce", "backward"): {**twice, "head": [HIDDEN]},
        }
    in_forward = expected.setdefault((loss_op, "forward"), {})
    in_forward["head"] = in_forward.get("head", []) + loss_bytes
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        for phase in ("forward", "backward"):
            assert sizes(got, op=op, phase=phase) == expected.get((op, phase), {}), f"{phase} {op}"


# Memory


@pytest.mark.parametrize(
    ("replicate", "shard", "tp"), [(1, 8, 1), (4, 8, 8), (8, 1, 1), slow(4, 2, 1), slow(1, 2, 4)]
)
def test_parameters_gradients_and_optimizer_are_their_share_to_the_byte(replicate, shard, tp):
    memory = simulated_8b(replicate, shard, tp).memory
    share = FP32 * (2 * EMBEDDING + 2 * MATRICES) // (shard * tp)
    norms = FP32 * 5 * DIM // shard  # in full on each tp rank
    assert memory.params == memory.grads == share + norms
    step_counts = (2 + 2 * 9 + 1) * FP32  # one float32 for each parameter
    assert memory.optimizer == 2 * (share + norms) + step_counts


def test_an_uneven_dim_is_padded_to_whole_rows_of_every_rank():
    dim, vocab, shard = 32, 265, 2
    uneven = ("--model.n_layers=1", "--model.vocab_size=265")
    ranks = [simulated(2, *TINY, *uneven, rank=rank).memory for rank in range(2)]
    rest = 2 * dim * dim + 2 * 16 * dim + 3 * dim * 64 + 3 * dim
    # two tables of 265 rows: the second rank has 132 rows and one of padding
    padded = 2 * (vocab + 1) * dim
    for memory in ranks:
        assert memory.params == memory.grads == FP32 * (padded + rest) // shard
    # The optimizer state is not padded: together the ranks have two full copies, each with its step counts.
    assert sum(m.optimizer for m in ranks) == 2 * FP32 * (2 * vocab * dim + rest) + 2 * FP32 * (2 + 9 + 1)


def test_accumulated_gradients_stay_sharded():
    one = simulated(4, *TINY, REPLICAS, *prefetch(0)).memory
    three = simulated(4, *TINY, *HSDP3, *prefetch(0)).memory
    assert one.grads == three.grads == one.params
    # tensors that wait for the all-reduce count as gradients; scalars are buffers
    assert abs(one.buffers - three.buffers) < 64


def test_gathered_parameters_are_counted_as_they_live():
    dim, shard = 32, 4
    table, block = 264 * dim, 2 * dim * dim + 2 * 16 * dim + 3 * dim * 64 + 2 * dim
    head = table + dim
    kept = simulated(shard, *TINY, BFLOAT16, KEEP, *prefetch(0)).memory.unsharded
    # FSDP2 gathers into one buffer and copies the parameters out of it. In a forward it frees a unit's buffer
    # only after the next unit's copy: here all units, the head's buffer, and the last block's.
    assert kept == BF16 * (table + 3 * block + head + head + block)
    freed = simulated(shard, *TINY, BFLOAT16, *prefetch(0)).memory.unsharded
    assert freed == BF16 * (block + block + block)  # a block, its buffer, and that of the block before
    ahead = simulated(shard, *PLAIN).memory.unsharded
    # A block, its buffer, that of the next block, and this rank's shard that is copied into it.
    assert ahead == BF16 * (block + block + block + block // shard)


def test_gradients_on_their_way_are_those_of_one_unit():
    dim, shard = 32, 4
    block = 2 * dim * dim + 2 * 16 * dim + 3 * dim * 64 + 2 * dim
    frequencies = 8 // 2 * FP32
    buffers = simulated(shard, *TINY, "--model.vocab_size=8", BFLOAT16).memory.buffers
    # A block's gradient and the float32 buffer from which it, or the previous block, is reduced.
    assert buffers == frequencies + BF16 * block + FP32 * block


def test_each_way_of_recomputing_keeps_less():
    kept = [
        simulated(4, *TINY, TP, *prefetch(1), *way).memory.activations
        for way in ([checkpoint("full")], [checkpoint("selective")], [])
    ]
    assert kept == sorted(set(kept))


def test_logits_are_what_the_loss_makes_of_them():
    tokens, vocab = 48, 264
    memory = simulated(4, *PLAIN).memory
    three_copies = 3 * tokens * vocab * FP32  # log-probabilities, their gradient, and that of the logits
    assert three_copies <= memory.logits < three_copies * 1.02
    assert simulated(8, *TINY, TP, BFLOAT16, REPLICAS).memory.logits < memory.logits * 0.7


def test_the_peak_is_at_least_what_is_always_there_and_at_most_all_maxima_together():
    simulation = simulated(4, *PLAIN)
    most, peak = dataclasses.asdict(simulation.memory), dataclasses.asdict(simulation.at_peak)
    assert all(peak[kind] <= most[kind] for kind in most)
    assert (
        most["params"] + most["optimizer"] < simulation.peak_bytes == sum(peak.values()) < sum(most.values())
    )


def test_offloaded_memory_is_told_apart():
    plain, offloaded = (simulated(4, *PLAIN, *keys) for keys in ((), ("--parallel.cpu_offload=true",)))
    assert plain.host_bytes == 0
    on_host = {kind: getattr(plain.memory, kind) for kind in ("params", "grads", "optimizer")}
    assert offloaded.host_bytes == sum(on_host.values())
    assert all(getattr(offloaded.memory, kind) == 0 for kind in on_host)
    assert offloaded.peak_bytes < plain.peak_bytes


# The simulation itself


def test_a_simulation_leaves_nothing_behind_and_every_rank_does_the_same():
    first = simulated(8, *TINY, TP, BFLOAT16, REPLICAS)
    last = simulated(8, *TINY, TP, BFLOAT16, REPLICAS, rank=7)
    assert first == last
    assert not dist.is_initialized()
    assert type(torch.ones(1)) is torch.Tensor
