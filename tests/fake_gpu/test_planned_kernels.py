"""The planner's list of kernels against those that inductor generates for an H100."""

import dataclasses

import pytest

from meshwright.tools.bench.planner.dryrun import compare_dry_run, read_plans
from meshwright.tools.dryrun.install import FakeGpu

pytestmark = pytest.mark.slow
PLANS = {plan.name: plan for plan in read_plans()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sampled(5, day=day))
        for name, day in {"1b": 2, "fsdp-8": 3, "70b": 4}.items()
    ],
)
def test_the_bytes_of_every_phase_are_those_of_inductors_kernels(fake_gpu: FakeGpu, name: str) -> None:
    plan = dataclasses.replace(PLANS[name], arguments=(*PLANS[name].arguments, "--model.n_layers=1"))
    kernels = compare_dry_run(fake_gpu, plan).kernels
    phases = {(module, phase) for module in ("layers.0", "head") for phase in ("forward", "backward")}
    assert {(each.module, each.phase) for each in kernels} == phases
    assert {(e.module, e.phase): e.predicted_bytes for e in kernels} == pytest.approx(
        {(e.module, e.phase): e.generated_bytes for e in kernels}, rel=0.05
    )
    # the host's cost of a graph is counted by its launches
    assert all(abs(each.predicted - each.generated) <= 2 for each in kernels)
