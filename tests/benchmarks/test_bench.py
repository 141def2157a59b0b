"""benchmarks.train measures a real run and records it without names; mistakes are found first."""

import json
import re
import tempfile
from pathlib import Path

import pytest

from benchmarks import cpu, fit, gpu, memory, train
from benchmarks.support.harness import measure, write_record
from benchmarks.train import make_figures, read_rows
from meshwright.tools.processes import BenchError
from tests.support.launch import EAGER, TINY, write_text
from tests.support.nested import run_nested


def test_train_measures_and_records_a_real_run(tmp_path: Path) -> None:
    arguments = ["--processes", "1", "--train.steps=2", *EAGER, *TINY, *write_text(tmp_path), "--json"]
    done = run_nested("benchmarks.train", *arguments)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    figures = document["figures"]
    assert figures["tokens_per_s_per_rank_best"] >= figures["tokens_per_s_per_rank"] > 0
    assert figures["startup_s"] > figures["step_times_s"][0] > 0
    assert len(figures["step_times_s"]) == 2
    assert figures["peak_memory_gib"] > 0.05
    assert figures["recompiles"] == 0
    assert 0 <= figures["data_wait_share"] <= 1

    first, second = (write_record(document, "train", tmp_path / "records") for _ in range(2))
    assert first != second
    record = json.loads(first.read_text())
    assert record["config"]["model"]["dim"] == 32
    assert {"python", "torch", "commit"} <= set(record["versions"])
    assert not re.search(r"""["'= ]/\w""", first.read_text()), "no absolute path"
    assert tempfile.gettempdir() not in first.read_text()


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_mistakes_are_found_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for benchmark, arguments, named in (
        (train, ["--model.dmi=3"], "model.dmi"),
        (train, ["--run.dir=x"], "run.dir"),
        (train, ["--parallel.dp_shard=3"], "dp_shard"),
        (cpu, ["--peer=BENCH_DIM"], "--peer"),
        (gpu, ["--tiny", "--model.dmi=3"], "model.dmi"),
    ):
        with pytest.raises(ValueError, match=re.escape(named)):
            measure(benchmark.MEASUREMENT, arguments)
    for benchmark, arguments, named in (
        (fit, ["--model.dim=3"], "--model.dim=3"),
        (memory, ["--record=a/b"], "--record: a/b"),
        (gpu, ["--tiny", "--only", "nothing like it"], "nothing like it"),
    ):
        with pytest.raises(SystemExit, match="2"):
            measure(benchmark.MEASUREMENT, arguments)
        assert named in capsys.readouterr().err


@pytest.mark.slow
def test_rates_are_of_the_complete_rows_after_the_fourth_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    rows = [
        {
            "step": i,
            "loss": 1.0,
            "tokens_per_s_per_gpu": float(i),
            "step_time_s": 2.0,
            "data_wait_s": 0.5 * (i > 4),
            "peak_memory_gib": 0.1 * i,
            "recompiles": 0,
        }
        for i in range(1, 8)
    ]
    lines = [{"step": 0, "eval_loss": 1.0}, *rows]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 8, "lo')
    assert read_rows(path) == rows
    figures = make_figures(rows, 3.0, "CPU")
    assert (figures.tokens_per_s_per_rank, figures.tokens_per_s_per_rank_best) == (6, 7)
    assert figures.data_wait_share == 0.25
    assert figures.peak_memory_gib == pytest.approx(0.7)
    with pytest.raises(BenchError, match="without a row"):
        make_figures([], 1.0, "CPU")
