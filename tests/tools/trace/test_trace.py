"""The command tools.trace: reading the stream, finding traces, its output, and user errors."""

import gzip
import json
import re
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.tools.trace.__main__ import main
from meshwright.tools.trace.reader import find_traces, read_events, read_header
from meshwright.train.errors import DataError
from tests.tools.trace.test_profiled_steps import CPU_EVENTS, write_trace

Output = pytest.CaptureFixture[str]
Tool = Callable[..., subprocess.CompletedProcess[str]]
FACTS = {"rank": 0, "world_size": 2, "first_step": 5, "steps": 1, "device_type": "cpu", "device_name": "CPU"}


def write_profile(run: Path, first_step: int, ranks: int = 1) -> Path:
    folder = run / "profile" / f"step-{first_step:08d}"
    folder.mkdir(parents=True)
    for rank in range(ranks):
        plain = write_trace(folder / "plain", CPU_EVENTS, meshwright=FACTS | {"rank": rank}, host_name="one")
        (folder / f"rank-{rank}.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
        (folder / f"rank-{rank}.compile.json").write_text("[]")
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_events_are_read_as_they_are(packed: bool, tmp_path: Path) -> None:
    """More events than the parser reads at a time; its chunks end inside two-byte characters."""
    events: list[dict[str, Any]] = [
        {"name": 'a "quoted" { [ name, é' + "é" * number, "ts": 12.5, "args": {"dims": [[1, 2], []]}}
        for number in range(1000)
    ]
    header = {"first": 123456, "distributedInfo": {"ranks": [{"deep": [1]}]}, "number": 17.5}
    document = {**header, "traceEvents": [*events, {}], "traceName": "x"}
    text = json.dumps(document, indent=1, ensure_ascii=False).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(text) if packed else text)
    assert list(read_events(path)) == [*events, {}]
    assert read_header(path) == header


