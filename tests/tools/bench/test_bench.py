"""tools.bench measures a real run and records it without names, and leaves no processes running."""

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.harness import write_record
from meshwright.tools.bench.train_run import Setup, make_figures, read_rows, resolve
from meshwright.tools.processes import BenchError, find_running, run_to_end
from meshwright.train.errors import ConfigError
from tests.support.launch import EAGER, LIMIT_S, TINY, write_text
from tests.support.nested import run_nested


def test_train_measures_and_records_a_real_run(tmp_path: Path) -> None:
    arguments = ["--processes", "1", "--train.steps=2", *EAGER, *TINY, *write_text(tmp_path), "--json"]
    done = run_nested("tools.bench", "train", *arguments)
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
    for arguments in (
        ["train", "--model.dmi=3"],
        ["train", "--run.dir=x"],
        ["train", "--parallel.dp_shard=3"],
        ["cpu", "--peer=BENCH_DIM"],
        ["gpu", "--tiny", "--model.dmi=3"],
    ):
        with pytest.raises(ValueError, match=r"model\.dmi|run\.dir|dp_shard|--peer"):
            main(arguments)
    for arguments, named in (
        (["attention", "--model.dim=3"], "--model.dim=3"),
        (["accumulation", "--record=a/b"], "--record: a/b"),
        (["gpu", "--tiny", "--only", "nothing like it"], "nothing like it"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert named in capsys.readouterr().err
    with pytest.raises(ConfigError):
        resolve(Setup(1, 1, ["--data.verify=none"]))


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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_an_interrupted_command_ends_with_all_its_descendants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a descendant in its own session, such as torchrun's workers, and one that ignores SIGTERM."""
    pids, script = tmp_path / "pids", tmp_path / "script.py"
    script.write_text(
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN) if os.fork() else "
        f"os.setsid()\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(1000)"
    )

    def interrupt() -> None:
        if pids.exists() and pids.read_text().count("\n") == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.tools.processes.GRACE_S", 0.2)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(f"{sys.executable} -S {script}; true", dict(os.environ), tmp_path / "log", interrupt)
    left = [int(pid) for pid in pids.read_text().split()]
    deadline_s = time.monotonic() + LIMIT_S
    while find_running(left) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not find_running(left)
