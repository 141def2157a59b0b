"""model.factory: what a command may name, what a checkpoint may not, and what a function must return."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.models.config import LlamaConfig
from meshwright.train import user_code
from meshwright.train.checkpoint.manifest import MANIFEST
from meshwright.train.config import Config, FactoryConfig
from meshwright.train.config_parser import config_to_yaml, load_config, parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.model.trained_model import TrainedModel, call_factory
from tests.support.tables import try_each

CAUSAL_LM = "meshwright.models.from_transformers:causal_lm"
MIXER = "tests.support.factories:mixer"


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "_allowed", {LlamaConfig.factory})


def model_of(*arguments: str, **keys: Any) -> Any:
    return parse_config(arguments, **keys).model


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_arguments_are_yaml_one_by_one_or_as_a_mapping(tmp_path: Path) -> None:
    one = model_of(f"--model.factory={MIXER}", "--model.args.width=16", "--model.args.eps=1e-6")
    assert one == FactoryConfig(MIXER, {"width": 16, "eps": 1e-6})
    file = write(
        tmp_path, f"model: {{factory: '{MIXER}', args: {{width: 8, names: [a, b]}}, blocks: '[12]'}}"
    )
    assert model_of(f"--config={file}").blocks == "[12]"
    assert model_of(f"--config={file}").args == {"width": 8, "names": ["a", "b"]}
    assert model_of(f"--config={file}", "--model.args.width=4").args == {"width": 4, "names": ["a", "b"]}
    assert model_of(f"--config={file}", "--model.args={n_layers: 1}").args["n_layers"] == 1


def test_a_factory_on_the_command_line_replaces_the_shape_of_a_file_and_reads_back_equal(
    tmp_path: Path,
) -> None:
    shape = parse_config(["--config=llama_debug"])
    config = parse_config(["--config=llama_debug", f"--model.factory={MIXER}", "--model.args.width=16"])
    assert config.model == FactoryConfig(MIXER, {"width": 16})
    assert config.optim == shape.optim
    assert isinstance(shape.model, LlamaConfig)
    assert repr(load_config(write(tmp_path, config_to_yaml(config)))) == repr(config)
    assert hash(config.model) == hash(FactoryConfig(MIXER, {"width": 16}))


WRONG_KEYS: list[tuple[list[str], list[str]]] = [
    ([f"--model.factory={MIXER}", "--model.dim=64"], ["model.dim", "model.args.KEY"]),
    (["--model.args.width=3"], ["model.args.width", "model.factory=MODULE:FUNCTION"]),
    (["--model.factory=mine"], ["model.factory=mine", "MODULE:NAME"]),
    (["--model.factory=mine:"], ["model.factory=mine:", "MODULE:NAME"]),
    (["--model.blocks=x.*"], ["model.blocks", "model.factory=MODULE:FUNCTION"]),
    (["--model.styles={x: vocab}"], ["model.styles", "model.factory=MODULE:FUNCTION"]),
    ([f"--model.factory={MIXER}", "--model.args=3"], ["model.args", "mapping"]),
    ([f"--model.factory={MIXER}", "--model.args.width=[1"], ["model.args.width"]),
    ([f"--model.factory={MIXER}", "--model.argz.width=1"], ["model.argz.width", "model.args"]),
    ([f"--model.factory={MIXER}", "--train.stepz=1"], ["train.stepz", "train.steps"]),
]


def test_the_options_of_describe_are_keys() -> None:
    keys = {
        "factory": "tests.support.factories:rooted",
        "blocks": "*.blocks.*",
        "units": "[inside.blocks.*.0.up]",
        "unsharded": "[bias]",
        "styles": "{inside.blocks.*.0.up: own_colwise, inside.blocks.*.0.down: rowwise}",
    }
    model = TrainedModel(model_of(*(f"--model.{key}={value}" for key, value in keys.items())))
    assert model.units.unsharded == ("bias", "scale")
    assert "inside.blocks.0.0" not in model.units.compiled, "a part of it is a unit of its own"
    assert [*model.units.styles["model"].values()] == ["own_colwise", "rowwise"]
    assert model.units.tp_share == 3 * (2 * 16 * 64 + 64 + 16) / model.parameters


def test_keys_that_do_not_go_together_are_refused() -> None:
    def check(arguments: list[str], facts: list[str]) -> None:
        with pytest.raises(ConfigError) as refused:
            parse_config(arguments)
        assert [fact for fact in facts if fact not in str(refused.value)] == [], refused.value

    try_each(WRONG_KEYS, check)


def test_a_factory_is_called_when_a_command_names_it() -> None:
    model = call_factory(model_of(f"--model.factory={MIXER}", "--model.args.width=16"))
    assert {parameter.device.type for parameter in model.module.parameters()} == {"meta"}
    assert model.module[0].weight.shape == (264, 16)  # type: ignore[index]
    assert model.example[0].shape == (2, 16)  # type: ignore[index]
    assert call_factory(FactoryConfig(MIXER), values=True).module[0].weight.device == torch.device("cpu")  # type: ignore[index]


def test_what_a_checkpoint_names_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config.yaml of a checkpoint names a module that would leave a mark."""
    mark = tmp_path / "imported"
    write(tmp_path, f"import pathlib\npathlib.Path({str(mark)!r}).touch()\ndef build(): ...\n", "evil.py")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    file = write(checkpoint, config_to_yaml(Config(model=FactoryConfig("evil:build"))), "config.yaml")
    (checkpoint / MANIFEST).write_text("{}")
    for read in (load_config(file).model, model_of(f"--config={file}")):
        with pytest.raises(ConfigError, match=r"add --model\.factory=evil:build"):
            TrainedModel(read)
    assert not mark.exists()
    (checkpoint / MANIFEST).unlink()  # a config file of the user's
    with pytest.raises(ConfigError, match="must return a model"):
        TrainedModel(model_of(f"--config={file}"))
    assert mark.exists()


WRONG_FACTORIES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("nowhere_at_all:build", {}, ["No module named 'nowhere_at_all'"]),
    ("tests.support.factories:mixr", {}, ["mixr", "mixer?"]),
    (MIXER, {"widht": 3}, ["model.args.widht", "width?", "--model.args.KEY=VALUE"]),
    (MIXER, {"width": "thirty"}, ["model.args.width='thirty'", "TypeError", "factories.py:"]),
    (MIXER, {"width": -1}, ["(width=-1)", "RuntimeError", "factories.py:"]),
    ("tests.support.factories:nothing", {}, ["must return a model"]),
    (CAUSAL_LM, {"model_type": "qwen33"}, ["qwen33"]),
    (CAUSAL_LM, {"folder": "/nowhere"}, ["/nowhere"]),
    (CAUSAL_LM, {"model_type": "qwen3", "hiden_size": 8}, ["hiden_size"]),
    (CAUSAL_LM, {}, ["folder", "model_type"]),
    (
        CAUSAL_LM,
        {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        ["rope_parameters.rope_type=dynamic", "yarn"],
    ),
]


def test_a_wrong_factory_is_refused_in_one_line() -> None:
    def check(name: str, args: dict[str, Any], facts: list[str]) -> None:
        with pytest.raises(ConfigError) as refused:
            call_factory(model_of(f"--model.factory={name}", f"--model.args={args}"))
        message = str(refused.value)
        assert [fact for fact in (name, *facts) if fact not in message] == [], message
        assert "\n" not in message

    try_each(WRONG_FACTORIES, check)
