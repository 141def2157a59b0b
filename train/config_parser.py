"""Parse YAML files and overrides into a Config, and explain unknown keys and values of a wrong type."""

import dataclasses
import difflib
import json
import re
import typing
from argparse import HelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from meshwright.models.llama import LlamaConfig
from meshwright.parallel.errors import one_line
from meshwright.parallel.yaml_io import YamlError, load_mapping, load_value
from meshwright.train.checkpoint.manifest import MANIFEST
from meshwright.train.config import Config, FactoryConfig, ModelConfig
from meshwright.train.errors import ConfigError
from meshwright.train.model.factory import name_factory


def describe_type_error(report: str) -> str:
    """Return jsonargparse's `report` without Python types: what the value must be, and what it is. A report
    in another format is returned unchanged."""
    report = re.sub(r"<class '(\w+)'>", r"\1", " ".join(report.split())).replace("typing.", "")
    if match := re.search(r"Subtypes: \[(.*)\] Errors: .* Given value: (.*)$", report):
        expected = re.findall(r"Literal\[[^]]*\]|[^,\s]+", match[1])
        return f"must be {' or '.join(map(_describe_type, expected))}, not {match[2]}"
    if match := re.search(r"^Expected a tuple with (\d+) elements\. Got value: (.*)$", report):
        return f"must be a list of {match[1]} values, not {match[2]}"
    if match := re.search(r"^Expected an? (.*)\. Got value: (.*)$", report):
        return f"must be {_describe_type(match[1])}, not {match[2]}"
    return report


def _describe_type(name: str) -> str:
    if name.startswith("Literal["):
        return " or ".join(name[len("Literal[") : -1].replace("'", "").rsplit(", ", 1))
    descriptions = {
        "int": "an integer",
        "float": "a number",
        "bool": "true or false",
        "str": "a string",
        "tuple": "a list such as [first, second]",
    }
    return descriptions.get(name, name)


def explain_parser_error(message: str, keys: Mapping[Path, Sequence[str]], overrides: Sequence[str]) -> str:
    """Return jsonargparse's error as one line with the key, and with its file unless an override set the key.

    An error without a key names all files if there are no overrides. `keys`: the dotted keys of each file.
    """
    match = re.search(r'Parser key "([^"]+)":\s*(.*)', message, re.DOTALL)
    if not match:
        return message if overrides else ": ".join([*map(str, keys), message])
    key, rest = match.groups()
    overridden = any(override.startswith(f"--{key}") for override in overrides)
    files = [path for path, names in keys.items() if any(name.startswith(key) for name in names)]
    return (
        f"{files[-1]}: {key}: {describe_type_error(rest)}"
        if files and not overridden
        else f"{key}: {describe_type_error(rest)}"
    )


CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "configs"


def find_config(name: str) -> Path:
    """Return a path unchanged, or the path of a name in configs/, with or without .yaml.

    Raises ConfigError, which suggests the nearest name, if there is no such file.
    """
    for path in (Path(name), CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name}.yaml"):
        if path.is_file():
            return path
    known = [path.name for path in list_configs()]
    near = difflib.get_close_matches(Path(name).name, known, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}?" if near else f"Available: {', '.join(known)}."
    raise ConfigError(f"--config {name}: no such file, as a path or in {CONFIG_FOLDER}. {hint}")


@dataclasses.dataclass(frozen=True)
class _Sources:
    """What a command line names: the mapping of each config file, and the overrides."""

    files: Mapping[Path, Mapping[str, Any]]
    overrides: Sequence[str]


def parse_config(
    arguments: Sequence[str],
    prog: str = "train.main",
    from_user: bool = True,
) -> Config:
    """Return the config of `--config NAME_OR_PATH` and `--section.key=value` overrides, which take
    precedence.

    Args:
        from_user: the arguments are those of a command, whose `model.factory` may then be called, except one
            that only a checkpoint's config.yaml names

    Raises ConfigError. `-h` and `--print_config` print and raise SystemExit(0).
    """
    sources = _read_sources(arguments)
    factory = any(key == FACTORY for key, _ in _keys(sources))
    if factory:
        sources = _replace_shape(sources)
    elif given := [key for key, _ in _keys(sources) if key.startswith((ARGS, BLOCKS))]:
        raise ConfigError(f"{given[0]} needs {FACTORY}=MODULE:FUNCTION, to whose model it belongs")
    # A parser that fails after --print_config would print at its next use, so it is not shared.
    prints = any(argument.startswith("--print_config") for argument in arguments)
    config = _parse(make_parser(prog, factory) if prints else _shared_parser(prog, factory), sources)
    if from_user and isinstance(config.model, FactoryConfig) and _is_named(sources):
        name_factory(config.model.factory)
    return config


