"""The number of threads of a process, which changes only the order of sums."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.train.config import RunConfig
from meshwright.train.distributed import process_group as process_group_module
from meshwright.train.distributed.process_group import start_process, usable_cores, usable_threads
from meshwright.train.distributed.ranks import RankInfo
from tests.support.control_groups import write_groups
from tests.support.launch import EAGER, TINY, read_metrics, run, write_text


def write_system(root: Path, siblings: dict[int, str], quota: str = "") -> Path:
    """Write /sys files of a machine: the hardware threads of each core, and a container's CPU quota."""
    for cpu, text in siblings.items():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")
    return write_groups(root, {"cpu.max": quota}) if quota else root


# 4 cores of 2 threads, numbered as Linux does on x86
EIGHT = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}


@pytest.mark.parametrize(
    ("siblings", "quota", "cpus", "cores"),
    [
        (EIGHT, "", range(8), 4),
        (EIGHT, "", (0, 4), 1),
        (EIGHT, "", (1, 2, 5), 2),
        ({}, "", range(3), 3),
        (EIGHT, "max 100000", range(8), 4),
        (EIGHT, "150000 100000", range(8), 2),
        (EIGHT, "50000 100000", range(8), 1),
    ],
)
def test_cores_are_counted_once_and_within_a_containers_quota(siblings, quota, cpus, cores, tmp_path) -> None:
    assert usable_cores(write_system(tmp_path, siblings, quota), cpus) == cores


def test_a_quota_of_version_1_counts(tmp_path) -> None:
    groups = [{"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100000} for quota in (250000, -1)]
    assert usable_cores(write_groups(tmp_path, *groups, version_1="cpu,cpuacct"), range(8)) == 3


def test_threads_are_no_more_than_a_quota_and_no_more_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, threads in ((None, 5), (3, 3), (9, 5)):
        monkeypatch.setattr(process_group_module, "processors", lambda quota=quota: quota)
        monkeypatch.setattr(process_group_module.os, "sched_getaffinity", lambda _: set(range(5)))
        assert usable_threads() == threads


@pytest.mark.parametrize("processes", [1, 64])
def test_processes_share_the_cores_whatever_torchrun_says(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    try:
        start_process(RunConfig(), RankInfo(0, 1, 0, processes, under_torchrun=False), torch.device("cpu"))
        dist.destroy_process_group()
        assert torch.get_num_threads() == max(1, usable_cores() // processes)
    finally:
        torch.set_num_threads(before)


def test_one_thread_and_two_train_the_same_model(tmp_path: Path) -> None:
    """Losses agree to 1e-5 nats over 2 steps. The tensors have more than 32,768 values, from which on torch
    uses several threads."""
    shape = ["--model.dim=128", "--train.seq_len=128", "--train.micro_batch_size=4"]
    short = ["--train.global_batch_size=4", "--train.steps=2", "--train.eval_every=0"]
    quiet = ["--checkpoint.every=0", "--metrics.tensorboard=false"]
    wide = [*TINY, *write_text(tmp_path), *EAGER, *shape, *short, *quiet]
    losses = []
    for threads in (1, 2):
        result = run(1, *wide, f"--run.threads={threads}", f"--run.dir={tmp_path / str(threads)}")
        assert result.returncode == 0, result.stderr
        assert f"{threads} CPU threads each" in result.stdout
        losses.append([row["loss"] for row in read_metrics(tmp_path / str(threads)).values()])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], abs=1e-5, rel=0)
