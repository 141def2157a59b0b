"""The rules of tools.doctor on made-up machines, and its inspection of this machine."""

import json
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from meshwright.parallel.yaml_io import load_value
from meshwright.tools.doctor.__main__ import verdict
from meshwright.tools.doctor.facts import Facts, find_filesystem, parse_gpus, try_write
from meshwright.tools.doctor.rules import judge
from meshwright.tools.doctor.trials import run_trial
from tests.support.launch import run
from tests.support.limited import LIMITED
from tests.support.nested import run_nested
from tests.support.plans import check_facts
from tests.support.tables import try_each


def gpu(name: str, driver: str = "", limit_w: float | None = None, default_w: float | None = None) -> Facts:
    return {"name": name, "driver": driver, "power_limit_w": limit_w, "default_power_limit_w": default_w}


H100 = gpu("NVIDIA H100", "470.1", 700, 700)
MACHINE: Facts = load_value("""
{compiled: "8.1 s to compile, cpu", cuda_of_torch: "", gpus: [], gpus_of_torch: 0, memory_gib: 64.0,
 cores: 16, open_files: null, memlock_kib: null, infiniband: [], shm_gib: 32.0, hostname: node,
 addresses: [10.0.0.1], run_folder: runs, run_free_gib: 1000.0, cache_folder: cache, cache_filesystem: ext4,
 environment: {}, failed: {}}
""")


def good(**changes: object) -> Facts:
    """A machine with two GPUs, changed."""
    return MACHINE | {"cuda_of_torch": "13.0", "gpus_of_torch": 2, "gpus": (H100, H100)} | changes


def failed(**reasons: str) -> Facts:
    return good(**dict.fromkeys(reasons), failed=reasons)


def variables(**environment: str) -> Facts:
    return good(environment=environment)


UNSEEN = {"gpus_of_torch": 0}
# A broken machine, the kind of the finding, and its facts: value, place, and the option, variable or command
# that fixes it
BROKEN: list[tuple[Facts, str, str]] = [
    (good(**UNSEEN, cuda_of_torch=""), "fails", "2 x NVIDIA H100 ... for CPUs ... torch with CUDA"),
    (good(**UNSEEN), "fails", "2 x NVIDIA H100 ... CUDA 13.0 ... driver 470.1 ... update the driver"),
    (
        good(**UNSEEN, environment={"CUDA_VISIBLE_DEVICES": ""}),
        "fails",
        "CUDA_VISIBLE_DEVICES hides ... unset CUDA_VISIBLE_DEVICES",
    ),
    (
        failed(compiled="no g++"),
        "fails",
        "torch.compile ... no g++ ... g++ python3-dev ... compile.enabled=false",
    ),
    (failed(all_reduce="refused"), "fails", "two processes ... refused ... GLOO_SOCKET_IFNAME"),
    (failed(run_free_gib="full"), "fails", "runs is not writable: full ... --run.dir"),
    (failed(cache_filesystem="no"), "fails", "cache is not writable: no ... --parallel.compile.cache_dir"),
    (good(run_free_gib=0.5), "fails", "runs ... 0.50 GiB free ... --run.dir"),
    (good(cache_filesystem="nfs4"), "slow", "cache ... nfs4 ... TORCHINDUCTOR_CACHE_DIR"),
    (good(open_files=64), "fails", "ulimit -Hn is 64 ... 1024 ... limits.conf"),
    (good(memlock_kib=64, infiniband=("mlx5_0",)), "fails", "64 KiB ... (mlx5_0) ... limits.conf"),
    (good(shm_gib=0.0625), "fails", "/dev/shm has 0.06 GiB ... --shm-size"),
    (good(compiled="54.0 s to compile, cpu"), "slow", "54.0 s to compile ... end other programs"),
    (good(memory_gib=2.0), "slow", "2.0 GiB of memory ... the container's limit"),
    (good(cores=3), "slow", "3 cores for 2 GPUs ... --exclusive"),
    (good(addresses=("127.0.1.1",)), "note", "host name node ... 127.0.1.1 ... GLOO_SOCKET_IFNAME"),
    (failed(addresses="Name not known"), "slow", "host name node ... Name not known ... /etc/hosts"),
    (failed(cudnn="old"), "slow", "cuDNN cannot be used: old ... LD_LIBRARY_PATH"),
    (failed(cores="no quota"), "note", "cores is unknown: no quota ... by hand"),
    (failed(gpus="GPU is lost"), "note", "nvidia-smi fails: GPU is lost ... restarted"),
    (good(gpus=(H100, gpu("T4"))), "slow", "NVIDIA H100, T4: ... slowest ... CUDA_VISIBLE_DEVICES"),
    (
        good(gpus=(H100, gpu("NVIDIA H100", "", 500, 700))),
        "slow",
        "GPU 1 ... 500 W ... 700 W ... nvidia-smi -i 1 -pl 700",
    ),
    (variables(OMP_NUM_THREADS="abc"), "slow", "OMP_NUM_THREADS=abc ... run.threads"),
    (variables(NCCL_P2P_DISABLE="1"), "slow", "NCCL_P2P_DISABLE=1 ... NVLink ... unset NCCL_P2P_DISABLE"),
    (variables(TORCH_DISTRIBUTED_DEBUG="DETAIL"), "slow", "DETAIL ... unset TORCH_DISTRIBUTED_DEBUG"),
    (variables(NCCL_DEBUG="INFO"), "note", "NCCL_DEBUG=INFO ... NCCL_DEBUG=WARN"),
    (variables(PYTORCH_ALLOC_CONF="a:b"), "note", "PYTORCH_ALLOC_CONF=a:b ... expandable_segments:True"),
]
NO_FAULTS = [
    good(),
    MACHINE | dict.fromkeys(MACHINE) | {"environment": {}, "failed": {}},
    good(memlock_kib=64),  # without InfiniBand
    variables(
        NCCL_P2P_DISABLE="0", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", OMP_NUM_THREADS="4,2"
    ),
]


