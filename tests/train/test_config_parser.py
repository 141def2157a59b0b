"""The configuration: finding files, strict parsing, overrides, help, and a YAML round trip."""

import dataclasses
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.models.config import RopeScaling
from meshwright.parallel.config import CompileConfig
from meshwright.train.config import Config
from meshwright.train.config_keys import known_keys, leaves, types
from meshwright.train.config_parser import (
    CONFIG_FOLDER,
    config_to_yaml,
    find_config,
    load_config,
    parse_config,
)
from meshwright.train.errors import ConfigError
from tests.support.plans import check_facts
from tests.support.tables import rows, try_each

DEBUG = CONFIG_FOLDER / "llama_debug.yaml"


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(arguments)
    return str(error.value)


def test_a_config_is_found_by_name_and_by_path_and_one_here_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llama_debug.yaml", "llama_debug", str(DEBUG)):
        for arguments in ([f"--config={name}"], ["--config", name]):
            config = parse_config(arguments)
            assert config.train.steps == yaml.safe_load(DEBUG.read_text())["train"]["steps"]
            assert config.run.dir == "runs/llama_debug"
    write(tmp_path, "train: {steps: 7}", "llama_debug.yaml")
    monkeypatch.chdir(tmp_path)
    assert parse_config(["--config=llama_debug.yaml"]).train.steps == 7
    assert find_config("llama_debug") == DEBUG, "a name without .yaml matches only configs/"


def test_the_folder_of_a_run_is_named_after_its_config_unless_given(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "train: {steps: 7}")).run.dir == "runs/mine"
    assert load_config(write(tmp_path, "run: {dir: here}")).run.dir == "here"
    assert parse_config(["--model.factory=theirs.mine:build"]).run.dir == "runs/mine"
    default = parse_config([])
    assert default == dataclasses.replace(Config(), run=dataclasses.replace(Config().run, dir="runs/llama"))


def test_overrides_win_over_the_file_key_by_key(tmp_path: Path) -> None:
    for line in (
        "--config=llama_debug --train.steps=5 --train.steps=7",
        "--train.steps 7 --config llama_debug",
    ):
        assert parse_config(line.split()).train.steps == 7
    path = write(
        tmp_path,
        "model: {rope_scaling: {factor: 9, original_max_seq_len: 77}}\n"
        "parallel: {compile: {backend: aot_eager}}",
    )
    keys = [f"--config={path}", "--model.rope_scaling.factor=4", "--parallel.compile.enabled=false"]
    config = parse_config(keys)
    assert config.model.rope_scaling == RopeScaling(factor=4.0, original_max_seq_len=77)
    assert config.parallel.compile == CompileConfig(enabled=False, backend="aot_eager")
    assert parse_config([f"--config={path}", "--model.rope_scaling=null"]).model.rope_scaling is None


WRITTEN = {  # scalars, and the number that YAML 1.2 makes of each
    "010": 10, "+5": 5, "0x10": 16, "0o17": 15, "2024": 2024, "1e3": 1000.0, "1.50": 1.5, ".5": 0.5,
    "3E-4": 3e-4, "1_000": None, "1:30": None, "2024-01-31": None, "no": None, "On": None, "y": None,
    "0b1": None, "1e": None, "true": None, "a b": None,
}  # fmt: skip
NUMBERS = [text for text, number in WRITTEN.items() if number]
TEXT = ("data.source", "data.text_field", "run.dir", "parallel.compile.cache_dir", "parallel.compile.mode")
FLOATS = ("optim.lr", "train.grad_clip", "model.rope_scaling.factor", "run.timeouts.step_s", "train.epochs")
INTEGERS = ("parallel.float8.min_dim", "parallel.loss_chunk_tokens", "parallel.dp_shard", "checkpoint.every")


