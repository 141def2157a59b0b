"""`tools.plan` with --gpu: figures, the planner's choice, the files it writes, and conflicting options."""

import dataclasses
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.parallel.planner.search import EQUAL
from meshwright.tools.cli import run_tool
from meshwright.tools.plan.__main__ import main
from meshwright.tools.plan.report import Target, make_report
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import run
from tests.support.simulated import TINY

Output = pytest.CaptureFixture[str]
EAGER = ["--config=llama_debug", *TINY, "--train.micro_batch_size=auto", "--parallel.compile.enabled=false"]
FREE = [*EAGER, "--train.global_batch_size=8"]
H100 = "--gpu=h100-sxm"
AUTO = [*FREE, H100, "--parallel.plan=auto"]
FIGURES = {
    "peak_memory_gib",
    "reserved_gib",
    "memory",
    "memory_at_peak",
    "step_time_s",
    "compute_s",
    "exposed_comm_s",
    "host_bound_s",
    "exposed_share",
    "exposed_by_lane_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "mfu_causal",
    "fits",
}
CHOICES = {
    "tp",
    "cp",
    "cp_exchange",
    "dp_replicate",
    "dp_shard",
    "activation_checkpoint",
    "activation_checkpoint_blocks",
    "reshard_after_forward",
    "reduce_gradients",
    "reshard_after_backward",
    "prefetch",
    "micro_batch_size",
}


