"""The rules of tools.doctor on made-up machines, and its inspection of this machine."""

import dataclasses
import json
import os
import resource
import signal

import psutil
import pytest

from meshwright.tools.doctor.__main__ import format_report
from meshwright.tools.doctor.facts import Facts, Folder, Gpu, MachineFacts, Software, TrialResult, Unknown
from meshwright.tools.doctor.probe import (
    find_filesystem,
    look_at_run_folder,
    nearest_existing,
    parse_gpus,
    read_topology,
)
from meshwright.tools.doctor.rules import find_slow_pairs, judge
from meshwright.tools.doctor.trials import parse_result
from tests.support.launch import run
from tests.support.limited import LIMITED
from tests.support.nested import run_nested
from tests.support.plans import check_facts
from tests.support.tables import try_each

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
    assert "no problem found" in format_report(GOOD, [])


UNWRITABLE = Folder("/data/runs", writable=False, problem="full")
# A broken machine, the kind of the finding, and its facts: value, place, and the option, variable or command
# that fixes it
BROKEN: list[tuple[Facts, str, str]] = [
    (software(torch_cuda="", gpus_of_torch=0), "fails", "2 x NVIDIA H100 ... for CPUs ... torch with CUDA"),
    (
        software(gpus_of_torch=0, versions={"driver": "470.1"}),
        "fails",
        "2 x NVIDIA H100 ... CUDA 13.0 ... driver 470.1 ... update the driver",
    ),
    (
        facts(software=NO_GPU, environment={"CUDA_VISIBLE_DEVICES": ""}),
        "fails",
        "CUDA_VISIBLE_DEVICES hides ... unset CUDA_VISIBLE_DEVICES",
    ),
    (software(compiler=""), "fails", "no C++ compiler ... apt-get install g++"),
    (
        dataclasses.replace(software(compiler=""), environment={"CXX": "/no"}),
        "fails",
        "no C++ compiler ... CXX=/no ... unset CXX",
    ),
    (
        dataclasses.replace(software(compiler=Unknown("no")), compiled=TrialResult(failed="full")),
        "fails",
        "torch.compile ... full ... --parallel.compile.enabled=false",
    ),
    (software(python_headers=False), "fails", "Python.h ... apt-get install python3-dev"),
    (
        facts(all_reduce=TrialResult(failed="refused")),
        "fails",
        "two processes ... refused ... GLOO_SOCKET_IFNAME",
    ),
    (facts(run_folder=UNWRITABLE), "fails", "/data/runs ... not writable: full ... --run.dir"),
    (facts(run_folder=Folder("runs", free_gib=0.5)), "fails", "runs ... 0.50 GiB free ... --run.dir"),
    (
        facts(run_folder=Folder("runs", write_mb_s=50.0)),
        "slow",
        "50 MB/s ... 5.3 minutes ... checkpoint.every",
    ),
    (facts(cache_folder=UNWRITABLE), "fails", "/data/runs ... --parallel.compile.cache_dir"),
    (facts(cache_folder=Folder("/c", filesystem="nfs4")), "slow", "/c ... nfs4 ... TORCHINDUCTOR_CACHE_DIR"),
    (machine(open_files=64, most_open_files=64), "fails", "ulimit -Hn is 64 ... 1024 ... limits.conf"),
    (machine(memlock_kib=64, infiniband=("mlx5_0",)), "fails", "64 KiB ... (mlx5_0) ... limits.conf"),
    (machine(shm_gib=0.0625), "fails", "/dev/shm has 64 MiB ... --shm-size"),
    (machine(cgroup_gib=2.0), "slow", "2.0 GiB of memory ... the container's limit"),
    (machine(cores=3), "slow", "3 cores for 2 GPUs ... --exclusive"),
    (machine(addresses=("127.0.1.1",)), "note", "host name node ... 127.0.1.1 ... GLOO_SOCKET_IFNAME"),
    (
        machine(addresses=Unknown("Name not known")),
        "slow",
        "host name node ... Name not known ... /etc/hosts",
    ),
    (software(versions={"cuDNN": Unknown("old")}), "slow", "cuDNN cannot be used: old ... LD_LIBRARY_PATH"),
    (
        facts(gpus=(H100, dataclasses.replace(H100, power_limit_w=500))),
        "slow",
        "GPU 1 ... 500 W ... 700 W ... nvidia-smi -i 1 -pl 700",
    ),
    (
        facts(topology=read_topology(TOPOLOGY)),
        "slow",
        "no NVLink ... GPU0-GPU2 (SYS), GPU1-GPU2 (PHB) ... parallel.tp=1",
    ),
    (software(versions={"datasets": "", "torchao": "1"}), "note", "not installed: datasets ... pip install"),
    (facts(environment={"OMP_NUM_THREADS": "abc"}), "slow", "OMP_NUM_THREADS=abc ... run.threads"),
    (facts(environment={"NCCL_P2P_DISABLE": "1"}), "slow", "NCCL_P2P_DISABLE=1 ... unset NCCL_P2P_DISABLE"),
]


def test_each_fault_is_named_with_its_value_and_a_remedy():
    def check(broken, kind, of_finding):
        (finding,) = judge(broken)
        assert finding.kind == kind
        check_facts(f"{finding.what}: {finding.remedy}", of_finding)

    try_each(BROKEN, check)


def test_what_is_unknown_is_no_fault():
    unknown = Unknown("not allowed")
    known = ("hostname", "addresses", "infiniband")
    nothing = {field.name: unknown for field in dataclasses.fields(MachineFacts) if field.name not in known}
    assert judge(Facts(Software(gpus_of_torch=unknown), MachineFacts(**nothing), unknown, unknown)) == []


def test_what_is_not_used_is_no_fault():
    assert judge(machine(memlock_kib=64)) == []
    alone = dataclasses.replace(machine(shm_gib=0.0625), gpus=(), software=Software())
    assert [finding.kind for finding in judge(alone)] == ["note"]
    off = {"NCCL_P2P_DISABLE": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for environment in (off, {"OMP_NUM_THREADS": "4,2"}):
        assert judge(facts(environment=environment)) == []


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
        assert not found.writable
        assert found.problem.startswith(f"{tmp_path / 'a'} is a file")


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
    assert not found.writable
    assert "256 MB" in found.problem
    assert found.problem.endswith(": File too large")
    assert os.listdir(tmp_path) == []


def test_a_checks_result_is_its_last_line_of_json():
    assert parse_result('warning: {\n{"said": "old"}\n{"said": "fast"}\nbye\n[1]\n').said == "fast"
    failed = parse_result("only words\n").failed
    assert "without a result" in failed
    assert failed.endswith("last line: only words")


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
    found = [(finding["kind"], finding["what"]) for finding in report["findings"]]
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
    for part in (
        "versions",
        "compiler: ",
        "write_mb_s: ",
        "s to compile",
        "16 MiB over two processes",
        "shm_gib: ",
    ):
        assert part in done.stdout
    assert "Traceback" not in done.stderr
    assert "Exit code 0" in run_nested("tools.doctor", "-h").stdout.replace("\n", " ")
    assert os.listdir(tmp_path) == []