def split_at_random(settings: dict[str, str], draws: random.Random) -> str:
    """One YAML mapping with the settings under dotted and nested keys, in random order."""
    nested: dict[str, Any] = {}
    for key, text in settings.items():
        *sections, last = re.sub(r"\.", lambda dot: draws.choice("./"), key).split("/")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = text

    def as_text(value: Any) -> str:
        if not isinstance(value, dict):
            return str(value)
        entries = draws.sample([*value.items()], len(value))
        return f"{{{', '.join(f'{name}: {as_text(each)}' for name, each in entries)}}}"

    return as_text(nested)


def test_a_file_however_split_and_the_command_line_set_what_is_written(tmp_path: Path) -> None:
    """Names of the mixture and of validation sets are text as written, and so are the values of TEXT."""
    draws = random.Random(os.environ["MESHWRIGHT_TESTS_SEED"])
    for _ in range(15):
        names = draws.sample([*WRITTEN], 8)
        settings = {
            **{key: draws.choice([*WRITTEN]) for key in TEXT},
            **{key: draws.choice(NUMBERS) for key in FLOATS},
            **{key: draws.choice(["010", "+5", "0x10", "0o17", "2024"]) for key in INTEGERS},
            "data.mixture": f"{{{', '.join(f'{name}: 1e3' for name in names[:4])}}}",
            "data.validation": f"{{{', '.join(f'{name}: 1e3' for name in names[4:])}}}",
        }
        text = split_at_random(settings, draws)
        config = load_config(write(tmp_path, text))
        assert config == parse_config([f"--{key}={value}" for key, value in settings.items()]), text
        flat = dict(leaves(dataclasses.asdict(config)))
        expected = {key: settings[key] if key in TEXT else WRITTEN.get(settings[key]) for key in settings}
        expected |= {"data.mixture": dict.fromkeys(names[:4], 1000.0)}
        expected |= {"data.validation": dict.fromkeys(names[4:], "1e3")}
        assert {key: flat[key] for key in expected} == expected, text
        assert load_config(write(tmp_path, config_to_yaml(config))) == config


def test_values_of_every_kind_reach_their_keys_and_read_back(tmp_path: Path) -> None:
    """From the command line; repr, because True == 1."""
    keys = {
        "optim.betas": "[0.8, 0.9]", "optim.schedule": "wsd", "optim.lr": "1e-7", "optim.eps": "1e-15",
        "parallel.dp_shard": "-1", "parallel.compile.enabled": "false", "train.micro_batch_size": "3",
        "train.epochs": "0.5", "data.cache_dir": "null", "data.source": "a: b # c", "run.dir": "2024-01-01",
        "model.tie_embeddings": "true", "checkpoint.resume": "**/*",
    }  # fmt: skip
    values = ((0.8, 0.9), "wsd", 1e-7, 1e-15, -1, False, 3, 0.5, None, "a: b # c", "2024-01-01", True, "**/*")
    for reshard, value in (("4", 4), ("false", False), ("auto", "auto")):
        given = {**keys, "parallel.reshard_after_forward": reshard}
        config = parse_config(["--config=llama_1b", *(f"--{key}={text}" for key, text in given.items())])
        flat = dict(leaves(dataclasses.asdict(config)))
        assert repr([flat[key] for key in given]) == repr([*values, value])
        assert repr(load_config(write(tmp_path, config_to_yaml(config)))) == repr(config)


