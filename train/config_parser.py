"""Parse YAML files and overrides into a Config, and explain unknown keys and values of a wrong type."""

import dataclasses
import difflib
import re
import sys
import typing
from argparse import HelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from meshwright.parallel.errors import one_line
from meshwright.parallel.yaml_io import YamlError, load_mapping
from meshwright.train.config import Config
from meshwright.train.errors import ConfigError

# Renamed keys: old name -> new name in the same section. Files and command lines may use old names until the
# next release, which deletes this table and the code that reads it. (That release must also decide how to
# read a config.yaml of older runs and checkpoints, as in tests/backward_compatibility.)
RENAMED_KEYS = {
    "parallel.checkpointed_blocks": "parallel.activation_checkpoint_blocks",
    "parallel.tp_parts": "parallel.tp_modules",
    "train.gc_every": "train.gc_every_steps",
    "data.held_out": "data.eval_fraction",
}


@cache
def warn_once(line: str) -> None:
    """Print a line to standard error, once per process."""
    print(line, file=sys.stderr, flush=True)


def ignore_warning(line: str) -> None:
    """Ignore a warning: for ranks other than 0, and for files that an older version wrote."""


def rename_keys(keys: Mapping[str, Any], place: str, warn: Callable[[str], None]) -> dict[str, Any]:
    """Return dotted `keys` with old names replaced by new ones, in the same order; `warn` gets a line for
    each old name.

    Raises ConfigError if `keys` contains both names of a key; the message names `place`.
    """
    for old, new in RENAMED_KEYS.items():
        if old in keys and new in keys:
            raise ConfigError(f"{place}: {old} is the old name of {new}, and both are set: remove {old}")
        if old in keys:
            warn(f"config: {old} was renamed to {new}; the next release does not accept the old name")
    return {RENAMED_KEYS.get(key, key): value for key, value in keys.items()}


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


def parse_config(
    arguments: Sequence[str], prog: str = "train.main", warn: Callable[[str], None] = warn_once
) -> Config:
    """Return the config of `--config NAME_OR_PATH` and `--section.key=value` overrides, which take
    precedence. `warn` gets a line for each old key name.

    Raises ConfigError. `-h` and `--print_config` print and raise SystemExit(0).
    """
    # A parser that fails after --print_config would print at its next use, so it is not shared.
    parser = (
        make_parser(prog)
        if any(argument.startswith("--print_config") for argument in arguments)
        else _shared_parser(prog)
    )
    return config_from(parser, parser_arguments(parser, arguments, warn))


def load_config(path: Path) -> Config:
    """Return the config of a YAML file, such as one in a run folder or a checkpoint. Old key names do not
    cause warnings, because the program and not the user wrote the file."""
    return parse_config([f"--config={path}"], warn=ignore_warning)


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


class _ConfigParser(ArgumentParser):
    """An ArgumentParser whose help omits jsonargparse's options for one file per section: only --config reads
    files."""

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        text = super().format_help(formatter)
        return re.sub(r"\n  --[\w.]+ CONFIG\s+Path to a configuration file\.", "", text)


def make_parser(prog: str) -> ArgumentParser:
    """Return a parser for the keys of all sections, for train.main and for tools that take a config."""
    set_parsing_settings(docstring_parse_attribute_docstrings=False)
    usage = f"python -m {prog} --config NAME_OR_PATH [--section.key=value ...]"
    about = "Train a Llama, sharded and compiled."
    parser = _ConfigParser(prog=f"python -m {prog}", usage=usage, description=about, exit_on_error=False)
    defaults = Config()
    for section in dataclasses.fields(Config):
        parser.add_argument(f"--{section.name}", type=section.type, default=getattr(defaults, section.name))
    parser.add_argument(
        "--config", action="config", help="YAML file: a path, or a name in configs/ such as llama_debug.yaml"
    )
    return parser


@cache
def _shared_parser(prog: str) -> ArgumentParser:
    """A cached parser of `make_parser`: making one takes as long as parsing."""
    return make_parser(prog)


def parser_arguments(
    parser: ArgumentParser, arguments: Sequence[str], warn: Callable[[str], None] = warn_once
) -> Namespace:
    """Parse the config files, with strict checks, and the overrides, which take precedence in any position.
    `warn` as for parse_config. Raises ConfigError."""
    files, overrides = _split_arguments(arguments)
    warnings = list[str]()  # an old name in a file and on the command line is reported once
    overrides = rename_overrides(overrides, warnings.append)
    paths = [find_config(name) for name in files]
    mappings = {path: _read_strictly(path, warnings.append) for path in paths}
    for override in overrides:
        _check_override(override)
    for line in dict.fromkeys(warnings):
        warn(line)
    lines = [f"--config={in_file}" for in_file, mapping in mappings.values() if mapping]
    try:
        namespace = parser.parse_args([*lines, *overrides])
    except Exception as error:  # jsonargparse raises several types, all about the user's input
        keys = {path: [key for key, _ in _leaves(mapping)] for path, (_, mapping) in mappings.items()}
        raise ConfigError(one_line(explain_parser_error(str(error), keys, overrides))) from None
    if not namespace["run.dir"]:
        namespace["run.dir"] = f"runs/{paths[-1].stem if paths else 'llama'}"
    return namespace


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