def _is_named(sources: _Sources) -> bool:
    """Whether the command itself names the factory: on the command line, or in a config file that is not a
    checkpoint's."""
    places = [place for key, place in _keys(sources) if key == FACTORY]
    return any(place == COMMAND_LINE or not (Path(place).parent / MANIFEST).exists() for place in places)


def load_config(path: Path) -> Config:
    """Return the config of a YAML file that the program wrote, in a run folder or a checkpoint."""
    return parse_config([f"--config={path}"], from_user=False)


def list_configs() -> list[Path]:
    """Paths of the configs in configs/."""
    return sorted(CONFIG_FOLDER.glob("*.yaml"))


def config_to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that parses to an equal Config."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def keys_of(section: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name, value and declared type of each key of the config section `name`."""
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, f"{name}.{item.name}")
        else:
            yield f"{name}.{item.name}", value, item.type


OWN_MODEL_HELP = """
A model of yours, in place of the keys of model above (docs/your-model.md):
  --model.factory MODULE:FUNCTION  function that returns the model, or also an example of its arguments
  --model.args.KEY VALUE           keyword argument of the function, as YAML; in a file a mapping, model.args
  --model.blocks B                 its blocks, a pattern of names or a number of parameters (default: found)
"""


class _ConfigParser(ArgumentParser):
    """An ArgumentParser whose help omits jsonargparse's options for one file per section, because only
    --config reads files, and ends with the keys of a model of yours."""

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        text = super().format_help(formatter)
        return re.sub(r"\n  --[\w.]+ CONFIG\s+Path to a configuration file\.", "", text) + OWN_MODEL_HELP


def make_parser(prog: str, factory: bool = False) -> ArgumentParser:
    """Return a parser for the keys of all sections, for train.main and for tools that take a config.
    `factory`: the section `model` names a function, and not the shape of our Llama."""
    set_parsing_settings(docstring_parse_attribute_docstrings=False)
    usage = f"python -m {prog} --config NAME_OR_PATH [--section.key=value ...]"
    about = "Train a Llama, or a model of yours, sharded and compiled."
    parser = _ConfigParser(prog=f"python -m {prog}", usage=usage, description=about, exit_on_error=False)
    defaults = Config()
    for section in dataclasses.fields(Config):
        kind: Any = section.type
        if section.name == "model":
            kind = FactoryConfig if factory else LlamaConfig
        default = {} if kind is FactoryConfig else {"default": getattr(defaults, section.name)}
        parser.add_argument(f"--{section.name}", type=kind, **default)
    parser.add_argument(
        "--config", action="config", help="YAML file: a path, or a name in configs/ such as llama_debug.yaml"
    )
    return parser


@cache
def _shared_parser(prog: str, factory: bool) -> ArgumentParser:
    """A cached parser of `make_parser`: making one takes as long as parsing."""
    return make_parser(prog, factory)


def _read_sources(arguments: Sequence[str]) -> _Sources:
    """Read the config files and check all keys. Raises ConfigError."""
    names, overrides = _split_arguments(arguments)
    files = {path: _read_strictly(path) for path in map(find_config, names)}
    for override in overrides:
        _check_override(override)
    return _Sources(files, overrides)


def _keys(sources: _Sources) -> Iterator[tuple[str, str]]:
    """Yield each key with its place, in the order of precedence: the files, then the command line."""
    for path, mapping in sources.files.items():
        yield from ((key, str(path)) for key, _ in _leaves(mapping))
    yield from ((_key_of(override), COMMAND_LINE) for override in sources.overrides)


