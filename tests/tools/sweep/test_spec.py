"""tools.sweep: the runs of a spec, and every error in a spec is found before a run starts."""

import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.parallel.errors import PlanError
from meshwright.tools.sweep.__main__ import STUDIES, find_spec, main, read_overrides
from meshwright.tools.sweep.preflight import changed_runs, check_sweep, refuse_changed
from meshwright.tools.sweep.runner import (
    Attempt,
    catch_interrupts,
    outcome_of,
    run_once,
    state_of,
    write_attempt,
)
from meshwright.tools.sweep.spec import SweepRun, make_cells, read_spec
from meshwright.train.errors import ConfigError, LockError
from meshwright.train.fault_tolerance.run_lock import lock_folder
from tests.support.sweeps import write_run, write_spec


def cells_of(path: Path, **changes: Any) -> list[SweepRun]:
    return make_cells(read_spec(path, changes, {}))


def test_a_grid_is_every_combination_with_the_last_key_fastest(tmp_path: Path) -> None:
    grid = {"parallel.forward_prefetch": [0, 1], "parallel.reshard_after_forward": [True, False]}
    cells = cells_of(write_spec(tmp_path, grid=grid))
    assert [cell.name for cell in cells] == [
        f"forward_prefetch={n}_reshard_after_forward={flag}" for n in (0, 1) for flag in ("true", "false")
    ]
    assert cells[1].own == {"parallel.forward_prefetch": 0, "parallel.reshard_after_forward": False}
    assert cells[1].overrides["train.steps"] == 20


def test_the_arguments_of_a_factory_can_be_varied_and_set(tmp_path: Path) -> None:
    grid = {"model.args.width": [32, 64]}
    cells = cells_of(write_spec(tmp_path, grid=grid))
    assert [cell.own for cell in cells] == [{"model.args.width": 32}, {"model.args.width": 64}]
    assert read_overrides(["model.args.width=8"]) == {"model.args.width": "8"}
    with pytest.raises(ConfigError, match=r"unknown key model\.arg\.width"):
        read_overrides(["model.arg.width=8"])


def test_named_runs_are_multiplied_by_seeds_and_repeats_and_may_have_processes_of_their_own(
    tmp_path: Path,
) -> None:
    runs = {"a": None, "b": {"processes": 4, "nodes": 2, "parallel.tp": 2}}
    cells = cells_of(write_spec(tmp_path, runs=runs, seeds=[3, 5], repeat=2))
    assert [cell.name for cell in cells[:4]] == [
        "a_seed=3_turn=1",
        "a_seed=3_turn=2",
        "a_seed=5_turn=1",
        "a_seed=5_turn=2",
    ]
    assert len(cells) == 8
    assert [(cell.processes, cell.nodes) for cell in (cells[0], cells[7])] == [(2, 1), (4, 2)]
    assert cells[7].own == {"parallel.tp": 2, "run.seed": 5}


def test_names_are_folders_and_each_has_its_own(tmp_path: Path) -> None:
    grid = {"data.source": ["a/b:c", "a:b/c", "../../x"]}
    names = [cell.name for cell in cells_of(write_spec(tmp_path, grid=grid))]
    assert names == ["source=a_b_c", "source=a_b_c-2", "source=.._.._x"]
    (one,) = cells_of(write_spec(tmp_path, runs={"report.html": {}}))
    assert one.name == "report.html-2", "the sweep has a file of this name"


def test_all_mistakes_of_what_a_spec_says_are_in_one_report(tmp_path: Path) -> None:
    path = write_spec(
        tmp_path,
        overrides={"run.dir": "x", "train.stepz": 1},
        grid={"optim.lr": [1, 1]},
        runs={"a": {"parallel.forward_prefetc": 1, "processes": 0}},
        seeds=[1, 1],
    )
    with pytest.raises(ConfigError) as raised:
        read_spec(path, {}, {})
    for message in (
        "grid: optim.lr has a value twice",
        "seeds=[1, 1]",
        "runs: a: processes=0",
        "overrides: run.dir is set by the sweep",
        "Did you mean train.steps?",
        "Did you mean parallel.forward_prefetch?",
    ):
        assert message in str(raised.value), message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("confg: llama_debug.yaml", "unknown key confg. Did you mean config?"),
        ("config: llama_debug.yaml\nparallel.tp: 2", "put it under overrides"),
        (
            "config: llama_debug.yaml\ngrid: {optim.lr: []}",
            r"grid\.optim\.lr=\[\] must be a list of length >= 1",
        ),
        (
            "config: llama_debug.yaml\nfolder: ~nosuchuser/x",
            "folder='~nosuchuser/x' is no usable path .*: name another",
        ),
        (
            "config: llama_debug.yaml\nseeds: [1]\nruns: {a: {run.seed: 2}}",
            "runs: a: run.seed .*seeds.*remove one",
        ),
    ],
)
def test_a_wrong_file_is_one_message(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path / "wrong.yaml", {}, {})


