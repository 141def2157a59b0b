"""The comparison of the ways to accumulate gradients."""

import dataclasses

import pytest

from meshwright.parallel.errors import PlanError
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.bench.planner.accumulation import DEFAULT, MICRO_BATCHES, TODAY, choose, way_cases
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run

# the compiler traces in this process
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sampled(10, together="bench-planner"),
    pytest.mark.filterwarnings("ignore"),
]
KEYS = (
    *("--parallel.plan=auto", "--train.micro_batch_size=1", "--train.global_batch_size=64"),
    *("--parallel.tp=1", "--parallel.dp_replicate=1", "--parallel.activation_checkpoint=none"),
)


def test_every_way_is_another_plan_with_four_micro_batches() -> None:
    plans = {way: plan_run(parse_config(case.keys).job, case.processes) for way, case in way_cases(2).items()}
    assert len(plans) == 8
    assert next(iter(plans)) == DEFAULT
    for way, plan in plans.items():
        unit = plan.units[1]
        settings = unit.reshard_after_forward, unit.reshard_after_backward, unit.reduce_gradients
        assert tuple(str(value).lower() for value in settings) == way
        assert plan.accumulation == MICRO_BATCHES


def test_a_way_is_chosen_for_a_slow_network_and_none_where_nothing_fits() -> None:
    hardware = load_hardware()["h100-sxm"]
    slow = dataclasses.replace(hardware, network=dataclasses.replace(hardware.network, gb_s=5.0))
    chosen, today = (choose([*KEYS, *way], 16, slow) for way in ((), TODAY))
    assert chosen is not None
    assert today is not None
    assert chosen.rate() > today.rate()
    assert choose(KEYS, 16, dataclasses.replace(hardware, memory_gib=0.01)) is None
    with pytest.raises(PlanError, match="tp=3"):
        choose([*KEYS, "--parallel.tp=3"], 16, hardware)
