"""Architecture rules checked by parsing the code: directions of imports, sizes, names, forbidden paths."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "models": {"models"},
    "parallel": {"parallel"},
    "train": {"models", "parallel", "train"},
    "tools": {"models", "parallel", "train", "tools"},
}
PACKAGE = "meshwright"
# Data modules import no modules that do work: prefixes of the project's modules that these files may import.
GROUND = {
    "parallel/config.py": ("parallel.errors", "parallel.structure"),
    "parallel/errors.py": (),
    "parallel/plan": (
        "parallel.plan",
        "parallel.config",
        "parallel.errors",
        "parallel.structure",
        "parallel.yaml_io",
    ),
    "train/config.py": ("models.config", "parallel.config", "parallel.structure"),
    "train/errors.py": ("parallel.errors",),
}
MAX_FUNCTION_LINES = 60
MAX_MODULES = 20  # per folder: more are more than one concept
# An import or a command without the package's name: a module imported by two names exists twice, with
# different classes, and the command fails in an installed package.
BARE_IMPORT = re.compile(r"^ *(?:import|from) (?:models|parallel|train|tools)\b", re.MULTILINE)
BARE_COMMAND = re.compile(
    r'(?<!python", )"-m", "(?:models|parallel|train|tools)\.|python_command\("(?!meshwright)'
)
MACHINE_PATH = re.compile(r"(?<![\w.~$}/])/(home|root|Users|tmp|mnt|work)/\w")
# What few runs need is imported late. The first module is imported by one process per core; a run with a
# manual plan needs no planner except on rank 0.
LATE = {
    "train.data.prepare.worker": ("torch", "yaml", "filelock", "pyarrow", "rich", "asyncio"),
    # -h, mistakes in keys and lists of checkpoints are printed at once
    "train.main": ("torch", "matplotlib", "rich"),
    "tools.plan.__main__": ("torch", "matplotlib", "rich"),
    "tools.checkpoint.__main__": ("torch", "matplotlib", "rich"),
    # imports what reads URLs when there are some
    "train.data.stream.remote": ("torch", "fsspec", "aiohttp"),
    "train.phases": (
        *("PIL", "matplotlib", "torchao", "transformers", "datasets", "pyarrow", "tensorboard"),
        *(f"{PACKAGE}.parallel.planner.{name}" for name in ("search", "workload", "timeline")),
        *(f"{PACKAGE}.parallel.{name}" for name in ("tensor_parallel", "context_parallel", "float8")),
    ),
}


@functools.cache
def sources(root: Path) -> list[Path]:
    return [path for folder in MAY_IMPORT for path in sorted((root / folder).rglob("*.py"))]


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def module_name(path: Path, root: Path) -> str:
    return ".".join((PACKAGE, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


@functools.cache
def imports_of(path: Path, root: Path) -> list[str]:
    """Return the dotted names that a file imports anywhere: inside functions, under TYPE_CHECKING, relative,
    or by a call with a literal."""
    package = module_name(path, root).split(".")
    imports = set[str]()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + (path.name == "__init__.py")] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            imports |= {base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            imports |= {
                a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)
            }
    return sorted(imports)


def wrong_directions(root: Path) -> Iterator[str]:
    """Yield imports of the project's folders that the direction rule forbids, and all imports of tests and
    benchmarks."""
    for path in sources(root):
        allowed = MAY_IMPORT[path.relative_to(root).parts[0]]
        for name in imports_of(path, root):
            folder = name.removeprefix(f"{PACKAGE}.").split(".")[0]
            if folder in {*MAY_IMPORT, "tests", "benchmarks"} - allowed:
                yield f"{path.relative_to(root)} imports {name}"


def above_ground(root: Path) -> Iterator[str]:
    """Yield imports of the files of GROUND that are not allowed."""
    for source, prefixes in GROUND.items():
        allowed = tuple(f"{PACKAGE}.{prefix}." for prefix in prefixes)
        for path in [root / source] if source.endswith(".py") else sorted((root / source).rglob("*.py")):
            for name in imports_of(path, root):
                if (
                    name.startswith(f"{PACKAGE}.")
                    and name.count(".") > 1
                    and not f"{name}.".startswith(allowed)
                ):
                    yield f"{path.relative_to(root)} imports {name}"


def bare_names(root: Path) -> Iterator[str]:
    """Yield files that import or start modules of the project without the package's name."""
    others = [path for folder in ("tests", "benchmarks") for path in sorted((root / folder).rglob("*.py"))]
    for path in (*sources(root), *others):
        text = path.read_text(encoding="utf-8")
        if BARE_IMPORT.search(text) or (path not in others and BARE_COMMAND.search(text)):
            yield str(path.relative_to(root))


