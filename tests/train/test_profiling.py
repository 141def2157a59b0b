"""A window of profiled steps: annotations of its traces, overhead when it is off, and a profile that
fails."""

import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.train.config import ProfileConfig
from meshwright.train.data.sequences import Batch
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.profiling import ProfiledRun, StepProfiler
from meshwright.train.step import train_step
from tests.support.launch import EAGER, TINY, read_metrics, run, write_text
from tests.support.sharded import build_sharded
from tests.support.steps import step_done

UNITS = ["tok_embeddings", "layers.0", "layers.1", "head"]
WINDOW = ["--train.steps=3", "--profile.start=2", "--profile.steps=2", "--metrics.every=1"]


def profiled_run(processes: int, folder: Path, *keys: str) -> Path:
    """Train two micro batches a step, of which steps 2 and 3 are profiled; return the profile's folder."""
    batch = ["--train.micro_batch_size=1", f"--train.global_batch_size={2 * processes}"]
    data = write_text(folder)
    result = run(processes, *TINY, *data, *keys, *WINDOW, *batch, f"--run.dir={folder / 'run'}")
    assert result.returncode == 0, result.stderr
    profile = folder / "run" / "profile" / "step-00000002"
    assert f"profile: {profile}" in result.stdout
    assert [row["recompiles"] for step, row in read_metrics(folder / "run").items() if step] == [0] * 3
    return profile


@pytest.fixture(scope="module")
def recomputed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of an eager run that recomputes, on two ranks."""
    keys = [*EAGER, "--parallel.activation_checkpoint=full", "--profile.all_ranks=true"]
    return profiled_run(2, tmp_path_factory.mktemp("recomputed"), *keys)


def annotations(trace: Path) -> list[dict]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])


def check_ranks(folder: Path) -> None:
    """Every rank names every unit's work and communication."""
    files = [f"rank-{rank}.{kind}" for rank in (0, 1) for kind in ("compile.json", "json.gz")]
    assert sorted(path.name for path in folder.iterdir()) == files
    for rank in (0, 1):
        events = annotations(folder / f"rank-{rank}.json.gz")
        counts = Counter(event["name"] for event in events)
        assert [counts[f"ProfilerStep#{step}"] for step in (1, 2, 3, 4)] == [0, 1, 1, 0]
        for unit in UNITS:  # two steps of two micro batches
            assert counts[f"{unit} forward"] == counts[f"{unit} backward"] == 4
            assert counts[f"FSDP::all_gather_copy_out ({unit})"] >= 4
            assert counts[f"FSDP::post_backward_reduce ({unit})"] >= 4
        facts = json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()))["meshwright"]
        assert (facts["rank"], facts["world_size"], facts["first_step"], facts["steps"]) == (rank, 2, 2, 2)


@pytest.mark.sampled(3, day=2)
def test_every_rank_names_every_units_work_and_communication(recomputed: Path) -> None:
    check_ranks(recomputed)


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_compiled_run_names_them_too_and_its_graphs(tmp_path: Path) -> None:
    folder = profiled_run(2, tmp_path, "--parallel.compile.backend=aot_eager", "--profile.all_ranks=true")
    check_ranks(folder)
    graphs = json.loads((folder / "rank-0.compile.json").read_text())
    assert len(graphs) >= 2
    assert all("forward (" in graph["function"] and graph["total_s"] > 0 for graph in graphs)


@pytest.mark.sampled(3, day=1)
def test_a_units_range_lies_behind_its_gathering_and_before_its_reduction(recomputed: Path) -> None:
    events = annotations(recomputed / "rank-0.json.gz")
    ends = {e["name"]: e["ts"] + e["dur"] for e in reversed(events)}
    starts = {e["name"]: e["ts"] for e in reversed(events)}
    for unit in ("layers.0", "layers.1"):
        gathered = ends[f"FSDP::all_gather_copy_out ({unit})"]
        assert gathered <= starts[f"{unit} forward"] < starts[f"{unit} backward"]
    assert ends["layers.1 forward"] <= starts["FSDP::post_forward (layers.1)"]
    assert ends["layers.1 backward"] <= starts["FSDP::post_backward_accumulate (layers.1)"]


