"""AdamW in bfloat16: its rounding, on one process and on several, and that it learns as AdamW in float32
does."""

import copy
import dataclasses
import math
import os
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.models.config import LlamaConfig
from meshwright.models.llama import Llama
from meshwright.parallel.fsdp import full_tensor
from meshwright.train.checkpoint.manifest import SavedTensor
from meshwright.train.checkpoint.reader import refuse_different
from meshwright.train.config import OptimConfig
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import CheckpointError
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.optim.adamw_kernel import AdamWStep, Slice, random_bits, round_stochastically, update
from meshwright.train.optim.optimizer import build_optimizer
from meshwright.train.optim.stochastic_adamw import RoundedAdamW
from meshwright.train.step import train_step
from tests.support.adamw_on_ranks import Case, compare_kernel, train, train_on_meshes
from tests.support.interpreted import INTERPRETED
from tests.support.launch import EAGER, TINY
from tests.support.sharded import sharded_alone
from tests.support.steps import bits, make_batches
from tests.support.worlds import run_ranks
from tests.train.test_step import READS, Count

N = 2**18  # draws
BF16, F32 = torch.bfloat16, torch.float32
BFLOAT16 = [
    "--parallel.storage_dtype=bfloat16",
    "--parallel.param_dtype=bfloat16",
    "--optim.state_dtype=bfloat16",
]


