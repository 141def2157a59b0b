"""Functions that test_stochastic_adamw.py runs in other processes: AdamW's Triton kernel against its
reference, and steps on a mesh."""

import dataclasses
import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.fsdp import copy_shard, full_tensor
from meshwright.train.optim import adamw_kernel
from tests.support.interpreted import forget_triton, guarded
from tests.support.sharded import build_sharded

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
PROGRAM = 512 * 32  # elements, of train.optim.adamw_triton
# Elements, position of the first, columns, gap: less than a block, more than a block, more than a program
# with positions beyond 32 bits, one element, several blocks.
PARTS = [
    (5, 0, 5, 0),
    (3000, 7, 100, 0),
    (PROGRAM + 17, 2**32 - 1000, 1000, 24),
    (1, 3, 1, 0),
    (64 * 33, 500, 33, 31),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_slices(parameter: torch.dtype, moment: torch.dtype) -> list[adamw_kernel.Slice]:
    """Slices with the same values at every call; one gradient is infinite."""
    generator, slices = torch.Generator().manual_seed(0), []
    for i, (n, first, columns, gap) in enumerate(PARTS):
        values = [torch.randn(n, generator=generator) * scale for scale in (0.1, 1.0, 0.1, 0.1)]
        if i == 2:
            values[1][0] = torch.inf
        values[3].square_()
        dtypes = (parameter, parameter, moment, moment)
        tensors = [value.to(dtype) for value, dtype in zip(values, dtypes, strict=True)]
        placed = (guarded(tensor) if DEVICE == "cpu" else tensor.to(DEVICE) for tensor in tensors)
        slices.append(adamw_kernel.Slice(*placed, 2**32 - 5 + i, first, columns, gap))
    return slices


def make_step(skip: float) -> adamw_kernel.AdamWStep:
    counts = torch.arange(1, len(PARTS) + 1).double()
    rates, roots = 1e-3 / (1 - 0.9**counts), (1 - 0.999**counts).sqrt()
    values = (counts, rates, roots, torch.tensor(3.7), torch.tensor(skip))
    return adamw_kernel.AdamWStep(0.9, 0.999, 1e-8, 1 - 1e-4, *(x.float().to(DEVICE) for x in values))


def bits(part: adamw_kernel.Slice) -> dict[str, Tensor]:
    """The bits of each tensor, with one pattern for every NaN."""
    tensors = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {
        name: value.masked_fill(value.isnan(), torch.nan).view(BITS[value.dtype])
        for name, value in tensors.items()
        if isinstance(value, Tensor)
    }


Case = tuple[torch.dtype, torch.dtype, float]  # of parameters, of moments, whether the step is skipped


def compare_kernel(cases: list[Case]) -> list[tuple[torch.dtype, torch.dtype, float, list[str], list[str]]]:
    """Compare the kernel with its reference bit for bit: the case, which tensors of a slice differ, and which
    have changed. Without a GPU the process must have the environment INTERPRETED."""
    if DEVICE == "cpu":
        forget_triton()
    from meshwright.train.optim import adamw_triton

    assert adamw_triton.BLOCK * adamw_triton.BLOCKS == PROGRAM
    results = []
    for parameter, moment, skip in cases:
        before, expected, updated = (make_slices(parameter, moment) for _ in range(3))
        adamw_kernel.update(expected, make_step(skip))
        adamw_triton.update(updated, make_step(skip))
        for slices in zip(before, expected, updated, strict=True):
            old, reference, new = map(bits, slices)
            different = [name for name in reference if not torch.equal(reference[name], new[name])]
            changed = [name for name in reference if not torch.equal(old[name], new[name])]
            results.append((parameter, moment, skip, different, changed))
    return results


STEPS = 3


def train(arguments: list[str]) -> dict[str, Tensor]:
    """Full parameters and moments by name, after some steps with gradients that are the same on any mesh."""
    run = build_sharded(arguments)
    model, optimizer = run.model, run.optimizer
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{step}:{name}".encode()))
            parameter.grad = torch.zeros_like(parameter)
            copy_shard(parameter.grad, torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}, {key}": value for key, value in optimizer.state[parameter].items()}
    return {name: full_tensor(value) for name, value in tensors.items()}


def train_on_meshes(arguments: list[str]) -> list[dict[str, Tensor]]:
    """`train` with FSDP alone and with tensor parallelism alone."""
    return [train([*arguments, f"--parallel.tp={tp}"]) for tp in (1, dist.get_world_size())]
