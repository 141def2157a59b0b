"""The project's Triton kernels, compiled for sm_90 (H100) by the project's launch code, and their PTX
executed on the CPU.

Tested with Triton 3.6.0, 3.7.1 (the version of torch 2.13's GPU builds), 3.8.0 and 3.9.0.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which is for Linux only")

from triton import knobs

from meshwright.models.kernels.cross_entropy import plain_losses, plain_rows
from meshwright.train.optim import adamw_kernel
from meshwright.train.optim.adamw_kernel import AdamWStep, Slice
from tests.fake_gpu.cubins import TOOLS, read_cubin
from tests.fake_gpu.kernel_table import (
    ADAMW,
    LOSS,
    PAIRS,
    VOCABULARY,
    Compiled,
    compile_adamw,
    compile_kernels,
)
from tests.fake_gpu.ptx import AccessError, execute, parse
from tests.fake_gpu.triton_driver import Launch, load_copy, offline_triton
from tests.support.adamw_on_ranks import bits

pytestmark = [
    pytest.mark.skipif(not TOOLS.exists(), reason="needs a Triton that brings NVIDIA's tools"),
    pytest.mark.skipif(
        knobs.runtime.interpret, reason="needs a Triton that compiles: TRITON_INTERPRET is set"
    ),
]

F32, BF16 = torch.float32, torch.bfloat16
# Limits of registers per thread, with a margin above the maximum observed: AdamW 64 with Triton 3.9.0 and 96
# with 3.7.1, cross entropy 32 with both. At these limits an H100's multiprocessor holds 16 warps of AdamW and
# 48 of cross entropy.
REGISTERS = {"AdamW": 104, "cross entropy, read": 40, "cross entropy, write": 40}
# Float operations that are rounded correctly, as in the reference. `.rn` also forbids ptxas to fuse them (PTX
# ISA, 9.7.3).
ROUNDED = {
    "add.rn.f32",
    "sub.rn.f32",
    "mul.rn.f32",
    "div.rn.f32",
    "sqrt.rn.f32",
    "cvt.f32.bf16",
    "cvt.rn.bf16.f32",
    "cvt.rzi.s64.f32",
}
# Elements, index of the first, columns, and gap of each slice: one element; the block of a program (512), one
# less and one more; a gap; a full program; more than one program, with an index beyond 32 bits; rows of one
# element with gaps that together exceed 32 bits; and rows without gaps.
PARTS = [
    (1, 3, 1, 0),
    (511, 0, 73, 0),
    (512, 9, 512, 0),
    (513, 0, 27, 100),
    (64 * 33, 500, 33, 31),
    (512 * 32, 0, 128, 0),
    (20_000, 2**32 - 1000, 1000, 24),
    (700, 7, 1, 2**26),
    (5 * 333, 17, 333, 0),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache for Triton."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def compiled(cache: Path) -> dict[str, Compiled]:
    return {f"{kernel.name}, {kernel.dtypes}": kernel for kernel in compile_kernels(cache)}


@pytest.fixture
def launches(cache: Path) -> Iterator[list[Launch]]:
    with offline_triton(cache) as launches:
        yield launches


def changed(folder: Path, source: Path, *changes: tuple[str, str]) -> ModuleType:
    """Load a copy of the kernels' file with replaced snippets, each of which must occur once."""
    text = source.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / source.name).write_text(text, encoding="utf-8")
    return load_copy(folder / source.name)


# Compiled


def too_much(name: str, launch: Launch) -> list[str]:
    """Return the resources of the compiled kernel that exceed their limits."""
    cubin = read_cubin(launch.cubin)
    spilled = [f"{cubin.spilled_bytes} spilled bytes"] if cubin.spilled_bytes else []
    return [*spilled, f"{cubin.registers} registers"] if cubin.registers > REGISTERS[name] else spilled


def inexact(launch: Launch) -> set[str]:
    """Return opcodes with a float type, except those that are rounded correctly."""
    opcodes = {instruction.opcode for instruction in parse(launch.ptx.read_text()).instructions}
    return {opcode for opcode in opcodes if re.search(r"\.(f|bf|tf|e\dm)\d", opcode)} - ROUNDED