@pytest.fixture(autouse=True)
def alone_on_its_core():
    """One thread: when other processes use the cores, small products would wait longer for a second thread
    than they take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Rounding


def draws(key: int = 1, count: int = 1, stream: int = 0, first: int = 0, n: int = N) -> Tensor:
    return random_bits(key, torch.tensor(count), first + torch.arange(n)) >> 16 * stream


@pytest.mark.parametrize(
    ("key", "count", "index", "expected"),
    [
        (0, 0, 0, 0xCD26BE2A257A3673),
        (2**32 - 1, 2**24 - 1, 2**40 - 1, 0x3DC9D239AB302C4D),
        (0x13198A2E, 0x85A308, 0xD3243F6A88, 0xE4C770B3BEDBBE6B),
    ],
)
def test_the_bits_are_those_of_philox(key: int, count: int, index: int, expected: int) -> None:
    """Known answers of Random123 for philox2x32 with 7 rounds."""
    got = random_bits(key, torch.tensor(count), torch.tensor(index))
    assert got.item() & (2**64 - 1) == expected


def test_every_bit_is_even_and_none_follows_from_another_element_step_parameter_or_tensor() -> None:
    """Each pair of bits is equal in half of the draws, within five sigma."""
    changes = ({}, {"key": 2}, {"count": 2}, {"stream": 1}, {"stream": 2}, {"first": 1}, {"first": 2**32})
    variants = [draws(**change) for change in changes]
    sigma = 0.5 / math.sqrt(N)
    for bit in range(16):
        columns = torch.stack([(draw >> bit) & 1 for draw in variants]).double()
        assert (columns.mean(1) - 0.5).abs().max() < 5 * sigma
        same = torch.stack([(columns[0] == column).double().mean() for column in columns[1:]])
        assert (same - 0.5).abs().max() < 5 * sigma


@pytest.mark.parametrize("value", [1.001, -1.001, 1.999, 3e-39, -2.3e-41, 1e30, 0.1, -math.pi])
def test_rounding_takes_one_of_two_neighbours_and_keeps_the_mean(value: float) -> None:
    values = torch.full((N,), value)
    exact = values[0].double().item()
    got = round_stochastically(values, draws()).double()
    step = abs(exact) * 2**-7 if abs(exact) > 2**-126 else 2**-133
    assert len(got.unique()) == 2, "both neighbors occur"
    assert got.min() < exact < got.max()
    assert got.max() - got.min() <= step
    up = (exact - got.min().item()) / (got.max() - got.min()).item()
    sigma = (got.max() - got.min()).item() * math.sqrt(up * (1 - up) / N)
    assert abs(got.mean().item() - exact) < 4 * sigma


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.5, 2.0**-133, math.inf, -math.inf, 3.3895e38])
def test_what_bfloat16_has_stays_as_it_is(value: float) -> None:
    values = torch.full((1000,), value, dtype=BF16)
    got = round_stochastically(values.float(), draws(n=1000))
    assert torch.equal(got.view(torch.int16), values.view(torch.int16))


# An update


def full_slice(
    parameter: torch.dtype = BF16, moment: torch.dtype = BF16, rows: int = 30, columns: int = 20
) -> Slice:
    values = torch.randn(4, rows * columns, generator=torch.Generator().manual_seed(0))
    values[3].square_()
    dtypes = (parameter, parameter, moment, moment)
    tensors = (value.to(dtype) for value, dtype in zip(values, dtypes, strict=True))
    return Slice(*tensors, key=77, first=0, columns=columns, gap=0)


def step_of(count: int, lr: float = 1e-3) -> AdamWStep:
    scalars = [[count], [lr / (1 - 0.9**count)], [math.sqrt(1 - 0.999**count)], 1.0, 0.0]
    return AdamWStep(0.9, 0.999, 1e-8, 1.0, *(torch.tensor(value, dtype=F32) for value in scalars))


def tensors_of(shard: Slice) -> list[Tensor]:
    return [shard.parameter, shard.exp_avg, shard.exp_avg_sq]


def test_not_a_number_stays_so_whatever_its_bits() -> None:
    numbers = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(F32)
    shard = full_slice(F32, rows=1000, columns=4)
    shard.gradient.copy_(numbers.repeat(1000))
    update([shard], step_of(5))
    assert all(tensor.isnan().all() for tensor in tensors_of(shard))


def test_other_steps_and_other_parameters_round_otherwise() -> None:
    results = []
    for key, count in ((77, 5), (77, 5), (78, 5), (77, 6)):
        shard = dataclasses.replace(full_slice(), key=key)
        update([shard], step_of(count, lr=0.0))  # only the rounding of the moments depends on the count
        results.append(shard.exp_avg)
    assert torch.equal(results[0], results[1])
    for result in results[2:]:
        assert 0.2 < (result != results[0]).float().mean() < 0.5, (
            "of values uniform between neighbors a third would differ"
        )


def test_a_second_moment_falls_where_nearest_rounding_would_keep_it() -> None:
    """From 1, with gradients of 0, 500 steps lead to 0.999 ** 500 = 0.61. Rounding to nearest turns 0.999
    into 1."""
    values = [torch.zeros(1024, dtype=BF16) for _ in range(3)]
    shard = Slice(*values, torch.ones(1024, dtype=BF16), key=3, first=0, columns=1024, gap=0)
    nearest, expected = torch.ones(1, dtype=BF16), 0.999**500
    for count in range(1, 501):
        update([shard], step_of(count))
        nearest = (nearest.float() * 0.999).to(BF16)
    assert nearest.item() == 1.0
    got = shard.exp_avg_sq.double()
    assert abs(got.mean().item() - expected) < 4 * (got.std() / math.sqrt(len(got))).item()
    assert got.std() < 0.1 * expected


def test_in_float32_it_is_torchs_adamw() -> None:
    ours, plain = (torch.nn.Parameter(torch.linspace(-1, 1, 600).view(30, 20)) for _ in range(2))
    group = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    rounded, fused = (
        RoundedAdamW([{"params": [ours], **group}], {ours: 1}),
        torch.optim.AdamW([plain], **group, fused=True),
    )
    rounded.state[ours] = {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(ours),
        "exp_avg_sq": torch.zeros_like(ours),
    }
    for step in range(5):
        for p, optimizer in ((ours, rounded), (plain, fused)):
            p.grad = torch.randn(30, 20, generator=torch.Generator().manual_seed(step))
            optimizer.grad_scale = torch.tensor(1.0 + step)
            optimizer.step()
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    for key in ("step", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            rounded.state[ours][key], fused.state[plain][key], rtol=1e-6, atol=1e-7, msg=key
        )


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(BF16, BF16, 0.0), (BF16, BF16, 1.0)], id="bfloat16"),
        pytest.param(
            [(F32, BF16, 0.0), (BF16, F32, 0.0)], id="mixed", marks=[pytest.mark.slow, pytest.mark.sampled(6)]
        ),
    ],
)
def test_the_kernel_of_a_gpu_does_the_same_to_the_bit(cases: list[Case]) -> None:
    (results,) = run_ranks(1, compare_kernel, cases, **({} if torch.cuda.is_available() else INTERPRETED))
    assert len(results) == len(cases) * 5, "five sizes"
    assert [result for result in results if result[3]] == []
    for parameter, moment, skip, _, moved in results:
        assert moved[:2] == ([] if skip else ["parameter", "exp_avg"]), (parameter, moment)


# The optimizer


MODEL = LlamaConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=97, max_seq_len=16)


def small_model(dtype: torch.dtype = BF16) -> Llama:
    model = Llama(MODEL)
    model.initialise(0)
    for p in model.parameters():
        p.data = p.data.to(dtype)
        p.grad = torch.full_like(p, 0.01)
    return model


@pytest.mark.parametrize(
    ("stored", "state"), [(F32, "float32"), (F32, "bfloat16"), (BF16, "float32"), (BF16, "bfloat16")]
)
def test_only_what_is_all_in_float32_is_torchs_own(stored: torch.dtype, state: str) -> None:
    optimizer = build_optimizer(small_model(stored), OptimConfig(state_dtype=state))
    assert type(optimizer) is (torch.optim.AdamW if (stored, state) == (F32, "float32") else RoundedAdamW)
    for value in optimizer.state.values():
        assert (value["step"].dtype, value["exp_avg"].dtype, value["exp_avg_sq"].dtype) == (
            F32,
            *[getattr(torch, state)] * 2,
        )


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_going_on_from_saved_state_is_the_same_to_the_bit(state: str) -> None:
    through, first, again = small_model(), small_model(), small_model()
    optimizers = [
        build_optimizer(model, OptimConfig(state_dtype=state), seed=5) for model in (through, first, again)
    ]
    for _ in range(5):
        optimizers[0].step()
    for _ in range(2):
        optimizers[1].step()
    again.load_state_dict(first.state_dict())
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    for _ in range(3):
        optimizers[2].step()
    assert all(
        torch.equal(a, b)
        for a, b in zip(bits(through, optimizers[0]), bits(again, optimizers[2]), strict=True)
    )


def test_another_seed_rounds_otherwise() -> None:
    models = [small_model() for _ in range(2)]
    for seed, model in enumerate(models):
        build_optimizer(model, OptimConfig(), seed).step()
    assert not torch.equal(models[0].head.output.weight, models[1].head.output.weight)


def test_the_bits_are_the_same_on_any_mesh() -> None:
    arguments = [*TINY, *EAGER, *BFLOAT16, "--model.ffn_dim=66", "--model.vocab_size=258"]
    (alone,) = run_ranks(1, train, arguments)
    for mesh in run_ranks(2, train_on_meshes, arguments)[0]:
        assert mesh.keys() == alone.keys()
        assert [name for name, value in alone.items() if not torch.equal(mesh[name], value)] == []


def step_of_shapes(shapes: Sequence[tuple[int, ...]], axes: Sequence[int | None]) -> list[bool]:
    """Whether a step of each shape gives this rank, which has a shard by `axes`, the bits of the whole."""
    mesh, whole, sharded = init_device_mesh("cpu", (2, 2)), list[Tensor](), list[Tensor]()
    generator = torch.Generator().manual_seed(0)
    for shape, axis in zip(shapes, axes, strict=True):
        values = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
        placements = [Shard(0) if shape else Replicate(), Replicate() if axis is None else Shard(axis)]
        for tensors, parts in (
            (whole, values),
            (sharded, [distribute_tensor(x, mesh, placements) for x in values]),
        ):
            tensors.append(torch.nn.Parameter(parts[0]))
            tensors[-1].grad = parts[1]
    for tensors in (whole, sharded):
        model = torch.nn.Module()
        model.all = torch.nn.ParameterList(tensors)
        build_optimizer(model, OptimConfig(state_dtype="bfloat16", weight_decay=0.0)).step()
    return [torch.equal(a, full_tensor(b)) for a, b in zip(whole, sharded, strict=True)]  # type: ignore[attr-defined]


def test_a_shard_of_any_shape_has_the_bits_of_the_whole() -> None:
    """Such as a convolution's, or experts [E, D, F]; FSDP shards the first dimension, tp another or none."""
    draws = random.Random(os.environ["MESHWRIGHT_TESTS_SEED"])
    shapes = [tuple(draws.randint(1, 7) for _ in range(dims)) for dims in (0, 1, 2, 2, 3, 3, 3, 4, 4, 5)]
    axes = [draws.choice([None, *range(1, len(shape))]) for shape in shapes]
    for same in run_ranks(4, step_of_shapes, shapes, axes):
        assert same == [True] * len(shapes), (shapes, axes)


