"""What the launcher says of a process, how long its collectives wait, and its end, with a thread of gloo caught in it."""

import dataclasses
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import ROOT, environment, run
from train.allocator import VARIABLES
from train.place import Place, read_place
from train.run_config import RunConfig
from train.runtime import group_timeout, start_process
from train.watchdog import TimeoutConfig


def ended(way: str) -> tuple[int, str]:
    result = run(2, way, module="tests.train.end_worker")
    assert all(f"rank {rank} has done all" in result.stdout for rank in (0, 1)), result.stderr
    return result.returncode, result.stderr


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 lets such a thread sleep (python/cpython#87135)")
def test_python_aborts_a_process_whose_gloo_thread_waits_for_it():
    """Why end_process is there; it goes away with Python 3.13."""
    code, said = ended("sys.exit")
    assert code != 0
    assert "terminate called without an active exception" in said


def test_our_end_does_not():
    assert ended("end_process") == (0, "")


@pytest.mark.parametrize(
    ("said", "restarts"),
    [({}, 0), ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2), ({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "1"}, 1)],
)
def test_restarts_are_counted_wherever_they_are_made(said: dict, restarts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    torchrun_restarts = int(said.get("TORCHELASTIC_RESTART_COUNT", 0))
    assert read_place() == Place(0, 1, 0, 1, False, restarts, torchrun_restarts)


ALLOCATOR = """
import torch
from train.allocator import use_expandable_segments
print(use_expandable_segments(), torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.parametrize(
    ("variable", "value", "then"),
    [("", "", "True expandable_segments:True"),
     ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", "False"),
     ("PYTORCH_ALLOC_CONF", "expandable_segments:False", "False expandable_segments:False")],
)  # fmt: skip
def test_segments_grow_unless_the_users_own_variable_says_something(variable: str, value: str, then: str) -> None:
    said = {variable: value} if variable else {}
    kept = {name: text for name, text in environment(**said).items() if name not in VARIABLES or name == variable}
    child = subprocess.run([sys.executable, "-c", ALLOCATOR], cwd=ROOT, env=kept, text=True, capture_output=True, check=True)
    assert child.stdout.strip().startswith(then)
    assert "True" not in child.stdout.removeprefix(then)


def test_a_cpu_leaves_the_settings_of_the_gpus_allocator_alone() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    start_process(RunConfig(), Place(0, 1, 0, 1, under_torchrun=False), torch.device("cpu"))
    dist.destroy_process_group()
    assert torch._C._accelerator_getAllocatorSettings() == before


def test_a_collective_waits_longer_than_any_section() -> None:
    """So that the watchdog speaks first."""
    for field in dataclasses.fields(TimeoutConfig):
        longer = RunConfig(timeouts=dataclasses.replace(TimeoutConfig(), **{field.name: 5000.0}))
        assert group_timeout(longer) > timedelta(seconds=5000)
        never = RunConfig(timeouts=dataclasses.replace(TimeoutConfig(), **{field.name: 0}))
        assert group_timeout(never) == timedelta(days=1)


def test_the_process_group_has_that_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    config = RunConfig(timeouts=TimeoutConfig(*[7000.0] * len(dataclasses.fields(TimeoutConfig))))
    start_process(config, Place(0, 1, 0, 1, under_torchrun=True), torch.device("cpu"))
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout == group_timeout(config)
    finally:
        dist.destroy_process_group()