FACTORY, ARGS, BLOCKS, COMMAND_LINE = "model.factory", "model.args", "model.blocks", "the command line"


def _replace_shape(sources: _Sources) -> _Sources:
    """Return sources that name a factory without the shape of our Llama that earlier files set, and with the
    function's arguments, which may come key by key, as one mapping. Raises ConfigError for such a shape
    beside the factory."""
    places = [place for key, place in _keys(sources) if key == FACTORY]
    after = [*dict.fromkeys(place for _, place in _keys(sources))]
    after = after[after.index(places[0]) :]
    for key, place in _keys(sources):
        if key.startswith("model.") and not key.startswith((FACTORY, ARGS, BLOCKS)) and place in after:
            raise ConfigError(
                f"{place}: {key} is of the shape of our Llama, but {FACTORY} in {places[-1]} builds the "
                f"model: remove one of them. Arguments of the function are {ARGS}.KEY=VALUE"
            )
    args: dict[str, Any] = {}
    files = {}
    for path, mapping in sources.files.items():
        leaves = dict(_leaves(mapping))
        for key, value in leaves.items():
            args |= _argument_of(key, value)
        own = {key.removeprefix("model."): leaves[key] for key in (FACTORY, BLOCKS) if key in leaves}
        kept = {key: value for key, value in mapping.items() if key.split(".")[0] != "model"}
        files[path] = kept | ({"model": own} if own else {})
    rest = []
    for override in sources.overrides:
        key, equals, text = override.removeprefix("--").partition("=")
        if not key.startswith(ARGS):
            rest.append(override)
        elif not equals:
            raise ConfigError(f"--{key} needs a value: --{ARGS}.KEY=VALUE")
        else:
            args |= _argument_of(key, _value_of(key, text))
    return _Sources(files, [*rest, f"--{ARGS}={json.dumps(args)}"])


def _as_value(path: Path, mapping: Mapping[str, Any]) -> str:
    """Return what jsonargparse's --config takes: the path, or YAML text if the mapping is no longer that of
    the file."""
    return str(path) if mapping == load_mapping(path) else yaml.safe_dump(dict(mapping))


def _value_of(key: str, text: str) -> Any:
    try:
        return load_value(text)
    except YamlError as error:
        raise ConfigError(f"{key}: {error}") from None


def _argument_of(key: str, value: Any) -> dict[str, Any]:
    """Return what a key of `model.args` sets: all of a mapping, or one argument."""
    if key.startswith(f"{ARGS}."):
        return {key.removeprefix(f"{ARGS}."): value}
    if key == ARGS and not isinstance(value, dict):
        given = one_line(repr(value), 200)
        raise ConfigError(f"{ARGS} is the function's arguments and needs a mapping, not {given}")
    return value if key == ARGS else {}


def _parse(parser: ArgumentParser, sources: _Sources) -> Config:
    """Parse the files' mappings and the overrides, which take precedence in any position, and build the
    frozen dataclasses. Raises ConfigError, also for values that these reject."""
    lines = [f"--config={_as_value(path, mapping)}" for path, mapping in sources.files.items() if mapping]
    try:
        namespace = parser.parse_args([*lines, *sources.overrides])
    except Exception as error:  # jsonargparse raises several types, all about the user's input
        keys = {path: [key for key, _ in _leaves(mapping)] for path, mapping in sources.files.items()}
        raise ConfigError(one_line(explain_parser_error(str(error), keys, sources.overrides))) from None
    try:
        built = parser.instantiate(namespace)
        if not built.run.dir:
            built.run = dataclasses.replace(built.run, dir=f"runs/{_name_of_run(sources, built.model)}")
        return Config(
            **{section.name: getattr(built, section.name) for section in dataclasses.fields(Config)}
        )
    except ValueError as error:
        raise ConfigError(one_line(error)) from None


def _name_of_run(sources: _Sources, model: ModelConfig) -> str:
    """Return the config's name, or without a config that of the factory's module."""
    if sources.files:
        return [*sources.files][-1].stem
    return model.factory.partition(":")[0].rpartition(".")[2] if isinstance(model, FactoryConfig) else "llama"


