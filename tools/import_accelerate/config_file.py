"""The verdict on a file of accelerate: on its keys in and outside of sections, each by its rule in table.py,
on unknown keys and on missing ones."""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.parallel.plan.rules import nearest
from meshwright.tools.import_accelerate.rules import Given, Item, Rule, dropped, drops, judge, mapped, refused
from meshwright.tools.import_accelerate.table import (
    PREFIXES,
    REDUCE,
    STEPS,
    TABLE,
    TYPES,
    cost_of_whole_gradients,
    count,
    distributed,
)


def judge_accelerate(config: Mapping[Any, Any]) -> list[Item]:
    """Return the verdict on every key of the file, and on missing keys: required ones, and those with another
    default in accelerate."""
    entries, items = _flatten(config)
    given = {plain: value for _, _, plain, value in entries if value is not None}
    seen: dict[str, str] = {}
    for key, section, plain, value in entries:
        if plain in seen:
            why = f"it is the same key as {seen[plain]}: delete one of them"
            items.append(Item(key, value, refused(why)))
        else:
            items.append(judge(key, value, given, _rule(section, plain, given)))
            seen[plain] = key
    return [*items, *_judge_missing(given)]


def _flatten(config: Mapping[Any, Any]) -> tuple[list[tuple[str, str, str, Any]], list[Item]]:
    """Return (written key, section, plain name, value) of each entry, and items of unreadable sections."""
    entries: list[tuple[str, str, str, Any]] = []
    items = []
    for key, value in config.items():
        if str(key) not in PREFIXES:
            entries.append(_flat_entry(str(key), value))
        elif value in (None, {}):
            items.append(Item(str(key), value, dropped("the section is empty")))
        elif isinstance(value, dict):
            entries += [_flat_entry(f"{key}.{inner}", leaf) for inner, leaf in value.items()]
        else:
            why = "it is a section and needs a mapping of keys to values"
            items.append(Item(str(key), value, refused(why)))
    return entries, items


def _flat_entry(key: str, value: Any) -> tuple[str, str, str, Any]:
    """Return the entry of a key, with a dot after its section. As in accelerate, a key without its section's
    prefix gets it."""
    section, dot, name = key.partition(".")
    if section not in PREFIXES:
        return key, "", key, value
    prefix = PREFIXES[section]
    return key, section + dot, prefix + name.removeprefix(prefix), value


def _rule(section: str, plain: str, given: Given) -> Rule:
    if section + plain not in TABLE:
        known = [*TABLE, *PREFIXES]
        same_end = [name for name in known if name.rsplit(".", 1)[-1] == plain]
        hint = f" Did you mean {same_end[0]}?" if same_end else nearest(section + plain, known)
        return lambda value, given: refused(f"unknown key.{hint or ' Remove it.'}")
    if section == "fsdp_config." and distributed(given) in TYPES[1:]:
        return drops(f"distributed_type {distributed(given)} does not read fsdp_config, as in accelerate")
    return TABLE[section + plain]


def _judge_missing(given: Given) -> Iterator[Item]:
    """Yield the required keys that are missing, and accelerate's defaults that differ from ours: it does not
    compile, and FSDP reduces gradients in the last micro batch only."""
    if "distributed_type" not in given:
        why = f"the key is missing: set it to one of {', '.join(TYPES)}"
        yield Item("distributed_type", None, refused(why))
    if "num_processes" not in given and distributed(given) != "NO":
        why = "the key is missing: set it to the number of processes on all machines together"
        yield Item("num_processes", None, refused(why))
    if "dynamo_backend" not in given:
        note = (
            "nothing is compiled, as accelerate does by default; --parallel.compile.enabled=true compiles "
            "every block"
        )
        verdict = mapped("accelerate's default", {"parallel.compile.enabled": False}, note)
        yield Item("dynamo_backend", None, verdict)
    if "sync_each_batch" not in given and distributed(given) == "FSDP" and count(given, STEPS) > 1:
        verdict = mapped("accelerate's default", {REDUCE: "last_micro_batch"}, cost_of_whole_gradients(given))
        yield Item("sync_each_batch", None, verdict)
