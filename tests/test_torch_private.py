"""docs/torch_private.md lists exactly the private names of torch that the product uses, and the installed
torch has each of them.

A name is private if a part of its dotted path begins with one underscore. Files are parsed, not imported. Not
found: names composed at run time, and names inside longer strings (the page lists these).
"""

import ast
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("models", "parallel", "train", "tools")
PAGE = ROOT / "docs/torch_private.md"
# Private attributes of objects of argparse, datasets, torchao and transformers.
NOT_TORCH = {
    *("_actions", "_fingerprint", "_tensor", "_attn_implementation", "_init_weights", "_no_split_modules"),
    *("_keys_to_ignore_on_load_unexpected", "_supports_attention_backend", "_tp_plan"),
}
# Private operators and namespaces of torch that occur alone in strings.
OPERATORS = {
    "_c10d_functional": "torch.ops._c10d_functional",
    "_unsafe_view": "torch.ops.aten._unsafe_view",
}
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Methods of dictionaries and functions of torch; the row names the dictionary or function.
METHODS = {"get", "clear", "items", "keys", "values", "cache_clear"}
OBJECT = "*."  # prefix of an attribute of an object whose class is not known


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def uses_in(text: str) -> set[str]:
    """Return the private names of torch in a module's text: dotted paths, or `*.NAME` for an attribute of an
    object. A path that is a prefix of another one is left out."""
    module = ast.parse(text)
    imported = _local_names(
        (part for each in module.body if not isinstance(each, SCOPES) for part in ast.walk(each)), {}
    )
    names = {name for statement in module.body for name in _names(list(ast.walk(statement)), imported)}
    names = {name for name in names if name.startswith(("torch.", OBJECT)) and is_private(name)}
    return {name for name in names if not any(longer.startswith(f"{name}.") for longer in names)}


def _local_names(nodes: Iterable[ast.AST], outer: Mapping[str, str]) -> dict[str, str]:
    """Return the full name of what is imported, or renamed as in c10d = torch.ops._c10d_functional, by local
    name, with those of the enclosing scope."""
    known = dict(outer)
    for node in nodes:
        if isinstance(node, ast.Import):
            known |= {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names}
            known |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("meshwright"):
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and is_private(path := _path(node.value, known)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known |= {target.id: path for target in targets if isinstance(target, ast.Name)}
    return known


def _names(nodes: list[ast.AST], imported: Mapping[str, str]) -> Iterator[str]:
    """Yield the dotted names in a statement of a module, private or not."""
    known = _local_names(nodes, imported)
    yield from known.values()
    for node in nodes:
        match node:
            case ast.Constant(value=str(value)):
                name = value.replace("aten::", "torch.ops.aten.")
                yield name if re.fullmatch(r"torch(\.\w+)+", name) else OPERATORS.get(name, "")
            case ast.Attribute(value=base, attr=name):
                yield _attribute(base, name, known)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[base, ast.Constant(name), *_]
            ):
                yield _attribute(base, str(name), known)
            case ast.Call(func=ast.Attribute(value=base, attr="patch"), keywords=keywords):
                yield from (_attribute(base, keyword.arg or "", known) for keyword in keywords)


def _path(node: ast.AST | None, known: Mapping[str, str]) -> str:
    """Return the dotted path of `torch.a.b` or `alias.b`; "" if it does not begin with an import."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if not isinstance(node, ast.Attribute):
        return ""
    base = _path(node.value, known)
    return f"{base}.{node.attr}" if base and node.attr not in METHODS else base


def _attribute(base: ast.AST, name: str, known: Mapping[str, str]) -> str:
    if path := _path(base, known):
        return path if name in METHODS else f"{path}.{name}"
    of_ours = name in NOT_TORCH or ast.unparse(base) in ("self", "cls", "super()")
    return f"{OBJECT}{name}" if is_private(name) and not of_ours else ""


def rows() -> dict[str, tuple[set[str], str]]:
    """Return the files and the row of the page's tables, by name."""
    table = dict[str, tuple[set[str], str]]()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            name, where, why, since = (cell.strip() for cell in line.strip("|").split(" | "))
            assert why, line
            assert since, line
            assert name.strip("`") not in table, f"{PAGE}: {name} has two rows"
            table[name.strip("`")] = (set(re.findall(r"`([^`]+)`", where)), line)
    return table


def is_there(name: str, row: str) -> bool:
    """Return whether the installed torch has the name, or need not: it is older than the row's version, or
    has no NCCL. An attribute that is not on the class must occur in the torch file that the row names."""
    import torch

    since = re.search(r"\| (\d+)\.(\d+)[^|]*\|$", row)
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
    return hasattr(value, attribute or "__doc__") or any(
        re.search(rf"\b{attribute}\b", text) for text in texts
    )


def test_the_page_lists_every_private_name_and_where_it_is_used() -> None:
    used, listed = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for name in uses_in(path.read_text(encoding="utf-8")):
            used[name].add(path.relative_to(ROOT).as_posix())
    for name, (files, _) in rows().items():  # `torch.nn.Module()._call_impl` is used as `*._call_impl`
        listed[f"{OBJECT}{name.partition('().')[2]}" if "()." in name else name] |= files
    assert listed == used, "each name needs its row and each row its name, with all files"


def test_the_installed_torch_has_every_name_of_the_page() -> None:
    lost = [row for name, (_, row) in rows().items() if not is_there(name, row)]
    assert not lost, "this torch lacks:\n" + "\n".join(lost)
