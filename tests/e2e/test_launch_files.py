"""configs/launch: checks of the files without a cluster. test_launch_nodes.py and test_launch_slurm.py run
them."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.train.config import RunConfig
from meshwright.train.config_parser import parse_config
from tests.support.launch import ROOT, environment

LAUNCH = ROOT / "configs/launch"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The documents of kubernetes.yaml by kind."""
    return {
        document["kind"]: document
        for document in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    }


def job(manifest: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = manifest["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return replicated


def number(path: Path, pattern: str) -> int:
    return int(re.search(pattern, path.read_text()).group(1))


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_bash_and_can_be_run(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    assert path.stat().st_mode & 0o111
    assert "set -" in path.read_text()


@pytest.mark.parametrize("arguments", [[], ["host", "many", "llama_debug.yaml"]])
def test_nodes_says_how_it_is_used(arguments):
    done = subprocess.run(
        [LAUNCH / "nodes.sh", *arguments], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 2
    assert "usage: configs/launch/nodes.sh FIRST_HOST" in done.stderr
    assert "a relative path is relative to the repository's root" in done.stderr


def test_the_job_names_its_runtime_and_its_outputs_lie_on_a_volume(manifest):
    runtime, train = manifest["TrainingRuntime"], manifest["TrainJob"]
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    pod = job(manifest)["template"]["spec"]["template"]["spec"]
    # The Trainer requires these names of job and container (kubeflow/trainer, pkg/constants).
    assert job(manifest)["name"] == pod["containers"][0]["name"] == "node"
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/runs"]]
    # a pod's own disk is deleted with the pod
    for argument in ("--run.dir=/runs/", "--data.cache_dir=/runs/cache/$HOSTNAME"):
        assert argument in train["spec"]["trainer"]["args"][0]


def test_the_command_is_a_config_and_keys_that_exist(manifest):
    (line,) = manifest["TrainJob"]["spec"]["trainer"]["args"]
    arguments = shlex.split(line)
    assert arguments[:2] == ["exec", "configs/launch/nodes.sh"]
    parse_config(["--config", arguments[4], *arguments[5:]])
    trainer = manifest["TrainJob"]["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]


def test_who_waits_waits_longer_than_whom_it_waits_for(manifest):
    torchrun_s = number(LAUNCH / "nodes.sh", r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)")
    assert RunConfig().grace_s < torchrun_s
    assert torchrun_s < number(LAUNCH / "slurm.sh", r"--signal=B:USR1@(\d+)")
    assert torchrun_s < job(manifest)["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert torchrun_s < number(LAUNCH / "slurm.sh", r"--wait=(\d+)")
