"""The configuration: finding files, strict parsing, overrides, help, and a YAML round trip."""

import dataclasses
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.models.rope_scaling import RopeScaling
from meshwright.parallel.config import CompileConfig
from meshwright.train.config import Config
from meshwright.train.config_parser import (
    CONFIG_FOLDER,
    config_to_yaml,
    find_config,
    known_keys,
    leaves,
    load_config,
    parse_config,
)
from meshwright.train.errors import ConfigError
from tests.support.tables import try_each

DEBUG_STEPS = yaml.safe_load((CONFIG_FOLDER / "llama_debug.yaml").read_text())["train"]["steps"]


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(arguments)
    return str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config=llama_debug.yaml"],
        ["--config", "llama_debug.yaml"],
        ["--config=llama_debug"],
        ["--config", "llama_debug"],
        [f"--config={CONFIG_FOLDER / 'llama_debug.yaml'}"],
        ["--config", f"{CONFIG_FOLDER / 'llama_debug.yaml'}"],
    ],
)
def test_a_config_is_found_by_bare_name_and_by_path(arguments: list[str]) -> None:
    config = parse_config(arguments)
    assert config.train.steps == DEBUG_STEPS
    assert config.run.dir == "runs/llama_debug"


def test_a_file_here_comes_before_a_shipped_one_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "train: {steps: 7}", "llama_debug.yaml")
    monkeypatch.chdir(tmp_path)
    assert parse_config(["--config=llama_debug.yaml"]).train.steps == 7
    assert find_config("llama_debug") == CONFIG_FOLDER / "llama_debug.yaml", (
        "a name without .yaml matches only configs/"
    )


def test_without_a_file_every_key_has_its_default() -> None:
    config = parse_config([])
    assert dataclasses.replace(config, run=Config().run) == Config()
    assert config.run.dir == "runs/llama"


def test_the_folder_of_a_run_is_named_after_its_config_unless_given(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "train: {steps: 7}")).run.dir == "runs/mine"
    assert load_config(write(tmp_path, "run: {dir: here}")).run.dir == "here"
    assert parse_config(["--model.factory=theirs.mine:build"]).run.dir == "runs/mine"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config=llama_debug", "--train.steps=7"],
        ["--config=llama_debug", "--train.steps", "7"],
        ["--config=llama_debug", "--train.steps=5", "--train.steps=7"],
        ["--train.steps=7", "--config=llama_debug"],
        ["--train.steps", "7", "--config", "llama_debug"],
    ],
)
def test_overrides_win_over_the_file(arguments: list[str]) -> None:
    assert parse_config(arguments).train.steps == 7


