"""configs/launch: checks of the files without a cluster. test_launch_nodes.py and test_launch_slurm.py run
them."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.train.config import RunConfig
from meshwright.train.config_parser import parse_config
from tests.support.launch import ROOT

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