def test_names_of_kernels_with_control_characters_and_broken_letters_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b'{"traceEvents": [{"name": "a\x01b\tc\xff"}]}')
    assert list(read_events(path)) == [{"name": "a b c\ufffd"}]


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_long_trace_is_read_in_little_memory(tmp_path: Path) -> None:
    """A trace of 9 MB."""
    path, line = tmp_path / "long.json", json.dumps(CPU_EVENTS[3])
    path.write_text('{"traceEvents": [' + line + (", " + line) * (9_000_000 // len(line)) + "]}")
    tracemalloc.start()
    events = sum(1 for _ in read_events(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert events > 9_000_000 / 200
    assert peak < 6e6


def replaced(old: bytes, new: bytes, count: int = -1) -> Callable[[bytes], bytes]:
    return lambda text: text.replace(old, new, count)


def with_header(json_text: bytes) -> Callable[[bytes], bytes]:
    return lambda text: b"{" + json_text + b", " + text[1:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], r"EOF \(before character 3,\d+, after \d\d events\)"),
        (replaced(b'"ph"', b'"ph', 1), r'\{"ph: "X".* \(before character [\d,]+, after 0 events\)'),
        (replaced(b"aten::mm", b"aten::\\udfff"), r"unreadable trace: 'utf-8' .* \(before character"),
        (
            lambda text: b'{"traceEvents": [5]}',
            r"'5' instead of an event \(before character 20.*rofile again",
        ),
        (
            lambda text: gzip.compress(text)[:-200],
            r"ended before the end-of-stream marker .*after \d+ events",
        ),
        (lambda text: gzip.compress(text)[:60] + b"x" * 99, "unreadable trace.*rofile again"),
        (replaced(b"ProfilerStep#", b"Step#"), r"no profiled step.*ProfilerStep#N.*--profile\.start=N"),
        (replaced(b'"args": {}', b'"args": {"Input Dims": 5}'), "unknown event.*'ph': 'X'"),
        (replaced(b'"dur": 10000', b'"dur": 0'), "step 5 has a duration of 0.*profile again"),
        (replaced(b'"args": {}', b'"args": ' + b"[" * 200_000, 1), r"nested too deeply \(before character"),
        (replaced(b"1000000000000000000", b'"x"'), "baseTimeNanoseconds is 'x'.*integer.*profile again"),
        (with_header(b'"meshwright": [1]'), r"meshwright is '\[1\]'.*an object"),
    ],
)
def test_a_broken_trace_is_one_line(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json", CPU_EVENTS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        main([str(path)])
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_the_newest_profile_is_taken_or_the_one_asked_for(tmp_path: Path) -> None:
    old, new = write_profile(tmp_path, 5), write_profile(tmp_path, 20, ranks=2)
    assert find_traces(tmp_path, None) == {0: new / "rank-0.json.gz", 1: new / "rank-1.json.gz"}
    assert find_traces(tmp_path, 5) == find_traces(old, None) == {0: old / "rank-0.json.gz"}
    assert find_traces(old / "rank-0.json.gz", None) == {0: old / "rank-0.json.gz"}
    with pytest.raises(DataError, match=r"--step=6.* 5, 20"):
        find_traces(tmp_path, 6)
    with pytest.raises(DataError, match=r"--rank=7 was not profiled.* 0, 1"):
        main([str(tmp_path), "--rank=7"])


def test_json_has_all_figures(tmp_path: Path, capsys: Output) -> None:
    write_profile(tmp_path, 5, ranks=2)
    main([str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"trace", "run", "steps", "advice", "communication", "slow_units", "kernels"}
    assert sum(found["shares"].values()) == 1.0
    assert found["seconds"] == {
        "compute": 0.00392,
        "overlapped": 0.0003,
        "exposed": 0.00224,
        "host": 0.0033,
        "idle": 0.00024,
    }
    facts = [found[key] for key in ("ranks", "step", "step_s", "clock")]
    assert facts == [[0, 1], 5, 0.01, "one host's clock"]
    gather = found["prefetch"][0]["gathers"][1]
    assert gather == {
        "unit": "layers.1",
        "issued_s": 0.00165,
        "started_s": 0.0017,
        "finished_s": 0.0027,
        "needed_s": 0.0016,
        "waited_s": 0.0011,
        "ahead": 0,
        "held_units": 0,
        "late": True,
        "depth": 1,
        "verdict": "late by 1.10 ms (depth 1 hides it)",
    }
    assert found["stragglers"][0]["collectives"] == 5
    assert "folder of its run" in found["plan"]["why_not"]


def test_the_text_begins_with_the_step_in_plain_words(tmp_path: Path, capsys: Output) -> None:
    trace = write_trace(tmp_path / "trace.json", CPU_EVENTS, meshwright=FACTS)
    main([str(trace), f"--picture={tmp_path / 'step.svg'}"])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == (
        "step 5: 10.0 ms: 42.2% computing (3.0% with hidden communication), 22.4% exposed communication, "
        "33.0% host-bound, 2.4% idle"
    )
    assert lines[1] == "rank 0 of 2, CPU"
    assert lines[4] == "What to do"
    assert re.match(r"  1\. 33\.0%: 3\.30 ms .*host-bound", lines[5])
    assert (
        "layers.1  forward  1.65    1.70     2.70      1.60    1.10    0      late by 1.10 ms (depth 1 "
        "hides it)" in lines
    )
    assert (tmp_path / "step.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("other", [{"world_size": 4}, {"first_step": 6}, {"rank": 2}])
def test_a_trace_of_another_run_is_left_out_and_named(
    other: dict[str, int], tmp_path: Path, capsys: Output
) -> None:
    folder = write_profile(tmp_path, 5, ranks=2)
    stale = f"rank-{other.get('rank', 1)}.json.gz"
    write_trace(folder / stale, CPU_EVENTS, meshwright=FACTS | {"rank": 1} | other)
    main([str(tmp_path)])
    ((name, value),) = other.items()
    reason = f"rank {value} .*world_size 2" if name == "rank" else f"{name} {value}, not {FACTS[name]}"
    printed = capsys.readouterr().out
    assert re.search(rf"another run: {re.escape(stale)} \({reason}\)", printed)
    assert ("Ranks at the collectives" in printed) == (name == "rank")


def test_a_byte_order_mark_and_half_a_surrogate_pair_do_no_harm(tmp_path: Path, capsys: Output) -> None:
    path = write_trace(tmp_path / "trace.json", CPU_EVENTS)
    text = path.read_bytes().replace(b"layers.2", b"layers.\\ud800")
    path.write_bytes(b"\xef\xbb\xbf" + text)
    main([str(path), f"--picture={tmp_path / 'step.svg'}"])
    assert "aten::mm" in capsys.readouterr().out
    assert "layers.?" in (tmp_path / "step.svg").read_text()


def test_as_a_command(tool: Tool, tmp_path: Path) -> None:
    done = tool("trace", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"DataError: {tmp_path}.* no profile.*--profile\.start=STEP.*--profile\.all_ranks=true.*\n",
        done.stderr,
    )
