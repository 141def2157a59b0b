"""What jsonargparse says of a value of the wrong type, in words."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


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
    if it is one of those with these `keys`."""
    match = re.search(r'Parser key "([^"]+)":\s*(.*)', message, re.DOTALL)
    if not match:
        return message
    key, rest = match.groups()
    overridden = any(override.startswith(f"--{key}") for override in overrides)
    files = [path for path, inside in keys.items() if any(k.startswith(key) for k in inside)]
    return f"{files[-1]}: {key}: {in_words(rest)}" if files and not overridden else f"{key}: {in_words(rest)}"
