"""`parallel.param_dtype: auto` resolves to bfloat16 if the device multiplies it faster."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.plan.__main__ import main as plan_main
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.planning.resolve import (
    FAST_ON_CPUS,
    best_attention,
    best_dtype,
    cpu_dtype,
    describe_dtype,
    dtype_on_device,
    gpu_dtype,
    plan_on_device,
    plan_run,
)
from tests.support.launch import EAGER, TINY, run, write_text

AUTO = "--parallel.param_dtype=auto"
CPU = torch.device("cpu")
CPUINFO = Path("/proc/cpuinfo")


def dtypes(plan: Plan) -> set[str]:
    return {unit.param_dtype for unit in plan.units}


def test_a_gpu_kind_takes_bfloat16_and_a_cpu_the_faster_one() -> None:
    for kind in load_hardware().values():
        faster = kind.peak_tflops["bfloat16"] > kind.peak_tflops["float32"]
        assert best_dtype(kind) == ("bfloat16" if faster else "float32")
        assert faster or kind.cores
    assert best_dtype(None) == "float32", "an unknown CPU"


@pytest.mark.skipif(not CPUINFO.is_file(), reason="only Linux lists the instructions of the CPU in a file")
def test_this_cpu_takes_bfloat16_if_the_kernel_reports_instructions_for_it() -> None:
    """Linux's names: amx_bf16 and avx512_bf16 on x86, bf16 on Arm."""
    flags = set(CPUINFO.read_text().split())
    expected = (
        "bfloat16" if flags & FAST_ON_CPUS.keys() and torch.backends.mkldnn.is_available() else "float32"
    )
    assert dtype_on_device(CPU) == expected
    line = describe_dtype(CPU)
    assert line.startswith(f"param_dtype: auto is {expected}: ")
    assert expected == "float32" or any(name in line for key, name in FAST_ON_CPUS.items() if key in flags)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({"avx2": True, "avx512_f": True}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"amx_bf16": False, "avx512_bf16": False}, "float32"),
        ({"neon": True, "bf16": False}, "float32"),
        ({"neon": True, "bf16": True}, "bfloat16"),
    ],
)
def test_other_cpus(reported: dict[str, bool], expected: str) -> None:
    dtype, reason = cpu_dtype(reported, onednn=True)
    assert dtype == expected
    assert ("multiplies it faster" in reason) == (expected == "bfloat16")
    assert cpu_dtype(reported, onednn=False)[0] == "float32", "nothing uses the instructions"


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_gpus_from_ampere_on_take_bfloat16(capability: tuple[int, int], expected: str) -> None:
    dtype, reason = gpu_dtype(capability)
    assert dtype == expected
    assert f"{capability[0]}.{capability[1]}" in reason


def test_a_plan_here_has_this_devices_dtype_and_a_dtype_that_is_named_stays() -> None:
    place = RankInfo(0, 1, 0, 1, False)
    assert dtypes(plan_on_device(parse_config([*TINY, AUTO]).job, place, CPU, "CPU")) == {
        dtype_on_device(CPU)
    }
    for dtype in ("float32", "bfloat16"):
        config = parse_config([*TINY, f"--parallel.param_dtype={dtype}"])
        assert dtypes(plan_on_device(config.job, place, CPU, "CPU")) == {dtype}
    assert dtypes(plan_run(parse_config([*TINY, AUTO]).job, 1)) == {"float32"}, (
        "the default for an unknown machine"
    )


def test_attention_in_auto_is_what_bfloat16_has() -> None:
    h200 = load_hardware()["h200"]
    assert best_attention(parse_config([AUTO]).job, h200) == best_attention(
        parse_config(["--parallel.param_dtype=bfloat16"]).job, h200
    )
    assert best_attention(parse_config([]).job, h200) == "efficient"


def test_the_plan_tool_takes_bfloat16_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--train.global_batch_size=-1", "--train.micro_batch_size=1", "--model.n_layers=1", *EAGER]
    plan_main(["--config=llama_debug", "--gpus=2", "--gpu=h200", *keys, "--json"])
    units = json.loads(capsys.readouterr().out)["plan"]["units"]
    assert {unit["param_dtype"] for unit in units} == {"bfloat16"}


def test_a_run_says_what_auto_has_become(tmp_path: Path) -> None:
    keys = [*TINY, *EAGER, *write_text(tmp_path), "--train.steps=1", "--train.eval_every=0"]
    result = run(1, *keys, AUTO, "--checkpoint.every=0", f"--run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(describe_dtype(CPU)) == 1
