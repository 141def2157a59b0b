"""tools/prepare_data.py as a command."""

import json
import os
import pty
import re
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwright.tools.cli import run_tool
from meshwright.tools.prepare_data import PlainLines, main, to_line
from meshwright.tools.processes import children, find_running
from meshwright.train.data.prepare import worker
from meshwright.train.data.prepare.prepare import Progress, prepare
from meshwright.train.data.prepare.worker import PrepareSettings
from meshwright.train.data.token_store import read_manifest
from meshwright.train.errors import DataError
from tests.support.forks import fork, run_module
from tests.support.launch import LIMIT_S, Launch, kill, started
from tests.support.nested import NESTED, run_nested
from tests.support.tables import try_each
from tests.support.texts import files_of, odd_texts, spawned_workers, train_bpe, write_jsonl


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("source") / "a.jsonl", odd_texts(2000, seed=11), field="body")


def test_it_prepares_and_reports_and_the_second_time_it_is_there(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, out = train_bpe(tmp_path / "small-bpe"), tmp_path / "out"
    settings = [f"--tokenizer={tokenizer.parent}", "--text_field=body", "--held_out=0.1", "--bos=none"]
    call = [str(source), str(out), *settings]
    first = run_nested("tools.prepare_data", *call)
    assert first.returncode == 0, first.stderr
    manifest = read_manifest(out)
    assert (manifest.tokenizer.bos, manifest.settings["held_out"]) == (None, 0.1)
    assert f"wrote {out}\n" in first.stdout
    assert "tokenizer small-bpe: 600 ids, stored as uint16\n" in first.stdout
    assert re.search(
        r"bytes per token; \d+ documents without text and 0 bad records were left out", first.stdout
    )
    assert re.search(rf"data\.source: {out}, model\.vocab_size: 640 \(.*600;", first.stdout)
    main([*call, "--json", "--workers=1", "--shard_mb=1"])
    figures = json.loads(capsys.readouterr().out)
    assert (figures["already_there"], figures["mb_per_s"]) == (True, None)
    shards = [shard for split in manifest.splits.values() for shard in split]
    tokens = sum(shard.tokens for shard in shards)
    assert sum(figures["tokens"].values()) == tokens
    held_out = sum(shard.documents for shard in manifest.splits["held_out"])
    assert figures["documents"]["held_out"] == held_out > 100
    assert figures["bytes_per_token"] == sum(shard.text_bytes for shard in shards) / tokens
    with pytest.raises(
        DataError, match=rf"{out} already exists .*held_out=0\.1: use another folder, or delete"
    ):
        main([*call, "--held_out=0.2"])


REFUSED = [
    (["nowhere", "out"], "DataError: data.source=nowhere: no such file, folder or glob"),
    (
        ["SOURCE", "out"],
        r"a\.jsonl, line 1: no field text .*'id', 'body'.*data\.text_field \(--text_field of",
    ),
    (
        ["SOURCE", "full", "--text_field=body"],
        "full already exists .*not made by tools.prepare_data.*: use another folder",
    ),
    (["prepared", "out"], r"prepared is .*prepared data: use data\.source=prepared"),
    (["SOURCE", "out", "--held_out=1"], "1 must be a number of at least 0 and less than 1"),
    (["SOURCE", "out", "--workers=0"], "0 must be an integer of at least 1"),
    (["SOURCE", "out", "--eos=</s>"], r"data\.eos=</s> .*data\.tokenizer=bytes"),
    (["SOURCE", "/"], "DataError: OUT_DIR=/ .*new folder: .* /tokens"),
    (["SOURCE", "a/.."], r"DataError: OUT_DIR=a/\.\. .*new folder: .* a/\.\./tokens"),
    (["SOURCE", "."], r"DataError: OUT_DIR=\. .*new folder: .* tokens"),
    (["SOURCE", ""], "DataError: OUT_DIR is empty"),
    (["", "out"], "DataError: SOURCE is empty"),
    (["SOURCE", "~nosuchuser/out"], "DataError: OUT_DIR='~nosuchuser/out' .*path"),
    (["s" * 5000, "out"], r"\(5,000 letters\)' .*path \(File name too long\)"),
]


def test_what_cannot_be_done_is_one_message(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file in (("full", "x"), ("prepared", "manifest.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    monkeypatch.chdir(tmp_path)

    def refused(call: list[str], pattern: str) -> None:
        with pytest.raises(SystemExit, match="2"):
            run_tool(lambda: main([str(source) if part == "SOURCE" else part for part in call]))
        errors = capsys.readouterr().err
        assert re.search(pattern, errors), errors
        assert "Traceback" not in errors

    try_each(REFUSED, refused)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "prepared"]


@pytest.mark.sampled(3, day=1)
def test_ctrl_c_ends_all_processes_at_once_and_the_next_start_goes_on(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", odd_texts(6_000, seed=12, mean_bits=60))
    tokenizer, out = train_bpe(tmp_path / "bpe"), tmp_path / "out"
    call = [str(source), str(out), f"--tokenizer={tokenizer}", "--workers=2", "--shard_mb=1"]
    results = tmp_path / ".out.partial" / "results"
    process = fork(prepare_with_a_worker_held, call, output=tmp_path / "output")
    preparing = Launch([process], tmp_path / "output")
    try:
        assert preparing.wait_until(lambda: list(results.glob("*.json"))), preparing.output()
        workers = spawned_workers(process.pid)
        assert all(signal.SIGINT in blocked_signals(worker) for worker in workers), (
            "Ctrl-C reaches only the parent, which then kills them"
        )
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the process group
        assert preparing.wait(LIMIT_S) == 130
    finally:
        kill(children(process.pid))
        process.kill()
    assert re.fullmatch(r"stopped: the same command continues .*\n", preparing.output())
    assert len(workers) == 2
    assert not find_running(workers)
    assert not out.exists()
    again = run_nested("tools.prepare_data", *call)
    assert again.returncode == 0
    assert re.search(r"continuing after \d+\.\d MB .*finished", again.stderr)
    settings = PrepareSettings(shard_bytes=2**20)
    prepare(str(source), str(tokenizer), "auto", "auto", tmp_path / "afresh", settings)
    assert files_of(out) == files_of(tmp_path / "afresh")


def blocked_signals(pid: int) -> set[int]:
    mask = int(re.search(r"^SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def prepare_with_a_worker_held(call: Sequence[str]) -> None:
    """Run the command in a separate process group. The second of its two workers is stopped from the start,
    so that it does not finish."""
    begin, started = worker._Worker.start, []

    def start(process: worker._Worker) -> None:
        begin(process)
        started.append(process.pid)
        if len(started) == 2:
            os.kill(process.pid, signal.SIGSTOP)

    os.setpgid(0, 0)
    worker._Worker.start = start
    run_module("tools.prepare_data", call)


def test_a_terminal_gets_a_bar(source: Path, tmp_path: Path) -> None:
    terminal, its_end = pty.openpty()
    call = ["tools.prepare_data", str(source), str(tmp_path / "out"), "--text_field=body", "--json"]
    files = {"output": tmp_path / "output", "errors": Path(os.ttyname(its_end))}
    with started(1, *call, **files, module=NESTED, TERM="xterm", COLUMNS="100") as preparing:
        seen, deadline_s = b"", time.monotonic() + LIMIT_S
        while preparing.running() or select.select([terminal], [], [], 0)[0]:
            assert time.monotonic() < deadline_s, seen
            if select.select([terminal], [], [], 0.05)[0]:
                seen += os.read(terminal, 4096)
    os.close(its_end)
    os.close(terminal)
    assert preparing.returncode == 0, seen
    figures = json.loads(preparing.output())
    assert figures["documents"]["train"] > 1000
    assert "━".encode() in seen
    assert b"MB/s" in seen or b"kB" in seen


def test_without_a_terminal_a_line_tells_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    lines, kept = PlainLines(), 10_000_000
    for elapsed_s in (0.0, 1.0, 11.0, 12.0, 22.0):
        lines(Progress(kept + int(elapsed_s * 2e6), 74_000_000, kept, 500, elapsed_s))
    assert capsys.readouterr().err.splitlines() == [
        "continuing after 10.0 MB that are already finished",
        "32.0 of 74.0 MB, 2.0 MB/s, 21 s left, 500 tokens",
        "54.0 of 74.0 MB, 2.0 MB/s, 10 s left, 500 tokens",
    ]
    assert "inf s left" in to_line(Progress(kept, 2 * kept, kept, 0, 1.0))
