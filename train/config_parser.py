"""Parse YAML files and overrides into a Config, or explain all their mistakes."""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.models.config import LlamaConfig
from meshwright.parallel.errors import one_line
from meshwright.parallel.structure import Written, accepts_null, convert, is_text, report, value_of
from meshwright.parallel.yaml_io import YamlError, load_mapping, load_written, to_yaml
from meshwright.train.checkpoint.manifest import MANIFEST
from meshwright.train.config import Config, FactoryConfig
from meshwright.train.config_keys import (
    ARGS,
    FACTORY,
    OF_FACTORY,
    above,
    help_text,
    is_config_key,
    key_hint,
    leaves,
    sections_in,
    type_of,
)
from meshwright.train.errors import ConfigError
from meshwright.train.user_code import KEYS, allow

CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "configs"
COMMAND_LINE, HELP, PRINT = "the command line", ("-h", "--help"), "--print_config"
NULLS = ("null", "Null", "NULL", "~")


def find_config(name: str) -> Path:
    """Return a path unchanged, or the path of a name in configs/, with or without .yaml.

    Raises ConfigError, which suggests the nearest name, if there is no such file.
    """
    for path in (Path(name), CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name}.yaml"):
        if path.is_file():
            return path
    if Path(name).exists():
        raise ConfigError(
            f"--config {name}: not a regular file: use a YAML file, or a name in {CONFIG_FOLDER}"
        )
    known = [path.name for path in list_configs()]
    near = difflib.get_close_matches(Path(name).name, known, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}?" if near else f"Available: {', '.join(known)}."
    raise ConfigError(f"--config {name}: no such file, as a path or in {CONFIG_FOLDER}. {hint}")


def list_configs() -> list[Path]:
    return sorted(CONFIG_FOLDER.glob("*.yaml"))


def load_config(path: Path) -> Config:
    """Return the config of a YAML file that the program wrote, in a run folder or a checkpoint."""
    return parse_config([f"--config={path}"], from_user=False)


def config_to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that parses to an equal Config."""
    return to_yaml(dataclasses.asdict(config))


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A key, dotted, with its value and the `place` that sets it: a config file or the command line."""

    key: str
    value: Any
    place: str


def parse_config(arguments: Sequence[str], from_user: bool = True) -> Config:
    """Return the config of `--config NAME_OR_PATH` and `--section.key=value` overrides, which take
    precedence. Raises ConfigError. `-h [KEY]` and `--print_config` print and raise SystemExit(0).

    `from_user`: the arguments are those of a command, which may then import what they name, such as
    `model.factory`, except what only a checkpoint's config.yaml names.
    """
    if asked := [at for at, argument in enumerate(arguments) if argument in HELP]:
        names = (path.stem for path in list_configs())
        print(help_text("".join(arguments[asked[0] + 1 :][:1]), names), end="")
        raise SystemExit(0)
    given = list(_split_arguments([argument for argument in arguments if argument != PRINT]))
    files = [find_config(text) for key, text in given if key == "config"]
    try:
        settings = [setting for path in files for setting in _settings(_read_file(path), str(path))]
    except YamlError as error:
        raise ConfigError(str(error)) from None
    overrides = (each for key, text in given if key != "config" for each in _read_override(key, text))
    settings += _settings(overrides, COMMAND_LINE)
    factories = [setting.place for setting in settings if setting.key == FACTORY]
    if factories:
        settings = _without_shape(settings, factories)
    elif alone := [setting.key for setting in settings if setting.key.startswith(OF_FACTORY)]:
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
            names = setting.value
            yield from [names] if isinstance(names, str) else names or ()


def _folder(files: Sequence[Path], config: Config) -> str:
    """The default of run.dir, by the config's name, or without a config that of the factory's module."""
    module = config.model.factory.partition(":")[0]
    return f"runs/{files[-1].stem if files else module.rpartition('.')[2]}"


