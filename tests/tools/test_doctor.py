"""The rules of tools.doctor on machines made up, and its looking at this one."""

import dataclasses
import json
import os
import resource
import signal
from pathlib import Path

import psutil
import pytest

from meshwright.tools.doctor.__main__ import format_report, main
from meshwright.tools.doctor.facts import (
    Facts,
    Folder,
    Gpu,
    MachineFacts,
    Software,
    TrialResult,
    Unknown,
    find,
)
from meshwright.tools.doctor.probe import (
    find_filesystem,
    look_at_run_folder,
    nearest_existing,
    parse_gpus,
    read_topology,
)
from meshwright.tools.doctor.rules import find_slow_pairs, judge, judge_environment
from meshwright.tools.doctor.trials import read_said
from meshwright.train.errors import ConfigError
from tests.support.launch import run
from tests.support.limited import LIMITED
from tests.support.nested import run_nested

H100 = Gpu("NVIDIA H100 80GB HBM3", 700, 700)
NO_GPU = Software(torch_cuda="13.0")
GOOD = Facts(Software(torch_cuda="13.0", gpus_of_torch=2), MachineFacts(cores=16), (H100, H100))
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47
GPU1\tNV18\t X \tPHB\tSYS\t0-47
GPU2\tSYS\tPHB\t X \tSYS\t48-95

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def software(**changes: object) -> Facts:
    return dataclasses.replace(GOOD, software=dataclasses.replace(GOOD.software, **changes))


def machine(**changes: object) -> Facts:
    return dataclasses.replace(GOOD, machine=dataclasses.replace(GOOD.machine, **changes))


def facts(**changes: object) -> Facts:
    return dataclasses.replace(GOOD, **changes)


def test_a_good_machine_has_no_findings():
    assert judge(GOOD) == []
    assert "nothing will fail or be slow" in format_report(GOOD, [])


@pytest.mark.parametrize(
    ("broken", "kind", "words"),
    [
        (software(torch_cuda="", gpus_of_torch=0), "fails", "a build for CPUs"),
        (
            software(gpus_of_torch=0, versions={"driver": "470.1"}),
            "fails",
            "cannot use them with driver 470.1",
        ),
        (facts(software=NO_GPU, environment={"CUDA_VISIBLE_DEVICES": ""}), "fails", "hides them"),
        (software(compiler=""), "fails", "no C++ compiler"),
        (
            dataclasses.replace(software(compiler=""), environment={"CXX": "/no"}),
            "fails",
            "no C++ compiler: CXX=/no is none",
        ),
        (
            dataclasses.replace(software(compiler=Unknown("no")), compiled=TrialResult(failed="full")),
            "fails",
            "not work here: full",
        ),
        (software(python_headers=False), "fails", "Python.h"),
        (
            facts(compiled=TrialResult(failed="it broke")),
            "fails",
            "torch.compile does not work here: it broke",
        ),
        (facts(all_reduce=TrialResult(failed="refused")), "fails", "refused"),
        (facts(run_folder=Folder("/data/runs", writable=False)), "fails", "/data/runs cannot be written"),
        (facts(run_folder=Folder("runs", False, "full")), "fails", "runs cannot be written: full"),
        (facts(run_folder=Folder("runs", free_gib=0.5)), "fails", "0.50 GiB free"),
        (
            facts(run_folder=Folder("runs", write_mb_s=50.0)),
            "slow",
            "50 MB/s, flushed, so 16 GB of a checkpoint take 5.3",
        ),
        (
            facts(cache_folder=Folder("cache", writable=False)),
            "fails",
            "compile cache cache cannot be written",
        ),
        (facts(cache_folder=Folder("cache", filesystem="nfs4")), "slow", "is on nfs4"),
        (machine(open_files=64, most_open_files=64), "fails", "ulimit -Hn is 64"),
        (
            machine(memlock_kib=64, infiniband=("mlx5_0",)),
            "fails",
            "ulimit -l is 64 KiB, and InfiniBand (mlx5_0)",
        ),
        (machine(shm_gib=0.0625), "fails", "/dev/shm has 64 MiB"),
        (machine(cgroup_gib=2.0), "slow", "2.0 GiB of memory"),
        (machine(cores=3), "slow", "3 cores for 2 GPUs"),
        (machine(addresses=("127.0.1.1",)), "note", "127.0.1.1: no other machine reaches gloo there"),
        (machine(addresses=Unknown("Name or service not known")), "slow", "Name or service not known"),
        (
            software(versions={"cuDNN": Unknown("cuDNN version incompatibility")}),
            "slow",
            "cuDNN cannot be used: cuDNN version incompatibility",
        ),
        (
            facts(gpus=(H100, dataclasses.replace(H100, power_limit_w=500))),
            "slow",
            "GPU 1 may take 500 W of its 700 W",
        ),
        (
            facts(topology=read_topology(TOPOLOGY)),
            "slow",
            "no NVLink between GPU0-GPU2 (SYS), GPU1-GPU2 (PHB)",
        ),
        (software(versions={"datasets": "", "torchao": "0.18"}), "note", "not installed: datasets"),
        (
            facts(environment={"OMP_NUM_THREADS": "abc"}),
            "slow",
            "OMP_NUM_THREADS=abc is no number of threads",
        ),
        (facts(environment={"NCCL_P2P_DISABLE": "1"}), "slow", "NCCL_P2P_DISABLE=1 sends between GPUs"),
    ],
)
def test_each_fault_is_named_with_its_value_and_a_remedy(broken, kind, words):
    (found,) = judge(broken)
    assert found.kind == kind
    assert words in found.what
    assert found.remedy