@pytest.mark.sampled(3, day=1)
def test_no_kernel_spills_or_takes_too_many_registers(compiled: dict[str, Compiled]) -> None:
    assert len(compiled) == len(PAIRS) + 2 * 2
    excess = {title: too_much(kernel.name, kernel.launch) for title, kernel in compiled.items()}
    assert {title: resources for title, resources in excess.items() if resources} == {}


@pytest.mark.sampled(3, day=2)
def test_adamw_has_only_correctly_rounded_float_operations(compiled: dict[str, Compiled]) -> None:
    launches = [kernel.launch for kernel in compiled.values() if kernel.name == "AdamW"]
    assert [inexact(launch) for launch in launches] == [set()] * len(PAIRS)


def test_spilled_registers_are_noticed(cache: Path, tmp_path: Path) -> None:
    limited = changed(tmp_path, ADAMW, ("num_warps=4,", "num_warps=4, maxnreg=32,"))
    (found,) = too_much("AdamW", compile_adamw(cache, limited, F32, F32))
    assert re.fullmatch(r"\d+ spilled bytes", found)


# AdamW, executed


def make_slices(parameter: torch.dtype, moment: torch.dtype) -> list[Slice]:
    """Return slices with the same values at every call. The tensors of every second slice are not aligned to
    16 bytes; two slices have a non-finite gradient."""
    generator, slices = torch.Generator().manual_seed(0), []
    for number, (n, first, columns, gap) in enumerate(PARTS):
        values = [torch.randn(n, generator=generator) * scale for scale in (0.1, 1.0, 0.1, 0.1)]
        values[1][-1] = {5: torch.inf, 6: torch.nan}.get(number, 0.0)
        values[3].square_()
        tensors = [
            torch.empty(n + 1, dtype=dtype)[number % 2 :][:n]
            for dtype in (parameter, parameter, moment, moment)
        ]
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        slices.append(Slice(*tensors, 2**32 - 3 + number, first, columns, gap))
    return slices


def make_step(skip: float = 0.0) -> AdamWStep:
    counts = torch.arange(1.0, len(PARTS) + 1)
    rates, roots = 1e-3 / (1 - 0.9**counts), (1 - 0.999**counts).sqrt()
    return AdamWStep(0.9, 0.999, 1e-8, 1 - 1e-4, counts, rates, roots, torch.tensor(3.7), torch.tensor(skip))


def tensors_of(slices: list[Slice]) -> list[Tensor]:
    return [
        tensor for part in slices for tensor in (part.parameter, part.gradient, part.exp_avg, part.exp_avg_sq)
    ]


def executed(
    kernels: ModuleType, launches: list[Launch], parameter: torch.dtype, moment: torch.dtype
) -> list[str]:
    """Return the names of tensors that differ from the reference's after a step of these kernels."""
    actual, expected = make_slices(parameter, moment), make_slices(parameter, moment)
    kernels.update(actual, make_step())
    execute(launches[-1], tensors_of(actual))
    adamw_kernel.update(expected, make_step())
    pairs = [(bits(a), bits(e)) for a, e in zip(actual, expected, strict=True)]
    return [name for a, e in pairs for name in a if not torch.equal(a[name], e[name])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_adamw_does_what_its_reference_does_to_the_bit(
    dtypes: tuple[torch.dtype, torch.dtype], launches: list[Launch]
) -> None:
    assert executed(load_copy(ADAMW), launches, *dtypes) == []


def test_a_skipped_step_changes_no_bit(launches: list[Launch]) -> None:
    slices, before = make_slices(BF16, F32), make_slices(BF16, F32)
    load_copy(ADAMW).update(slices, make_step(skip=1.0))
    execute(launches[0], tensors_of(slices))
    for tensor, old in zip(tensors_of(slices), tensors_of(before), strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))


# Cross entropy, executed


