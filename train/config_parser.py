"""YAML files and dotted overrides -> Config; the help; unknown keys and values of a wrong type, in words."""

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

# Keys that were renamed, old name -> new name in the same section. Old names are accepted in files and on
# command lines until the next release; then this table goes, with what reads it. (How a config.yaml of older
# runs and checkpoints is read from then on, as in tests/backward_compatibility, must be decided with it.)
RENAMED_KEYS = {
    "parallel.checkpointed_blocks": "parallel.activation_checkpoint_blocks",
    "parallel.tp_parts": "parallel.tp_modules",
    "train.gc_every": "train.gc_every_steps",
    "data.held_out": "data.eval_fraction",
}


@cache
def warn_once(line: str) -> None:
    """Print a line on standard error, the same one only once per process."""
    print(line, file=sys.stderr, flush=True)


def no_warning(line: str) -> None:
    """Say nothing: on ranks other than 0, and of files that an older version wrote."""


def rename_keys(keys: Mapping[str, Any], place: str, warn: Callable[[str], None]) -> dict[str, Any]:
    """Dotted `keys` under their names of today, in the same order; `warn` gets a line per old name.

    Raises ConfigError where `keys`, which stand in `place`, have both names of one.
    """
    for old, new in RENAMED_KEYS.items():
        if old in keys and new in keys:
            raise ConfigError(f"{place}: {old} is the old name of {new}, and both are given: leave {old} out")
        if old in keys:
            warn(f"config: {old} is now {new}; the old name goes with the next release")
    return {RENAMED_KEYS.get(key, key): value for key, value in keys.items()}


def in_words(report: str) -> str:
    """`report` without Python's types: what the value must be, and what it is. Unknown reports stay as they
    are."""
    report = re.sub(r"<class '(\w+)'>", r"\1", " ".join(report.split())).replace("typing.", "")
    if match := re.search(r"Subtypes: \[(.*)\] Errors: .* Given value: (.*)$", report):
        wanted = re.findall(r"Literal\[[^]]*\]|[^,\s]+", match[1])
        return f"must be {' or '.join(map(_type_in_words, wanted))}, not {match[2]}"
    if match := re.search(r"^Expected an? (.*)\. Got value: (.*)$", report):
        return f"must be {_type_in_words(match[1])}, not {match[2]}"
    return report


def _type_in_words(name: str) -> str:
    if name.startswith("Literal["):
        return name[len("Literal[") : -1].replace("'", "")
    words = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "a text",
        "tuple": "a list, as [first, second]",
    }
    return words.get(name, name)


def explain(message: str, keys: Mapping[Path, Sequence[str]], overrides: Sequence[str]) -> str:
    """jsonargparse's report of a value of the wrong type, as one sentence that names the file it comes from,
    if it is one of those with these `keys`; of another mistake all of them, unless an override may be to
    blame."""
    match = re.search(r'Parser key "([^"]+)":\s*(.*)', message, re.DOTALL)
    if not match:
        return message if overrides else ": ".join([*map(str, keys), message])
    key, rest = match.groups()
    overridden = any(override.startswith(f"--{key}") for override in overrides)
    files = [path for path, inside in keys.items() if any(k.startswith(key) for k in inside)]
    return f"{files[-1]}: {key}: {in_words(rest)}" if files and not overridden else f"{key}: {in_words(rest)}"


CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "configs"


def find_config(name: str) -> Path:
    """A path as it is, or a bare name from configs/, with or without .yaml; ConfigError names the nearest
    one."""
    for path in (Path(name), CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name}.yaml"):
        if path.is_file():
            return path
    known = [path.name for path in list_configs()]
    near = difflib.get_close_matches(Path(name).name, known, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}?" if near else f"Shipped: {', '.join(known)}."
    raise ConfigError(f"--config {name}: no such file, here or in {CONFIG_FOLDER}. {hint}")


def parse_config(
    arguments: Sequence[str], prog: str = "train.main", warn: Callable[[str], None] = warn_once
) -> Config:
    """Config from `--config NAME_OR_PATH` and `--section.key=value` overrides, which win. `warn` gets a line
    for each key that has its old name.

    Raises ConfigError. `-h` and `--print_config` print and leave with SystemExit(0).
    """
    # A parser that was asked to print, and then found a mistake, would print at its next use: it is not used
    # again.
    parser = (
        make_parser(prog)
        if any(argument.startswith("--print_config") for argument in arguments)
        else _shared_parser(prog)
    )
    return config_from(parser, parser_arguments(parser, arguments, warn))


def load_config(path: Path) -> Config:
    """Config of a YAML file alone, such as one in a run's folder or a checkpoint. Old names of keys are no
    mistake of who uses it, so nothing is said of them."""
    return parse_config([f"--config={path}"], warn=no_warning)


def list_configs() -> list[Path]:
    """The configs that come with the project."""
    return sorted(CONFIG_FOLDER.glob("*.yaml"))


def config_to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that reads back to an equal one."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def keys_of(section: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, value and declared type of each key of a section of the config, whose own name is
    `name`."""
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, f"{name}.{item.name}")
        else:
            yield f"{name}.{item.name}", value, item.type


class _ConfigParser(ArgumentParser):
    """Its help leaves out jsonargparse's options for a file per section: --config is the one way."""

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        text = super().format_help(formatter)
        return re.sub(r"\n  --[\w.]+ CONFIG\s+Path to a configuration file\.", "", text)


