"""tools/bench: figures of real runs, peers' lines, records without names, and no processes left running."""

import getpass
import json
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.harness import RECORDS, make_document, without_names, write_record
from meshwright.tools.bench.speed import attention
from meshwright.tools.bench.speed.peers import (
    OURS,
    Contender,
    Figures,
    make_ratios,
    parse_bench_lines,
    parse_peers,
    run_rounds,
)
from meshwright.tools.bench.train_run import Setup, compile_seconds, make_figures, read_rows, resolve
from meshwright.tools.processes import BenchError, find_running, run_to_end
from meshwright.train.calibration.timing import AttentionShape
from meshwright.train.errors import ConfigError
from tests.support.forks import ROOT
from tests.support.launch import EAGER, TINY
from tests.support.nested import run_nested

Output = pytest.CaptureFixture[str]
FIGURES = {"tokens_per_s_per_rank": 1000.0, "peak_memory_gib": 0.5, "startup_s": 10.0}
LINES = """
some log of a trainer
BENCH rank=1 startup_to_first_step_s=26.50
[rank0]: BENCH rank=0 startup_to_first_step_s=26.54
BENCH rank=0 n=9 tok/s/rank median=1399 best=1841 step_ms median=1823 best=1112 cpu_ms/step=1110 peak_rss_GiB=0.92 loss=6.98
BENCH rank=1 n=9 tok/s/rank median=1401 best=1834 step_ms median=1820 best=1117 cpu_ms/step=1115 peak_rss_GiB=0.90 loss=6.98
"""  # noqa: E501


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON document of `train` with a tiny shape, two steps, without compilation."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "text").mkdir()
    for i in range(4):
        (folder / "text" / f"{i}.txt").write_text(f"text {i} " * 400)
    keys = [
        f"--data.source={folder / 'text'}",
        f"--data.cache_dir={folder / 'cache'}",
        "--data.eval_fraction=0.2",
    ]
    arguments = ["train", "--processes", "1", "--train.steps=2", *EAGER, *TINY, *keys, "--json"]
    done = run_nested("tools.bench", *arguments)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_train_measures_a_real_run(trained: dict[str, Any]) -> None:
    figures = trained["figures"]
    assert figures["tokens_per_s_per_rank_best"] >= figures["tokens_per_s_per_rank"] > 0
    assert figures["startup_s"] > figures["step_times_s"][0] > 0
    assert len(figures["step_times_s"]) == 2
    assert figures["peak_memory_gib"] > 0.05
    assert figures["recompiles"] == 0
    assert 0 <= figures["data_wait_share"] <= 1
    assert figures["device"] != "unknown"


def test_a_record_says_what_and_where_and_not_who(trained: dict[str, Any], tmp_path: Path) -> None:
    path, second = (write_record(trained, "train", tmp_path / "records") for _ in range(2))
    assert path.name == f"{trained['date']}-train.json"
    assert second.name == f"{trained['date']}-train-2.json"
    record = json.loads(path.read_text())
    assert set(record) == {"name", "date", "hardware", "versions", "command", "config", "figures"}
    assert set(record["hardware"]) == {"cpu", "cores", "gpu", "gpus"}
    assert {"python", "torch", "triton", "commit"} <= set(record["versions"])
    assert record["config"]["model"]["dim"] == 32
    assert record["config"]["run"]["dir"] == "RUN_DIR"
    assert "--data.source=text" in record["command"]
    assert not re.search(r"""["'= ]/\w""", path.read_text())
    assert str(tempfile.gettempdir()) not in path.read_text()