def make_rows(rows: int, vocabulary: int, dtype: torch.dtype, between: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits with `between` elements between their rows, and targets; those of the first and third row
    belong to another rank."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocabulary + between, generator=generator) * 5).to(dtype)[:, :vocabulary]
    return logits, torch.tensor([-7, vocabulary - 1, vocabulary])[:rows]


@pytest.mark.parametrize(
    ("rows", "vocabulary", "between", "dtype"), [(2, VOCABULARY, 0, BF16), (3, VOCABULARY // 16 + 1, 3, F32)]
)
def test_cross_entropy_does_what_its_reference_does(
    rows: int, vocabulary: int, between: int, dtype: torch.dtype, launches: list[Launch]
) -> None:
    """Sums of float32 in another order differ by at most 1e-5; a gradient by one rounding of its dtype, or of
    1."""
    kernels, (logits, targets) = load_copy(LOSS), make_rows(rows, vocabulary, dtype, between)
    actual, expected = kernels.read_rows(logits, targets, 0), plain_rows(logits, targets, 0)
    execute(launches[-1])
    assert torch.equal(actual[[0, 2]], expected[[0, 2]])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=0.0)
    rest, losses = (expected, 0.01, torch.tensor(2.0)), torch.zeros(2, rows)
    padded = logits.as_strided((rows, vocabulary + between), (vocabulary + between, 1)) if between else logits
    untouched, expected = padded[:, vocabulary:].clone(), logits.clone()
    kernels.write_losses(logits, targets, 0, *rest, losses[0], True)
    execute(launches[-1])
    plain_losses(expected, targets, 0, *rest, losses[1], True)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0.0)
    tolerance = 1e-6 if dtype is F32 else 2**-8
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(padded[:, vocabulary:], untouched)


def test_a_vector_load_from_a_misaligned_address_is_refused(
    compiled: dict[str, Compiled], launches: list[Launch]
) -> None:
    """The project's launch code compiles another kernel for logits at such an address, which loads single
    elements."""
    aligned = compiled["cross entropy, read, float32"].launch
    logits = torch.zeros(2 * VOCABULARY + 1)[1:].view(2, VOCABULARY)
    with pytest.raises(AccessError, match=r"16 bytes at \w+ are misaligned"):
        execute(replace(aligned, arguments=(logits, *aligned.arguments[1:])))
    load_copy(LOSS).read_rows(logits, torch.zeros(2, dtype=torch.int64), 0)
    execute(launches[0])


# The gradients of the loss, multiplied by that of the loss


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gradients_are_multiplied_in_place_unless_the_factor_is_1(
    dtype: torch.dtype, tmp_path: Path, launches: list[Launch]
) -> None:
    """With 1 the kernel accesses no gradient: it is executed with another tensor, of one element."""
    kernels = changed(tmp_path, LOSS, ("PROGRAMS = 1024", "PROGRAMS = 2"))
    gradient, factor = torch.randn(3 * 4096 + 7).to(dtype), torch.tensor(0.3)
    expected = (gradient.float() * factor).to(dtype)
    kernels.multiply_unless_one(gradient, factor)
    execute(launches[-1])
    assert torch.equal(gradient, expected)
    launch = replace(launches[-1], arguments=(gradient[:1].clone(), *launches[-1].arguments[1:]))
    with pytest.raises(AccessError, match="outside every buffer"):
        execute(launch)
    factor.fill_(1)
    execute(launch)


# Masks


MASKS = {
    "AdamW stores": (ADAMW, "PARAMETER), mask=inside", "PARAMETER)"),
    "the loss loads": (LOSS, 'logits + columns, mask=columns < v, other=-float("inf")', "logits + columns"),
    "the loss stores": (LOSS, "logits.dtype.element_ty), mask=columns < v", "logits.dtype.element_ty)"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MASKS)
def test_a_missing_mask_is_noticed(name: str, tmp_path: Path, launches: list[Launch]) -> None:
    source, old, new = MASKS[name]
    kernels = changed(tmp_path, source, (old, new))
    slices, (logits, targets) = make_slices(F32, F32), make_rows(3, 5000, F32)
    if source is ADAMW:
        kernels.update(slices, make_step())
    elif "store" in name:
        kernels.write_losses(logits, targets, 0, torch.ones(3, 3), 0.0, torch.ones(()), torch.zeros(3), True)
    else:
        kernels.read_rows(logits, targets, 0)
    with pytest.raises(AccessError, match="outside every buffer"):
        execute(launches[0], tensors_of(slices))
