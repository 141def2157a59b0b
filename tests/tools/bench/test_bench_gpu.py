"""tools.bench gpu on a CPU, tiny: every part works, a call goes on with the last one's record, a failure
costs one case."""

import dataclasses
import gzip
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.tools.bench import harness
from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.case_record import open_record
from meshwright.tools.bench.gpu.cases import (
    LLAMA_8B,
    TENSORWISE,
    TINY,
    TORCHTITAN,
    VARIANTS,
    Curves,
    EndToEnd,
    GpuCase,
    PeerRun,
    compare_losses,
    make_cases,
    measure_curves,
)
from meshwright.tools.bench.gpu.command import find_machine, in_turns, run_cases
from meshwright.tools.bench.gpu.parts import PARTS
from meshwright.tools.bench.gpu.peer_torchtitan import prepare, read_log
from meshwright.tools.bench.gpu.peers import measure_peer
from meshwright.tools.bench.gpu.report import part_table, summary
from meshwright.tools.bench.speed.kernel_table import KernelEvent, classify, covered, own_seconds, table_of
from meshwright.tools.processes import BenchError
from tests.support.launch import EAGER, write_text

Output = pytest.CaptureFixture[str]
CPU = torch.device("cpu")
PROFILED = "kernels: 1 layers, 1 x 1, none, weights bf16, moments bf16"
TOO_MANY = "1 layers, 1 x 8, full, weights fp32, moments fp32"
TITAN_LOG = """
[titan] - INFO - \x1b[31mstep:  {n}  \x1b[32mloss:  5.96  \x1b[33mmemory: 6{n}.50GiB(44%)  \x1b[34mtps: 1{n},146  \x1b[36mmfu
"""  # noqa: E501


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("part", PARTS)
def test_every_way_is_measured_or_says_which_device_it_needs(part: str) -> None:
    figures = PARTS[part](TINY, CPU)
    ways = {name: value for name, value in figures.items() if isinstance(value, dict)}
    assert ways or len(figures["products"]) == 4
    assert {value["reason"] for value in ways.values() if "reason" in value} <= {"runs on cuda only"}
    timings = [value.get("both", value) for value in ways.values() if "reason" not in value] + figures.get(
        "products", []
    )
    assert all(timing["median_s"] >= timing["best_s"] > 0 and timing["runs"] >= 5 for timing in timings)
    assert all(name in part_table(part, figures) for name in ways)


def test_the_chunked_loss_and_plain_cross_entropy_are_compared() -> None:
    figures = PARTS["head and loss"](TINY, CPU)
    assert figures["plain compiled"]["over_plain_compiled"] == 1
    assert figures["chunks of 16"]["over_plain_compiled"] == pytest.approx(
        figures["chunks of 16"]["median_s"] / figures["plain compiled"]["median_s"]
    )


@pytest.mark.parametrize(("peer", "checkpoint"), [("plain eager", "none"), ("plain compiled", "full")])
def test_plain_peers_train(peer: str, checkpoint: str) -> None:
    figures = measure_peer(peer, TINY, 2, checkpoint, CPU)
    assert figures["tokens_per_s_per_rank"] == pytest.approx(
        TINY.seq_len / sorted(figures["step_times_s"])[1]
    )
    assert len(figures["step_times_s"]) == 3