def make_parser(prog: str) -> ArgumentParser:
    """A parser of every section's keys, for train.main and for tools that take a config."""
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
    """A parser of `make_parser` for many uses: to make one takes as long as to parse."""
    return make_parser(prog)


def parser_arguments(
    parser: ArgumentParser, arguments: Sequence[str], warn: Callable[[str], None] = warn_once
) -> Namespace:
    """Parse the config file, read strictly, and the overrides, which win wherever they stand. `warn` as for
    parse_config. Raises ConfigError."""
    files, overrides = _split_arguments(arguments)
    said = list[str]()  # a key may have its old name in a file and on the command line: one line
    overrides = rename_overrides(overrides, said.append)
    paths = [find_config(name) for name in files]
    mappings = {path: _read_strictly(path, said.append) for path in paths}
    for override in overrides:
        _check_override(override)
    for line in dict.fromkeys(said):
        warn(line)
    lines = [f"--config={in_file}" for in_file, mapping in mappings.values() if mapping]
    try:
        namespace = parser.parse_args([*lines, *overrides])
    except Exception as error:  # jsonargparse raises several kinds; all of them are about what the user wrote
        keys = {path: [key for key, _ in _leaves(mapping)] for path, (_, mapping) in mappings.items()}
        raise ConfigError(one_line(explain(str(error), keys, overrides))) from None
    if not namespace["run.dir"]:
        namespace["run.dir"] = f"runs/{paths[-1].stem if paths else 'llama'}"
    return namespace


def _split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names given to --config, and everything else."""
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
    """`--section.key=value`, and `--section.key` with its value after it, under the keys' names of today."""
    given = dict.fromkeys(_key_of(override) for override in overrides)
    rename_keys(given, "the command line", warn)
    renamed = []
    for override in overrides:
        key = _key_of(override)
        new = RENAMED_KEYS.get(key)
        renamed.append(f"--{new}{override[len(f'--{key}') :]}" if new else override)
    return renamed


def _key_of(override: str) -> str:
    """The key of `--section.key=value`, of `--section.key` or of `--section.key.help`; "" of a value."""
    return override[2:].split("=")[0].removesuffix(".help") if override.startswith("--") else ""


def _check_override(argument: str) -> None:
    if not argument.startswith("--") or argument.startswith(("--print_config", "--help")):
        return
    key = _key_of(argument)
    _check_key(key, "the command line")
    if key not in known_keys() and dataclasses.is_dataclass(_type_at(key)):
        raise ConfigError(
            f"--{key} is a section: give its keys one by one, as --{key}.NAME=value, or in a --config file"
        )


def config_from(parser: ArgumentParser, namespace: Namespace) -> Config:
    """Build the frozen dataclasses of a parsed namespace; their own checks raise ConfigError."""
    try:
        built = parser.instantiate(namespace)
        return Config(
            **{section.name: getattr(built, section.name) for section in dataclasses.fields(Config)}
        )
    except ValueError as error:
        raise ConfigError(one_line(error)) from None


def _read_strictly(path: Path, warn: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
    """The file's mapping, after checking that every key exists, sections are mappings, and null is where it
    may be. Before it stands what jsonargparse's --config takes: the path, or the mapping as YAML where keys
    had their old names."""
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
            raise ConfigError(f"{path}: {key} stands twice, with a dot and without: delete one")
        wanted = _type_at(key)
        # A word in place of a section would do: jsonargparse takes one for a class, and imports its module.
        if value != {} and (
            dataclasses.is_dataclass(wanted) or (_dataclass_in(wanted) and value is not None)
        ):
            raise ConfigError(
                one_line(f"{path}: {key} is a section and needs a mapping of keys to values, not {value!r}")
            )
        if value is None and type(None) not in typing.get_args(wanted):
            raise ConfigError(
                f"{path}: {key} has no value. Give it one, or leave the key out for its default"
            )
    return str(path) if data == written else yaml.safe_dump(data), data


def _rename_nested(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A file's mapping with today's names, each key in its place: nested, or dotted."""
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
        # but for keys that have mappings
        if isinstance(value, dict) and value and f"{prefix}{key}" not in known_keys():
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_key(key: str, place: str) -> None:
    """ConfigError naming the nearest valid key, unless `key` (dotted) is one, or a section."""
    if not is_config_key(key):
        raise ConfigError(f"unknown key {one_line(key, 80)} in {place}. {near_key(key)}")


def is_config_key(key: str) -> bool:
    """Whether a config has this dotted key, or a section of this name."""
    return any(known == key or known.startswith(f"{key}.") for known in known_keys())


def near_key(key: str) -> str:
    """What to say of a key that no config has: the one that was meant, or where they all are."""
    known = known_keys()
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = same_end or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else "See train.main -h for all."


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key a config can have."""
    return tuple(_keys_of(Config, ""))


def _keys_of(cls: Any, prefix: str) -> list[str]:
    keys = []
    for item in dataclasses.fields(cls):
        inner = _dataclass_in(item.type)
        keys += _keys_of(inner, f"{prefix}{item.name}.") if inner else [f"{prefix}{item.name}"]
    return keys


def _dataclass_in(wanted: Any) -> Any:
    """The dataclass that a field's type is or may be (as in RopeScaling | None), or None."""
    return next((t for t in (wanted, *typing.get_args(wanted)) if dataclasses.is_dataclass(t)), None)


def _type_at(key: str) -> Any:
    """The declared type of a dotted key."""
    wanted: Any = Config
    for name in key.split("."):
        wanted = {item.name: item.type for item in dataclasses.fields(_dataclass_in(wanted))}[name]
    return wanted
