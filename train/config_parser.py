"""Parse YAML files and overrides into a Config, and explain unknown keys and values of a wrong type."""

import builtins
import contextlib
import dataclasses
import difflib
import re
import types
import typing
from argparse import HelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, set_parsing_settings

from meshwright.models.llama import LlamaConfig
from meshwright.parallel.errors import one_line
from meshwright.parallel.yaml_io import (
    Written,
    YamlError,
    load_mapping,
    load_value,
    load_written,
    to_yaml,
    value_of,
)
from meshwright.train.checkpoint.manifest import MANIFEST
from meshwright.train.config import Config, FactoryConfig
from meshwright.train.errors import ConfigError
from meshwright.train.user_code import KEYS, allow


def read_as(declared: Any, written: Any) -> Any:
    """Return what is `written` (`parallel.yaml_io.load_written`) as a value of the `declared` type: as text
    where that is text, otherwise by YAML's rules. Raises ValueError."""
    value, inner = value_of(written), typing.get_args(declared)
    if declared is Any or (declared is dict and isinstance(value, dict)):
        return value
    if declared is str and isinstance(written, str):
        return str(written)
    match typing.get_origin(declared):
        case types.UnionType | typing.Union if value is not None:
            for kind in inner:
                with contextlib.suppress(ValueError):
                    return read_as(kind, written)
        case typing.Literal if isinstance(written, str) and str(written) in inner:
            return str(written)
        case builtins.tuple if isinstance(written, list) and (inner[-1] is ... or len(inner) == len(written)):
            return tuple(read_as(inner[0], each) for each in written)
        case builtins.dict if isinstance(written, dict):
            return {str(name): read_as(inner[1], each) for name, each in written.items()}
    if isinstance(value, str):
        value = load_value(value)  # "3e-4" in quotes is a number too
    if type(value) is declared or (value is None and types.NoneType in inner):
        return value
    if declared is float and type(value) is int:
        return float(value)
    raise ValueError


def _describe_type(declared: Any) -> str:
    inner = typing.get_args(declared)
    match typing.get_origin(declared):
        case types.UnionType | typing.Union:
            return " or ".join(map(_describe_type, inner))
        case typing.Literal:
            return " or ".join(filter(None, (", ".join(inner[:-1]), inner[-1])))
        case builtins.tuple:
            return "a list" if inner[-1] is ... else f"a list of {len(inner)} values"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names.get(declared, "null" if declared is types.NoneType else "a mapping of names to values")


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
class _Setting:
    """A key, dotted, with what is `written` for it in `place`: a config file or the command line."""

    key: str
    written: Any
    place: str


def parse_config(arguments: Sequence[str], prog: str = "train.main", from_user: bool = True) -> Config:
    """Return the config of `--config NAME_OR_PATH` and `--section.key=value` overrides, which take
    precedence. Raises ConfigError. `-h` and `--print_config` print and raise SystemExit(0).

    `from_user`: the arguments are those of a command, which may then import what they name, such as
    `model.factory`, except what only a checkpoint's config.yaml names.
    """
    if asked := [argument for argument in arguments if argument in HELP]:
        factory = any(argument.startswith(f"--{FACTORY}") for argument in arguments)
        make_parser(prog, factory).parse_args(asked)
    given = list(_split_arguments([argument for argument in arguments if argument != PRINT]))
    files = [find_config(text) for key, text in given if key == "config"]
    try:
        settings = [each for path in files for each in _settings(load_mapping(path, written=True), str(path))]
    except YamlError as error:
        raise ConfigError(str(error)) from None
    settings += [each for key, text in given if key != "config" for each in _read_override(key, text)]
    factories = [setting.place for setting in settings if setting.key == FACTORY]
    if factories:
        settings = _without_shape(settings, factories)
    elif alone := [setting.key for setting in settings if setting.key.startswith((ARGS, BLOCKS))]:
        raise ConfigError(f"{alone[0]} needs {FACTORY}=MODULE:FUNCTION, to whose model it belongs")
    config = _build(_merge(settings), FactoryConfig if factories else LlamaConfig)
    if config.run.dir is None:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=_folder(files, config)))
    if PRINT in arguments:
        print(config_to_yaml(config), end="")
        raise SystemExit(0)
    if from_user:
        allow(_names_of_user(settings))
    return config