@pytest.mark.usefixtures("forked_commands")
def test_the_suite_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """A profiled run, a part, a case that cannot be planned and an absent peer; then the same again; then one
    of them again."""
    monkeypatch.setattr(harness, "RECORDS", tmp_path / "records")
    words = ["--only", PROFILED, "optimizer", TOO_MANY, "torchtitan: 2"]
    suite, keys = ["gpu", "--tiny", "--device=cpu", "--record=x"], [*EAGER, *write_text(tmp_path)]
    main([*suite, *words, *keys, "--train.global_batch_size=2", "--json"])
    document = json.loads(capsys.readouterr().out)
    (path,) = (tmp_path / "records").iterdir()
    cases = json.loads(path.read_text())["figures"]["cases"]
    assert cases == document["figures"]["cases"]
    assert document["figures"]["shape"] == "tiny"
    assert document["hardware"]["cpu"]
    assert {name: case["state"] for name, case in cases.items() if "titan" not in name} == {
        PROFILED: "measured",
        "optimizer": "measured",
        TOO_MANY: "failed",
    }
    assert "global_batch_size" in cases[TOO_MANY]["reason"]
    if find_spec("torchtitan") is None:
        assert (
            cases["torchtitan: 2 layers, selective"]["reason"]
            == "torchtitan is absent: torchtitan not installed here"
        )
    (run,) = cases[PROFILED]["runs"]
    assert run["tokens_per_s_per_rank"] > 0
    assert len(run["step_times_s"]) == 5
    assert run["predicted"]["step_time_s"] > 0
    assert cases[PROFILED]["config"]["optim"]["state_dtype"] == "bfloat16"
    table = run["kernels"]
    assert table["by_class_s"]["GEMM"] > 0
    assert sum(table["by_class_s"].values()) + table["idle_s"] - table["beside_s"] == pytest.approx(
        table["step_s"]
    )

    before = path.read_bytes()
    main([*suite, *words, *keys])
    text = capsys.readouterr().out
    assert path.read_bytes() == before
    assert all(
        part in text
        for part in (f"failed: {TOO_MANY}", "RoundedAdamW", "ms a step", "not measured yet: attention")
    )

    main([*suite, "--again", "--only", TOO_MANY, *keys, "--json"])
    assert json.loads(capsys.readouterr().out)["figures"]["cases"][TOO_MANY]["state"] == "measured"
    with pytest.raises(BenchError, match="shape tiny, here it is 8b"):
        open_record("x", [], LLAMA_8B.name)


def test_when_time_is_over_nothing_is_begun(tmp_path: Path, capsys: Output) -> None:
    kept = open_record("late", [], TINY.name, tmp_path)
    run_cases([GpuCase("rooflines", "rooflines")], kept, find_machine("cpu", True, ()), time.monotonic() - 1)
    assert "time is over" in capsys.readouterr().err
    assert kept.cases == {}


def test_a_case_is_cut_off_and_not_recorded(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.tools.bench.gpu.command.GRACE_S", 0.0)
    kept = open_record("late", [], TINY.name, tmp_path)
    run_cases(
        [GpuCase("rooflines", "rooflines")], kept, find_machine("cpu", True, ()), time.monotonic() + 0.3
    )
    assert "cut off" in capsys.readouterr().err
    assert kept.cases == {}


def test_mistakes_end_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="no case has that"):
        main(["gpu", "--tiny", "--device=cpu", "--only", "nothing like it"])
    with pytest.raises(ValueError, match=r"model\.dmi"):
        main(["gpu", "--tiny", "--device=cpu", "--model.dmi=3"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchError, match="--tiny"):
        main(["gpu"])


def test_the_8b_cases_begin_with_the_whole_model_and_cover_what_was_asked() -> None:
    cases = make_cases(LLAMA_8B)
    runs = [case.work for case in cases if isinstance(case.work, EndToEnd) and not case.profiled]
    assert len({case.name for case in cases}) == len(cases)
    assert runs[0] == EndToEnd(32, 1, 1, "none", "bfloat16", "bfloat16")
    assert {run.layers for run in runs} == {4, 8, 16, 32}
    assert {run.checkpoint for run in runs} == {"none", "full", "selective", "offload"}
    assert {run.variant for run in runs} == set(VARIANTS)
    for variant in ("", TENSORWISE):  # at every depth, three times
        alike = [
            case
            for case in cases
            if case.work
            == EndToEnd(
                case.work.layers if isinstance(case.work, EndToEnd) else 0,
                1,
                1,
                "none",
                "bfloat16",
                "bfloat16",
                variant,
            )
        ]
        repeated = {
            case.work.layers for case in alike if isinstance(case.work, EndToEnd) and case.repeats == 3
        }
        assert repeated == {4, 8, 16, 32}
    assert {(run.storage, run.state) for run in runs} >= {("float32", "float32"), ("float32", "bfloat16")}
    assert set(PARTS) <= {case.name for case in cases}
    rivals = {case.work.rival for case in cases if isinstance(case.work, PeerRun)}
    assert rivals <= set(runs)
    turns = [turn for turn, _ in in_turns(cases)]
    assert turns == sorted(turns)
    assert turns[-1] == 2


def test_curves_are_compared_in_means_and_step_by_step() -> None:
    apart = compare_losses([5.0] * 60 + [4.0] * 60, [5.0] * 60 + [4.5] + [4.0] * 59)
    assert apart["largest_of_a_step"] == 0.5
    assert apart["largest_difference"] == pytest.approx(0.5 / 50)
    assert (apart["last_difference"], apart["last_mean"], apart["steps"]) == (0.0, [4.0, 4.0], 120)


@pytest.mark.usefixtures("forked_commands")
def test_the_losses_of_two_runs_are_measured(tmp_path: Path) -> None:
    plain = EndToEnd(1, 1, 1, "none", "float32", "float32")
    work = Curves(dataclasses.replace(plain, variant="joined projections"), plain, 3)
    keys = [*EAGER, *write_text(tmp_path), "--run.device=cpu"]
    figures = measure_curves(tmp_path, work, TINY, keys, 1, lambda: None)
    assert figures["steps"] == 3
    assert figures["first"][0] == pytest.approx(figures["first"][1], abs=1e-3)


def test_repeats_spread_between_runs_and_one_run_within() -> None:
    def run(rate: float) -> dict[str, Any]:
        return {
            "tokens_per_s_per_rank": rate,
            "spread": 0.5,
            "peak_memory_gib": 1.0,
            "mfu": None,
            "mfu_causal": None,
        }

    assert summary({"runs": [run(100.0)]})["spread"] == 0.5
    three = summary({"runs": [run(90.0), run(110.0), run(100.0)]})
    assert (three["rate"], three["spread"], three["mfu"]) == (100.0, pytest.approx(0.2), None)


def test_torchtitans_log_and_folder(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(TITAN_LOG.format(n=n) for n in range(1, 8)))
    figures = read_log(log, 8192)
    assert (figures["tokens_per_s_per_rank"], figures["reserved_memory_gib"]) == (16146, 67.5)
    log.write_text("nothing")
    with pytest.raises(BenchError, match="tps"):
        read_log(log, 8192)
    folder = tmp_path / "titan"
    command = prepare(folder, "8b", 8, "none")
    assert command[-4:] == ["--module", "bench_torchtitan", "--config", "bench"]
    assert "make_config('8b', 8, 'none')" in (folder / "bench_torchtitan.py").read_text()
    assert json.loads((folder / "tests/assets/c4_test/data.json").read_text().splitlines()[0])["text"]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", "communication"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            "optimizer",
        ),
        ("_update", "optimizer"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "memory-bound"),
        ("aten::mm", "GEMM"),
        ("aten::mul", "memory-bound"),
    ],
)
def test_kernels_have_classes(kernel: str, kind: str) -> None:
    assert classify(kernel) == kind


