"""docs/torch_private.md lists exactly the private names of torch that the product uses, and the installed
torch has each of them.

A name is private if a part of its dotted path begins with one underscore. Files are parsed, not imported. Not
found: names composed at run time, and names inside longer strings (the page lists these).
"""

import ast
import importlib
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("models", "parallel", "train", "tools")
PAGE = "docs/torch_private.md"
# Private attributes of objects of other packages, and the package.
NOT_TORCH = {
    "_actions": "argparse",
    "_fingerprint": "datasets",
    "_tensor": "torchao",
    **dict.fromkeys(
        (
            *("_attn_implementation", "_init_weights", "_keys_to_ignore_on_load_unexpected"),
            *("_no_split_modules", "_supports_attention_backend", "_tp_plan"),
        ),
        "transformers",
    ),
}
# Private operators and namespaces of torch that occur alone in strings.
OPERATORS = {"_c10d_functional": "torch.ops", "_unsafe_view": "torch.ops.aten"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
ATTRIBUTE_FUNCTIONS = {"getattr", "hasattr", "setattr", "delattr"}
# Methods of dictionaries and functions of torch; the row names the dictionary or function.
METHODS = {"get", "clear", "items", "keys", "values", "cache_clear"}
DOTTED = re.compile(r"torch(\.\w+)+")
SELF = ("self", "cls", "super()")
OBJECT = "*."  # prefix of an attribute of an object whose class the parser does not know


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def uses_in(text: str) -> set[str]:
    """Return the private names of torch in a module's text: dotted paths, or `*.NAME` for an attribute of an
    object. A path that is a prefix of another one is left out."""
    names = {name for name in _of_scope(ast.parse(text), {}) if is_private(name)}
    return {name for name in names if not any(longer.startswith(f"{name}.") for longer in names)}


def _of_scope(scope: ast.AST, outer: Mapping[str, str]) -> Iterator[str]:
    """Yield the names in a module or a function, including its inner functions. `outer`: full names by local
    name in the enclosing scope."""
    nodes = list(_nodes_of(scope))
    imported = [(full, local) for node in nodes for full, local in _imported(node)]
    yield from (full for full, _ in imported if full.startswith("torch."))
    arguments = getattr(scope, "args", None)
    hidden = {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)} if arguments else set()
    known = {name: full for name, full in outer.items() if name not in hidden}
    known |= {local: full for full, local in imported if not full.startswith("meshwright.")}
    for node in nodes:
        known |= _set_to_private(node, known)
    for node in nodes:
        yield from _of_node(node, known)
        if isinstance(node, ast.ClassDef):
            yield from _inherited(node, known)
        elif isinstance(node, FUNCTIONS):
            yield from _of_scope(node, known)


def _set_to_private(node: ast.AST, known: Mapping[str, str]) -> dict[str, str]:
    """Return the full name by local name of an assignment such as c10d = torch.ops._c10d_functional, else
    {}."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or not node.value:
        return {}
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    full = _path(node.value, known) or ""
    return {target.id: full} if isinstance(target, ast.Name) and is_private(full) else {}


def _nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below a scope, including its functions but not their bodies."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, FUNCTIONS):
            yield from _nodes_of(node)


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the full and local names of an import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.name, alias.asname) if alias.asname else (alias.name, alias.name)
            yield alias.name.partition(".")[0], alias.name.partition(".")[0]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from ((f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names)


def _path(node: ast.AST, known: Mapping[str, str]) -> str | None:
    """Return the dotted path of `torch.a.b` or `alias.b`; None if it does not begin with an import."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _path(node.value, known)
        return base and (base if node.attr in METHODS else f"{base}.{node.attr}")
    return None


