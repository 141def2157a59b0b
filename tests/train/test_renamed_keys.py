"""Renamed keys: for one release the old names work too, with a warning that names the new one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.tools.eval import find_target, make_parser
from meshwright.tools.run_reader import read_config
from meshwright.tools.sweep.__main__ import read_overrides
from meshwright.tools.sweep.spec import read_spec
from meshwright.train.config import Config
from meshwright.train.config_parser import (
    RENAMED_KEYS,
    config_to_yaml,
    known_keys,
    load_config,
    parse_config,
    warn_once,
)
from meshwright.train.errors import ConfigError
from tests.support.forks import ROOT
from tests.support.launch import EAGER, run
from tests.support.sweeps import write_spec
from tests.support.tables import try_each

OLD_RUN = ROOT / "tests" / "backward_compatibility" / "run"
VALUES: dict[str, Any] = {
    "parallel.checkpointed_blocks": 2,
    "parallel.tp_parts": ["attention", "head"],
    "train.gc_every": 7,
    "data.held_out": 1e-4,
}


def assert_warnings(lines: list[str], *old_names: str) -> None:
    """There is one line for each old name, in this order, with both names and the deadline."""
    assert len(lines) == len(old_names), lines
    for line, old in zip(lines, old_names, strict=True):
        facts = ("config: ", f" {old} ", f" {RENAMED_KEYS[old]};", "next release")
        assert [fact for fact in facts if fact not in line] == [], line


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    sections: dict[str, Any] = {}
    for key, value in keys.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return sections


def by_new_names(keys: dict[str, Any]) -> dict[str, Any]:
    return {RENAMED_KEYS[old]: value for old, value in keys.items()}


def as_overrides(keys: dict[str, Any]) -> list[str]:
    return [f"--{key}={json.dumps(value)}" for key, value in keys.items()]


def parsed(arguments: list[str]) -> tuple[Config, list[str]]:
    """The config, and the warnings about old names."""
    lines = list[str]()
    config = parse_config(arguments, warn=lines.append)
    return config, lines


def assert_both_names_refused(message: str, place: str, old: str, new: str) -> None:
    facts = (f"{old} is the old name of {new}", "both", f"remove {old}")
    assert message.startswith(f"{place}: ")
    assert [fact for fact in facts if fact not in message] == [], message


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(arguments, warn=lambda line: None)
    return str(error.value)


def write(folder: Path, keys: dict[str, Any], name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(json.dumps(keys))  # JSON is YAML
    return f"--config={path}"


def test_the_table_names_keys_of_the_same_section() -> None:
    """Reading nested files relies on it."""
    assert VALUES.keys() == RENAMED_KEYS.keys()
    for old, new in RENAMED_KEYS.items():
        assert old not in known_keys()
        assert new in known_keys()
        assert old.rpartition(".")[0] == new.rpartition(".")[0]


@pytest.mark.parametrize("form", [dict, nested], ids=["dotted", "nested"])
def test_old_names_in_a_file_say_what_the_new_ones_say(form: Any, tmp_path: Path) -> None:
    others = {"train.steps": 9, "optim.lr": 3e-5, "optim.betas": [0.8, 0.9]}
    old, warnings = parsed([write(tmp_path, form({**VALUES, **others}))])
    new, no_warnings = parsed([write(tmp_path, form({**by_new_names(VALUES), **others}))])
    assert old == new
    assert (new.parallel.tp_modules, new.data.eval_fraction) == (("attention", "head"), 1e-4)
    assert_warnings(warnings, *RENAMED_KEYS)
    assert no_warnings == []


def test_old_names_on_the_command_line_say_what_the_new_ones_say() -> None:
    new, no_warnings = parsed(as_overrides(by_new_names(VALUES)))
    separated = [part for text in as_overrides(VALUES) for part in text.split("=", 1)]
    for arguments in (as_overrides(VALUES), separated):
        old, warnings = parsed(arguments)
        assert old == new
        assert_warnings(warnings, *RENAMED_KEYS)
    assert (new.parallel.activation_checkpoint_blocks, new.train.gc_every_steps, no_warnings) == (2, 7, [])


def test_a_file_is_written_with_new_names(tmp_path: Path) -> None:
    text = config_to_yaml(parsed([write(tmp_path, VALUES)])[0])
    assert not re.search(r"\b(checkpointed_blocks|tp_parts|gc_every|held_out)\b", text)
    assert "tp_modules" in text


def test_both_names_in_one_place_are_refused(tmp_path: Path) -> None:
    def check(old: str, value: Any) -> None:
        new = RENAMED_KEYS[old]
        mixed = {**nested({old: value}), new: value}
        for keys in ({old: value, new: value}, nested({old: value, new: value}), mixed):
            file = write(tmp_path, keys)
            assert_both_names_refused(refusal(file), str(tmp_path / "mine.yaml"), old, new)
        given = as_overrides({new: value, old: value})
        for message in (refusal(*given), refusal(f"--{old}", json.dumps(value), given[0])):
            assert_both_names_refused(message, "the command line", old, new)

    try_each(VALUES.items(), check)


def test_the_command_line_wins_over_the_file_by_either_name(tmp_path: Path) -> None:
    old, new = {"train.gc_every": 3}, {"train.gc_every_steps": 4}
    by_old, by_new = write(tmp_path, nested(old), "old.yaml"), write(tmp_path, nested(new), "new.yaml")
    for arguments, expected in (
        ([by_old, *as_overrides(new)], 4),
        ([by_new, *as_overrides(old)], 3),
        ([*as_overrides(old), by_new], 3),
        ([by_old, "--train.gc_every=5"], 5),
        ([by_old, by_new], 4),
        ([by_new, by_old], 3),
    ):
        config, lines = parsed(arguments)
        assert config.train.gc_every_steps == expected, arguments
        assert_warnings(lines, "train.gc_every")


def test_the_old_name_twice_is_the_new_one_twice(tmp_path: Path) -> None:
    file = write(tmp_path, {"train": {"gc_every": 1}, "train.gc_every": 2})
    assert re.search(r"mine\.yaml: train\.gc_every_steps .*twice.*: delete one", refusal(file))
    assert parsed(["--train.gc_every=1", "--train.gc_every=2"])[0].train.gc_every_steps == 2


def test_a_wrong_value_is_reported_under_the_new_name(tmp_path: Path) -> None:
    file = write(tmp_path, {"parallel": {"tp_parts": "attention"}})
    expected = "parallel.tp_modules: must be a list such as [first, second], not attention"
    assert refusal(file) == f"{tmp_path / 'mine.yaml'}: {expected}"
    assert refusal("--parallel.tp_parts=attention") == expected
    assert refusal("--data.held_out=1").startswith("data.eval_fraction=1")
    empty = write(tmp_path, {"train": {"gc_every": None}})
    assert "mine.yaml: train.gc_every_steps has no value" in refusal(empty)


def test_a_line_is_printed_once_per_process(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    warn_once.cache_clear()
    file = write(tmp_path, nested(VALUES))
    for _ in range(3):
        parse_config([file, *as_overrides(VALUES)])
    out, err = capfd.readouterr()
    assert out == ""
    assert_warnings(err.splitlines(), *RENAMED_KEYS)


@pytest.mark.parametrize("processes", [1, 2])
def test_of_a_run_rank_0_says_it_once_on_standard_error(processes: int, tmp_path: Path) -> None:
    """--print_config prints YAML with only the new names."""
    file = write(tmp_path, nested(VALUES))
    done = run(processes, file, "--train.gc_every=8", "--print_config")
    assert done.returncode == 0
    assert_warnings(sorted(done.stderr.splitlines()), *sorted(RENAMED_KEYS))
    if processes == 1:  # two processes print two documents
        printed = yaml.safe_load(done.stdout)
        assert printed["train"]["gc_every_steps"] == 8
        assert printed["parallel"]["activation_checkpoint_blocks"] == 2
    assert not re.search(r"\b(checkpointed_blocks|tp_parts|gc_every|held_out)\b", done.stdout)


def test_the_help_has_the_new_names_alone() -> None:
    text = run(1, "-h").stdout
    for old, new in RENAMED_KEYS.items():
        assert f"--{new} " in text
        assert f"--{old} " not in text


def test_a_tool_prints_one_json_document_on_standard_output() -> None:
    tp = ["--parallel.tp=2", "--parallel.tp_parts=[attention,feed_forward]"]
    plan = ["--config=llama_debug", "--gpus=2", "--train.global_batch_size=-1", *EAGER, "--json"]
    done = run(1, *plan, *tp, module="tools.plan")
    assert done.returncode == 0
    assert_warnings(done.stderr.splitlines(), "parallel.tp_parts")
    assert json.loads(done.stdout)["plan"]["mesh"]["tp"] == 2


def test_a_sweep_may_vary_a_key_by_its_old_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    warn_once.cache_clear()
    runs = {"a": {"parallel.tp_parts": ["head"]}, "b": {"parallel": {"tp_parts": ["attention"]}}}
    keys = {"overrides": {"data.held_out": 0.1}, "grid": {"train.gc_every": [1, 2]}, "runs": runs}
    given = read_overrides(["--parallel.checkpointed_blocks=1"])
    spec = read_spec(write_spec(tmp_path, **keys), {}, given)
    assert spec.grid == {"train.gc_every_steps": (1, 2)}
    assert spec.runs["b"] == {"parallel.tp_modules": ["attention"]}
    assert spec.overrides["data.eval_fraction"] == 0.1
    assert spec.overrides["parallel.activation_checkpoint_blocks"] == "1"
    assert_warnings(sorted(capfd.readouterr().err.splitlines()), *sorted(RENAMED_KEYS))

    both = {"grid": {"train.gc_every": [1, 2], "train.gc_every_steps": [3]}}
    with pytest.raises(ConfigError, match=r"grid: train\.gc_every is the old name of train\.gc_every_steps"):
        read_spec(write_spec(tmp_path, **both), {}, {})
    with pytest.raises(ConfigError, match=r"--override: train\.gc_every is the old name"):
        read_overrides(["train.gc_every=1", "train.gc_every_steps=1"])
    with pytest.raises(ConfigError, match=r"--override train\.gc_every_steps: grid varies this key"):
        read_spec(write_spec(tmp_path, grid={"train.gc_every": [1]}), {}, {"train.gc_every_steps": "1"})


def test_what_an_older_version_wrote_is_read_without_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    warn_once.cache_clear()
    text = (OLD_RUN / "config.yaml").read_text()
    assert all(f"{old.rpartition('.')[2]}:" in text for old in RENAMED_KEYS), "the file has the old names"
    config = load_config(OLD_RUN / "config.yaml")
    written = yaml.safe_load(text)
    assert config.train.gc_every_steps == written["train"]["gc_every"]
    assert config.parallel.tp_modules == tuple(written["parallel"]["tp_parts"])
    flat = read_config(OLD_RUN)
    assert flat["data.eval_fraction"] == written["data"]["held_out"]
    assert not flat.keys() & RENAMED_KEYS.keys()
    assert capfd.readouterr() == ("", "")


def test_the_evaluation_of_an_old_run_takes_a_key_by_its_old_name() -> None:
    """The user's value overrides the tool's own; only the override is warned about, not the file."""
    warnings = list[str]()
    options = make_parser().parse_known_args([str(OLD_RUN), "--parallel.checkpointed_blocks=2"])
    found = find_target(*options, warnings.append)
    assert found.config.parallel.activation_checkpoint_blocks == 2
    assert_warnings(warnings, "parallel.checkpointed_blocks")


def test_the_docs_and_shipped_configs_have_the_new_names_alone() -> None:
    """Except in records of measurements."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
    old = re.compile(r"\b(checkpointed_blocks|tp_parts|gc_every|data\.held_out)\b")
    outdated = {page.name for page in pages if page.stem != "measured" and old.search(page.read_text())}
    assert not outdated
