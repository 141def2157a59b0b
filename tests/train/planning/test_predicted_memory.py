"""The predicted memory of whole steps against the allocator's on the fake GPU, as tests/fake_gpu/record.json
has it."""

import json

import pytest

from meshwright.parallel.planner.hardware import load_hardware
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import Prediction, predict
from tests.fake_gpu.plans import CASES
from tests.fake_gpu.record import PATH, plan_on_h100

H100 = load_hardware()["h100-sxm"]
RECORD = json.loads(PATH.read_text())


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Prediction, int, int]:
    """The prediction of a plan, and the bytes that the fake GPU's allocator had in use and reserved."""
    case, recorded = CASES[request.param], RECORD[request.param]
    plan = plan_on_h100(case.arguments, case.world_size)
    predicted = predict(parse_config(case.arguments).job, plan, H100, 8)
    return predicted, recorded["peak_allocated_bytes"], recorded["peak_reserved_bytes"]


def test_the_peak_is_within_two_percent(case: tuple[Prediction, int, int]) -> None:
    """cuBLAS's workspaces, 64 MiB, are not predicted."""
    predicted, allocated, _ = case
    assert predicted.memory.peak_bytes == pytest.approx(allocated, rel=0.02)


def test_reserved_memory_is_never_too_low_and_at_most_nine_percent_too_high(
    case: tuple[Prediction, int, int],
) -> None:
    predicted, _, reserved = case
    assert reserved <= predicted.allocator_bytes <= 1.09 * reserved


def test_each_pool_counts(case: tuple[Prediction, int, int]) -> None:
    predicted, _, reserved = case
    used = {stream: size for stream, size in predicted.memory.pools.items() if size}
    assert {"compute", "reduce_scatter"} <= used.keys()
    for stream, size in used.items():
        assert predicted.memory.pool_bytes - size < 0.99 * reserved, f"without the pool of {stream}"