def test_an_override_changes_one_key_of_a_nested_section_and_leaves_the_others(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: {rope_scaling: {factor: 9, original_max_seq_len: 77}}\nparallel: {compile: {backend: "
        "aot_eager}}",
    )
    config = parse_config(
        [f"--config={path}", "--model.rope_scaling.factor=4", "--parallel.compile.enabled=false"]
    )
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


def test_a_value_that_is_empty_or_a_comment_is_not_the_default(tmp_path: Path) -> None:
    for key in (
        "run.dir",
        "train.steps",
        "data.mixture",
        "data.source",
        "data.cache_dir",
        "model.rope_scaling",
    ):
        assert key in refusal(f"--{key}=")
        for text in (f"{key}: #x", f"{key}:", f"{key}: ''"):
            assert key in refusal(f"--config={write(tmp_path, text)}"), text
    assert parse_config(["--run.dir=#x"]).run.dir == "#x"
    assert "train.steps" in refusal("--train.steps=#5")
    assert "twice" in refusal("--data.mixture={/a: 0.7, /a: 0.3}")


def test_values_of_every_kind_reach_their_keys(tmp_path: Path) -> None:
    text = """
        optim: {betas: [0.8, 0.9], schedule: wsd}
        parallel: {reshard_after_forward: 4, dp_shard: -1, compile: {enabled: false}}
        train: {micro_batch_size: 3, epochs: 0.5}
        data: {cache_dir: null, source: a/b.txt}
        """
    config = load_config(write(tmp_path, text))
    assert config.optim.betas == (0.8, 0.9)
    assert repr(config.parallel.reshard_after_forward) == "4"
    assert (config.parallel.dp_shard, config.parallel.compile.enabled) == (-1, False)
    assert (config.train.micro_batch_size, config.train.epochs) == (3, 0.5)
    assert (config.data.cache_dir, config.data.source) == (None, "a/b.txt")
    assert (
        repr(parse_config(["--parallel.reshard_after_forward=false"]).parallel.reshard_after_forward)
        == "False"
    )


UNKNOWN_KEYS = [
    ("train.stepz", "train.steps"),
    ("trian.steps", "train.steps"),
    ("parallel.dp_shrad", "parallel.dp_shard"),
    ("parallel.compile.backnd", "parallel.compile.backend"),
    ("model.rope_scaling.facto", "model.rope_scaling.factor"),
    ("grad_clip", "train.grad_clip"),
]


def test_an_unknown_key_names_the_nearest_valid_one_and_its_place(tmp_path: Path) -> None:
    def check(key: str, nearest: str) -> None:
        def assert_named(message: str, place: str) -> None:
            facts = (f"unknown key {key} ", place, f"Did you mean {nearest}?")
            assert [fact for fact in facts if fact not in message] == [], message

        assert_named(refusal(f"--{key}=1"), "the command line")
        assert_named(refusal(f"--{key}", "1"), "the command line")
        *sections, leaf = key.split(".")
        text = (
            "".join(f"{'  ' * i}{part}:\n" for i, part in enumerate(sections))
            + f"{'  ' * len(sections)}{leaf}: 1\n"
        )
        path = write(tmp_path, text)
        assert_named(refusal(f"--config={path}"), str(path))

    try_each(UNKNOWN_KEYS, check)


WRONG_TYPES = [
    ("train.steps", "many", ["integer", "many"]),
    ("train.steps", "3.5", ["integer", "3.5"]),
    ("train.steps", "true", ["integer", "true"]),
    ("optim.lr", "fast", ["a number", "fast"]),
    ("optim.betas", "[0.9]", ["2 values"]),
    ("optim.schedule", "cosin", ["cosin", "cosine"]),
    ("parallel.dp_shard", "all", ["all", "integer"]),
    ("parallel.reshard_after_forward", "maybe", ["maybe", "true or false", "integer"]),
    ("parallel.activation_checkpoint", "some", ["some", "full"]),
    ("parallel.compile.enabled", "maybe", ["true or false", "maybe"]),
    ("model.tie_embeddings", "3", ["true or false", "3"]),
    ("train.micro_batch_size", "some", ["some", "auto"]),
]


def test_a_value_of_the_wrong_type_is_refused_with_its_key(tmp_path: Path) -> None:
    def check(key: str, value: str, facts: list[str]) -> None:
        *sections, leaf = key.split(".")
        text = "".join(f"{s}: {{" for s in sections) + f"{leaf}: {value}" + "}" * len(sections)
        for message in (refusal(f"--{key}={value}"), refusal(f"--config={write(tmp_path, text)}")):
            assert [fact for fact in (key, *facts) if fact not in message] == [], message
            assert "<class" not in message
            assert "\n" not in message

    try_each(WRONG_TYPES, check)


@pytest.mark.parametrize(
    "key", ["train.steps", "run.seed", "parallel.dp_shard", "model.tie_embeddings", "data.source"]
)
def test_null_in_a_file_is_refused_where_the_key_has_no_null(key: str, tmp_path: Path) -> None:
    section, leaf = key.split(".")
    assert key in refusal(f"--config={write(tmp_path, f'{section}: {{{leaf}: null}}')}")


@pytest.mark.parametrize("text", ["train: 5\n", "train: []\n", "train:\n", "parallel: {compile: true}\n"])
def test_a_section_that_is_no_mapping_is_refused_by_name_and_place(text: str, tmp_path: Path) -> None:
    message = refusal(f"--config={write(tmp_path, text)}")
    assert "mine.yaml" in message
    assert "train" in message or "parallel.compile" in message


OUT_OF_RANGE = [
    ("--train.steps=0", ["train.steps=0", "at least 1"]),
    ("--train.seq_len=4096", ["train.seq_len=4096", "model.max_seq_len=2048"]),
    ("--train.grad_clip=-1", ["train.grad_clip=-1", "at least 0"]),
    ("--model.n_kv_heads=3", ["model.n_kv_heads=3", "model.n_heads=8"]),
    ("--optim.lr=-1", ["optim.lr=-1", "at least 0"]),
    ("--optim.eps=0", ["optim.eps=0", "greater than 0"]),
    ("--optim.betas=[0.9,1.0]", ["optim.betas=[0.9, 1.0]", "[0, 1)"]),
    ("--optim.warmup_steps=-1", ["optim.warmup_steps=-1"]),
    ("--optim.decay_ratio=2", ["optim.decay_ratio=2", "between 0 and 1"]),
    ("--optim.lr=.inf", ["optim.lr=inf", "finite", "at least 0"]),
    (f"--train.steps={10**400}", ["train.steps=1000", "finite", "at least 1"]),
    ("--train.epochs=.inf", ["train.epochs=inf", "finite", "at least 0"]),
    ("--run.device=tpu", ["run.device: must be auto, cpu or cuda, not tpu"]),
    ("--run.grace_s=-1", ["run.grace_s=-1"]),
    ("--data.eval_fraction=1", ["data.eval_fraction=1", "between 0 and 0.999"]),
    ("--data.verify=some", ["data.verify: must be full or size, not some"]),
    ("--data.prefetch=0", ["data.prefetch=0", "at least 1"]),
    ("--checkpoint.keep=-1", ["checkpoint.keep=-1"]),
    ("--metrics.every=-1", ["metrics.every=-1"]),
    ("--profile.steps=0", ["profile.steps=0"]),
    ("--run.seed=-1", ["run.seed=-1"]),
    ("--data.mixture={a: 0}", ["data.mixture: a ", " 0.0", "finite", "greater than 0"]),
]


def test_a_value_out_of_range_is_refused_with_key_value_and_rule() -> None:
    def check(argument: str, facts: list[str]) -> None:
        message = refusal(argument)
        assert [fact for fact in facts if fact not in message] == [], message

    try_each(OUT_OF_RANGE, check)


@pytest.mark.parametrize("argument", ["train.steps=3", "-x", "something"])
def test_an_argument_that_is_no_option_is_refused(argument: str) -> None:
    assert argument in refusal(argument)


@pytest.mark.parametrize("name", ["lama_debug.yaml", "llama_debug.yml", "folder/llama_debg.yaml"])
def test_a_missing_file_names_the_nearest_shipped_one(name: str) -> None:
    message = refusal(f"--config={name}")
    assert name in message
    assert "Did you mean llama_debug.yaml?" in message
    assert refusal("--config", name) == message


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--config=llama_8b"],
        ["--config=llama_1b", "--model.tie_embeddings=true", "--optim.betas=[0.8,0.99]", "--optim.lr=1e-7"],
        [
            "--parallel.reshard_after_forward=4",
            "--parallel.dp_shard=-1",
            "--parallel.compile.enabled=false",
            "--train.epochs=0.5",
        ],
        [
            "--parallel.reshard_after_forward=false",
            "--train.micro_batch_size=3",
            "--data.cache_dir=/x",
            "--optim.eps=1e-15",
        ],
        ["--run.dir=2024-01-01", "--data.source=**/*.txt"],
        ["--run.dir=true", "--data.source=a: b # c"],
    ],
    ids=" ".join,
)
def test_a_config_written_as_yaml_reads_back_equal(arguments: list[str], tmp_path: Path) -> None:
    config = parse_config(arguments)
    again = load_config(write(tmp_path, config_to_yaml(config)))
    assert repr(again) == repr(config), "repr, because True == 1"