def test_the_kernels_table_adds_up(tmp_path: Path) -> None:
    """Two streams over 100 us: 10 us with nothing, 20 us with two at once."""
    rows = [("nvjet", 7, 0, 40), ("ncclDevKernel", 20, 20, 40), ("triton_x", 7, 70, 30)]
    events = [
        {"ph": "X", "cat": "kernel", "name": n, "pid": 0, "tid": tid, "ts": ts, "dur": dur}
        for n, tid, ts, dur in rows
    ]
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 500}
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, operator]}).encode()))
    table = table_of(path, steps=2)
    in_us = {name: 1e6 * s for name, s in table["by_class_s"].items()}
    assert in_us == {
        "communication": pytest.approx(20),
        "optimizer": 0,
        "attention": 0,
        "GEMM": pytest.approx(20),
        "memory-bound": pytest.approx(15),
    }
    assert [1e6 * table[key] for key in ("step_s", "idle_s", "beside_s")] == pytest.approx([50, 5, 10])
    path.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(BenchError, match="no kernels"):
        table_of(path, steps=2)


def test_an_operator_does_not_count_what_it_calls() -> None:
    events = [
        KernelEvent("outer", (0, 0), 0.0, 10.0),
        KernelEvent("inner", (0, 0), 2.0, 6.0),
        KernelEvent("innermost", (0, 0), 3.0, 4.0),
        KernelEvent("other thread", (0, 1), 1.0, 3.0),
        KernelEvent("later", (0, 0), 10.0, 11.0),
    ]
    assert [own_s for _, own_s in own_seconds(events)] == [6.0, 3.0, 1.0, 2.0, 1.0]
    assert covered(events) == 11.0


def test_torchtitan_is_one_of_the_peers_of_the_whole_model() -> None:
    whole = [
        case.work
        for case in make_cases(LLAMA_8B)
        if isinstance(case.work, PeerRun) and case.work.peer == TORCHTITAN
    ]
    assert {work.layers for work in whole} == {8, 32}