def test_a_wrong_name_of_a_record_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["accumulation", "--record=a/b"])
    assert "--record: a/b: the name of a record may contain only" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_kept_record_is_whole_and_the_docs_name_it(path: Path) -> None:
    record = json.loads(path.read_text())
    assert set(record) == {"name", "date", "hardware", "versions", "command", "config", "figures"}
    assert path.name.startswith(record["date"])
    assert path.name in (ROOT / "docs" / "measured.md").read_text()


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("WORK=/tmp/w/x bash /a/b/run.sh 2", "WORK=x bash run.sh 2"),
        ("cc -I/usr/include '/a b/c'", "cc -Iinclude 'a b/c'"),
        ("ls /home/alice ~bob/x /Users/carol/y:/opt/z/", "ls HOME x y:z"),
        ("ssh bob@node-7:/x node-77", "ssh USER@HOST:x node-77"),
        ("1399 tok/s/rank ours / peer ./run.sh ../x/y $HOME/z tools/bench", None),
    ],
)
def test_without_names(text: str, safe: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "node-7")
    monkeypatch.setattr(getpass, "getuser", lambda: "bob")
    assert without_names({"a": [text, 3, None]}) == {"a": [text if safe is None else safe, 3, None]}


def test_peers_lines_of_all_ranks() -> None:
    assert parse_bench_lines(LINES) == {
        "tokens_per_s_per_rank": 1400,
        "peak_memory_gib": 0.92,
        "startup_s": 26.54,
    }
    one = "BENCH tok/s/rank median=5 peak_memory_GiB=60.5\nBENCH startup_to_first_step_s=2\n"
    assert parse_bench_lines(one) == {"tokens_per_s_per_rank": 5, "peak_memory_gib": 60.5, "startup_s": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", r"BENCH line.*tok/s/rank median=\.\.\. or .*startup"),
        (LINES.replace("26.54", "soon"), "'soon'"),
        (LINES.replace("median=1399", "median=nan"), "'nan'"),
    ],
)
def test_peers_lines_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse_bench_lines(text)


@pytest.mark.parametrize(
    "texts", [["x"], ["=true"], ["a b=true"], ["a="], ["a=true", "a=true"], [f"{OURS}=true"]]
)
def test_peers_that_are_not_name_and_command(texts: list[str]) -> None:
    with pytest.raises(BenchError, match="--peer"):
        parse_peers(texts, threads=1, variables={})


def test_rounds_are_interleaved_and_caches_shared_as_asked(tmp_path: Path) -> None:
    """Peers are real shell commands; each writes its name and its cache folder to a file."""
    order = tmp_path / "order"
    report = (
        "echo BENCH startup_to_first_step_s=$OMP_NUM_THREADS; echo BENCH tok/s/rank median=500 peak_rss_GiB=1"
    )
    note = f"$TORCHINDUCTOR_CACHE_DIR >> {order}"
    peers = parse_peers([f"a=echo a {note}; {report}", f"b=echo b {note}; {report}"], threads=4, variables={})
    ours = Contender(OURS, lambda cache: FIGURES)
    for cache, names, folders in (("cold", "abab", 4), ("warm", "ababab", 2), ("keep", "abab", 0)):
        order.unlink(missing_ok=True)
        rounds, left_out = run_rounds([ours, *peers], 2, cache)
        assert not left_out
        lines = [line.split() for line in order.read_text().splitlines()]
        assert "".join(line[0] for line in lines) == names
        inherited = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        assert len({line[1] for line in lines if line[1:] and line[1] != inherited}) == folders
        assert [list(r) for r in rounds] == [[OURS, "a", "b"]] * 2
        assert rounds[0]["a"] == {"tokens_per_s_per_rank": 500, "peak_memory_gib": 1, "startup_s": 4}


def test_ratios_are_within_rounds() -> None:
    def scaled(by: float) -> Figures:
        return {name: value * by for name, value in FIGURES.items()}

    rounds = [{OURS: scaled(drift), "a": scaled(drift * 2), "b": scaled(drift / 2)} for drift in (1, 10, 3)]
    ratios = make_ratios(rounds)
    assert ratios == {figure: {"a": pytest.approx(0.5), "b": pytest.approx(2)} for figure in FIGURES}


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("echo working; echo disk is full >&2; exit 3", ["exit code 3", "disk is full"]),
        (
            "echo 'PlanError: no'; echo '  Fits: yes'; seq 99; exit 1",
            ["exit code 1", "PlanError: no\n    Fits: yes"],
        ),
        ("exit 1", ["exit code 1", "printed nothing"]),
        ("echo fine", ["no BENCH line"]),
    ],
)
def test_a_failing_peer_is_one_clear_error(command: str, parts: list[str]) -> None:
    with pytest.raises(BenchError) as error:
        parse_peers([f"titan={command}"], threads=1, variables={})[0].run({})
    message = str(error.value)
    assert message.startswith("--peer titan: ")
    assert all(part in message for part in parts)
    assert len(message.splitlines()) < 10