def document(capsys: Output, *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def test_a_plan_of_ones_own_has_figures(capsys: Output) -> None:
    answer = document(capsys, *FREE, "--gpus=4", H100)
    predicted = answer["predicted"]
    assert set(answer) == {"plan", "reasons", "advice", "predicted"}
    assert set(predicted) == FIGURES
    assert predicted["step_time_s"] == pytest.approx(
        predicted["compute_s"] + predicted["exposed_comm_s"] + predicted["host_bound_s"]
    )
    assert predicted["exposed_comm_s"] == pytest.approx(sum(predicted["exposed_by_lane_s"].values()))
    assert predicted["tokens_per_s_per_gpu"] == pytest.approx(8 * 48 / 4 / predicted["step_time_s"])
    assert predicted["fits"] is True
    assert predicted["reserved_gib"] > predicted["peak_memory_gib"]
    assert 0 < predicted["mfu_causal"] < predicted["mfu"] < 1


def test_the_planner_says_what_it_chose_and_what_else_there_was(capsys: Output) -> None:
    answer = document(capsys, *AUTO, "--gpus=4", "--tokens=1e12")
    assert set(answer) == {"plan", "reasons", "advice", "predicted", "candidates", "time_to_train"}
    best, *others = answer["candidates"]
    assert all(set(row["choices"]) == CHOICES for row in answer["candidates"])
    assert best["step_time_s"] == pytest.approx(answer["predicted"]["step_time_s"])
    assert best["tokens_per_s_per_gpu"] == pytest.approx(answer["predicted"]["tokens_per_s_per_gpu"])
    assert best["choices"]["dp_shard"] == answer["plan"]["mesh"]["dp_shard"]
    assert best["choices"]["micro_batch_size"] == answer["plan"]["micro_batch_size"]
    rates = [row["tokens_per_s_per_gpu"] for row in others if row["fits"]]
    assert rates == sorted(rates, reverse=True)
    assert len(answer["reasons"]) > 3
    train = answer["time_to_train"]
    assert train["days"] == pytest.approx(1e12 / answer["predicted"]["tokens_per_s_per_gpu"] / 4 / 86400)
    assert train["gpu_hours"] == pytest.approx(24 * train["gpu_days"])
    assert train["gpu_days"] == pytest.approx(4 * train["days"])


def test_people_get_reasons_figures_and_runners_up(capsys: Output) -> None:
    main([*AUTO, "--gpus=4", "--tokens=1e12"])
    text = capsys.readouterr().out
    for part in (
        "mesh: dp_replicate",
        "\nwhy:\n- ",
        "memory       most GiB",
        "\ntokens/s per GPU ",
        "MFU, causal attention",
        "\n1e+12 tokens ",
        "GPU hours",
        "\nfits h100-sxm: ",
        "\nrunners-up:\ntp  dp_replicate",
    ):
        assert part in text
    runners_up = text.split("runners-up:\n")[1].split("\n\n")[0].splitlines()[1:]
    assert 0 < len(runners_up) <= 5
    without_prefetch = [
        tuple(cell for i, cell in enumerate(line.split()[:8]) if i != 6) for line in runners_up
    ]
    assert len(set(without_prefetch)) == len(runners_up)


def test_a_cpu_has_no_mfu_and_its_processes_share_its_memory(capsys: Output) -> None:
    answer = document(capsys, *FREE, "--gpus=4", "--gpu=cpu")
    assert answer["predicted"]["mfu"] is None
    main([*FREE, "--gpus=4", "--gpu=cpu"])
    text = capsys.readouterr().out
    assert f"of {load_hardware()['cpu'].memory_gib / 4:.1f} GiB" in text
    assert "unknown: no peak" in text


LARGE = [
    *EAGER,
    "--train.global_batch_size=-1",
    "--parallel.plan=auto",
    "--model.n_layers=8",
    "--model.dim=4096",
    "--model.n_heads=32",
    "--model.n_kv_heads=8",
    "--model.ffn_dim=16384",
    "--model.vocab_size=65536",
    "--model.max_seq_len=4096",
    "--train.seq_len=4096",
]


def test_more_memory_is_never_slower() -> None:
    """Except for ties, which the simpler plan wins."""
    config, hardware = parse_config(LARGE), load_hardware()["h100-sxm"]
    rates = []
    for memory_gib in (20.0, 28.0, 60.0, 160.0):
        report = make_report(config.job, Target(4, 4, dataclasses.replace(hardware, memory_gib=memory_gib)))
        assert report.prediction is not None
        assert report.prediction.reserved_bytes <= memory_gib * 2**30
        rates.append(report.prediction.tokens_per_s_per_gpu)
    assert all(more >= less * (1 - EQUAL) for less, more in pairwise(rates))
    assert rates[-1] > rates[0] * (1 + EQUAL)


def test_what_does_not_fit_comes_last_with_its_reason(capsys: Output) -> None:
    small = document(capsys, *LARGE, "--gpus=4", H100)
    too_large = [row for row in small["candidates"] if not row["fits"]]
    assert too_large
    for row in too_large:
        assert row["needed_gib"] > 79
        assert row["reason"].startswith("needs ")
        assert (row["step_time_s"], row["tokens_per_s_per_gpu"], row["exposed_share"]) == (None, None, None)
    fits = [row["fits"] for row in small["candidates"]]
    assert fits == sorted(fits, reverse=True)


def test_the_nearest_that_do_not_fit_are_shown(capsys: Output) -> None:
    main([*LARGE, "--gpus=4", H100])
    assert re.search(r"\ntoo large for 79\.1 GiB.* \d+:\ntp ", capsys.readouterr().out)


def test_the_fewest_gpus(capsys: Output) -> None:
    chosen = document(capsys, *LARGE, H100, "--min-gpus")
    gpus = chosen["min_gpus"]
    mesh = chosen["plan"]["mesh"]
    assert gpus == mesh["dp_replicate"] * mesh["dp_shard"] * mesh["tp"]
    assert chosen["predicted"]["fits"] is True
    manual = [key for key in LARGE if key != "--parallel.plan=auto"]
    manual_plan = document(capsys, *manual, H100, "--min-gpus")
    assert manual_plan["predicted"]["fits"] is True
    assert manual_plan["min_gpus"] >= gpus
    if manual_plan["min_gpus"] > 1:
        fewer = document(capsys, *manual, H100, f"--gpus={manual_plan['min_gpus'] // 2}")
        assert fewer["predicted"]["fits"] is False


def test_what_fits_nowhere_says_so() -> None:
    with pytest.raises(
        PlanError, match=r"--min-gpus: .*fit on 1 to 65536 h100-sxm.*train.seq_len.*plan=auto"
    ):
        main(
            [
                *EAGER,
                H100,
                "--min-gpus",
                "--model.dim=8192",
                "--model.ffn_dim=65536000",
                "--train.global_batch_size=-1",
            ]
        )


def test_the_saved_plan_is_the_one_shown_and_runs(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    main([*AUTO, "--gpus=4", f"--save={path}"])
    assert f"wrote {path}" in capsys.readouterr().out
    title, first_reason = path.read_text().splitlines()[:2]
    assert title == "# llama_debug on 4 h100-sxm"
    assert re.match(r"# \d+ plans ", first_reason)
    saved = load_plan(path)
    assert plan_run(parse_config([*FREE, f"--parallel.plan={path}"]).job, 4) == saved
    again = document(capsys, *FREE, H100, "--gpus=4", f"--parallel.plan={path}")
    auto = document(capsys, *AUTO, "--gpus=4")
    assert again["plan"] == auto["plan"]
    assert again["predicted"] == auto["predicted"]
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"--save={path} exists.*not overwritten: .*name.* remove"):
        main([*AUTO, "--gpus=4", f"--save={path}"])
    assert path.read_bytes() == before
    assert [child.name for child in tmp_path.iterdir()] == ["plan.yaml"]


def test_the_step_as_picture_and_trace(tmp_path: Path, capsys: Output) -> None:
    for suffix in ("svg", "png", "json"):
        main([*FREE, H100, "--gpus=4", f"--timeline={tmp_path / f'step.{suffix}'}", "--json"])
        json.loads(capsys.readouterr().out)
    assert ElementTree.parse(tmp_path / "step.svg").getroot().tag.endswith("svg")
    assert (
        "llama_debug on 4 h100-sxm: dp_replicate 1, dp_shard 4, tp 1" in (tmp_path / "step.svg").read_text()
    )
    with Image.open(tmp_path / "step.png") as image:
        image.load()
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" and event["dur"] > 0 for event in events)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of the arguments --gpus --min-gpus --sweep is required"),
        (["--gpus=4", "--min-gpus", H100], "--min-gpus: not allowed with argument --gpus"),
        (
            ["--gpus=4", "--parallel.plan=auto"],
            "parallel.plan=auto needs --gpu KIND.* a100-80gb",
        ),
        (["--gpus=4", "--parallel.plan=auto", "--gpu=h10"], "Did you mean h100"),
        (["--gpus=4", "--tokens=1e9"], "--tokens needs --gpu KIND.* a100-80gb"),
        (["--min-gpus"], "--min-gpus needs --gpu KIND"),
        (["--gpus=4", "--timeline=step.svg"], "--timeline needs --gpu KIND"),
        (["--gpus=4", "--timline=step.svg"], "unknown option --timline. Did you mean --timeline"),
        (["--gpus=4", "--sweeep"], "Did you mean --sweep"),
        (["--gpus=4", "--zzzz"], "unknown option --zzzz. See -h"),
        (["--gpus=4", H100, "--timeline=step.gif"], "must end in .svg or .png or .json"),
        (["--gpus=4", H100, "--timeline=nowhere/step.svg"], "there is no folder nowhere: create it"),
        (["--gpus=4", "--save=plan.txt"], "must end in .yaml or .yml"),
        (["--gpus=4", H100, "--compare"], "--gpu: .*--compare.*: remove"),
        (["--gpus=4", "--check", "--compare"], "--check: .*--compare.*: remove"),
        (["--sweep=gpus=1..4", H100, "--check"], "--check: .*--sweep.*--gpus.*: remove"),
        (
            ["--min-gpus", H100, "--parallel.plan=plan.yaml"],
            "--min-gpus: parallel.plan=plan.yaml .*one number of GPUs: use auto or manual",
        ),
        (["--gpus=64", H100, "--parallel.plan=auto"], "train.global_batch_size=8 must be a multiple"),
        (["--gpus=4", H100, "--parallel.plan=auto", "--parallel.tp=3"], "tp=3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_said(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, PlanError), match=message):
        main([*FREE, *options])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(ConfigError, match=r"step\.svg: cannot be written \(Permission denied\)"):
        main([*FREE, H100, "--gpus=4", f"--timeline={tmp_path / 'step.svg'}"])
    assert not list(tmp_path.iterdir())


def test_nothing_fits_leaves_with_2_and_one_message(capsys: Output) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_tool(lambda: main([*LARGE, H100, "--gpus=1", "--model.n_layers=48"]))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("PlanError: parallel.plan=auto: none of ")
    assert "Fits: " in captured.err


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_the_largest_model_on_the_most_gpus_is_planned_on_a_laptop() -> None:
    result = run(
        1,
        "tools.plan",
        "--config=llama_405b",
        "--gpus=4096",
        H100,
        "--parallel.plan=auto",
        "--json",
        module="tests.support.workers.peak_memory",
        timeout_s=500,
    )
    assert result.returncode == 0, result.stderr
    kib = int(result.stderr.splitlines()[-1])
    assert kib * 1024 < 2e9, f"{kib / 2**20:.2f} GiB"
    answer = json.loads(result.stdout)
    assert answer["predicted"]["fits"] is True
    tried = re.match(r"(\d+) plans ", answer["reasons"][0])
    assert tried
    assert int(tried[1]) > 1000
