"""`tools.check --sharded` and `assert_same` on somebody's own functions, in processes that they start."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.errors import PlanError
from meshwright.testing import assert_same
from meshwright.tools.check import main
from meshwright.train.errors import ConfigError
from tests.gallery.faults import ALL
from tests.gallery.models import Model, build
from tests.gallery.shardings import fsdp, sums
from tests.support import forks
from tests.support.launch import LIMIT_S

BUILD, SHARDED = "--model.factory=tests.gallery.models:build", "--sharded=tests.tools.test_check_sharding"


@pytest.fixture(autouse=True, scope="module")
def server() -> None:
    """The tests' own server of forks, from which the processes of a check are forked too."""
    assert forks.PRELOADED
    forkserver.ensure_running()


def ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def build_frozen() -> Any:
    model, example = build()
    model.layers[0].requires_grad_(False)
    return model, example


def frozen(model: Model, mesh: DeviceMesh) -> None:
    model.layers[0].requires_grad_(False)
    fsdp(model, mesh)


def reduced_again(model: Model, mesh: DeviceMesh) -> None:
    sums(model, mesh, again=ALL)


def untied(model: Model, mesh: DeviceMesh) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    fsdp(model, mesh)


def nothing_left(model: Model, mesh: DeviceMesh) -> None:
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)


def reversed_signs(model: Model, mesh: DeviceMesh) -> None:
    sums(model, mesh)
    for parameter in model.parameters():
        parameter.register_hook(torch.neg)


def failing(model: Model, mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    fsdp(model, mesh)


def ending(model: Model, mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def another(model: Model, mesh: DeviceMesh) -> nn.Module:
    return nn.Linear(8, 8)


def lost(model: Model, mesh: DeviceMesh) -> None:
    fsdp(copy.deepcopy(model), mesh)


class NoLoop:
    def __init__(self, model: Model, mesh: DeviceMesh | None) -> None: ...


def waiting(model: Model, mesh: DeviceMesh) -> None:
    time.sleep(1000)


def test_a_right_sharding_passes_and_a_wrong_one_fails_a_test() -> None:
    report = assert_same(build, fsdp)
    assert report.same
    assert report.compared > 100
    with pytest.raises(AssertionError, match="micro batch 1 counts 2 times"):
        assert_same(build, reduced_again, dp_shard=2)


def test_the_command_says_that_nothing_was_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    main([BUILD, f"{SHARDED}:ddp", "--json", "--optimizer=muon"])
    found = json.loads(capsys.readouterr().out)
    assert found["same"]
    assert any("nothing is sharded" in hint for hint in found["hints"])
    assert any("updates of Muon: to 1e-05" in hint for hint in found["hints"]), "of a model in a wrapper"


def test_a_broken_tie_is_named() -> None:
    with pytest.raises(AssertionError, match=r"tied with embedding\.weight on one process"):
        assert_same(build, untied)


def test_only_the_model_may_freeze() -> None:
    assert assert_same(build_frozen, fsdp).same
    with pytest.raises(AssertionError, match="frozen by the sharding"):
        assert_same(build, frozen)


@pytest.mark.parametrize("sharding", [nothing_left, reversed_signs])
def test_only_a_positive_factor_may_be_common(sharding: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match=r"gradient of norm\.weight"):
        assert_same(build, sharding)


def test_a_ci_gets_a_junit_file_and_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "report.xml"
    with pytest.raises(SystemExit) as end:
        main([BUILD, f"{SHARDED}:reduced_again", f"--junit={file}"])
    assert end.value.code == 1
    suite = ElementTree.parse(file).getroot()
    assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure")) > 0


@pytest.mark.parametrize(
    ("sharding", "loop", "error", "message"),
    [
        (failing, None, PlanError, r"ValueError: only here .*test_check_sharding\.py:\d+"),
        (ending, None, PlanError, "1 .* 3 "),
        (another, None, PlanError, r"another .*test_check_sharding\.py:\d+"),
        (lost, None, AssertionError, r"lost .*test_check_sharding\.py:\d+"),
        (fsdp, NoLoop, PlanError, r"NoLoop .*test_check_sharding\.py:\d+"),
    ],
    ids=["an error", "an end", "another model", "no sharded model", "no step"],
)
def test_what_is_wrong_with_a_function_is_said_with_its_place(
    sharding: Any, loop: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        assert_same(build, sharding, loop=loop)


@pytest.mark.parametrize(
    "arguments",
    [
        (BUILD, "--step=mine:Loop"),
        (BUILD, f"{SHARDED}:ddp", "--backend=none"),
        (BUILD, SHARDED),
        (BUILD, f"{SHARDED}:SHARDED"),
        (BUILD, f"{SHARDED}:ddp", "--tpp=2"),
        (BUILD, "--optim.lr=1"),
        (BUILD, "--optimizer=sgd"),
        (BUILD, f"--optimizer={SHARDED.partition('=')[2]}:nowhere"),
        (BUILD, f"{SHARDED}:ddp", f"--step={SHARDED.partition('=')[2]}:NoLoop", "--optimizer=adamw"),
        (BUILD, f"{SHARDED}:ddp", "--junit=nowhere/x.xml"),
        (BUILD, f"{SHARDED}:ddp", "--device=cuda", "--dp_shard=64"),
    ],
    ids=[
        "no sharding",
        "of a plan",
        "no name",
        "no function",
        "no option",
        "no optimizer",
        "unknown",
        "no such",
        "two",
        "no folder",
        "no GPU",
    ],
)
def test_mistakes_are_refused_before_processes_start(arguments: tuple[str, ...], tmp_path: Path) -> None:
    old = tmp_path / "report.xml"  # of a check that passed
    old.touch()
    with pytest.raises(PlanError if "--device=cuda" in arguments else ConfigError):
        main([f"--junit={old}", *arguments])
    assert old.exists() == any("--junit" in each for each in arguments)


@pytest.mark.sampled(4)
def test_a_check_that_is_interrupted_at_any_moment_ends_at_once_and_silently() -> None:
    print(f"after {(delay_s := random.uniform(0, 6)):.1f} s")
    command = [sys.executable, "-m", "tools.check", BUILD, f"{SHARDED}:waiting"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        while not psutil.Process(process.pid).children():  # before, a busy machine may still import torch
            time.sleep(0.02)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT_S)  # until all its processes have ended
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in output