def test_ranks_without_a_row_count_their_steps_too() -> None:
    """Norms of 6 rows are sharded over 4 ranks as 2, 2, 2 and 0, and any rank may save the step count."""
    arguments = [*TINY, *EAGER, *BFLOAT16, "--model.dim=6", "--model.n_heads=1", "--model.n_kv_heads=1"]
    (alone,) = run_ranks(1, train, arguments)
    for rank in run_ranks(4, train, arguments):
        assert [name for name, value in alone.items() if not torch.equal(rank[name], value)] == []


# In a training step


@pytest.fixture
def trainer():
    with sharded_alone([*TINY, *EAGER, *BFLOAT16]) as run:
        yield run.model, run.sharded, run.optimizer, run.group


def test_a_model_is_stored_as_its_float32_values_rounded_to_nearest(trainer) -> None:
    plain = Llama(parse_config(TINY).model)
    plain.initialise(parse_config(TINY).run.seed)
    stored = dict(trainer[0].named_parameters())
    for name, value in plain.named_parameters():
        assert torch.equal(full_tensor(stored[name]), value.to(BF16)), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(trainer[0].get_buffer(name), buffer), name


def test_a_step_reads_nothing_back_and_a_skipped_one_changes_no_bit(trainer) -> None:
    model, sharded, optimizer, _ = trainer
    train_step(sharded, optimizer, make_batches(2), 1.0, loss_of_forward)
    before = bits(model, optimizer)
    with Count(*READS) as reads:
        result = train_step(sharded, optimizer, make_batches(2), 0.01, loss_of_forward)
        assert reads.count == 0
    assert result.skipped.item() == 0
    after = bits(model, optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    model.head.loss.register_forward_hook(lambda _module, _inputs, loss: loss * math.nan)
    assert train_step(sharded, optimizer, make_batches(2), 1.0, loss_of_forward).skipped.item() == 1
    assert all(torch.equal(a, b) for a, b in zip(after, bits(model, optimizer), strict=True))


def test_a_checkpoint_in_another_dtype_is_refused_by_the_key_that_differs(tmp_path) -> None:
    saved = {"model.w": SavedTensor((2, 3), "float32"), "optim.w.exp_avg": SavedTensor((2, 3), "float32")}
    for name, key in (("model.w", "parallel.storage_dtype"), ("optim.w.exp_avg", "optim.state_dtype")):
        here = saved | {name: SavedTensor((2, 3), "bfloat16")}
        with pytest.raises(
            CheckpointError,
            match=rf"{name}: .*bfloat16\[2, 3\].*saved float32.* {key}.* another run\.dir",
        ):
            refuse_different(tmp_path, here, saved)
    with pytest.raises(CheckpointError, match=r"other tensors: model\.w"):
        refuse_different(tmp_path, saved | {"model.w": SavedTensor((2, 4), "bfloat16")}, saved)


# Learning


def last_loss(stored: torch.dtype, state: str, nearest: bool = False) -> float:
    """Mean loss of the last 20 of 200 steps towards the weights of a linear map, starting 0.3 away.
    `nearest`: use torch's AdamW."""
    generator = torch.Generator().manual_seed(0)
    model, goal = torch.nn.Linear(64, 64, bias=False), torch.randn(64, 64, generator=generator)
    model.weight.data = (goal + 0.3 * torch.randn(64, 64, generator=generator)).to(stored)
    config = OptimConfig(lr=5e-3, betas=(0.9, 0.999), weight_decay=0.0, state_dtype=state)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
        if nearest
        else build_optimizer(model, config)
    )
    losses = []
    for _ in range(200):
        x = torch.randn(128, 64, generator=generator)
        loss = (x @ (model.weight.float() - goal).T).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 4
    return sum(losses[-20:]) / 20


def test_bfloat16_learns_what_float32_learns_and_nearest_rounding_does_not() -> None:
    plain = last_loss(F32, "float32")
    assert plain < 0.1
    assert last_loss(F32, "bfloat16") == pytest.approx(plain, rel=0.02)
    assert last_loss(BF16, "bfloat16") == pytest.approx(plain, rel=0.1), (
        "the loss of weights that differ from the goal by a rounding"
    )
    assert last_loss(BF16, "bfloat16", nearest=True) > 5 * plain