def test_each_fault_is_named_with_its_value_and_a_remedy() -> None:
    def check(broken: Facts, kind: str, of_finding: str) -> None:
        (finding,) = judge(broken)
        assert finding.kind == kind
        check_facts(f"{finding.what}: {finding.remedy}", of_finding)

    try_each(BROKEN, check)


def test_what_is_good_unknown_or_not_used_is_no_fault() -> None:
    assert [judge(facts) for facts in NO_FAULTS] == [[]] * len(NO_FAULTS)
    assert [finding.kind for finding in judge(MACHINE | {"shm_gib": 0.0625})] == ["note"]


def test_the_verdict_is_that_of_the_worst_finding() -> None:
    findings = judge(good(open_files=64, cores=3, environment={"NCCL_DEBUG": "INFO"}))
    assert [finding.kind for finding in findings] == ["fails", "slow", "note"]
    said = [verdict(findings[start:]) for start in range(4)]
    assert [text.split(":")[0] for text in said] == ["not ready", "ready, but slow", "ready", "ready"]
    assert "1 of 3" in said[0]
    assert ("3 cores for 2 GPUs" in said[1], "see: NCCL_DEBUG=INFO" in said[2]) == (True, True)


def test_the_drivers_table_is_read_with_gaps() -> None:
    text = "NVIDIA H100, 470.1, 700.00, 700.00\nTesla T4, 470.1, 70, [N/A]\nbroken\n"
    assert parse_gpus(text) == (H100, gpu("Tesla T4", "470.1", 70, None))


def test_a_folder_that_a_run_would_make_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert try_write(tmp_path / "not/yet") == tmp_path
    for blocked in ("a", "a/b", "link/b"):
        with pytest.raises(OSError, match=str(tmp_path)):
            try_write(tmp_path / blocked)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            try_write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(os.listdir(tmp_path)) == ["a", "link"], "nothing is left behind"


def test_a_folder_is_on_the_file_system_of_the_longest_mount_point_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"/": "ext4", f"{tmp_path}/a share": "nfs4", f"{tmp_path}/a share/run": "ceph"}
    mounts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in places.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert find_filesystem(tmp_path / "a share/runs") == "nfs4"
    assert find_filesystem(tmp_path) == "ext4"


def test_a_trial_whose_process_fails_has_its_error() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
        run_trial("nothing", 1)


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_this_machine_with_a_broken_compiler_and_few_files(tmp_path: Path) -> None:
    command = ("NOFILE=64", "tools.doctor", "--json", f"--run_dir={tmp_path}")
    done = run(1, *command, module=LIMITED, CXX="/nonexistent", NCCL_DEBUG="INFO")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"].startswith("not ready")
    found = [(finding["kind"], finding["what"]) for finding in report["findings"]]
    assert any(kind == "fails" and what.startswith("torch.compile fails: ") for kind, what in found)
    assert any(kind == "fails" and what.startswith("ulimit -Hn is 64") for kind, what in found)
    assert any(kind == "note" and what.startswith("NCCL_DEBUG=INFO") for kind, what in found)
    facts = report["facts"]
    assert (facts["compiled"], facts["environment"]["CXX"]) == (None, "/nonexistent")
    assert "GB/s, gloo" in (facts["all_reduce"] or facts["failed"]["all_reduce"] + "GB/s, gloo")
    assert facts["cores"] >= 1


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_this_machine_as_it_is(tmp_path: Path) -> None:
    done = run_nested("tools.doctor", f"--run_dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ready")
    for part in ("versions", "s to compile", "16 MiB over two processes", "run_free_gib: ", "shm_gib: "):
        assert part in done.stdout
    assert "Traceback" not in done.stderr
    assert "Exit code 0" in run_nested("tools.doctor", "-h").stdout
    assert os.listdir(tmp_path) == []
