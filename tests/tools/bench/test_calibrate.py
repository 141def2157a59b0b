"""tools.bench calibrate: the fit, the written file, and a real calibration whose file the planner reads."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml

from meshwright.parallel.planner.cost_model import Group, collective_s
from meshwright.parallel.planner.hardware import (
    COLLECTIVES,
    HARDWARE_FOLDER,
    Link,
    load_hardware,
    read_hardware,
    share_at,
)
from meshwright.tools.bench.calibrate import command
from meshwright.tools.bench.calibrate.command import add_calibrate_options, calibrate, find_base
from meshwright.tools.bench.calibrate.hardware_file import (
    CalibratedMachine,
    SourcedValue,
    hardware_text,
    product_curves,
    source_in,
)
from meshwright.tools.bench.calibrate.measure import (
    CPU_SCALE,
    GPU_SCALE,
    CollectiveTiming,
    attention_work,
    fit_link,
    measure_attention,
    measure_product,
    quicker,
)
from meshwright.tools.processes import BenchError
from meshwright.train.calibration.timing import AttentionShape, Timer
from meshwright.train.errors import ConfigError

SHARES = {
    "all_gather": ((2, 1.0), (4, 0.5)),
    "reduce_scatter": ((2, 0.4), (4, 0.3)),
    "all_reduce": ((2, 0.9), (4, 0.6)),
}
LINK = Link(2.0, 1e-4, SHARES)
SIZES = [2.0**power for power in range(14, 26, 2)]


def timings_over(link: Link) -> list[CollectiveTiming]:
    """Return the planner's times of collectives over this link: the fit inverts its formula."""
    hardware = dataclasses.replace(load_hardware()["cpu"], node=link)
    return [
        CollectiveTiming(op, n, int(size), collective_s(op, size, Group(n, n, 1), hardware))
        for op in COLLECTIVES
        for n in (2, 4)
        for size in SIZES
    ]


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_calibrate_options(parser)
    return parser.parse_args(arguments)


def test_the_fit_finds_the_link_that_the_planner_timed() -> None:
    link, error = fit_link(timings_over(LINK))
    assert error < 1e-6
    assert link.latency_s == pytest.approx(LINK.latency_s)
    assert link.gb_s == pytest.approx(2.0)  # the fastest of all
    for op, curve in LINK.efficiency.items():
        assert [share for _, share in link.efficiency[op]] == pytest.approx([share for _, share in curve])


def test_a_latency_below_nothing_becomes_nothing() -> None:
    # small tensors are far too fast
    grows = [CollectiveTiming("all_gather", 2, size, size**1.5) for size in (1000, 10_000, 100_000)]
    link, _ = fit_link(grows)
    assert link.latency_s == 0
    assert link.gb_s > 0


@pytest.mark.parametrize("value", [0.0, 5e-6, 1.0, 3350.0, 123456.0, 1e22, 0.00012345])
def test_numbers_are_read_back_as_floats(value: float) -> None:
    cpu = vars(load_hardware()["cpu"]) | {"memory_gib": value}
    text = hardware_text("a title", {key: SourcedValue(known, "a source") for key, known in cpu.items()})
    read = yaml.safe_load(text)["memory_gib"]
    assert isinstance(read, float)
    assert read == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("kind", sorted(load_hardware()))
def test_a_written_file_says_what_it_was_given(kind: str, tmp_path: Path) -> None:
    hardware = load_hardware()[kind]
    path = tmp_path / f"{kind}.yaml"
    keys = [item.name for item in dataclasses.fields(hardware)]
    path.write_text(
        hardware_text(
            "a title", {key: SourcedValue(getattr(hardware, key), f"source of {key}") for key in keys}
        )
    )
    read = read_hardware(path)
    assert read.device_names == hardware.device_names
    assert read.node.latency_s == pytest.approx(hardware.node.latency_s)
    assert read.cores == hardware.cores
    for dtype, curve in hardware.matmul.items():
        assert share_at(read.matmul[dtype], 50) == pytest.approx(share_at(curve, 50), rel=1e-3)
    assert all(source_in(path, key) == f"source of {key}" for key in keys if key != "name")