def test_more_runs_than_a_sweep_may_have_are_counted_and_not_made(tmp_path: Path) -> None:
    keys = ("optim.lr", "train.steps", "metrics.every", "train.seq_len", "optim.eps")
    grid = {key: list(range(90)) for key in keys}
    for spec, count in (({"repeat": 10**15}, 10**15), ({"grid": grid}, 90**5)):
        with pytest.raises(ConfigError, match=f" {count} runs, more than 1000.*grid.*repeat"):
            cells_of(write_spec(tmp_path, **spec))


def test_overrides_of_the_command_line_are_passed_on_as_they_stand(tmp_path: Path) -> None:
    given = read_overrides(["data.source=2024_01", "run.seed=3"])
    (one,) = check_sweep(read_spec(write_spec(tmp_path), {}, given), local=True)
    assert (one.config.data.source, one.config.run.seed) == ("2024_01", 3)
    assert "--data.source=2024_01" in one.arguments
    with pytest.raises(ConfigError, match=r"--override: run\.seed .*seeds"):
        read_spec(write_spec(tmp_path, seeds=[1]), {}, given)


def test_a_folder_is_one_specs(tmp_path: Path) -> None:
    mine, other = write_spec(tmp_path), write_spec(tmp_path, "other", folder=str(tmp_path / "study"))
    main([str(mine), "--report"])
    for what in ("--report", "--dry-run"):
        with pytest.raises(ConfigError, match=r"study .*the sweep study, not of other: .*--folder"):
            main([str(other), what])
    main([str(mine), "--report"])