def _split_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys, or "config", and their texts, which may be the next arguments. Raises ConfigError."""
    rest = iter(arguments)
    for argument in rest:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            raise ConfigError(f"unrecognized argument {argument}: keys are set with --section.key=value")
        if not equals and not is_config_key(key) and key != "config":
            raise ConfigError(f"{COMMAND_LINE}: unknown key {one_line(key, 80)}. {key_hint(key)}")
        if not equals and ((text := next(rest, "--")).startswith("--")):
            raise ConfigError(f"--{key}: expected one argument, as in --{key}=VALUE")
        yield key, text


def _read_file(path: Path) -> list[tuple[str, Any]]:
    """Return the dotted keys of a file, with what is written for each. Raises YamlError, and ConfigError if a
    key is given twice."""
    pairs = [*leaves(load_mapping(path, written=True))]
    keys = [key for key, _ in pairs]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"{path}: {twice} is set twice, nested and with a dot: delete one")
    if null := next((section for key in keys for section in above(key) if section in keys), None):
        raise ConfigError(f"{path}: {null} is set as a whole and key by key: delete one")
    return pairs


def _read_override(key: str, text: str) -> list[tuple[str, Any]]:
    """Return what the command line sets: text as it is where the key's type is text. Raises ConfigError."""
    if not is_config_key(key):
        return [(key, text)]
    if is_text(type_of(key)):
        written: Any = Written(text)
        written.value = None if text in NULLS else text
    else:
        try:
            written = load_written(text)
        except YamlError as error:
            raise ConfigError(f"{COMMAND_LINE}: {key}: {error}") from None
    return [*leaves({key: written})]


def _settings(pairs: Iterable[tuple[str, Any]], place: str) -> list[_Setting]:
    """Return what dotted keys and what is written for them set. Raises ConfigError with all keys that are
    unknown, or have no value or one of another type."""
    settings: list[_Setting] = []
    mistakes: list[str] = []
    for key, written in pairs:
        settings.append(_Setting(key, _read(key, written, mistakes), place))
    if mistakes:
        raise ConfigError(report(place, mistakes))
    return settings


def _read(key: str, written: Any, mistakes: list[str]) -> Any:
    """Return the value that is written for a key, of its declared type, or add to `mistakes`."""
    if not is_config_key(key):
        mistakes.append(f"unknown key {one_line(key, 80)}. {key_hint(key)}")
        return None
    declared, null = type_of(key), value_of(written) is None
    if (null and not (written and accepts_null(declared))) or (written == "" and is_text(declared)):
        none = ", null for none" if accepts_null(declared) else ""
        mistakes.append(f"{key} has no value: set one{none}, or remove the key to use its default")
    elif sections_in(declared) and written == {}:
        return {}
    elif sections_in(declared) and not null:
        rule = f"needs a mapping of keys to values, or --{key}.NAME=value"
        mistakes.append(f"{key} is a section and {rule}, not {one_line(value_of(written), 200)}")
    else:
        return convert(declared, written, key, mistakes)
    return None


def _without_shape(settings: Sequence[_Setting], factories: Sequence[str]) -> list[_Setting]:
    """Return the settings without the shape of our Llama that earlier files set. Raises ConfigError for such
    a shape beside the factory, or after it. `factories`: the places that name one."""
    places = [*dict.fromkeys(setting.place for setting in settings)]
    after = places[places.index(factories[0]) :]
    kept = []
    for setting in settings:
        if not setting.key.startswith("model.") or setting.key.startswith(OF_FACTORY):
            kept.append(setting)
        elif setting.place in after:
            raise ConfigError(
                f"{setting.place}: {setting.key} is of the shape of our Llama, but {FACTORY} in "
                f"{factories[-1]} builds the model: remove one of them. Arguments of the function are "
                f"{ARGS}.KEY=VALUE"
            )
    return kept


def _merge(settings: Sequence[_Setting]) -> dict[str, Any]:
    """Return the last value of each key. Null for a section replaces its keys, and a key the null."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, value = setting.key, setting.value
        below = [other for other in values if other.startswith(f"{key}.")]
        for other in [*above(key), *(below if value is None else [])]:
            values.pop(other, None)
        if not below or value is None:
            values[key] = value
    return values


def _build(values: Mapping[str, Any], model: type) -> Config:
    """Return the Config of dotted keys and values. Raises ConfigError for values that a section rejects."""

    def make(kind: Any, section: str) -> Any:
        """A dataclass of the values below `section`, otherwise with its defaults."""
        given = {}
        for item in dataclasses.fields(kind):
            key = f"{section}{item.name}"
            inner = [model] if key == "model" else sections_in(item.type)
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