# Keys with values of a wrong type or out of range -> the facts of the line that refuses each, from the
# command line and from a file.
VALUES = """
train.steps=many -> train.steps ... integer ... many
train.steps=3.5 -> train.steps ... integer ... 3.5
train.steps=true -> train.steps ... integer ... true
optim.lr=fast -> optim.lr=fast ... a finite number of at least 0
optim.betas=[0.9] -> optim.betas ... 2 values
optim.schedule=cosin -> optim.schedule ... cosin ... cosine
parallel.dp_shard=all -> parallel.dp_shard ... all ... integer
parallel.reshard_after_forward=maybe -> reshard_after_forward ... maybe ... true or false ... integer
parallel.activation_checkpoint=some -> parallel.activation_checkpoint ... some ... full
parallel.compile.enabled=maybe -> parallel.compile.enabled ... true or false ... maybe
model.tie_embeddings=3 -> model.tie_embeddings ... true or false ... 3
train.micro_batch_size=some -> train.micro_batch_size ... some ... auto
train.steps=null -> train.steps
parallel.dp_shard=null -> parallel.dp_shard
model.tie_embeddings=null -> model.tie_embeddings
data.source=null -> data.source
train=5 -> train
train=[] -> train
parallel.compile=true -> parallel.compile
train.seq_len=4096 -> train.seq_len=4096 ... model.max_seq_len=2048
model.n_kv_heads=3 -> model.n_kv_heads=3 ... model.n_heads=8
optim.lr=.inf -> optim.lr=.inf ... finite ... at least 0
optim.eps=0 -> optim.eps=0 ... greater than 0
optim.betas=[0.9, 1.0] -> optim.betas[1]=1.0 ... less than 1
optim.decay_ratio=2 -> optim.decay_ratio=2 ... at least 0 and at most 1
train.epochs=.inf -> train.epochs=.inf ... finite ... at least 0
run.device=tpu -> run.device=tpu must be auto, cpu or cuda
data.eval_fraction=1 -> data.eval_fraction=1 ... at least 0 and at most 0.999
data.verify=some -> data.verify=some must be full or size
data.mixture={a: 0} -> data.mixture.a=0 ... finite ... greater than 0
data.mixture={/a: 0.7, /a: 0.3} -> twice
data.validation={a: ''} -> data.validation ... needs a name and a source
"""


def test_a_wrong_value_is_one_line_with_key_value_and_rule(tmp_path: Path) -> None:
    def check(setting: str, facts: str) -> None:
        key, value = setting.split("=", 1)
        *sections, leaf = key.split(".")
        text = "".join(f"{s}: {{" for s in sections) + f"{leaf}: {value}" + "}" * len(sections)
        for argument in (f"--{setting}", f"--config={write(tmp_path, text)}"):
            message = refusal(argument)
            check_facts(message, facts)
            assert "<class" not in message
            assert "\n" not in message

    try_each(rows(VALUES), check)
    assert "train.steps=1000" in refusal(f"--train.steps={10**400}")


LOWEST = {  # value of the keys that have bounds
    -1: "checkpoint.every",
    0: "run.seed run.threads run.max_hours data.skip_bad data.eval_fraction optim.lr optim.eps "
    "optim.weight_decay optim.warmup_steps optim.min_lr_ratio optim.decay_ratio train.epochs train.grad_clip "
    "train.z_loss train.max_skipped_steps train.eval_every train.eval_sequences train.gc_every_steps "
    "checkpoint.keep checkpoint.keep_every metrics.every profile.start run.timeouts.setup_s "
    "run.timeouts.data_s run.timeouts.first_step_s run.timeouts.step_s run.timeouts.evaluation_s "
    "run.timeouts.checkpoint_s",
    1: "run.grace_s data.prefetch train.steps train.seq_len profile.steps",
}


def test_a_number_below_its_bound_is_refused() -> None:
    for low, keys in LOWEST.items():
        for key in keys.split():
            assert f" {key}={low - 1} must be " in refusal(f"--{key}={low - 1}"), key


UNKNOWN = """
train.stepz -> train.steps
trian.steps -> train.steps
parallel.dp_shrad -> parallel.dp_shard
parallel.compile.backnd -> parallel.compile.backend
model.rope_scaling.facto -> model.rope_scaling.factor
grad_clip -> train.grad_clip
"""


