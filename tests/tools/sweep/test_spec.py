"""tools.sweep: the runs of a spec, and every error in a spec is found before a run starts."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.tools.sweep.__main__ import main, read_overrides
from meshwright.tools.sweep.spec import STUDIES, SweepRun, find_spec, make_runs, read_spec
from meshwright.train.errors import ConfigError
from meshwright.train.planning.resolve import plan_run
from tests.support.sweeps import write_run, write_spec
from tests.support.tables import try_each


def runs_of(path: Path, *overrides: str, **changes: Any) -> list[SweepRun]:
    return make_runs(path, read_spec(path, changes, read_overrides(overrides)))


def test_a_grid_is_every_combination_with_the_last_key_fastest(tmp_path: Path) -> None:
    grid = {"parallel.forward_prefetch": [0, 1], "parallel.reshard_after_forward": [True, False]}
    runs = runs_of(write_spec(tmp_path, grid=grid))
    assert [run.name for run in runs] == [
        f"forward_prefetch={n}_reshard_after_forward={flag}" for n in (0, 1) for flag in ("true", "false")
    ]
    assert runs[1].own == {"parallel.forward_prefetch": 0, "parallel.reshard_after_forward": False}
    assert runs[1].config.train.steps == 20


def test_variants_are_repeated_as_a_whole_and_the_first_turn_keeps_its_name(tmp_path: Path) -> None:
    runs = {"a": None, "b": {"processes": 4, "parallel.tp": 2}}
    made = runs_of(write_spec(tmp_path, runs=runs, seeds=[3, 5]), repeat=2)
    names = ["a_seed=3", "b_seed=3", "a_seed=5", "b_seed=5"]
    assert [run.name for run in made] == names + [f"{name}_turn=2" for name in names]
    assert [(run.variant, run.processes, run.config.run.seed) for run in made[:4:3]] == [
        ("a", 2, 3),
        ("b", 4, 5),
    ]


def test_names_are_folders_and_each_variant_has_its_own(tmp_path: Path) -> None:
    grid = {"data.source": ["a/b:c", "a:b/c", "../../x"]}
    names = [run.name for run in runs_of(write_spec(tmp_path, grid=grid))]
    assert names == ["source=a_b_c", "source=a_b_c-2", "source=.._.._x"]
    (one,) = runs_of(write_spec(tmp_path, runs={"report.html": {}}))
    assert one.name == "report.html-2", "the sweep has a file of this name"


def test_all_mistakes_of_a_spec_are_in_one_report(tmp_path: Path) -> None:
    path = write_spec(
        tmp_path,
        overrides={"run.dir": "x", "train.stepz": 1},
        grid={"optim.lr": [1, 1]},
        runs={"a": {"parallel.forward_prefetc": 1, "processes": 0, "optim.lr": 2, "run.seed": 4}},
        seeds=[1, 1],
    )
    with pytest.raises(ConfigError) as raised:
        runs_of(path, "optim.lr=3")
    for message in (
        f"{path}:",
        "grid: optim.lr has a value twice",
        "seeds=[1, 1] must be a list of distinct",
        "runs: a: processes=0",
        "overrides: run.dir is set by the sweep",
        "Did you mean train.steps?",
        "Did you mean parallel.forward_prefetch?",
        "runs: a: run.seed is set by seeds too",
        "runs: a: optim.lr is set by the grid too",
        "grid: optim.lr is set by --override too",
    ):
        assert message in str(raised.value), message


def test_a_wrong_file_is_one_message(tmp_path: Path) -> None:
    def check(more: str, message: str) -> None:
        (tmp_path / "wrong.yaml").write_text(f"config: llama_debug.yaml\n{more}")
        with pytest.raises(ConfigError, match=message):
            runs_of(tmp_path / "wrong.yaml")

    rows = [
        ("overides: {}", r"wrong\.yaml: unknown key overides. Did you mean overrides\?"),
        ("parallel.tp: 2", "put it under overrides"),
        ("grid: {optim.lr: []}", r"grid\.optim\.lr=\[\] must be a list that is not empty"),
        ("folder: ~nosuchuser/x", "folder='~nosuchuser/x' is no usable path .*: name another"),
        ("best: speed", "best='speed' must be tokens_per_s, loss"),
        ("repeat: 1000000000000000", r"wrong\.yaml: 1000000000000000 runs, more than 1000.*grid.*repeat"),
        ("grid: {model.arg.width: [32]}", r"unknown key model\.arg\.width"),
    ]
    try_each(rows, check)


def test_wrong_values_of_all_runs_are_in_one_report_and_nothing_is_started(tmp_path: Path) -> None:
    path = write_spec(tmp_path, runs={"a": {"optim.lr": "fast"}, "b": {"train.seq_len": 100000}, "c": {}})
    with pytest.raises(ConfigError) as raised:
        main([str(path)])
    assert f"{path}: no run was started" in str(raised.value)
    assert "a: optim.lr=fast must be a finite number" in str(raised.value)
    assert "b: train.seq_len=100000 must not exceed" in str(raised.value)
    assert not (tmp_path / "study").exists()


def test_the_command_line_replaces_what_the_spec_does_not_vary(tmp_path: Path) -> None:
    path = write_spec(tmp_path, folder=None, grid={"parallel.tp": [1, 2]})
    run, _ = runs_of(path, "train.steps=7", "data.source=2024_01", config="llama_1b.yaml", processes=4)
    assert (run.folder.parent, run.processes) == (Path("sweeps/study-llama_1b"), 4)
    assert (run.config.train.steps, run.config.data.source) == (7, "2024_01")
    with pytest.raises(ConfigError, match=r"--override train\.steps: .*key and a value.*train\.steps=100"):
        read_overrides(["train.steps"])


def test_a_run_that_was_started_with_other_keys_is_found_by_its_config(tmp_path: Path) -> None:
    path = write_spec(tmp_path)
    write_run(tmp_path / "study" / "run", [], config={"train": {"steps": 30}, "run": {"dir": "x"}})
    with pytest.raises(ConfigError, match=r"other keys .*\(train.steps: 30 -> 20\): use another --folder"):
        main([str(path), "--dry-run"])


def test_a_dry_run_prints_the_commands_of_unfinished_runs(tmp_path: Path, capsys: Any) -> None:
    path = write_spec(tmp_path, runs={"one": {"processes": 1}, "two": {"data.source": "a b"}, "done": {}})
    write_run(tmp_path / "study" / "done", [])
    main([str(path), "--dry-run"])
    one, two = map(shlex.split, capsys.readouterr().out.splitlines())
    assert one[1:4] == ["-m", "meshwright.train.main", "--config=llama_debug.yaml"]
    assert two[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert "--data.source=a b" in two
    assert two[-1] == f"--run.dir={tmp_path / 'study' / 'two'}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_included_study_plans_on_a_laptop_and_for_eight_gpus(path: Path) -> None:
    """The comment at the top of each study gives both commands."""
    text = re.sub(r" \\\n# *", " ", path.read_text())  # a command may continue on the next line
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert any(f"python -m tools.sweep {path.stem}" in line and "llama" not in line for line in head)
    (large,) = [
        line for line in head if f"tools.sweep {path.stem} --config llama_8b.yaml --processes 8" in line
    ]
    laptop = runs_of(find_spec(path.stem))
    given = [part.strip() for part in large.split("--override ")[1:]]
    cluster = runs_of(path, *given, config="llama_8b.yaml", processes=8)
    assert len(laptop) == len(cluster) >= 3
    for run in (*laptop, *cluster):
        plan_run(run.config.job, run.processes)
    assert len({yaml.safe_dump(dict(run.own)) for run in laptop}) == len(laptop)
