"""The project's Triton kernels, compiled for sm_90 (H100) by the project's launch code. What they compute:
tests/models/test_loss.py and tests/train/optim/test_stochastic_adamw.py, in Triton's interpreter.

Tested with Triton 3.6.0, 3.7.1 (the version of torch 2.13's GPU builds), 3.8.0 and 3.9.0.
"""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which is for Linux only")

from triton import knobs

from meshwright.parallel.planner.cost_model import ADAMW_INSTRUCTIONS
from tests.fake_gpu.cubins import TOOLS, read_usage
from tests.fake_gpu.kernel_table import ADAMW, HARDWARE, PAIRS, Compiled, compile_adamw, compile_kernels
from tests.fake_gpu.triton_driver import Launch, load_copy

pytestmark = [
    pytest.mark.skipif(not TOOLS.exists(), reason="needs a Triton that brings NVIDIA's tools"),
    pytest.mark.skipif(
        knobs.runtime.interpret, reason="needs a Triton that compiles: TRITON_INTERPRET is set"
    ),
]

# Limits of registers per thread, with a margin above the maximum observed: AdamW 48 with Triton 3.9.0 and 72
# with 3.7.1, cross entropy 31 with both. At these limits an H100's multiprocessor holds 24 warps of AdamW and
# 48 of cross entropy.
REGISTERS = {"AdamW": 80, "cross entropy, read": 40, "cross entropy, write": 40}
# Float operations that are rounded correctly, as in the reference. `.rn` also forbids ptxas to fuse them (PTX
# ISA, 9.7.3).
ROUNDED = {
    "add.rn.f32",
    "sub.rn.f32",
    "mul.rn.f32",
    "div.rn.f32",
    "sqrt.rn.f32",
    "cvt.f32.bf16",
    "cvt.rzi.u32.f32",  # of the step count
    "setp.num.f32",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return list(compile_kernels(tmp_path_factory.mktemp("triton")))


def too_much(name: str, launch: Launch) -> list[str]:
    """Return the resources of the compiled kernel that exceed their limits."""
    registers, spilled = read_usage(launch.cubin)
    excess = [f"{spilled} spilled bytes"] * (spilled > 0)
    return excess + [f"{registers} registers"] * (registers > REGISTERS[name])


def inexact(launch: Launch) -> set[str]:
    """Return opcodes with a float type, except those that are rounded correctly."""
    opcodes = re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*\.[\w.:]*)", launch.ptx.read_text(), re.MULTILINE)
    return {opcode for opcode in opcodes if re.search(r"\.(f|bf|tf|e\dm)\d", opcode)} - ROUNDED


@pytest.mark.sampled(3, day=1)
def test_no_kernel_spills_or_takes_too_many_registers(compiled: list[Compiled]) -> None:
    assert len(compiled) == len(PAIRS) + 2 * 2
    excess = {(kernel.name, kernel.dtypes): too_much(kernel.name, kernel.launch) for kernel in compiled}
    assert {title: resources for title, resources in excess.items() if resources} == {}


@pytest.mark.sampled(3, day=2)
def test_adamw_is_issued_while_its_bytes_move(compiled: list[Compiled]) -> None:
    """In bfloat16 on an H200 it takes 0.71 of the memory's time with Triton 3.9.0, 0.74 with 3.7.1."""
    kernels = (kernel for kernel in compiled if kernel.name == "AdamW")
    for kernel, pair in zip(kernels, PAIRS, strict=True):
        planned = ADAMW_INSTRUCTIONS.get(tuple(dtype.itemsize for dtype in pair), kernel.instructions())
        assert kernel.instructions() == pytest.approx(planned, rel=0.1)
        for name, hardware in HARDWARE.items():
            issue, memory = kernel.times_ps(hardware)
            assert 0.1 * memory < issue < 0.8 * memory, (kernel.dtypes, name)


@pytest.mark.sampled(3, day=3)
def test_adamw_loads_several_elements_at_once_only_where_all_are_aligned(tmp_path: Path) -> None:
    for size, first, vectors in ((16, 0, True), (24, 0, False), (16, 1, False)):
        launch = compile_adamw(tmp_path, load_copy(ADAMW), torch.bfloat16, torch.bfloat16, size, first)
        assert bool(re.search(r"ld\.global\S*\.v\d", launch.ptx.read_text())) == vectors, (size, first)


@pytest.mark.sampled(3, day=2)
def test_adamw_has_only_correctly_rounded_float_operations(compiled: list[Compiled]) -> None:
    launches = [kernel.launch for kernel in compiled if kernel.name == "AdamW"]
    assert [inexact(launch) for launch in launches] == [set()] * len(PAIRS)


def test_spilled_registers_are_noticed(tmp_path: Path) -> None:
    text, warps = ADAMW.read_text(encoding="utf-8"), "num_warps=4,"
    assert text.count(warps) == 1
    (tmp_path / ADAMW.name).write_text(text.replace(warps, f"{warps} maxnreg=32,"), encoding="utf-8")
    limited = load_copy(tmp_path / ADAMW.name)
    launch = compile_adamw(tmp_path, limited, torch.float32, torch.float32)
    assert not inexact(launch)
    (found,) = too_much("AdamW", launch)
    assert re.fullmatch(r"\d+ spilled bytes", found)
