"""A run that really runs out of memory, and the planner's advice on what would free most."""

import dataclasses
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright.train.training
from meshwright.parallel.planner.hardware import Machines, load_hardware
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import OutOfMemory
from meshwright.train.fault_tolerance.out_of_memory import explaining_out_of_memory, is_out_of_memory
from meshwright.train.main import main
from meshwright.train.planning import fit
from meshwright.train.planning.fit import suggest_savings
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run
from meshwright.train.step import train_step
from tests.support.forks import fork
from tests.support.launch import EAGER, LIMIT_S, TINY, read_status, write_text

SMALL = [
    *EAGER,
    "--model.dim=64",
    "--model.n_layers=2",
    "--model.n_heads=8",
    "--model.n_kv_heads=8",
    "--model.ffn_dim=128",
    "--train.seq_len=16",
    "--train.micro_batch_size=4",
]
BATCH = ["--train.micro_batch_size=2048", "--train.global_batch_size=2048", "--parallel.loss_chunk_tokens=0"]


def main_with_a_limit(arguments: list[str]) -> None:
    """Run train.main, whose step 2 may only allocate a little more than the process has."""
    steps = 0

    def limited(*of_step: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
            resource.setrlimit(
                resource.RLIMIT_DATA, (pages * resource.getpagesize() + 2**26, resource.RLIM_INFINITY)
            )
        try:
            return train_step(*of_step)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    meshwright.train.training.train_step = limited  # type: ignore[assignment]
    main(arguments)


@pytest.mark.sampled(3, day=2)
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a process's data is Linux's")
def test_a_run_that_runs_out_of_memory_says_where_it_went_and_what_would_help(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    keys = ["--train.steps=3", "--metrics.tensorboard=false", f"--run.dir={tmp_path / 'run'}"]
    arguments = [*TINY, *EAGER, *BATCH, *data, *keys]
    process = fork(main_with_a_limit, arguments, output=tmp_path / "out", errors=tmp_path / "err")
    assert process.wait(LIMIT_S) == 1
    stderr = (tmp_path / "err").read_text()
    assert "Traceback" not in stderr
    lines = stderr[stderr.index("OutOfMemory: ") :].splitlines()
    assert "rank 0 ran out of memory" in lines[0]
    assert "you tried to allocate" in lines[0]
    assert re.match(
        r"  resident, in GiB: params 0\.00, optimizer 0\.00, process at its peak \d+\.\d\d$", lines[1]
    )
    assert re.match(
        r"  predicted \d+\.\d\d GiB at the peak, in GiB: params .*, activations .*, logits ", lines[2]
    )
    helps = [line for line in lines if line.startswith("  would help: --")]
    assert len(helps) == 3
    assert any(
        "--parallel.activation_checkpoint=full" in line and "GiB less, a step takes " in line
        for line in helps
    )
    status = read_status(tmp_path / "run")
    assert status["state"] == "failed"
    assert status["reason"].startswith("OutOfMemory: rank 0 ran out of memory")


def test_what_counts_as_running_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**62, dtype=torch.int8)
    assert is_out_of_memory(refused.value)
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))


OTHER_BLOCKS = ["--model.factory=tests.support.factories:Positioned", "--train.seq_len=64"]


def as_arguments(changes: Mapping[str, Any]) -> list[str]:
    return [f"--{key}={str(value).lower()}" for key, value in changes.items()]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param([*SMALL, "--parallel.dp_replicate=2"], id="llama"),
        pytest.param([*OTHER_BLOCKS, *EAGER], id="blocks of another name", marks=pytest.mark.sampled(3)),
    ],
)
def test_each_saving_is_what_the_planner_predicts_for_its_keys_and_the_same_batch(
    model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a run without a global batch size, whose global batch is one micro batch of every rank."""
    monkeypatch.setattr(fit, "SHOWN", 100)
    monkeypatch.setattr(fit, "WORTH", -100.0)
    config, hardware = parse_config(model), load_hardware()["h100-sxm"]
    plan = plan_run(config.job, 8)
    peak = predict_memory(config.job, plan).peak_bytes
    found = suggest_savings(config.job, plan, Machines(8, 8, 0, hardware, 2**36))
    assert found == sorted(found, key=lambda saving: -saving.freed_bytes)
    assert {"parallel.activation_checkpoint", "optim.state_dtype"} <= {
        key for saving in found for key in saving.keys
    }
    for saving in found:
        changed = parse_config([*model, *as_arguments(saving.keys)]).job
        its_plan = plan_run(changed, 8)
        assert its_plan.global_batch_size == plan.global_batch_size, saving
        assert peak - saving.freed_bytes == predict_memory(changed, its_plan).peak_bytes, saving
        assert saving.slower is None or saving.slower > -0.5
    unknown = suggest_savings(config.job, plan, Machines(8, 8, host_bytes=2**36))
    assert [dataclasses.replace(saving, slower=None) for saving in found] == unknown


def test_advice_is_given_for_a_model_whose_blocks_have_another_name(tmp_path: Path) -> None:
    job = parse_config([*OTHER_BLOCKS, *EAGER]).job
    plan, optimizer = plan_run(job, 1), torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())
    with (
        pytest.raises(OutOfMemory, match="would help: --parallel"),
        explaining_out_of_memory(job, plan, torch.device("cpu"), optimizer, tmp_path),
    ):
        raise MemoryError
