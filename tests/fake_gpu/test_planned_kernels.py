"""The planner's list of kernels against those that inductor generates for an H100."""

from pathlib import Path

import pytest

from meshwright.parallel.planner.tracing.fx_graph import FUSED
from meshwright.tools.dryrun.install import FakeGpu, run_program
from meshwright.tools.dryrun.launches import read_recorded_step
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import run_workload
from tests.fake_gpu.record import plan_on_h100

GENERATED = "triton_"  # begins the names of the kernels that inductor generates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "gpus"),
    [
        pytest.param(*case, marks=pytest.mark.sampled(10, day=2 * day + 1))
        for case, day in {("llama_1b", 8): 2, ("llama_8b", 8): 3, ("llama_70b", 64): 4}.items()
    ],
)
def test_the_bytes_of_every_phase_are_those_of_inductors_kernels(
    fake_gpu: FakeGpu, config: str, gpus: int, tmp_path: Path
) -> None:
    """Bytes are inductor's own estimates, which leave out results of tensor-parallel collectives."""
    arguments = (f"--config={config}.yaml", "--model.n_layers=1")
    plan = plan_on_h100(arguments, gpus)
    run_program(fake_gpu, tmp_path, plan, arguments, lambda line: None)
    graphs = read_recorded_step(tmp_path).graphs
    modules = run_workload(parse_config(arguments).job, plan).modules
    unit_of = {module: unit.name for unit in plan.units for module in unit.modules}
    for module, phase in ((m, p) for m in ("layers.0", "head") for p in ("forward", "backward")):
        operations = getattr(modules[module], phase).operations
        predicted = [op.bytes.at(plan.micro_batch_size) for op in operations if op.name.startswith(FUSED)]
        generated = [
            kernel.bytes or 0
            for graph in graphs
            if unit_of[module] in graph.units and graph.phase == phase
            for kernel in graph.kernels
            if kernel.name.startswith(GENERATED)
        ]
        assert generated, (module, phase)
        assert sum(predicted) == pytest.approx(sum(generated), rel=0.05), (module, phase)
        # the host's cost of a graph is counted by its launches
        assert abs(len(predicted) - len(generated)) <= 2, (module, phase)