def _names_of_user(settings: Sequence[_Setting]) -> Iterator[str]:
    """Yield the names of functions and classes on the command line, and in config files that are not a
    checkpoint's."""
    for setting in settings:
        if setting.key in KEYS and not (Path(setting.place).parent / MANIFEST).exists():
            names = read_as(_type_at(setting.key), setting.written)
            yield from [names] if isinstance(names, str) else names or ()


def _folder(files: Sequence[Path], config: Config) -> str:
    """The default of run.dir, by the config's name, or without a config that of the factory's module."""
    module = config.model.factory.partition(":")[0]
    return f"runs/{files[-1].stem if files else module.rpartition('.')[2]}"


def load_config(path: Path) -> Config:
    """Return the config of a YAML file that the program wrote, in a run folder or a checkpoint."""
    return parse_config([f"--config={path}"], from_user=False)


def list_configs() -> list[Path]:
    """Paths of the configs in configs/."""
    return sorted(CONFIG_FOLDER.glob("*.yaml"))


def config_to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that parses to an equal Config."""
    return to_yaml(dataclasses.asdict(config))


def keys_of(section: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name, value and declared type of each key of the config section `name` ("": of all)."""
    for item in dataclasses.fields(section):
        value, key = getattr(section, item.name), f"{name}.{item.name}".removeprefix(".")
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, key)
        else:
            yield key, value, item.type


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
    parser = _ConfigParser(prog=f"python -m {prog}", usage=usage, description=about, print_config=None)
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
    parser.add_argument(PRINT, action="store_true", help="Print the resolved configuration and exit.")
    return parser


FACTORY, ARGS, BLOCKS, COMMAND_LINE = "model.factory", "model.args", "model.blocks", "the command line"
HELP, PRINT = ("-h", "--help", "--model.rope_scaling.help"), "--print_config"
NULLS = ("null", "Null", "NULL", "~")


def _without_shape(settings: Sequence[_Setting], factories: Sequence[str]) -> list[_Setting]:
    """Return the settings without the shape of our Llama that earlier files set. Raises ConfigError for such
    a shape beside the factory, or after it. `factories`: the places that name one."""
    places = [*dict.fromkeys(setting.place for setting in settings)]
    after = places[places.index(factories[0]) :]
    kept = []
    for setting in settings:
        if not setting.key.startswith("model.") or setting.key.startswith((FACTORY, ARGS, BLOCKS)):
            kept.append(setting)
        elif setting.place in after:
            raise ConfigError(
                f"{setting.place}: {setting.key} is of the shape of our Llama, but {FACTORY} in "
                f"{factories[-1]} builds the model: remove one of them. Arguments of the function are "
                f"{ARGS}.KEY=VALUE"
            )
    return kept


def _merge(settings: Sequence[_Setting]) -> dict[str, Any]:
    """Return the last value of each key, of its declared type. Null for a section replaces its keys, and a
    key replaces the null. Raises ConfigError for a value of another type."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, written, declared = setting.key, setting.written, _type_at(setting.key)
        try:
            value = {} if written == {} else read_as(declared, written)
        except ValueError:
            where = "" if setting.place == COMMAND_LINE else f"{setting.place}: "
            shown = one_line(written if isinstance(written, str) else value_of(written), 200)
            raise ConfigError(f"{where}{key}: must be {_describe_type(declared)}, not {shown}") from None
        below = [other for other in values if other.startswith(f"{key}.")]
        for other in [*_above(key), *(below if value is None else [])]:
            values.pop(other, None)
        if not below or value is None:
            values[key] = value
    return values


def _above(key: str) -> list[str]:
    """The sections that contain a key."""
    names = key.split(".")
    return [".".join(names[:number]) for number in range(1, len(names))]


def _build(values: Mapping[str, Any], model: type) -> Config:
    """Return the Config of dotted keys and values. Raises ConfigError for values that a section rejects."""

    def make(kind: Any, section: str) -> Any:
        """A dataclass of the values below `section`, otherwise with its defaults."""
        given = {}
        for item in dataclasses.fields(kind):
            key = f"{section}{item.name}"
            inner = [model] if key == "model" else _dataclasses_in(item.type)
            below = [name for name in values if name.startswith(f"{key}.")]
            if key == ARGS and below:
                given[item.name] = {name.removeprefix(f"{ARGS}."): values[name] for name in below}
            elif inner and (below or values.get(key) == {}):
                given[item.name] = make(inner[0], f"{key}.")
            elif key in values:
                given[item.name] = values[key]
        return kind(**given)

    try:
        built: Config = make(Config, "")
    except ValueError as error:
        raise ConfigError(one_line(error)) from None
    return built


def _split_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys, or "config", and their texts, which may be the next arguments. Raises ConfigError."""
    rest = iter(arguments)
    for argument in rest:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            raise ConfigError(f"unrecognized argument {argument}: keys are set with --section.key=value")
        if key != "config":
            _check_key(key, COMMAND_LINE)
        if not equals and ((text := next(rest, "--")).startswith("--")):
            raise ConfigError(f"--{key}: expected one argument, as in --{key}=VALUE")
        yield key, text