def test_products_are_medians_over_processes_and_equal_sizes() -> None:
    compute = [
        {"matmul": {"float32": [(2.0, 10.0), (1.0, 5.0), (2.0, 20.0)]}},
        {"matmul": {"float32": [(2.0, 30.0), (1.0, 7.0), (2.0, 20.0)]}},
    ]
    assert product_curves(compute) == {"float32": [(1.0, 6.0), (2.0, 20.0)]}


def test_attention_is_counted_as_the_planner_does() -> None:
    forward, backward = attention_work(AttentionShape(batch=2, heads=4, kv_heads=2, head_dim=8, seq=16))
    assert forward == 2 * (2 * 4 * 16 * 16 * 8)  # two products of 2 operations each, half of the square
    assert backward == 2.5 * forward  # five products: one of the forward's is recomputed


def test_rates_of_tiny_work_are_measured() -> None:
    clock = Timer(torch.device("cpu"), budget_s=0.01)
    gflop, rate = measure_product(clock, (8, 16, 4), "float32")
    assert gflop == pytest.approx(2 * 8 * 16 * 4 / 1e9)
    assert rate > 0
    assert all(rate > 0 for rate in measure_attention(clock, AttentionShape(1, 2, 1, 8, 64), "bfloat16"))


@pytest.mark.parametrize("scale", [CPU_SCALE, GPU_SCALE])
def test_quick_is_a_part_of_the_whole(scale) -> None:
    quick = quicker(scale)
    assert set(quick.products) < set(scale.products)
    assert set(quick.attention) < set(scale.attention)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder to which a calibration writes."""
    monkeypatch.setattr(command, "HARDWARE_FOLDER", tmp_path)
    return tmp_path


def test_a_file_is_not_overwritten_unasked(folder: Path) -> None:
    path = folder / "here.yaml"
    path.write_text("mine")
    with pytest.raises(BenchError, match=r"here\.yaml exists.*--overwrite.*--name"):
        calibrate(options_of("--name=here"), [])
    assert path.read_text() == "mine"


def test_a_base_that_is_not_there_is_told_before_anything_is_measured(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configs/hardware/h100\.yaml\. Did you mean h100-sxm"):
        calibrate(options_of("--name=x", "--base=h100"), [])
    assert not list(folder.iterdir())


def test_a_gpu_of_no_known_kind_needs_a_base() -> None:
    unknown = CalibratedMachine("cuda", "Some GPU", 1, quick=False)
    with pytest.raises(BenchError, match=r"Some GPU: no file in configs/hardware.*--base .*h200"):
        find_base(None, unknown)
    assert find_base("h200", unknown).name == "h200"
    assert find_base(None, dataclasses.replace(unknown, name="NVIDIA H200")).name == "h200"


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.usefixtures("forked_commands")
def test_a_real_calibration_is_read_by_the_planner(folder: Path) -> None:
    path = folder / "here.yaml"
    result = calibrate(options_of("--name=here", "--quick"), [])
    json.dumps(result.figures)
    hardware = read_hardware(path)
    assert path.read_text() in result.text
    assert hardware.peak_tflops["float32"] > 1e-3
    # the peak is the best product
    assert max(share for _, share in hardware.matmul["float32"]) == pytest.approx(1)
    assert 0 < hardware.operation_s < 1e-3
    assert {size for size, _ in hardware.node.efficiency["all_reduce"]} == {2, 4}
    assert source_in(path, "peak_tflops").startswith("measured 20")
    assert torch.__version__ in source_in(path, "peak_tflops")
    assert hardware.network == load_hardware()["cpu"].network
    assert source_in(path, "network").startswith("as in cpu.yaml: ")
    assert source_in(HARDWARE_FOLDER / "cpu.yaml", "network")
