"""Keys that were renamed: for one release the old names say the same, with a line that names the new one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.tools.eval import find_subject, make_parser
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


def line_of(old: str) -> str:
    return f"config: {old} is now {RENAMED_KEYS[old]}; the old name goes with the next release"


LINES = [line_of(old) for old in RENAMED_KEYS]


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
    """The config, and the lines about old names."""
    lines = list[str]()
    config = parse_config(arguments, warn=lines.append)
    return config, lines


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(arguments, warn=lambda line: None)
    return str(error.value)


def write(folder: Path, keys: dict[str, Any], name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(json.dumps(keys))  # JSON is YAML
    return f"--config={path}"


def test_the_table_names_keys_of_the_same_section() -> None:
    """The reading of nested files takes the old section for the new one."""
    assert VALUES.keys() == RENAMED_KEYS.keys()
    for old, new in RENAMED_KEYS.items():
        assert old not in known_keys()
        assert new in known_keys()
        assert old.rpartition(".")[0] == new.rpartition(".")[0]


@pytest.mark.parametrize("form", [dict, nested], ids=["dotted", "nested"])
def test_old_names_in_a_file_say_what_the_new_ones_say(form: Any, tmp_path: Path) -> None:
    others = {"train.steps": 9, "optim.lr": 3e-5, "optim.betas": [0.8, 0.9]}
    old, said = parsed([write(tmp_path, form({**VALUES, **others}))])
    new, nothing = parsed([write(tmp_path, form({**by_new_names(VALUES), **others}))])
    assert old == new
    assert (new.parallel.tp_modules, new.data.eval_fraction) == (("attention", "head"), 1e-4)
    assert (said, nothing) == (LINES, [])


def test_old_names_on_the_command_line_say_what_the_new_ones_say() -> None:
    new, nothing = parsed(as_overrides(by_new_names(VALUES)))
    apart = [word for text in as_overrides(VALUES) for word in text.split("=", 1)]
    for arguments in (as_overrides(VALUES), apart):
        assert parsed(arguments) == (new, LINES)
    assert (new.parallel.activation_checkpoint_blocks, new.train.gc_every_steps, nothing) == (2, 7, [])


def test_a_file_is_written_with_new_names(tmp_path: Path) -> None:
    text = config_to_yaml(parsed([write(tmp_path, VALUES)])[0])
    assert not re.search(r"\b(checkpointed_blocks|tp_parts|gc_every|held_out)\b", text)
    assert "tp_modules" in text


def test_both_names_in_one_place_are_refused(tmp_path: Path) -> None:
    def check(old: str, value: Any) -> None:
        new = RENAMED_KEYS[old]
        named = rf"{old} is the old name of {new}, and both are given: leave {old} out"
        mixed = {**nested({old: value}), new: value}
        for keys in ({old: value, new: value}, nested({old: value, new: value}), mixed):
            file = write(tmp_path, keys)
            assert refusal(file) == f"{tmp_path / 'mine.yaml'}: {named}"
        given = as_overrides({new: value, old: value})
        assert refusal(*given) == f"the command line: {named}"
        assert refusal(f"--{old}", json.dumps(value), given[0]) == f"the command line: {named}"

    try_each(VALUES.items(), check)


def test_the_command_line_wins_over_the_file_by_either_name(tmp_path: Path) -> None:
    old, new = {"train.gc_every": 3}, {"train.gc_every_steps": 4}
    by_old, by_new = write(tmp_path, nested(old), "old.yaml"), write(tmp_path, nested(new), "new.yaml")
    line = [line_of("train.gc_every")]
    for arguments, wanted, said in (
        ([by_old, *as_overrides(new)], 4, line),
        ([by_new, *as_overrides(old)], 3, line),
        ([*as_overrides(old), by_new], 3, line),
        ([by_old, "--train.gc_every=5"], 5, line),
        ([by_old, by_new], 4, line),
        ([by_new, by_old], 3, line),
    ):
        config, lines = parsed(arguments)
        assert (config.train.gc_every_steps, lines) == (wanted, said), arguments


def test_the_old_name_twice_is_the_new_one_twice(tmp_path: Path) -> None:
    file = write(tmp_path, {"train": {"gc_every": 1}, "train.gc_every": 2})
    assert "train.gc_every_steps stands twice" in refusal(file)
    assert parsed(["--train.gc_every=1", "--train.gc_every=2"])[0].train.gc_every_steps == 2


def test_a_wrong_value_is_reported_under_the_new_name(tmp_path: Path) -> None:
    file = write(tmp_path, {"parallel": {"tp_parts": "attention"}})
    wrong = "parallel.tp_modules: must be a list, as [first, second], not attention"
    assert refusal(file) == f"{tmp_path / 'mine.yaml'}: {wrong}"
    assert refusal("--parallel.tp_parts=attention") == wrong
    assert refusal("--data.held_out=1").startswith("data.eval_fraction=1")
    empty = write(tmp_path, {"train": {"gc_every": None}})
    assert "mine.yaml: train.gc_every_steps has no value" in refusal(empty)


def test_a_line_is_printed_once_per_process(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    warn_once.cache_clear()
    file = write(tmp_path, nested(VALUES))
    for _ in range(3):
        parse_config([file, *as_overrides(VALUES)])
    out, err = capfd.readouterr()
    assert (out, err.splitlines()) == ("", LINES)


@pytest.mark.parametrize("processes", [1, 2])
def test_of_a_run_rank_0_says_it_once_on_standard_error(processes: int, tmp_path: Path) -> None:
    """What --print_config prints is YAML with the new names alone."""
    file = write(tmp_path, nested(VALUES))
    done = run(processes, file, "--train.gc_every=8", "--print_config")
    assert (done.returncode, sorted(done.stderr.splitlines())) == (0, sorted(LINES))
    if processes == 1:  # else two of them
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
    assert (done.returncode, done.stderr.splitlines()) == (0, [line_of("parallel.tp_parts")])
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
    assert sorted(capfd.readouterr().err.splitlines()) == sorted(LINES)

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
    assert all(f"{old.rpartition('.')[2]}:" in text for old in RENAMED_KEYS), "it has the old names"
    config = load_config(OLD_RUN / "config.yaml")
    written = yaml.safe_load(text)
    assert config.train.gc_every_steps == written["train"]["gc_every"]
    assert config.parallel.tp_modules == tuple(written["parallel"]["tp_parts"])
    flat = read_config(OLD_RUN)
    assert flat["data.eval_fraction"] == written["data"]["held_out"]
    assert not flat.keys() & RENAMED_KEYS.keys()
    assert capfd.readouterr() == ("", "")


def test_the_evaluation_of_an_old_run_takes_a_key_by_its_old_name() -> None:
    """It has a value of its own for the key, which the user's follows; of the file it says nothing."""
    said = list[str]()
    options = make_parser().parse_known_args([str(OLD_RUN), "--parallel.checkpointed_blocks=2"])
    found = find_subject(*options, said.append)
    assert found.config.parallel.activation_checkpoint_blocks == 2
    assert said == [line_of("parallel.checkpointed_blocks")]


def test_the_docs_and_shipped_configs_have_the_new_names_alone() -> None:
    """But for records of the past."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
    old = re.compile(r"\b(checkpointed_blocks|tp_parts|gc_every|data\.held_out)\b")
    found = {page.name for page in pages if page.stem != "measured" and old.search(page.read_text())}
    assert not found
