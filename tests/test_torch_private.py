"""docs/torch_private.md lists the private names of torch that the product uses, and the installed torch has
each of them.

A name is private if a part of its dotted path begins with one underscore. The code is searched as text: names
composed at run time, and names inside longer strings, are not found (the page lists these).
"""

import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("models", "parallel", "train", "tools")
PAGE = ROOT / "docs/torch_private.md"
# Private names of Python, argparse, datasets, torchao and transformers.
NOT_TORCH = {
    *("_exit", "_run_exitfuncs", "_current_frames"),
    *("_actions", "_fingerprint", "_tensor", "_attn_implementation", "_init_weights", "_no_split_modules"),
    *("_keys_to_ignore_on_load_unexpected", "_supports_attention_backend", "_tp_plan"),
}
DOCSTRING = re.compile(r'"""(?:.|\n)*?"""')
FROM = re.compile(r"^( *)from (torch[\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)
RENAMED = re.compile(r"^(?:import (torch[\w.]*) as (\w+)|(\w+)(?:: \w+)? = (torch[\w.]*))$", re.MULTILINE)
PATH = re.compile(r"(?<![\w.])torch(?:\.\w+)+")
# of any object but self; not in strings of operators such as aten._scaled_mm
ATTRIBUTE = re.compile(
    r"(?<=[\w)\]])(?<!\bself)(?<!\bcls)(?<!\baten)\.(_[A-Za-z]\w*)|getattr\([^,]+, \"(_[A-Za-z]\w*)"
)


def rows() -> dict[str, tuple[set[str], str]]:
    """Return the files and the row of the page's tables, by name."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    table = {row[0].strip("`"): (set(re.findall(r"`([^`]+)`", row[1])), " | ".join(row)) for row in cells}
    assert len(table) == len(lines), f"{PAGE}: a name has two rows"
    assert all(len(row) == 4 and all(row) for row in cells)
    return table


def private_parts(path: str) -> list[str]:
    return [part for part in re.split(r"\W+", path) if re.match(r"_[A-Za-z]", part)]


def used_in(text: str) -> Iterator[str]:
    """Yield the private paths of torch in a module's text, also by the names that it imports them under, and
    private attributes of any object."""
    text = re.sub(r"(?m)#.*", "", DOCSTRING.sub("", text))
    paths = set(PATH.findall(text))
    names = {b or c: a or d for a, b, c, d in RENAMED.findall(text)}
    for indent, module, lines, line in FROM.findall(text):
        for name, _, other in (item.strip().partition(" as ") for item in (lines or line).split(",")):
            paths.add(f"{module}.{name}".rstrip("."))
            names |= {} if indent else {other or name: f"{module}.{name}"}
    for name, path in names.items():
        paths |= (
            {path + rest for rest in re.findall(rf"(?<![\w.]){name}((?:\.\w+)*)", text)} if name else set()
        )
    yield from (path for path in paths if private_parts(path))
    yield from ("".join(found) for found in ATTRIBUTE.findall(text))


def is_listed(used: str, listed: list[str]) -> bool:
    if not used.startswith("torch."):
        return used in NOT_TORCH or any(used in private_parts(name) for name in listed)
    return any(f"{used}.".startswith(f"{name}.") or name.startswith(f"{used}.") for name in listed)


def is_there(name: str, row: str) -> bool:
    """Return whether the installed torch has the name, or need not: it is older than the row's version, or
    has no NCCL. An attribute that is not on the class must occur in the torch file that the row names."""
    import torch

    since = re.search(r"\| (\d+)\.(\d+)[^|]*$", row)
    if since and tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, since.groups())):
        return True
    if "NCCL" in row and not torch.distributed.is_nccl_available():
        return True
    owner, _, attribute = name.partition("().")
    try:
        value = pkgutil.resolve_name(owner)
    except (AttributeError, ImportError):
        return False
    files = [Path(torch.__file__).parent / path for path in re.findall(r"`torch/([\w/]+\.pyi?)`", row)]
    texts = [file.read_text() for file in files if file.is_file()]
    return hasattr(value, attribute or "__doc__") or any(attribute in text for text in texts)


def test_the_page_lists_every_private_name_and_where_it_is_used() -> None:
    table, wrong = rows(), list[str]()
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        file, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        listed = [name for name, (files, _) in table.items() if file in files]
        wrong += [f"{file}: {used} has no row" for used in used_in(text) if not is_listed(used, listed)]
        for name in listed:
            parts = private_parts(name.rpartition("().")[2]) or [name]
            if not all(part in text for part in parts):
                wrong.append(f"{file}: does not use {name}")
    wrong += [
        f"{file}: no such file" for files, _ in table.values() for file in files if not (ROOT / file).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_the_installed_torch_has_every_name_of_the_page() -> None:
    lost = [row for name, (_, row) in rows().items() if not is_there(name, row)]
    assert not lost, "this torch lacks:\n" + "\n".join(lost)