def rename_overrides(overrides: Sequence[str], warn: Callable[[str], None]) -> list[str]:
    """Return overrides with old key names replaced by new ones, both `--section.key=value` and
    `--section.key` followed by a value."""
    given = dict.fromkeys(_key_of(override) for override in overrides)
    rename_keys(given, "the command line", warn)
    renamed = []
    for override in overrides:
        key = _key_of(override)
        new = RENAMED_KEYS.get(key)
        renamed.append(f"--{new}{override[len(f'--{key}') :]}" if new else override)
    return renamed


def _key_of(override: str) -> str:
    """The key of `--section.key=value`, `--section.key` or `--section.key.help`; "" for a value."""
    return override[2:].split("=")[0].removesuffix(".help") if override.startswith("--") else ""


def _check_override(argument: str) -> None:
    if not argument.startswith("--") or argument.startswith(("--print_config", "--help")):
        return
    key = _key_of(argument)
    _check_key(key, "the command line")
    if key not in known_keys() and dataclasses.is_dataclass(_type_at(key)):
        raise ConfigError(
            f"--{key} is a section: set its keys one by one with --{key}.NAME=value, or in a --config file"
        )


def config_from(parser: ArgumentParser, namespace: Namespace) -> Config:
    """Build the frozen dataclasses of a parsed namespace. Raises ConfigError for values that they reject."""
    try:
        built = parser.instantiate(namespace)
        return Config(
            **{section.name: getattr(built, section.name) for section in dataclasses.fields(Config)}
        )
    except ValueError as error:
        raise ConfigError(one_line(error)) from None


def _read_strictly(path: Path, warn: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
    """Return the value for jsonargparse's --config (the path, or YAML text if keys were renamed) and the
    file's mapping.

    Raises ConfigError if a key is unknown, given twice or null without being optional, or if a section is not
    a mapping.
    """
    try:
        written = load_mapping(path)
    except YamlError as error:
        raise ConfigError(str(error)) from None
    rename_keys(dict(_leaves(written)), str(path), warn)
    data = _rename_nested(written)
    leaves = list(_leaves(data))
    for i, (key, value) in enumerate(leaves):
        _check_key(key, str(path))
        if key in dict(leaves[:i]):
            raise ConfigError(f"{path}: {key} is set twice, nested and with a dot: delete one")
        declared = _type_at(key)
        # jsonargparse would accept a string instead of a section: it takes it as a class and imports its
        # module.
        if value != {} and (
            dataclasses.is_dataclass(declared) or (_dataclass_in(declared) and value is not None)
        ):
            raise ConfigError(
                one_line(f"{path}: {key} is a section and needs a mapping of keys to values, not {value!r}")
            )
        if value is None and type(None) not in typing.get_args(declared):
            raise ConfigError(f"{path}: {key} has no value: set one, or remove the key to use its default")
    return str(path) if data == written else yaml.safe_dump(data), data


def _rename_nested(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a file's mapping with old key names replaced by new ones, nested or dotted as before."""
    renamed = dict[str, Any]()
    for key, value in data.items():
        name = f"{prefix}{key}"
        if name in RENAMED_KEYS:
            key = RENAMED_KEYS[name].removeprefix(prefix)
        elif isinstance(value, dict) and name not in known_keys():
            value = _rename_nested(value, f"{name}.")
        renamed[key] = value
    return renamed


def _leaves(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
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
    return any(known == key or known.startswith(f"{key}.") for known in known_keys())


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
        inner = _dataclass_in(item.type)
        keys += _keys_of(inner, f"{prefix}{item.name}.") if inner else [f"{prefix}{item.name}"]
    return keys


def _dataclass_in(declared: Any) -> Any:
    """The dataclass in a field's declared type (such as RopeScaling | None), or None."""
    return next((t for t in (declared, *typing.get_args(declared)) if dataclasses.is_dataclass(t)), None)


def _type_at(key: str) -> Any:
    """The declared type of a dotted key."""
    declared: Any = Config
    for name in key.split("."):
        declared = {item.name: item.type for item in dataclasses.fields(_dataclass_in(declared))}[name]
    return declared
