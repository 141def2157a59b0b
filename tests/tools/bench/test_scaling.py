"""tools.bench scale: every case equals the output of tools.plan, and docs/scaling.md equals the newest
record."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.parallel.planner.timeline_plot import to_svg
from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.planner.scaling import blocks_of, pairs, recomputed, tables
from meshwright.tools.bench.planner.scaling_plot import draw_scaling
from meshwright.tools.plan.__main__ import main as plan_tool
from meshwright.train.errors import ConfigError
from tests.support.forks import ROOT
from tests.support.launch import TINY
from tests.support.pictures import assert_alike, assert_readable, svg_texts
from tests.support.plans import make_model, plan_of

Output = pytest.CaptureFixture[str]
KEYS = [
    *TINY[:5],
    "--parallel.activation_checkpoint=none",
    "--parallel.compile.enabled=false",
    "--train.micro_batch_size=1",
    "--train.seq_len=64",
]
SCALE = ["scale", "--config", "llama_debug", "--gpus=8..16", "--gpu", "h200", "--sequences-per-gpu=2", *KEYS]


def figures_of(capsys: Output, *arguments: str) -> dict[str, Any]:
    main([*SCALE, *arguments, "--json"])
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)["figures"]
    return figures


def test_both_ways_at_every_number_of_gpus(capsys: Output) -> None:
    figures = figures_of(capsys)
    assert figures["predicted"] is True
    cells = list(figures["cases"].values())
    assert [(cell["way"], cell["gpus"]) for cell in cells] == [
        ("planner", 8),
        ("fsdp", 8),
        ("planner", 16),
        ("fsdp", 16),
    ]
    for cell in cells:
        assert 0 < cell["mfu"] < 1
        choices = cell["choices"]
        data_parallel = choices["dp_replicate"] * choices["dp_shard"]
        assert data_parallel * choices["tp"] == cell["gpus"]
        assert choices["micro_batch_size"] * choices["accumulation"] * data_parallel == 2 * cell["gpus"]
    assert all(cell["choices"]["tp"] == cell["choices"]["dp_replicate"] == 1 for cell in cells[1::2])
    assert all(
        chosen["tokens_per_s_per_gpu"] >= fsdp["tokens_per_s_per_gpu"] * 0.99
        for chosen, fsdp in zip(cells[::2], cells[1::2], strict=True)
    )


def test_a_case_is_what_tools_plan_says(capsys: Output) -> None:
    cell = figures_of(capsys)["cases"]["llama_debug h200 16 planner"]
    plan_tool(
        [
            "--config=llama_debug",
            "--gpus=16",
            "--gpu=h200",
            "--parallel.plan=auto",
            "--train.global_batch_size=32",
            *KEYS,
            "--json",
        ]
    )
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    for key in ("step_time_s", "reserved_gib", "mfu", "exposed_share"):
        assert cell[key] == predicted[key]


def test_what_fits_nowhere_has_its_reason(tmp_path: Path, capsys: Output) -> None:
    main([*SCALE, "--train.micro_batch_size=3", f"--picture={tmp_path / 'empty.png'}"])
    out = capsys.readouterr().out
    assert "| h200 |" not in out
    assert "llama_debug, 8 h200, planner: train.global_batch_size=16 must be a multiple" in out
    assert "llama_debug, 16 h200, fsdp: train.global_batch_size=32 must be a multiple" in out


def test_a_row_for_each_number_of_gpus_and_a_picture(tmp_path: Path, capsys: Output) -> None:
    figures = figures_of(capsys, f"--picture={tmp_path / 'scale.svg'}")
    (table,) = tables(list(figures["cases"].values()))
    rows = [line for line in table.splitlines() if line.startswith("| h200 | ")]
    assert [row.split(" | ")[1] for row in rows] == ["8", "16"]
    cell = figures["cases"]["llama_debug h200 8 fsdp"]
    assert f"{cell['tokens_per_s_per_gpu']:,.0f} | {cell['mfu']:.1%} | {cell['exposed_share']:.1%}" in rows[0]
    drawn = (tmp_path / "scale.svg").read_text()
    assert {"llama_debug", "h200, planner's choice", "h200, FSDP alone", "8", "16"} <= set(svg_texts(drawn))


def test_what_cannot_be_begun() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.plan"):
        main(["scale", "--parallel.plan=manual"])
    with pytest.raises(ConfigError, match="there is no folder"):
        main([*SCALE, "--picture=/nowhere/scale.svg"])


def test_blocks_are_named_where_not_all_are_checkpointed() -> None:
    assert (
        recomputed({"activation_checkpoint": "selective", "activation_checkpoint_blocks": 12}, 32)
        == "selective, 12 of 32"
    )
    assert (
        recomputed({"activation_checkpoint": "selective", "activation_checkpoint_blocks": 32}, 32)
        == "selective"
    )
    assert recomputed({"activation_checkpoint": "full"}, 32) == "full"
    plan = plan_of(
        4, 1, 8, model=make_model(4), tp=2, activation_checkpoint="full", activation_checkpoint_blocks=1
    )
    assert recomputed(blocks_of(plan), 4) == "full, 1 of 4"
    assert recomputed({"activation_checkpoint": "none", "activation_checkpoint_blocks": 0}, 32) == "none"


def test_the_docs_are_what_the_newest_record_says() -> None:
    newest = sorted((ROOT / "tools" / "bench" / "records").glob("????-??-??-scale.json"))[-1]
    figures = json.loads(newest.read_text())["figures"]
    text = (ROOT / "docs" / "scaling.md").read_text()
    cells = list(figures["cases"].values())
    page = [
        line for line in text[: text.index("Made by")].splitlines() if line.startswith(("| h", "**llama"))
    ]
    made = [line for table in tables(cells) for line in table.splitlines()]
    assert [line for line in made if line in page] == page
    assert {cell["config"] for cell in cells} == {"llama_8b", "llama_70b", "llama_405b"}
    figure = draw_scaling(pairs(cells))
    assert_readable(figure)
    assert_alike((ROOT / "docs" / "scaling.svg").read_text(), to_svg(figure))