def _of_node(node: ast.AST, known: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value.replace("aten::", "torch.ops.aten.")
        if DOTTED.fullmatch(name):
            yield name
        elif name in OPERATORS:
            yield f"{OPERATORS[name]}.{name}"
    elif isinstance(node, ast.Attribute):
        yield from _of_attribute(node.value, node.attr, known)
    elif isinstance(node, ast.Call):
        yield from _of_call(node, known)


def _of_call(node: ast.Call, known: Mapping[str, str]) -> Iterator[str]:
    """Yield the name in getattr(x, "name") and similar calls, and the keys in config.patch(key=value)."""
    function = node.func
    if isinstance(function, ast.Name) and function.id in ATTRIBUTE_FUNCTIONS and len(node.args) > 1:
        name = getattr(node.args[1], "value", None)
        if isinstance(name, str):
            yield from _of_attribute(node.args[0], name, known)
    if isinstance(function, ast.Attribute) and function.attr == "patch":
        for keyword in node.keywords:
            yield from _of_attribute(function.value, keyword.arg or "", known)


def _of_attribute(base: ast.AST, name: str, known: Mapping[str, str]) -> Iterator[str]:
    path = _path(base, known)
    if path:
        if path.partition(".")[0] == "torch" and name not in METHODS:
            yield f"{path}.{name}"
    elif is_private(name) and name not in NOT_TORCH and ast.unparse(base) not in SELF:
        yield f"{OBJECT}{name}"


def _inherited(node: ast.ClassDef, known: Mapping[str, str]) -> Iterator[str]:
    """Yield private attributes of `self` that a subclass of a torch class uses but does not set or define."""
    if not any((_path(base, known) or "").startswith("torch.") for base in node.bases):
        return
    own = {getattr(part, "name", None) or ast.unparse(getattr(part, "target", part)) for part in node.body}
    of_self = [
        part
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and is_private(part.attr) and ast.unparse(part.value) in SELF
    ]
    own |= {part.attr for part in of_self if isinstance(part.ctx, ast.Store)}
    yield from (f"{OBJECT}{part.attr}" for part in of_self if part.attr not in own)


@cache
def uses(root: Path) -> Mapping[str, set[str]]:
    """Return the files that use a private name of torch, by name."""
    files = defaultdict(set)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for name in uses_in(path.read_text(encoding="utf-8")):
                files[name].add(path.relative_to(root).as_posix())
    return dict(files)


def rows(root: Path) -> dict[str, tuple[set[str], str]]:
    """Return the files and the row of the page's tables, by name."""
    table = {}
    for line in (root / PAGE).read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            name, where, why, since = (cell.strip() for cell in line.strip("|").split(" | "))
            assert why, line
            assert since, line
            assert name.strip("`") not in table, f"{PAGE}: {name} has two rows"
            table[name.strip("`")] = (set(re.findall(r"`([^`]+)`", where)), line)
    return table


def as_used(name: str) -> str:
    """Return a row's name in the form of `uses`: `torch.nn.Module()._call_impl` is `*._call_impl`."""
    return f"{OBJECT}{name.partition('().')[2]}" if "()." in name else name


def differences(root: Path) -> list[str]:
    """Return the changes that the page needs to match the code."""
    listed: dict[str, set[str]] = defaultdict(set)
    for name, (files, _) in rows(root).items():
        listed[as_used(name)] |= files
    used = uses(root)
    wrong = []
    for name in sorted(used.keys() | listed.keys()):
        where = ", ".join(f"`{file}`" for file in sorted(used.get(name, ())))
        row = f"| `{name.replace(OBJECT, 'CLASS().')}` | {where} | WHAT FOR | SINCE; WHAT TO DO |"
        if name not in listed:
            wrong.append(f"{PAGE} lacks a private name of torch. Add: {row}")
        elif name not in used:
            wrong.append(f"{PAGE}: no file uses {name} any more: delete its row")
        elif listed[name] != used[name]:
            wrong.append(f"{PAGE}: {name} is used in {where}, but its row lists {sorted(listed[name])}")
    return wrong


def find(name: str) -> Any:
    """Return the object at a dotted path of torch. Raises AttributeError or ImportError if it does not
    exist."""
    path, *parts = name.split(".")
    value: Any = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        if not hasattr(value, part) and isinstance(value, ModuleType):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


def is_there(name: str, row: str) -> bool:
    """Return whether the installed torch has the name, or need not: it is older than the row's version, or
    has no NCCL.

    An attribute that is not on the class must occur in the torch file that the row names."""
    import torch

    since = re.search(r"\| (\d+)\.(\d+)[^|]*\|$", row)
    installed = tuple(map(int, torch.__version__.split(".")[:2]))
    if since and installed < tuple(map(int, since.groups())):
        return True
    if "NCCL" in row and not torch.distributed.is_nccl_available():
        return True
    owner, _, attribute = name.partition("().")
    try:
        value = find(owner)
    except (AttributeError, ImportError):
        return False
    if not attribute or hasattr(value, attribute):
        return True
    files = [Path(torch.__file__).parent / path for path in re.findall(r"`torch/([\w/]+\.pyi?)`", row)]
    return any(re.search(rf"\b{attribute}\b", file.read_text()) for file in files if file.is_file())


def test_the_page_lists_every_private_name_and_where_it_is_used() -> None:
    wrong = differences(ROOT)
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_installed_torch_has_every_name_of_the_page() -> None:
    lost = [row for name, (_, row) in rows(ROOT).items() if not is_there(name, row)]
    assert not lost, "this torch lacks:\n" + "\n".join(lost)


@pytest.mark.parametrize(
    ("name", "row", "there"),
    [
        ("torch._dynamo.reset", "| 2.11 or before; a |", True),
        ("torch._dynamo.no_such_name", "| 2.11 or before; a |", False),
        ("torch._no_such_module.x", "| 2.11; a |", False),
        ("torch._dynamo.no_such_name", "| 99.1: not in 2.11.0; a |", True),
        ("torch.nn.Module()._call_impl", "| 2.11; a |", True),
        ("torch.nn.Module()._parameters", "(`torch/nn/modules/module.py`) | 2.11; a |", True),
        ("torch.nn.Module()._parameters", "(`torch/nn/modules/no_such_file.py`) | 2.11; a |", False),
        ("torch.nn.Module()._no_such_name", "(`torch/nn/modules/module.py`) | 2.11; a |", False),
        ("torch.nn.NoSuchClass()._parameters", "(`torch/nn/modules/module.py`) | 2.11; a |", False),
    ],
)
def test_a_name_that_torch_lacks_is_found(name: str, row: str, there: bool) -> None:
    assert is_there(name, row) == there


PLANTED = {
    "from torch import _x": "torch._x",
    "from torch._y.z import a, b": "torch._y.z.a torch._y.z.b",
    "import torch\ntorch._y.z = 3": "torch._y.z",
    "import torch._y.z": "torch._y.z",
    "import torch._y.z as short\nshort.a()": "torch._y.z.a",
    "import torch.distributed as dist\ndist.c10d._world.map['a']": "torch.distributed.c10d._world.map",
    "from torch import _y\ndef f():\n    return _y.z": "torch._y.z",
    "def f():\n    from torch._y import config\n    config.a.b = 1": "torch._y.config.a.b",
    "from torch._y import config\nwith config.patch(a=1): pass": "torch._y.config.a torch._y.config.patch",
    "from torch._y import TABLE\nTABLE.get('a')": "torch._y.TABLE",
    "import torch\nc10d = torch.ops._c10d\nc10d.a(c10d.b(x))": "torch.ops._c10d.a torch.ops._c10d.b",
    "from torch._y import _z\nz: Any = _z\nz._a = 1": "torch._y._z._a",
    "import torch\ngetattr(torch._C, '_clear', None)": "torch._C._clear",
    "hasattr(module, '_typed_storage')": "*._typed_storage",
    "module._apply(f)": "*._apply",
    "from meshwright.models import llama\nllama.model()._compiled": "*._compiled",
    "import torch\nx = torch.tensor(1)\nx._cdata": "*._cdata",
    "import logging\nlogging.getLogger('torch._y.z')": "torch._y.z",
    "NAMES = ('c10d', '_c10d_functional')": "torch.ops._c10d_functional",
    "PRODUCTS = {'aten::_scaled_mm': 1}": "torch.ops.aten._scaled_mm",
    "from torch import nn\nclass A(nn.Module):\n    def f(self):\n        self._b = self._apply": "*._apply",
    "if TYPE_CHECKING:\n    from torch._y import z": "torch._y.z",
}
ALLOWED = (
    "import torch\ntorch.compile(x)\ntorch.__version__",
    "import os\nos._exit(1)",
    "from torch import nn\nclass A(nn.Module):\n  def f(self): self._b = self._g()\n  def _g(self): self._b",
    "class A:\n    def f(self):\n        return self._parameters",
    "from torch._y import config as other\ndef f(config):\n    return config.a, other.b",
    "raise ValueError('torch._y.z says no')",
    "def f():\n    from torch._y import config\n    config.b\ndef g(config):\n    config.mode",
    "parser._actions",
)


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_use_is_found(text: str) -> None:
    assert uses_in(text) == set(PLANTED[text].split())


def test_what_is_public_or_our_own_is_not_taken_for_a_private_name() -> None:
    assert [uses_in(text) - {"torch._y.config.b"} for text in ALLOWED] == [set()] * len(ALLOWED)


def test_the_page_and_the_code_are_compared_both_ways(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for folder in FOLDERS:
        (tmp_path / folder / "deep").mkdir(parents=True)
    (tmp_path / "train/deep/a.py").write_text("from torch._y import z\nmodule._apply(z)\n")
    (tmp_path / "tools/b.py").write_text("import torch\ntorch._y.z()\n")
    page = """\
        | name | where | what for | since; what to do if it is removed |
        |---|---|---|---|
        | `torch._y.z` | `tools/b.py`, `train/deep/a.py` | a | 2.11; b |
        | `torch.nn.Module()._apply` | `train/deep/a.py` | a | 2.11; b |
        """

    def report(old: str = "", new: str = "") -> list[str]:
        uses.cache_clear()
        (tmp_path / PAGE).write_text(textwrap.dedent(page).replace(old, new))
        return differences(tmp_path)

    assert report() == []
    (lacking,) = report("| `torch.nn.Module()._apply` | `train/deep/a.py` | a | 2.11; b |\n")
    assert lacking.endswith("Add: | `CLASS()._apply` | `train/deep/a.py` | WHAT FOR | SINCE; WHAT TO DO |")
    (incomplete,) = report("`tools/b.py`, ")
    assert "torch._y.z is used in `tools/b.py`, `train/deep/a.py`" in incomplete
    assert "['train/deep/a.py']" in incomplete
    (tmp_path / "train/deep/a.py").write_text("from torch._y import z\n")
    (superfluous,) = report()
    assert superfluous.startswith(PAGE)
    assert "*._apply" in superfluous
    assert superfluous.endswith("delete its row")