def test_an_unknown_key_names_the_nearest_valid_one_and_its_place(tmp_path: Path) -> None:
    def check(key: str, nearest: str) -> None:
        facts = f"unknown key {key}  ... Did you mean {nearest}?".replace("  ", " ")
        path = write(tmp_path, f"{key}: 1\n")
        nested = write(tmp_path, f"{{{key.replace('.', ': {')}: 1{'}' * key.count('.')}}}", "nested.yaml")
        for arguments, place in (
            ([f"--{key}=1"], "the command line"),
            ([f"--{key}", "1"], "the command line"),
            ([f"--config={path}"], str(path)),
            ([f"--config={nested}"], str(nested)),
        ):
            check_facts(refusal(*arguments), f"{facts} ... {place}")

    try_each(rows(UNKNOWN), check)


def test_what_is_no_setting_is_refused(tmp_path: Path) -> None:
    for argument in ("train.steps=3", "-x", "something", "--train.steps"):
        assert argument in refusal(argument)
    assert "--train.steps" in refusal("--train.steps", "--optim.lr=1")
    for text in (
        "{train.steps: 1, train: {steps: 2}}",
        "{model.rope_scaling: null, model: {rope_scaling: {factor: 2}}}",
    ):
        assert "mine.yaml" in refusal(f"--config={write(tmp_path, text)}")
    for name in ("lama_debug.yaml", "llama_debug.yml", "folder/llama_debg.yaml"):
        check_facts(refusal(f"--config={name}"), f"{name} ... Did you mean llama_debug.yaml?")
        assert refusal("--config", name) == refusal(f"--config={name}")
    for key in (
        "run.dir",
        "train.steps",
        "data.mixture",
        "data.source",
        "data.cache_dir",
        "model.rope_scaling",
    ):
        assert key in refusal(f"--{key}="), "empty is not the default"
        for text in (f"{key}: #x", f"{key}:", f"{key}: ''"):
            assert key in refusal(f"--config={write(tmp_path, text)}"), text
    assert parse_config(["--run.dir=#x"]).run.dir == "#x"
    assert "train.steps" in refusal("--train.steps=#5")


def test_all_mistakes_of_a_file_are_in_one_report(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {stepz: 1, seq_len: many}\noptim: {lr: -1}\nparallel.tp: a")
    place, *lines = refusal(f"--config={path}").splitlines()
    assert place == f"{path}:"
    assert [re.split("[ =.]", line.strip())[0] for line in lines] == ["unknown", "train", "optim", "parallel"]


def test_help_is_a_page_and_on_request_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> list[str]:
        with pytest.raises(SystemExit) as left:
            parse_config(arguments)
        assert left.value.code == 0
        return capsys.readouterr().out.splitlines()

    page = printed("-h")
    assert len(page) <= 40
    assert max(map(len, page)) <= 80
    every = printed("-h", "all")
    given = [line.removeprefix("--") for line in every if line.startswith("--")]
    assert [line.partition("=")[0] for line in given] == [*types_with_help()]
    assert printed("--help", "--train.steps")[0] == "--train.steps=1000"
    defaults = [f"--{line}" for line in given if not line.startswith(("model.", "run.dir"))]
    assert parse_config(defaults) == parse_config([]), "the defaults are written as they are given"
    assert "train.stepz" in refusal("-h", "train.stepz")


def types_with_help() -> list[str]:
    """All keys, and the section that null replaces."""
    return [key for key in types() if key in known_keys() or key == "model.rope_scaling"]


def test_print_config_prints_what_reads_back_and_leaves_nothing_for_the_next_parse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parses share a parser, which keeps the request to print if --print_config is followed by an error."""
    plain = repr(parse_config([]))
    arguments = ["--config=llama_8b", "--optim.lr=1e-4", "--parallel.reshard_after_forward=8"]
    with pytest.raises(SystemExit) as left:
        parse_config([*arguments, "--print_config"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert load_config(write(tmp_path, text, "llama_8b.yaml")) == parse_config(arguments)
    assert "train.steps" in refusal("--print_config", "--train.steps=many")
    parse_config(["--train.steps=7", "--data.mixture={a: 1.0}"]).data.mixture["b"] = 2.0
    assert repr(parse_config([])) == plain
    assert capsys.readouterr().out == ""
