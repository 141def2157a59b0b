"""torchtitan's Llama 3 settings, from a TOML file or from flags, as settings of ours, key by key.

Names and defaults read in torchtitan 0.1.0 (config_manager.py), 0.2.2 (config/job_config.py, distributed/
activation_checkpoint.py, models/llama3/infra/parallelize.py) and 0.3.0 (config/configs.py), which has no TOML
files any more.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.tools.import_accelerate.rules import Item, dropped, judge, refused, unknown_key
from meshwright.tools.import_accelerate.torchtitan_rules import ALIASES, DEFAULTS, RULES, SECTIONS
from meshwright.train.errors import ConfigError


def judge_torchtitan(file: Mapping[str, Any] | None, flags: Mapping[str, Any]) -> list[Item]:
    """What becomes of every key; flags win over the file. Defaults of torchtitan's that are not ours are
    written out where there is a file: flags alone are a part of a config that is somewhere else."""
    from_file = _by_name(_leaves(file or {}))
    from_flags = _by_name(flags)
    given = {name: value for name, (_, value) in (from_file | from_flags).items()}
    items = []
    for name, (key, value) in from_file.items():
        overridden = name in from_flags
        items.append(
            Item(key, value, dropped("a flag overrides it"))
            if overridden
            else _judge(name, key, value, given)
        )
    items += [_judge(name, f"--{key}", value, given) for name, (key, value) in from_flags.items()]
    defaults = {name: value for name, value in DEFAULTS.items() if file is not None and name not in given}
    return [
        *items,
        *(
            judge(f"{name} (torchtitan's default)", value, given, RULES[name])
            for name, value in defaults.items()
        ),
    ]


def _leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a TOML file's nested tables."""
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def _by_name(entries: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Name as of 0.2.2 -> (key as written, value). Raises ConfigError for a key that stands twice under two
    names."""
    found: dict[str, tuple[str, Any]] = {}
    for key, value in entries.items():
        name = _plain_name(key)
        if name in found:
            raise ConfigError(f"{key}: it is the same key as {found[name][0]}: delete one of them")
        found[name] = (key, value)
    return found


def _plain_name(key: str) -> str:
    """The full name of a key: an older one's newer name, and the section of one that is given without."""
    if key in ALIASES:
        return ALIASES[key]
    if "." in key:
        return key
    same_end = [
        name
        for name in (*RULES, *ALIASES)
        if name.rsplit(".", 1)[-1] == key
        and name.split(".")[0] in ("parallelism", "training", "activation_checkpoint", "compile")
    ]
    return ALIASES.get(same_end[0], same_end[0]) if same_end else key


def _judge(name: str, key: str, value: Any, given: Mapping[str, Any]) -> Item:
    section = name.split(".")[0]
    if name in RULES:
        return judge(key, value, given, RULES[name])
    if "." in name and section in SECTIONS:
        return Item(key, value, dropped(SECTIONS[section]))
    return Item(key, value, unknown_key(name, RULES) if value != {} else refused("a section without keys"))


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """Dotted key -> value of flags as torchtitan takes them: --a.b=v, --a.b v, several values for a list,
    --a.b and --a.no_b for true and false. Dashes and underscores are one. Raises ConfigError."""
    flags: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, text = word[2:].partition("=")
            key, value = _read_flag(key.replace("-", "_"), text if equals else None)
            if key in flags:
                raise ConfigError(f"--flags: --{key} stands twice: delete one")
            flags[key] = value
        elif not key:
            raise ConfigError(
                f"--flags: {word} does not follow a flag, such as --parallelism.tensor_parallel_degree=2"
            )
        else:
            before = flags[key]
            flags[key] = (
                _read_value(word)
                if before is True
                else [*(before if isinstance(before, list) else [before]), word]
            )
    return flags


def _read_flag(key: str, text: str | None) -> tuple[str, Any]:
    """Key and value of one flag; without a value it is a switch, turned off by `no_` before its last part."""
    if text is not None:
        return key, _read_value(text)
    head, _, last = key.rpartition(".")
    if last.startswith("no_"):
        return f"{head}.{last[3:]}" if head else last[3:], False
    return key, True


def _read_value(text: str) -> Any:
    """A whole number, a truth value, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text