def import_circles(root: Path) -> Iterator[str]:
    """Yield import cycles, starting with their alphabetically first file."""
    modules = {module_name(path, root): path for path in sources(root)}
    graph = {name: modules.keys() & {*imports_of(path, root)} - {name} for name, path in modules.items()}
    done = set[str]()

    def walk(name: str, trail: tuple[str, ...]) -> Iterator[str]:
        if name in trail:
            circle = trail[trail.index(name) :]
            first = circle.index(min(circle))
            yield " -> ".join((*circle[first:], *circle[:first], circle[first]))
        elif name not in done:
            for imported in sorted(graph[name]):
                yield from walk(imported, (*trail, name))
            done.add(name)

    for name in graph:
        yield from walk(name, ())


def large_functions(root: Path) -> Iterator[str]:
    """Yield functions over the limit, except argument parsers and Triton kernels, which are lists. Files have
    no limit, because it would only split them into fragments."""
    for path in sources(root):
        for node in nodes_of(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name == "make_parser":
                continue
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = (node.end_lineno or 0) - first + 1
            is_kernel = any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)
            if lines > MAX_FUNCTION_LINES and not is_kernel:
                yield f"{path.relative_to(root)}: {node.name} has {lines} lines"


def large_folders(root: Path) -> Iterator[str]:
    """Yield the folders with more than MAX_MODULES modules."""
    counts = Counter(path.parent.relative_to(root) for path in sources(root) if path.name != "__init__.py")
    yield from (f"{folder}: {count} modules" for folder, count in counts.items() if count > MAX_MODULES)


def shared_class_names(root: Path) -> Iterator[str]:
    """Yield class names that several files define."""
    files = dict[str, list[str]]()
    for path in sources(root):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(path.relative_to(root)))
    yield from (f"{name}: {', '.join(paths)}" for name, paths in files.items() if len(paths) > 1)


def catch_alls(root: Path) -> Iterator[str]:
    yield from (str(path.relative_to(root)) for path in sources(root) if path.name == "utils.py")


def machine_paths(root: Path, tracked: Sequence[str]) -> Iterator[str]:
    """Yield lines of tracked text files that contain an absolute path of a machine. Tests may: they contain
    made-up paths."""
    for name in tracked:
        if not name.startswith("tests/") and (root / name).is_file():
            text = (root / name).read_bytes().decode("utf-8", errors="ignore")
            for number, line in enumerate(text.splitlines(), 1):
                if MACHINE_PATH.search(line):
                    yield f"{name}:{number}: {line.strip()}"


RULES = (
    *(wrong_directions, above_ground, bare_names, import_circles, large_functions, large_folders),
    *(shared_class_names, catch_alls),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Callable[[Path], Iterator[str]]) -> None:
    assert list(rule(ROOT)) == []


WRONG = {name: "" for name in GROUND if name.endswith(".py")} | {  # a tree that breaks rules
    "models/a.py": "from .. import parallel",
    "parallel/config.py": "import meshwright.parallel.fsdp",
    "train/a.py": "def f():\n    from meshwright.train import b\n    from train import c",
    "train/b.py": "if TYPE_CHECKING:\n    from .a import A\n" + "def f():\n" + "    x = 1\n" * 60,
    "tools/a.py": 'import benchmarks.a\nimport meshwright.train.b\nrun([python, "-m", "train.main"])',
}


def test_violations_are_found(tmp_path: Path) -> None:
    for name, text in WRONG.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(wrong_directions(tmp_path)) == [
        "models/a.py imports meshwright.parallel",
        "tools/a.py imports benchmarks.a",
    ]
    assert list(above_ground(tmp_path)) == ["parallel/config.py imports meshwright.parallel.fsdp"]
    assert list(bare_names(tmp_path)) == ["train/a.py", "tools/a.py"]
    assert list(import_circles(tmp_path)) == [
        "meshwright.train.a -> meshwright.train.b -> meshwright.train.a"
    ]
    assert list(large_functions(tmp_path)) == ["train/b.py: f has 61 lines"]


def test_no_tracked_file_names_a_place_of_one_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to know which files are tracked")
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert list(machine_paths(ROOT, listed.split("\0"))) == []


@pytest.mark.sampled(3, day=1)
def test_what_few_need_is_imported_late() -> None:
    code = "import importlib, sys\n" + "".join(
        f"importlib.import_module('{PACKAGE}.{module}')\n"
        f"print('{module}', [name for name in {absent} if name in sys.modules])\n"
        for module, absent in LATE.items()
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{module} []" for module in LATE]


def test_the_page_on_architecture_has_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    packages = [
        path.parent for folder in ("train", "parallel") for path in ROOT.glob(f"{folder}/*/__init__.py")
    ]
    assert [p for p in packages if str(p.relative_to(ROOT)) not in page and f"{p.name}/" not in page] == []