def _read_override(key: str, text: str) -> list[_Setting]:
    """Return what the command line sets: text as it is where the key's type is text. Raises ConfigError."""
    if _is_text(_type_at(key)):
        written: Any = Written(text)
        written.value = None if text in NULLS else text
    else:
        try:
            written = load_written(text)
        except YamlError as error:
            raise ConfigError(f"{key}: {error}") from None
    return _settings({key: written}, COMMAND_LINE)


def _is_text(declared: Any) -> bool:
    inner = typing.get_args(declared)
    if typing.get_origin(declared) in (types.UnionType, typing.Union):
        return all(each is types.NoneType or _is_text(each) for each in inner)
    return declared is str or (typing.get_origin(declared) is typing.Literal and type(inner[0]) is str)


def _settings(data: Mapping[str, Any], place: str) -> list[_Setting]:
    """Return what a mapping of dotted and nested keys sets. Raises ConfigError if a key is unknown, is given
    twice or has no value, or if a section is not a mapping."""
    settings: dict[str, _Setting] = {}
    for key, written in leaves(data):
        _check_key(key, place)
        if key in settings:
            raise ConfigError(f"{place}: {key} is set twice, nested and with a dot: delete one")
        _check_written(key, written, place)
        settings[key] = _Setting(key, written, place)
    if null := next((section for key in settings for section in _above(key) if section in settings), None):
        raise ConfigError(f"{place}: {null} is set as a whole and key by key: delete one")
    return [*settings.values()]


def _check_written(key: str, written: Any, place: str) -> None:
    """Raise ConfigError for a section that is no mapping, and for an empty value."""
    declared = _type_at(key)
    optional = declared is Any or types.NoneType in typing.get_args(declared)
    null = value_of(written) is None
    if (null and not (written and optional)) or (written == "" and _is_text(declared)):
        none = ", null for none" if optional else ""
        raise ConfigError(f"{place}: {key} has no value: set one{none}, or remove the key to use its default")
    if _dataclasses_in(declared) and written != {} and not null:
        rule = f"needs a mapping of keys to values, or --{key}.NAME=value"
        raise ConfigError(f"{place}: {key} is a section and {rule}, not {one_line(value_of(written), 200)}")


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values of nested ones. A known key is a leaf, also with a mapping
    (data.mixture); of a factory's arguments each is one."""
    for name, written in data.items():
        key = f"{prefix}{name}"
        if isinstance(written, dict) and written and (key == ARGS or not has_value(key)):
            yield from leaves(written, f"{key}.")
        else:
            yield key, written


def _check_key(key: str, place: str) -> None:
    """Raise ConfigError with the nearest valid key unless `key` (dotted) is a key or a section."""
    if not is_config_key(key):
        raise ConfigError(f"unknown key {one_line(key, 80)} in {place}. {key_hint(key)}")


def is_config_key(key: str) -> bool:
    """Return whether `key` is a dotted key or a section of the config."""
    return key in _types() or has_value(key)


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
    return tuple(key for key, declared in _types().items() if not _dataclasses_in(declared))


def _dataclasses_in(declared: Any) -> list[Any]:
    """The dataclasses in a field's declared type (such as RopeScaling | None)."""
    return [t for t in (declared, *typing.get_args(declared)) if dataclasses.is_dataclass(t)]


@cache
def _types() -> dict[str, Any]:
    """The declared type of each dotted key and section."""

    def types_in(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for item in dataclasses.fields(cls):
            yield f"{prefix}{item.name}", item.type
            for inner in _dataclasses_in(item.type):
                yield from types_in(inner, f"{prefix}{item.name}.")

    return dict(types_in(Config, ""))


def _type_at(key: str) -> Any:
    return Any if key.startswith(f"{ARGS}.") else _types()[key]