def test_print_config_leaves_with_0_and_prints_what_reads_back_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--config=llama_8b",
        "--optim.lr=1e-4",
        "--run.dir=there",
        "--parallel.reshard_after_forward=8",
    ]
    with pytest.raises(SystemExit) as left:
        parse_config([*arguments, "--print_config"])
    assert left.value.code == 0
    assert load_config(write(tmp_path, capsys.readouterr().out)) == parse_config(arguments)


def test_what_one_parse_finds_is_nothing_to_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    """Parses share a parser, which keeps the request to print if --print_config is followed by an error."""
    plain = repr(parse_config([]))
    assert "train.steps" in refusal("--print_config", "--train.steps=many")
    parse_config(["--train.steps=7", "--data.mixture={a: 1.0}", "--optim.betas=[0.1,0.2]"]).data.mixture[
        "b"
    ] = 2.0
    assert repr(parse_config([])) == plain
    assert capsys.readouterr().out == ""


def test_the_keys_that_scripts_rely_on_exist() -> None:
    promised = """
        run.dir run.seed run.grace_s run.max_hours
        model.dim model.n_layers model.n_heads model.n_kv_heads model.ffn_dim model.vocab_size
        model.max_seq_len model.rope_theta model.norm_eps model.tie_embeddings
        parallel.plan parallel.dp_replicate parallel.dp_shard parallel.tp parallel.reshard_after_forward
        parallel.forward_prefetch parallel.backward_prefetch parallel.activation_checkpoint
        parallel.param_dtype parallel.reduce_dtype parallel.compile.enabled parallel.compile.backend parallel.compile.mode
        data.source data.tokenizer train.steps train.epochs train.seq_len train.micro_batch_size
        train.global_batch_size train.grad_clip train.eval_every
        optim.lr optim.betas optim.weight_decay optim.warmup_steps optim.schedule
        checkpoint.every checkpoint.keep checkpoint.resume metrics.every
        """  # noqa: E501
    assert set(promised.split()) <= set(known_keys())