def _split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of --config, and the other arguments."""
    files, overrides = [], []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config":
            argument = f"--config={next(rest, '')}"
        if argument == "--config=":
            raise ConfigError("--config needs a path, or a name in configs/ such as llama_debug.yaml")
        if argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        else:
            overrides.append(argument)
    return files, overrides


def _key_of(override: str) -> str:
    """The key of `--section.key=value`, `--section.key` or `--section.key.help`; "" for a value."""
    return override[2:].split("=")[0].removesuffix(".help") if override.startswith("--") else ""


def _check_override(argument: str) -> None:
    if not argument.startswith("--") or argument.startswith(("--print_config", "--help")):
        return
    key = _key_of(argument)
    _check_key(key, "the command line")
    declared = _type_at(key)
    if key not in known_keys() and _dataclasses_in(declared) and type(None) not in typing.get_args(declared):
        raise ConfigError(
            f"--{key} is a section: set its keys one by one with --{key}.NAME=value, or in a --config file"
        )


def _read_strictly(path: Path) -> dict[str, Any]:
    """Return a file's mapping.

    Raises ConfigError if a key is unknown, given twice or null without being optional, or if a section is not
    a mapping.
    """
    try:
        data = load_mapping(path)
    except YamlError as error:
        raise ConfigError(str(error)) from None
    leaves = list(_leaves(data))
    for i, (key, value) in enumerate(leaves):
        _check_key(key, str(path))
        if key in dict(leaves[:i]):
            raise ConfigError(f"{path}: {key} is set twice, nested and with a dot: delete one")
        declared = _type_at(key)
        # jsonargparse would accept a string instead of a section: it takes it as a class and imports its
        # module.
        optional = type(None) in typing.get_args(declared)
        if value != {} and _dataclasses_in(declared) and not (optional and value is None):
            raise ConfigError(
                one_line(f"{path}: {key} is a section and needs a mapping of keys to values, not {value!r}")
            )
        if value is None and not optional:
            raise ConfigError(f"{path}: {key} has no value: set one, or remove the key to use its default")
    return data


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        # a known key whose value is a mapping (data.mixture) is a leaf
        if isinstance(value, dict) and value and f"{prefix}{key}" not in known_keys():
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_key(key: str, place: str) -> None:
    """Raise ConfigError with the nearest valid key unless `key` (dotted) is a key or a section."""
    if not is_config_key(key):
        raise ConfigError(f"unknown key {one_line(key, 80)} in {place}. {key_hint(key)}")


def is_config_key(key: str) -> bool:
    """Return whether `key` is a dotted key or a section of the config."""
    return has_value(key) or any(known.startswith(f"{key}.") for known in known_keys())


def has_value(key: str) -> bool:
    """Return whether `key` is a dotted key of the config, or an argument of the model's factory."""
    return key in known_keys() or key.startswith(f"{ARGS}.")


def key_hint(key: str) -> str:
    """Return a hint for an unknown key: the nearest valid key, or the command that lists all keys."""
    known = known_keys()
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = same_end or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else "All keys: python -m train.main -h."


@cache
def known_keys() -> tuple[str, ...]:
    """All dotted keys of a config."""
    return tuple(_keys_of(Config, ""))


def _keys_of(cls: Any, prefix: str) -> list[str]:
    keys = []
    for item in dataclasses.fields(cls):
        inner = [
            key for each in _dataclasses_in(item.type) for key in _keys_of(each, f"{prefix}{item.name}.")
        ]
        keys += inner or [f"{prefix}{item.name}"]
    return keys


def _dataclasses_in(declared: Any) -> list[Any]:
    """The dataclasses in a field's declared type (such as RopeScaling | None)."""
    return [t for t in (declared, *typing.get_args(declared)) if dataclasses.is_dataclass(t)]


def _type_at(key: str) -> Any:
    """The declared type of a dotted key."""
    if key.startswith(f"{ARGS}."):
        return Any
    declared: Any = Config
    for name in key.split("."):
        fields = [item for each in _dataclasses_in(declared) for item in dataclasses.fields(each)]
        declared = {item.name: item.type for item in fields}[name]
    return declared
