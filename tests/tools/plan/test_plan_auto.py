"""`tools.plan` with --gpu: figures, the planner's choice, the files it writes, and conflicting options."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.serialize import load_plan, plan_to_dict
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.parallel.planner.search_space import Choices
from meshwright.tools.cli import run_tool
from meshwright.tools.plan.__main__ import main
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning import fit
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import run
from tests.support.plans import check_facts
from tests.support.simulated import TINY
from tests.support.tables import try_each

Output = pytest.CaptureFixture[str]
EAGER = ["--config=llama_debug", *TINY, "--train.micro_batch_size=auto", "--parallel.compile.enabled=false"]
FREE = [*EAGER, "--train.global_batch_size=8"]
H100 = "--gpu=h100-sxm"
AUTO = [*FREE, H100, "--parallel.plan=auto"]
ALWAYS = {"plan", "reasons", "advice", "predicted", "seconds"}
FIGURES = {
    "peak_memory_gib",
    "reserved_gib",
    "memory",
    "memory_at_peak",
    "step_time_s",
    "compute_s",
    "exposed_comm_s",
    "host_bound_s",
    "optimizer_s",
    "optimizer_share",
    "exposed_share",
    "exposed_by_lane_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "mfu_causal",
    "bound",
    "source",
    "errors",
    "fits",
}
CHOICES = {field.name for field in dataclasses.fields(Choices)}


def document(capsys: Output, *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def test_a_plan_of_ones_own_has_figures(capsys: Output) -> None:
    answer = document(capsys, *FREE, "--gpus=4", H100)
    predicted = answer["predicted"]
    assert set(answer) == ALWAYS
    assert set(predicted) == FIGURES
    assert predicted["step_time_s"] == pytest.approx(
        predicted["compute_s"] + predicted["exposed_comm_s"] + predicted["host_bound_s"]
    )
    assert predicted["exposed_comm_s"] == pytest.approx(sum(predicted["exposed_by_lane_s"].values()))
    assert predicted["tokens_per_s_per_gpu"] == pytest.approx(8 * 48 / 4 / predicted["step_time_s"])
    assert predicted["optimizer_share"] == pytest.approx(predicted["optimizer_s"] / predicted["step_time_s"])
    main([*FREE, "--gpus=4", H100, "--optim.name=some:function"])
    row = rf"optimizer +.*, {predicted['optimizer_share']:.1%} of the step, assumed to be AdamW's"
    assert re.search(row, capsys.readouterr().out)
    main([*FREE, "--gpus=4", H100, "--optim.name=muon"])
    assert re.search(r"  for all-to-all  +\d", capsys.readouterr().out)
    assert predicted["fits"] is True
    assert predicted["reserved_gib"] > predicted["peak_memory_gib"]
    assert 0 < predicted["mfu_causal"] < predicted["mfu"] < 1
    # of an H100 only the data sheet is known: every time is that of the bound by one factor
    bound, reached = predicted["bound"], load_hardware()["h100-sxm"].reached
    assert bound["step_time_s"] == pytest.approx(reached * predicted["step_time_s"])
    assert bound["tokens_per_s_per_gpu"] == pytest.approx(predicted["tokens_per_s_per_gpu"] / reached)
    assert [errors["rows"] for errors in predicted["errors"]] == ["h100-sxm", "clusters it has not seen"]


def test_kinds_are_listed_and_a_data_sheet_says_so_beside_a_speed(capsys: Output) -> None:
    main(["--gpu", "list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(load_hardware())
    kinds = document(capsys, "--gpu=list")["kinds"]
    compared = {row["kind"]: row["errors"] and row["errors"]["runs"] for row in kinds}
    assert (compared["b200"], compared["l40s"], compared["h200-kempnerforge"]) == (2, None, 7)
    sources = {row["kind"]: row["source"] for row in kinds}
    assert (sources["cpu"], sources["h200-kempnerforge"]) == ("measured here", "fitted to published runs")
    bounds = [kind for kind, source in sources.items() if source == "data sheet, an upper bound"]
    assert {"a100-40gb", "b200", "gb200", "l40s", "rtx-4090"} < set(bounds)
    for kind in bounds:
        main([*FREE, "--gpus=1", f"--gpu={kind}"])
        text = capsys.readouterr().out
        unseen = kind if compared[kind] else "GPUs it has not seen"
        assert re.search(rf"\ntokens/s per GPU .*, at most .*\n  errors +{unseen}: ", text)
        assert re.search(r"\n  from the data sheet +an upper bound; 78% of it is expected", text)


@pytest.mark.sampled(3, day=1)
def test_the_planner_says_what_it_chose_and_what_else_there_was(capsys: Output) -> None:
    answer = document(capsys, *AUTO, "--gpus=2", "--tokens=1e12", "--price=2.5")
    assert set(answer) == {*ALWAYS, "candidates", "time_to_train"}
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
    assert train["days"] == pytest.approx(1e12 / answer["predicted"]["tokens_per_s_per_gpu"] / 2 / 86400)
    assert train["gpu_hours"] == pytest.approx(24 * train["gpu_days"])
    assert train["gpu_days"] == pytest.approx(2 * train["days"])
    assert train["fewest_days"] < train["days"] < train["most_days"]
    assert train["cost"] == pytest.approx(2.5 * train["gpu_hours"])
    for row in answer["candidates"]:
        assert row["cost"] == pytest.approx(2.5 * 1e12 / row["tokens_per_s_per_gpu"] / 3600)
    assert answer["seconds"].keys() == {"tracing", "bounds", "memory", "timeline", "other"}
    assert min(answer["seconds"].values()) > 0


@pytest.mark.sampled(3, day=0)
def test_people_get_reasons_figures_and_the_best_plans_and_the_saved_plan_runs(
    capsys: Output, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    main([*AUTO, "--gpus=2", "--tokens=1e12", "--price=2", f"--save={path}"])
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
        f"wrote {path}",
    ):
        assert part in text
    table = [re.split("  +", line) for line in text.split("\n\n")[-2].splitlines()]
    assert table[0] == ["best plans", "chosen", "second", "third"]
    keys, figures = table[1:-7], {name: cells for name, *cells in table[-7:]}
    assert list(figures) == ["GiB", "step", "exposed", "tokens/s per GPU", "days", "GPU hours", "cost"]
    assert all(len(set(cells)) > 1 for _, *cells in keys)
    unlike = [row[1:] for row in keys if row[0] not in ("prefetch", "blocks")]
    assert len(set(zip(*unlike, strict=True))) == 3
    assert re.search(rf"\ncost +{figures['cost'][0]} \(.* at 2.00 per GPU hour\n", text)
    title, first_reason = path.read_text().splitlines()[:2]
    assert title == "# llama_debug on 2 h100-sxm"
    assert re.match(r"# \d+ plans ", first_reason)
    saved = load_plan(path)
    assert plan_run(parse_config([*FREE, f"--parallel.plan={path}"]).job, 2) == saved
    again = document(capsys, *FREE, H100, "--gpus=2", f"--parallel.plan={path}")
    assert again["plan"] == plan_to_dict(saved)
    assert re.search(rf"\ntokens/s per GPU +{again['predicted']['tokens_per_s_per_gpu']:,.0f}, at most", text)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"--save={path} exists.*not overwritten: .*name.* remove"):
        main([*AUTO, "--gpus=2", f"--save={path}"])
    assert path.read_bytes() == before
    assert [child.name for child in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_cpu_has_no_mfu_and_its_processes_share_its_memory(capsys: Output) -> None:
    main([*FREE, "--gpus=4", "--gpu=cpu"])
    text = capsys.readouterr().out
    assert f"of {load_hardware()['cpu'].memory_gib / 4:.1f} GiB" in text
    assert "unknown: no peak" in text


# 5 GiB per GPU on 4 GPUs, without activations; with few keys open, because each shape is traced
LARGE = [
    *EAGER,
    *("--train.global_batch_size=-1", "--parallel.tp=1", "--parallel.cp=1", "--parallel.dp_replicate=1"),
    *("--model.n_layers=4", "--model.dim=4096", "--model.n_heads=32", "--model.n_kv_heads=8"),
    *("--model.ffn_dim=16384", "--model.vocab_size=32768", "--model.max_seq_len=4096"),
    *("--train.seq_len=4096", "--parallel.plan=auto"),
]


@pytest.mark.sampled(3, day=2)
def test_what_does_not_fit_comes_last_with_its_reason(capsys: Output) -> None:
    deep = [*LARGE, "--model.n_layers=16", H100, "--gpus=1"]
    candidates = document(capsys, *deep)["candidates"]
    too_large = [row for row in candidates if not row["fits"]]
    assert too_large
    for row in too_large:
        assert row["needed_gib"] > 79
        assert row["reason"].startswith("needs ")
        assert (row["step_time_s"], row["tokens_per_s_per_gpu"], row["exposed_share"]) == (None, None, None)
    fits = [row["fits"] for row in candidates]
    assert fits == sorted(fits, reverse=True)
    main(deep)
    assert re.search(r"\n\d+ too large for 79\.1 GiB  smallest ", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_the_fewest_gpus(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "list_configs", list)  # test_fit.py has smaller models
    larger = [*LARGE, "--model.n_layers=24", "--parallel.activation_checkpoint=full", H100]
    chosen = document(capsys, *larger, "--min-gpus")
    mesh = chosen["plan"]["mesh"]
    assert chosen["min_gpus"] == mesh["dp_replicate"] * mesh["dp_shard"] * mesh["tp"] > 1
    assert chosen["predicted"]["fits"] is True
    manual = [key for key in larger if key != "--parallel.plan=auto"]
    manual_plan = document(capsys, *manual, "--min-gpus")
    assert manual_plan["predicted"]["fits"] is True
    assert manual_plan["min_gpus"] >= chosen["min_gpus"]
    fewer = document(capsys, *manual, f"--gpus={manual_plan['min_gpus'] // 2}")
    assert fewer["predicted"]["fits"] is False


ONE_BATCH = "--train.global_batch_size=-1"


def test_what_fits_nowhere_says_so() -> None:
    with pytest.raises(PlanError, match=r"fit on 1 to 65536 h100-sxm.*train.seq_len.*plan=auto"):
        main([*EAGER, H100, "--min-gpus", *("--model.dim=8192", "--model.ffn_dim=65536000"), ONE_BATCH])


def test_the_step_as_picture_and_trace(tmp_path: Path, capsys: Output) -> None:
    for suffix in ("svg", "png", "json"):
        main([*FREE, H100, "--gpus=4", f"--timeline={tmp_path / f'step.{suffix}'}", "--json"])
        json.loads(capsys.readouterr().out)
    assert ElementTree.parse(tmp_path / "step.svg").getroot().tag.endswith("svg")
    title = r"llama_debug on 4 h100-sxm: dp_replicate 1, dp_shard 4, tp 1; predicted MFU \d+\.\d%"
    assert re.search(title, (tmp_path / "step.svg").read_text())
    with Image.open(tmp_path / "step.png") as image:
        image.load()
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" and event["dur"] > 0 for event in events)
    assert len(list(tmp_path.iterdir())) == 3


WRONG: list[tuple[list[str], str]] = [
    ([], "--gpus --min-gpus --days --sweep"),
    (["--days=3", H100], "--days needs --tokens T"),
    (["--gpus=4", H100, "--price=2"], "--price needs --tokens T"),
    (["--gpus=4", H100, "--price=0", "--tokens=9"], "--price: 0 must be a number of at least"),
    (["--days=3", "--tokens=9", H100, "--parallel.plan=p.yaml"], "--days: ... p.yaml ... auto or manual"),
    (["--gpus=4", "--min-gpus", H100], "--min-gpus ... not allowed ... --gpus"),
    (["--gpus=4", "--parallel.plan=auto"], "parallel.plan=auto needs --gpu KIND ... a100-80gb"),
    (["--gpus=4", "--parallel.plan=auto", "--gpu=h10"], "Did you mean h100"),
    (["--gpu=list"], "--gpu list ... remove --config=llama_debug"),
    (["--gpus=4", "--gpu=h10"], "--gpu list"),
    (["--min-gpus"], "--min-gpus needs --gpu KIND"),
    (["--gpus=4", "--timeline=step.svg"], "--timeline needs --gpu KIND"),
    (["--gpus=4", "--timline=step.svg"], "unknown option --timline ... mean --timeline"),
    (["--gpus=4", H100, "--timeline=step.gif"], ".svg or .png or .json"),
    (["--gpus=4", H100, "--timeline=nowhere/step.svg"], "no folder nowhere: create it"),
    (["--gpus=4", "--save=plan.txt"], ".yaml or .yml"),
    (["--gpus=4", H100, "--compare"], "--gpu: ... --compare ... remove"),
    (["--sweep=gpus=1..4", H100, "--check"], "--check: ... --sweep ... --gpus ... remove"),
    (
        ["--min-gpus", H100, "--parallel.plan=p.yaml"],
        "--min-gpus: ... parallel.plan=p.yaml ... auto or manual",
    ),
    (["--gpus=64", H100, "--parallel.plan=auto"], "train.global_batch_size=8 must be a multiple"),
    (["--gpus=4", H100, "--parallel.plan=auto", "--parallel.tp=3"], "tp=3"),
]


def test_what_does_not_go_together_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(options: list[str], facts: str) -> None:
        with pytest.raises((ConfigError, PlanError)) as error:
            main([*FREE, *options])
        check_facts(str(error.value), facts)

    monkeypatch.chdir(tmp_path)
    try_each(WRONG, check)
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(3, day=1)
def test_nothing_fits_leaves_with_2_and_one_message(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "list_configs", list)  # test_fit.py has smaller models
    with pytest.raises(SystemExit, match="2"):
        run_tool(lambda: main([*LARGE, H100, "--gpus=1", "--model.n_layers=48"]))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("PlanError: parallel.plan=auto: none of ")
    assert "Fits: " in captured.err


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_the_largest_model_on_the_most_gpus_is_planned_on_a_laptop() -> None:
    arguments = ["--config=llama_405b", "--gpus=4096", H100, "--parallel.plan=auto", "--json"]
    result = run(1, "tools.plan", *arguments, module="tests.support.workers.peak_memory", timeout_s=500)
    assert result.returncode == 0, result.stderr
    kib = int(result.stderr.splitlines()[-1])
    assert kib * 1024 < 2e9, f"{kib / 2**20:.2f} GiB"
    answer = json.loads(result.stdout)
    assert answer["predicted"]["fits"] is True
    tried = re.match(r"(\d+) plans ", answer["reasons"][0])
    assert tried
    assert int(tried[1]) > 1000
