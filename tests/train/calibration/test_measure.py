"""A machine that measures itself: the sizes of a job, what is kept, and real processes."""

import dataclasses
from pathlib import Path

import pytest
import torch

from meshwright.parallel.planner.hardware import ALL_TO_ALL, COLLECTIVES, Hardware, read_hardware
from meshwright.train.calibration import measure
from meshwright.train.calibration.measure import (
    HERE,
    MOST_FLOPS,
    job_scale,
    kept_path,
    measure_here,
    read_kept,
)
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.ranks import read_rank_info
from tests.support.worlds import run_ranks

CPU = torch.device("cpu")
TINY = [
    "--config=llama_debug.yaml",
    "--model.dim=64",
    "--model.ffn_dim=96",
    "--train.seq_len=32",
    "--train.global_batch_size=4",
    "--parallel.param_dtype=float32",
]


def job_of(*keys: str) -> TrainingJob:
    return parse_config([*TINY, *keys], "test").job


def test_the_sizes_are_those_of_the_model() -> None:
    scale = job_scale(job_of(), 2, CPU)
    # of a rank's share of two sequences; kv heads are half as many
    assert set(scale.products) == {(64, 64, 64), (64, 64, 32), (64, 64, 96), (64, 96, 64), (64, 64, 264)}
    assert scale.attention == measure.AttentionShape(2, 8, 4, 8, 32)
    assert scale.dtypes == ("float32",)
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert 4 * block in scale.collectives_bytes
    given = job_scale(job_of("--train.micro_batch_size=1"), 2, CPU)
    assert {tokens for tokens, _, _ in given.products} == {32}


def test_a_large_model_is_measured_by_parts_that_take_seconds() -> None:
    for device in (CPU, torch.device("cuda")):
        scale = job_scale(parse_config(["--config=llama_8b.yaml"], "test").job, 2, device)
        shape, most = scale.attention, MOST_FLOPS[device.type]
        calls = (
            4 * shape.batch * shape.heads * shape.head_dim * shape.seq**2,
            *(2 * a * b * c for a, b, c in scale.products),
        )
        assert most / 8 < max(calls) <= most
        assert shape.head_dim == 128


def test_another_model_or_number_of_processes_is_measured_anew() -> None:
    wider = job_of("--model.ffn_dim=128")
    runs = [(job_of(), 2, 1), (job_of(), 4, 1), (job_of(), 2, 2), (wider, 2, 1)]
    paths = {kept_path(job, processes, threads, CPU) for job, processes, threads in runs}
    assert len(paths) == 4
    assert kept_path(job_of(), 2, 1, CPU) == kept_path(job_of("--optim.lr=1.0"), 2, 1, CPU)


def measure_twice(folder: str, stance: str) -> list[tuple[str, Hardware]]:
    """Measure with tiny tensors and few repetitions, and take what is kept."""
    measure.BUDGET_S, measure.GIVEN_BYTES, measure.ROTATED_BYTES = 1e-4, (2**14,), {"cpu": 2**12}
    job, ranks = job_of(f"--parallel.compile.cache_dir={folder}"), read_rank_info()
    printed: list[str] = []
    with torch.compiler.set_stance(stance):
        both = [measure_here(job, ranks, CPU, printed.append) for _ in range(2)]
    assert printed == [f"measuring this machine with {ranks.world_size} processes, up to a minute"]
    return [(line, hardware) for hardware, _, line in both]


@pytest.mark.parametrize(
    ("processes", "stance"),
    [
        (1, "force_eager"),
        pytest.param(2, "force_eager", marks=[pytest.mark.slow, pytest.mark.sampled(6)]),
        pytest.param(2, "default", marks=[pytest.mark.slow, pytest.mark.sampled(10)]),
    ],
)
def test_processes_measure_once_and_agree(tmp_path: Path, processes: int, stance: str) -> None:
    results = run_ranks(processes, measure_twice, str(tmp_path), stance)
    (path,) = tmp_path.glob("hardware-*.yaml")
    kept = dataclasses.replace(read_hardware(path), name=HERE)
    for (first, measured), (second, read) in results:
        assert first.startswith("measured this machine for ")
        assert second.startswith("this machine as it measured itself on 20")
        assert second.endswith(f"; delete {path} to measure it again")
        assert measured == read == kept
    assert set(kept.collectives_s) == ({*COLLECTIVES, ALL_TO_ALL} if processes > 1 else set())
    assert kept.host.unit_s >= 0  # a difference of two times, which a busy machine can make 0


def test_measurements_of_another_version_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "hardware-0.yaml"
    assert read_kept(path) is None
    path.write_text("memory_gib: 1.0\n")
    assert read_kept(path) is None