def test_what_is_left_to_do_is_neither_running_nor_failed_nor_refused_before(
    tmp_path: Path, capsys: Any
) -> None:
    path, study = write_spec(tmp_path, runs={"going": {}, "broken": {}, "fixed": {}}), tmp_path / "study"
    write_run(study / "going", [], "running")
    write_run(study / "broken", [], "failed", reason="DataError: no text")
    (study / "fixed").mkdir()
    write_attempt(study / "fixed", Attempt("refused", reason="PlanError: tp"))
    assert state_of(study / "fixed") == ("waiting", "")
    main([str(path), "--slurm"])
    going, broken, fixed = capsys.readouterr().out.splitlines()
    assert re.match(r"# going: running .*status\.json.* sbatch --job-name=going ", going)
    assert re.match(r"# broken: failed: DataError: no text .*--retry-failed", broken)
    assert fixed.startswith("sbatch --job-name=fixed ")
    main([str(path), "--dry-run", "--retry-failed"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines] == ["going", "broken", "fixed"]


def test_what_nohup_ignores_stays_ignored_and_the_rest_is_heard() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with catch_interrupts() as interrupts:
            for number in (signal.SIGHUP, signal.SIGTERM):
                os.kill(os.getpid(), number)
            assert interrupts == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_that_trains_on_without_its_sweep_is_named_with_its_process(tmp_path: Path) -> None:
    (one,) = check_sweep(read_spec(write_spec(tmp_path), {}, {}), local=True)
    one.folder.mkdir(parents=True)
    lock = lock_folder(one.folder)
    try:
        with pytest.raises(
            LockError, match=rf"^run is still training.*process {os.getpid()} on.*kill that process \(SIGTERM"
        ):
            run_once(one, [], lambda: None)
    finally:
        lock.release()


def test_wrong_values_of_all_runs_are_in_one_report_and_nothing_is_started(tmp_path: Path) -> None:
    path = write_spec(tmp_path, runs={"a": {"optim.lr": "fast"}, "b": {"train.seq_len": 100000}, "c": {}})
    with pytest.raises(ConfigError) as raised:
        check_sweep(read_spec(path, {}, {}), local=True)
    assert "a: optim.lr: must be a number, not fast" in str(raised.value)
    assert "b: train.seq_len=100000 must not exceed" in str(raised.value)
    assert not (tmp_path / "study").exists()


def test_a_refused_plan_is_a_result_unless_all_are(tmp_path: Path) -> None:
    planned = check_sweep(read_spec(write_spec(tmp_path, grid={"parallel.tp": [1, 3]}), {}, {}), local=True)
    assert [bool(one.refused) for one in planned] == [False, True]
    assert "tp=3" in planned[1].refused
    with pytest.raises(PlanError, match=r"the plan of every run is refused:\n  tp=3: .*tp=3"):
        check_sweep(read_spec(write_spec(tmp_path, grid={"parallel.tp": [3]}), {}, {}), local=True)


def test_the_command_line_wins_over_the_spec_but_not_over_what_is_varied(tmp_path: Path) -> None:
    path = write_spec(tmp_path, folder=None, grid={"parallel.tp": [1, 2]})
    spec = read_spec(
        path, {"config": "llama_1b.yaml", "processes": 4}, read_overrides(["train.steps=7", "optim.lr=1e-4"])
    )
    assert (spec.config, spec.processes, spec.folder) == ("llama_1b.yaml", 4, Path("sweeps/study-llama_1b"))
    assert (spec.overrides["train.steps"], spec.overrides["optim.lr"]) == ("7", "1e-4")
    with pytest.raises(ConfigError, match=r"--override parallel\.tp: grid varies this key: remove one"):
        read_spec(path, {}, read_overrides(["parallel.tp=2"]))
    with pytest.raises(
        ConfigError,
        match=r"--override train\.stepz=7: unknown key train\.stepz\. Did you mean train\.steps\?",
    ):
        read_overrides(["train.stepz=7"])
    with pytest.raises(ConfigError, match=r"--override train\.steps: .*key and a value.*train\.steps=100"):
        read_overrides(["train.steps"])


def test_a_run_that_was_begun_with_other_keys_is_noticed_by_its_config(tmp_path: Path) -> None:
    planned = check_sweep(read_spec(write_spec(tmp_path, grid={"parallel.tp": [1, 2]}), {}, {}), local=True)
    config = {
        "parallel": {"tp": 1},
        "train": {"steps": 30},
        "optim": {"lr": 0.003},
        "old": {"key": 1},
        "run": {"dir": "x"},
    }
    write_run(planned[0].folder, [], config=config)
    changed = changed_runs(planned, lambda folder: {"processes": 8} if folder == planned[1].folder else {})
    assert changed == {"tp=1": ["train.steps: 30 -> 20"], "tp=2": ["processes: 8 -> 2"]}
    with pytest.raises(
        ConfigError, match=r"(?s)2 runs in .* other keys.*tp=1: train.steps: 30 -> 20.*--folder"
    ):
        refuse_changed(changed, tmp_path)


def test_a_dry_run_prints_what_would_be_started_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_spec(
        tmp_path, runs={"one": {"processes": 1}, "two": {"data.source": "a b"}, "no": {"parallel.tp": 3}}
    )
    main([str(path), "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# no: PlanError")
    one, two = map(shlex.split, lines[1:])
    assert one[1:4] == ["-m", "meshwright.train.main", "--config=llama_debug.yaml"]
    assert two[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert "--data.source=a b" in two
    assert two[-1] == f"--run.dir={tmp_path / 'study' / 'two'}"
    assert not (tmp_path / "study").exists()


def test_slurm_jobs_have_nodes_and_only_slurm_takes_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_spec(tmp_path, runs={"far": {"nodes": 2, "processes": 8, "train.global_batch_size": 16}})
    main([str(path), "--slurm"])
    job = shlex.split(capsys.readouterr().out)
    assert job[:5] == ["sbatch", "--job-name=far", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8"]
    assert job[5:7] == ["configs/launch/slurm.sh", "llama_debug.yaml"]
    with pytest.raises(ConfigError, match=r"nodes is more than 1 for far.*--slurm"):
        main([str(path)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_study_plans_on_a_laptop_and_for_eight_gpus(path: Path) -> None:
    """The comment at the top of each study gives both commands."""
    text = re.sub(r" \\\n# *", " ", path.read_text())  # a command may continue on the next line
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert any(f"python -m tools.sweep {path.stem}" in line and "llama" not in line for line in head)
    (large,) = [
        line for line in head if f"tools.sweep {path.stem} --config llama_8b.yaml --processes 8" in line
    ]
    laptop = check_sweep(read_spec(find_spec(path.stem), {}, {}), local=True)
    given = read_overrides([part.strip() for part in large.split("--override ")[1:]])
    cluster = check_sweep(read_spec(path, {"config": "llama_8b.yaml", "processes": 8}, given), local=False)
    assert len(laptop) == len(cluster) >= 3
    assert not [run.refused for run in (*laptop, *cluster) if run.refused]
    assert len({yaml.safe_dump(dict(run.cell.own)) for run in laptop}) == len(laptop)


def test_a_status_from_before_does_not_speak_for_this_attempt(tmp_path: Path) -> None:
    write_run(tmp_path, [], state="finished")
    written_s = (tmp_path / "status.json").stat().st_mtime
    assert outcome_of(tmp_path, 0, written_s, "") == ("finished", "")
    assert outcome_of(tmp_path, 1, written_s + 60, "PlanError: no") == ("failed", "PlanError: no")
    state, reason = outcome_of(tmp_path, 0, written_s + 60, "bye")
    assert state == "failed"
    assert re.search(r"status\.json: bye", reason)