def test_what_is_unknown_is_no_fault():
    unknown = Unknown("not allowed")
    known = ("hostname", "addresses", "infiniband")
    nothing = {field.name: unknown for field in dataclasses.fields(MachineFacts) if field.name not in known}
    assert judge(Facts(Software(gpus_of_torch=unknown), MachineFacts(**nothing), unknown, unknown)) == []


def test_memlock_and_shm_matter_where_they_are_used():
    assert judge(machine(memlock_kib=64)) == []
    alone = dataclasses.replace(machine(shm_gib=0.0625), gpus=(), software=Software())
    assert [one.kind for one in judge(alone)] == ["note"]


def test_the_most_important_comes_first():
    both = dataclasses.replace(
        machine(most_open_files=64, addresses=("127.0.1.1",)), environment={"CUDA_LAUNCH_BLOCKING": "1"}
    )
    assert [one.kind for one in judge(both)] == ["fails", "slow", "note"]


def test_switches_that_are_off_are_no_fault():
    assert not list(judge_environment({"OMP_NUM_THREADS": "4,2"}))
    assert not list(
        judge_environment({"NCCL_P2P_DISABLE": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    )
    assert list(judge_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}))


def test_the_drivers_table_is_read_with_gaps():
    text = "NVIDIA H100 80GB HBM3, 700.00, 700.00\nTesla T4, 70, [N/A]\nbroken\n"
    assert parse_gpus(text) == (H100, Gpu("Tesla T4", 70, None))
    assert find_slow_pairs(("garbage", "GPU0 X")) == []


def test_folders_are_looked_at_for_real(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1000))
    assert nearest_existing(tmp_path / "not/yet") == tmp_path
    found = look_at_run_folder(tmp_path / "not/yet")
    assert found.writable
    assert found.write_mb_s > 1
    assert found.free_gib > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"], "nothing is left behind"
    for blocked in (tmp_path / "a", tmp_path / "a/b"):
        found = look_at_run_folder(blocked)
        assert (found.writable, found.problem) == (False, f"{tmp_path / 'a'} is a file, or a link to nothing")


def test_a_folder_is_on_the_file_system_of_the_longest_mount_point_above_it(tmp_path, monkeypatch):
    share = tmp_path / "a share"
    (share / "runs").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    escaped = str(share).replace(" ", "\\040")  # as Linux writes it: proc(5)
    text = f"/dev/a / ext4 rw 0 0\nhost:/x {escaped} nfs4 rw 0 0\nhost:/y {escaped}/run ceph rw 0 0\n"
    (tmp_path / "self/mounts").write_text(text)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert find_filesystem(share / "runs") == "nfs4"
    assert find_filesystem(tmp_path) == "ext4"


def test_a_write_that_fails_is_why_the_folder_cannot_be_written(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        found = look_at_run_folder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (found.writable, found.problem) == (False, "a file of 256 MB there: File too large")
    assert os.listdir(tmp_path) == []


def test_a_checks_result_is_its_last_line_of_json():
    assert read_said('warning: {\n{"said": "old"}\n{"said": "fast"}\nbye\n[1]\n').said == "fast"
    assert read_said("only words\n").failed == "it ended without a result; its last line: only words"


def test_a_home_folder_that_nobody_has_is_a_mistake():
    with pytest.raises(ConfigError, match="--run_dir='~nosuchuser/runs' is no usable path"):
        main(["--run_dir=~nosuchuser/runs"])


def test_whatever_goes_wrong_is_why_it_is_unknown():
    assert find(lambda: Path("/not/there").read_text()).unknown.startswith("[Errno 2]")
    assert find(lambda: 3) == 3


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_this_machine_with_a_broken_compiler_and_few_files(tmp_path):
    done = run(
        1,
        "NOFILE=64",
        "tools.doctor",
        "--json",
        f"--run_dir={tmp_path}",
        module=LIMITED,
        CXX="/nonexistent",
        NCCL_DEBUG="INFO",
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    found = [(one["kind"], one["what"]) for one in report["findings"]]
    assert any(kind == "fails" and what.startswith("no C++ compiler") for kind, what in found)
    assert any(kind == "fails" and what.startswith("ulimit -Hn is 64") for kind, what in found)
    assert any(kind == "note" and what.startswith("NCCL_DEBUG=INFO") for kind, what in found)
    assert report["facts"]["compiled"]["failed"]
    assert report["facts"]["environment"]["CXX"] == "/nonexistent"
    assert "GB/s, gloo" in report["facts"]["all_reduce"]["said"] or report["facts"]["all_reduce"]["failed"]
    assert report["facts"]["machine"]["cores"] >= 1


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_this_machine_as_it_is(tmp_path):
    done = run_nested("tools.doctor", f"--run_dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "versions",
        "compiler: ",
        "write_mb_s: ",
        "to compile; a product",
        "16 MiB over two processes",
        "shm_gib: ",
    ):
        assert words in done.stdout
    assert "Traceback" not in done.stderr
    assert "Exit code 0" in run_nested("tools.doctor", "-h").stdout.replace("\n", " ")
    assert os.listdir(tmp_path) == []