def test_mistakes_are_found_before_anything_starts() -> None:
    for arguments in (
        ["train", "--model.dmi=3"],
        ["train", "--run.dir=x"],
        ["train", "--parallel.dp_shard=3"],
        ["cpu", "--peer=BENCH_DIM"],
        ["cpu", "--peer=deaf=true"],
    ):
        with pytest.raises(ValueError, match=r"model\.dim|run\.dir|dp_shard|--peer"):
            main(arguments)
    with pytest.raises(SystemExit):
        main(["attention", "--model.dim=3"])
    with pytest.raises(ConfigError):
        resolve(Setup(1, 1, ["--data.verify=none"]))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_what_is_interrupted_ends_with_all_its_descendants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a descendant in its own session, such as torchrun's workers, and one that ignores SIGTERM."""
    pids = tmp_path / "pids"
    script = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN) if os.fork() else "
        f"os.setsid()\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(1000)"
    )
    (tmp_path / "script.py").write_text(script)

    def interrupt() -> None:
        if pids.exists() and pids.read_text().count("\n") == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.tools.processes.GRACE_S", 0.5)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(
            f"{sys.executable} -S {tmp_path / 'script.py'}; true",
            dict(os.environ),
            tmp_path / "log",
            interrupt,
        )
    deadline_s = time.monotonic() + 60
    while find_running(map(int, pids.read_text().split())) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not find_running(map(int, pids.read_text().split()))


def test_rows_still_being_written_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    path.write_text('{"step": 0, "eval_loss": 1.0}\n{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_rows(path) == [{"step": 1, "loss": 2.0}]
    with pytest.raises(BenchError, match="without a row"):
        make_figures([], 1.0, "CPU")


def test_rates_are_of_the_steps_after_the_fourth() -> None:
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
    figures = make_figures(rows, 3.0, "CPU")
    assert (figures.tokens_per_s_per_rank, figures.tokens_per_s_per_rank_best) == (6, 7)
    assert figures.data_wait_share == 0.25
    assert figures.peak_memory_gib == pytest.approx(0.7)


def test_attention_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """Both kernels are timed: one that does its work ten times takes longer than torch's, also on a busy
    machine."""

    def tenfold(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([attention.torch_attention(*inputs) for _ in range(10)]).sum(0)

    monkeypatch.setattr(attention, "SHAPES", (AttentionShape(2, 4, 2, 16, 256),))
    threads = torch.get_num_threads()
    main(["attention", "--rounds=1", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["config"] is None
    assert [row["dtype"] for row in document["figures"]["rows"]] == ["float32", "bfloat16"]
    for row in document["figures"]["rows"]:
        assert row["shape"] == "2x4x2x16x256"
        assert row["ratio"] == row["ours_s"] / row["torch_s"] > 0
    assert torch.get_num_threads() == threads
    monkeypatch.setattr(attention, "our_attention", tenfold)
    assert attention.compare(attention.SHAPES[0], "float32", rounds=2)["ratio"] > 1.2


def test_compile_time_is_the_first_step_beyond_a_later_one() -> None:
    assert compile_seconds([5.0, 1.0, 3.0, 2.0]) == 3.0
    assert compile_seconds([5.0]) == 5.0


def test_make_document_has_no_config_to_invent() -> None:
    assert make_document("x", ["attention"], None, {})["command"] == [
        "python",
        "-m",
        "tools.bench",
        "attention",
    ]
