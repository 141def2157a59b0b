"""Rank information from the launcher, the timeout of collectives, allocator settings, and process exit while
a gloo thread waits for the interpreter."""

import atexit
import ctypes
import dataclasses
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.train.config import RunConfig, TimeoutConfig
from meshwright.train.distributed.exit import end_process
from meshwright.train.distributed.process_group import (
    VARIABLES,
    group_timeout,
    start_process,
    use_expandable_segments,
)
from meshwright.train.distributed.ranks import RankInfo, read_rank_info
from tests.support.worlds import forked, run_ranks


def end_with_a_thread_of_gloo_caught(way: str, folder: Path, patience_s: float) -> None:
    """Run one of two processes. Rank 0 ends in an exit function that holds the interpreter, while a gloo
    thread that has finished the last collective waits for the interpreter. `way`: "python" (interpreter
    teardown) or "end_process"."""
    libc, pipes = ctypes.PyDLL(None), [os.open(folder / name, os.O_RDWR) for name in ("ends", "done")]
    dist.init_process_group("gloo")
    tensor = torch.ones(8)
    tensor.keep_the_python_object = True  # type: ignore[attr-defined]
    if dist.get_rank() == 1:
        os.read(pipes[0], 1)
        time.sleep(patience_s)  # now rank 0 holds the interpreter
        dist.all_reduce(tensor)
        time.sleep(2 * patience_s)  # now the gloo thread of rank 0 waits
        os.write(pipes[1], b"x")
        os._exit(0)
    work = dist.all_reduce(tensor, async_op=True)
    del tensor, work
    atexit._clear()
    atexit.register(libc.read, pipes[1], ctypes.create_string_buffer(1), 1)
    os.write(pipes[0], b"x")
    try:
        if way == "end_process":
            end_process(0)
    finally:
        ctypes.pythonapi.Py_Exit(0)  # as the interpreter does at the end of a command


def ended(way: str, folder: Path, patience_s: float = 0.25) -> tuple[int, str]:
    """Exit code and output of rank 0."""
    folder.mkdir(exist_ok=True)
    for name in ("ends", "done"):
        os.mkfifo(folder / name)
    with forked(2, end_with_a_thread_of_gloo_caught, way, folder, patience_s, folder=folder) as ranks:
        assert ranks[1].wait(60) == 0, (folder / "1.out").read_text()
        code = ranks[0].wait(60)
    return code, (folder / "0.out").read_text()


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="Python 3.14 makes such a thread sleep (python/cpython#87135)"
)
def test_python_aborts_a_process_whose_gloo_thread_waits_for_it(tmp_path: Path) -> None:
    """The reason for end_process, which is needed up to Python 3.13. If the thread did not wait yet, the test
    tries again more slowly."""
    tries = (ended("python", tmp_path / str(patience), 0.25 * patience) for patience in (1, 2, 4, 8))
    code, output = next((result for result in tries if result[0] == -signal.SIGABRT), (0, "it never aborted"))
    assert "terminate called without an active exception" in output
    assert code == -signal.SIGABRT


def test_our_end_does_not(tmp_path: Path) -> None:
    assert ended("end_process", tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("variables", "launched", "requeued", "keeper"),
    [
        ({}, False, False, "rank 0"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_RESTART_COUNT": "1"}, True, True, "rank 0"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "SLURM_RESTART_COUNT": "0"}, False, False, "rank 0"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, False, False, "torchrun on the first node"),
    ],
)
def test_the_launch_and_the_keeper_of_the_store_are_read_from_the_launcher(
    variables: dict[str, str],
    launched: bool,
    requeued: bool,
    keeper: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ranks = read_rank_info()
    assert (str(os.getppid()) in ranks.launch, ranks.requeued, ranks.store_host) == (
        launched,
        requeued,
        keeper,
    )


needs_settings = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="torch 2.11 does not return the settings",
)


def allocator_settings() -> tuple[bool, str]:
    return use_expandable_segments(), torch._C._accelerator_getAllocatorSettings()


@needs_settings
def test_segments_grow_unless_the_users_own_variable_says_something(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert run_ranks(1, allocator_settings) == [(True, "expandable_segments:True")]
    for name, value in zip(VARIABLES, ("max_split_size_mb:512", "expandable_segments:False"), strict=True):
        ((chosen, settings),) = run_ranks(1, allocator_settings, **{name: value})
        assert (chosen, "True" in settings) == (False, False), settings


@needs_settings
def test_a_cpu_leaves_the_settings_of_the_gpus_allocator_alone() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    start_process(RunConfig(), RankInfo(0, 1, 0, 1, under_torchrun=False), torch.device("cpu"))
    dist.destroy_process_group()
    assert torch._C._accelerator_getAllocatorSettings() == before


def test_a_collective_waits_longer_than_any_section() -> None:
    """The watchdog must report first."""
    for field in dataclasses.fields(TimeoutConfig):
        longer = RunConfig(timeouts=dataclasses.replace(TimeoutConfig(), **{field.name: 5000.0}))
        assert group_timeout(longer) > timedelta(seconds=5000)
        never = RunConfig(timeouts=dataclasses.replace(TimeoutConfig(), **{field.name: 0}))
        assert group_timeout(never) == timedelta(days=1)


def test_the_process_group_has_that_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    config = RunConfig(timeouts=TimeoutConfig(*[7000.0] * len(dataclasses.fields(TimeoutConfig))))
    start_process(config, RankInfo(0, 1, 0, 1, under_torchrun=True), torch.device("cpu"))
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout == group_timeout(config)
    finally:
        dist.destroy_process_group()
