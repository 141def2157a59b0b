"""Suggestions for a plan that does not fit: every suggested change has the effect that it states."""

import pytest

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import Machines, load_hardware
from meshwright.parallel.planner.memory_model import host_memory
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning import fit
from meshwright.train.planning.fit import Suggestion, check_fits, fewest_processes, suggest_fits, with_keys
from meshwright.train.planning.predict import predict_memory, run_workload
from meshwright.train.planning.resolve import best_attention, best_dtype, plan_run
from tests.support.launch import EAGER

ODD = ["--parallel.tp=8", "--train.seq_len=7000", "--train.micro_batch_size=300"]
OFFLOADED = ["--parallel.cpu_offload=true", "--train.micro_batch_size=16"]
FULL = "--parallel.activation_checkpoint=full"
H100 = load_hardware()["h100-sxm"]


@pytest.fixture(autouse=True)
def eager_shipped_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller models are suggested as they are, but not compiled: tracing a compiled one takes seconds."""
    monkeypatch.setattr(fit, "load_config", lambda path: parse_config([f"--config={path}", *EAGER]))


def job_of(*keys: str) -> TrainingJob:
    return parse_config(["--config=llama_8b", *EAGER, *keys]).job


def changed(job: TrainingJob, change: Suggestion) -> TrainingJob:
    """The job after the suggested change."""
    job = parse_config([f"--config={change.config}", *EAGER]).job if change.config else job
    return with_keys(job, change.keys)


SAMPLED = [pytest.mark.slow, pytest.mark.sampled(10)]


@pytest.mark.parametrize(
    ("machines", "keys"),
    [
        pytest.param(Machines(8, 8, 40 * GIB, None, 64 * GIB), [], id="eight"),
        pytest.param(
            Machines(8, 8, 12 * GIB),
            ["--parallel.activation_checkpoint=full"],
            id="recomputed",
            marks=SAMPLED,
        ),
        pytest.param(
            *(Machines(8, 8, 80 * GIB, H100), ODD),
            id="half a sequence is not divided by tp",
            marks=SAMPLED,
        ),
        pytest.param(
            Machines(8, 8, 27 * GIB // 2, H100, 64 * GIB),
            OFFLOADED,
            id="not in proportion to the sequence",
            marks=SAMPLED,
        ),
    ],
)
def test_every_change_really_fits(machines: Machines, keys: list[str]) -> None:
    job = job_of(*keys)
    best = best_attention(job, machines.hardware), best_dtype(machines.hardware)
    plan = plan_run(job, 8, 8, *best)
    with pytest.raises(PlanError) as error:
        check_fits(job, plan, machines, "this GPU")
    changes = list(suggest_fits(job, machines))
    lines = [f"  Fits: {change.describe()}." for change in changes]
    assert str(error.value).splitlines()[-len(lines) :] == lines
    assert len(set(lines)) == len(lines) > 0
    for change in changes:
        changed_job, count = changed(job, change), change.processes or 8
        changed_plan = plan_run(changed_job, count, 8, *best)
        memory = predict_memory(changed_job, changed_plan)
        host = host_memory(changed_plan, run_workload(changed_job, changed_plan))
        needed = machines.needed_bytes(memory, host)
        assert needed == change.needed_bytes, change.describe()
        assert machines.fits(needed, host), change.describe()
        assert (needed > memory.peak_bytes) == bool(machines.hardware)
        if change.config:
            assert model_of(changed_job.model).parameters < model_of(job.model).parameters


def test_keys_that_a_change_takes_back_are_named() -> None:
    job = job_of("--parallel.strategy=ddp")
    with pytest.raises(PlanError, match=r"Fits: here, with --parallel\.strategy=null \("):
        check_fits(job, plan_run(job, 8), Machines(8, 8, 80 * GIB), "H100")


def test_the_fewest_processes_are_asked_what_so_many_run_on() -> None:
    """`machines_of` depends on the number of processes, as on a CPU, whose memory they share."""
    job = job_of("--model.n_layers=4", "--train.seq_len=1024")
    alone = predict_memory(job, plan_run(job, 1)).peak_bytes
    assert fewest_processes(job, lambda count: Machines(count, count, int(1.1 * alone / count))) == 1
    assert fewest_processes(job, lambda count: Machines(count, count, int(0.9 * alone))) > 1


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_the_leanest_plans_of_the_planner_are_said_with_their_peak() -> None:
    job = job_of("--parallel.plan=auto", "--model.n_layers=4", "--train.global_batch_size=8")
    first = next(suggest_fits(job, Machines(2, 2, 10 * GIB, H100)))
    assert first.processes is not None
    assert 0 < first.needed_bytes < 10 * GIB