def test_a_frozen_embedding_has_no_backward_and_joined_modules_have_their_units_name(tmp_path: Path) -> None:
    keys = [*EAGER, "--parallel.unit_min_params=20000", "--train.freeze=[tok_embeddings.*]"]
    events = annotations(profiled_run(1, tmp_path, *keys) / "rank-0.json.gz")
    counts = Counter(e["name"] for e in events if e["name"].endswith(("forward", "backward")))
    joined = next(name.removesuffix(" forward") for name in counts if re.match(r"layers.* forward", name))
    assert counts[f"{joined} forward"] == counts[f"{joined} backward"] == 2 * counts["head forward"] == 8
    assert counts["tok_embeddings backward"] == 0


@pytest.fixture
def alone():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def profiler(config: ProfileConfig, folder: Path, warnings: list[str]) -> StepProfiler:
    subject = ProfiledRun(
        torch.nn.Linear(2, 2), SimpleNamespace(units=(), modules=()), torch.device("cpu"), range(1, 11)
    )
    return StepProfiler(config, folder, subject, warnings.append)


def steps(profiler: StepProfiler, count: int) -> list[Path]:
    """Do steps, and return the folders of traces."""
    for step in range(1, count + 1):
        profiler.before_step(step)
        torch.ones(2).sum()
        profiler.after_step(step_done(step))
    profiler.close()
    return [folder for folder in [profiler._folder] if any(folder.glob("*.json.gz"))]


@pytest.mark.parametrize(("start", "count"), [(1, 4), (2, 4), (4, 4), (3, 9)])
def test_a_window_becomes_one_trace_also_where_the_run_ends_in_it(
    alone, start: int, count: int, tmp_path: Path
) -> None:
    warnings: list[str] = []
    (folder,) = steps(profiler(ProfileConfig(start, 2), tmp_path / "profile", warnings), count)
    (trace,) = folder.glob("*.json.gz")
    names = [e["name"] for e in annotations(trace)]
    assert names == [f"ProfilerStep#{step}" for step in range(start, min(start + 1, count) + 1)]
    assert not any("warning" in line for line in warnings)


def test_a_window_that_will_not_come_is_one_warning(alone, tmp_path: Path) -> None:
    warnings: list[str] = []
    assert steps(profiler(ProfileConfig(11, 2), tmp_path / "profile", warnings), 3) == []
    (warning,) = warnings
    for fact in ("no profile", "profile.start=11 ", "1 to 10"):
        assert fact in warning


def test_a_profile_of_the_same_steps_takes_the_place_of_an_older_one(alone, tmp_path: Path) -> None:
    older = tmp_path / "profile" / "step-00000002"
    older.mkdir(parents=True)
    (older / "rank-7.json.gz").write_text("of a run of eight")
    (folder,) = steps(profiler(ProfileConfig(2, 1), tmp_path / "profile", []), 3)
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.compile.json", "rank-0.json.gz"]


@pytest.mark.parametrize("count", [2, 4])
def test_a_folder_that_cannot_be_made_is_one_warning(alone, count: int, tmp_path: Path) -> None:
    """Also if the loop ends within the window."""
    (tmp_path / "profile").write_text("a file")
    warnings: list[str] = []
    assert steps(profiler(ProfileConfig(2, 2), tmp_path / "profile", warnings), count) == []
    (warning,) = warnings
    for fact in (
        "no profile from step 2",
        str(tmp_path / "profile"),
        "NotADirectoryError",
        "the run continues",
    ):
        assert fact in warning


def test_a_profiler_that_is_off_adds_less_than_a_thousandth_of_the_calls_of_the_smallest_step(
    alone, tmp_path: Path
) -> None:
    """Counts calls of Python and C functions, not time. The step is eager, with two blocks and one micro
    batch."""
    run, tokens = build_sharded([*TINY, *EAGER]), torch.zeros(1, 32, dtype=torch.int64)
    off = StepProfiler(
        run.config.profile,
        tmp_path,
        ProfiledRun(run.model, run.plan, torch.device("cpu"), range(1, 11)),
        print,
    )

    done = step_done(1)

    def step(number: int) -> None:
        train_step(run.sharded, run.optimizer, [Batch(tokens, tokens)], 1.0, loss_of_forward)

    def profiled(number: int) -> None:
        off.before_step(number)
        off.after_step(done)

    step(1)
    in_step, in_profiler = count_calls(lambda: step(2)), count_calls(lambda: profiled(2))
    assert 2 <= in_profiler < in_step / 1000


def count_calls(work: Callable[[], None]) -> int:
    """Number of calls in `work`, without `work` itself."""
    calls: list[str] = []
    sys.setprofile(
        lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None
    )
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(calls) - 2  # without `work` and the call that ends the counting
