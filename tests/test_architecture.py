"""Architecture rules checked by parsing the code: directions of imports, sizes, names, and forbidden paths.

Every check takes a root folder, so that the tests below can show on made-up trees that it finds violations.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import EAGER, TINY, run, write_text

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
    "parallel/config.py": (),
    "parallel/errors.py": (),
    "parallel/plan": (
        "parallel.plan",
        "parallel.config",
        "parallel.errors",
        "parallel.structure",
        "parallel.yaml_io",
    ),
    "train/config.py": ("models.llama", "parallel.config"),
    "train/errors.py": ("parallel.errors",),
}
MAX_FUNCTION_LINES = 60
MAX_MODULES = 20  # per folder: more are more than one concept
MACHINE_PATH = re.compile(r"(?<![\w.~$}/])/(home|root|Users|tmp|mnt|work)/\w")


def sources(root: Path) -> Iterator[Path]:
    for folder in MAY_IMPORT:
        yield from sorted((root / folder).rglob("*.py"))


def module_name(path: Path, root: Path) -> str:
    return ".".join((PACKAGE, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


def imports_of(path: Path, root: Path) -> set[str]:
    """Return the dotted names that a file imports anywhere: inside functions, under TYPE_CHECKING, relative,
    or by a call with a literal."""
    package = module_name(path, root).split(".")
    imports = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    return imports


def wrong_directions(root: Path) -> list[str]:
    """Return imports of the project's folders that the direction rule forbids, and all imports of tests."""
    return [
        f"{path.relative_to(root)} imports {name}"
        for path in sources(root)
        for name in sorted(imports_of(path, root))
        if (folder := name.removeprefix(f"{PACKAGE}.").split(".")[0]) in (*MAY_IMPORT, "tests")
        and folder not in MAY_IMPORT[path.relative_to(root).parts[0]]
    ]


def above_ground(root: Path) -> list[str]:
    """Return imports of the files of GROUND that are not allowed."""
    return [
        f"{path.relative_to(root)} imports {name}"
        for source, allowed in GROUND.items()
        for path in ([root / source] if source.endswith(".py") else sorted((root / source).rglob("*.py")))
        for name in sorted(imports_of(path, root))
        if name.count(".") > 1 and name.startswith(f"{PACKAGE}.")
        if not f"{name.removeprefix(f'{PACKAGE}.')}.".startswith(tuple(f"{begin}." for begin in allowed))
    ]


def bare_imports(root: Path) -> list[str]:
    """Return imports of the project's folders without the package's name: a module imported by two names
    exists twice, with different classes."""
    return [
        f"{path.relative_to(root)} imports {name}"
        for path in (*sources(root), *sorted((root / "tests").rglob("*.py")))
        for name in sorted(imports_of(path, root))
        if name.split(".")[0] in MAY_IMPORT
    ]


def bare_commands(root: Path) -> list[str]:
    """Return commands that start a module of the project without the package's name, which fail in an
    installed package."""
    found = []
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            started: list[ast.expr] = []
            if isinstance(node, ast.List | ast.Tuple):
                values = [e.value if isinstance(e, ast.Constant) else "" for e in node.elts]
                starts = values[:1] != ["python"]  # a command in a record starts nothing
                pairs = zip(values, node.elts[1:], strict=False)
                started = [module for option, module in pairs if option == "-m" and starts]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "python_command":
                started = node.args[:1]
            modules = [e.value for e in started if isinstance(e, ast.Constant)]
            found += [
                f"{path.relative_to(root)} starts {name}"
                for name in modules
                if str(name).split(".")[0] in MAY_IMPORT
            ]
    return found


def import_circles(root: Path) -> list[str]:
    """Return import cycles, each once, starting with its alphabetically first file."""
    modules = {module_name(path, root): path for path in sources(root)}
    graph = {
        name: sorted((imports_of(path, root) & modules.keys()) - {name}) for name, path in modules.items()
    }
    circles = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            circle = trail[trail.index(name) :]
            first = circle.index(min(circle))
            circles.add(" -> ".join((*circle[first:], *circle[:first], circle[first])))
        elif name not in done:
            for imported in graph[name]:
                walk(imported, (*trail, name))
            done.add(name)

    done: set[str] = set()
    for name in graph:
        walk(name, ())
    return sorted(circles)


def too_large(root: Path) -> list[str]:
    """Return functions over the limit, except argument parsers and Triton kernels. Files have no limit,
    because it would only split them into fragments."""
    found = []
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_list(node):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if (lines := (node.end_lineno or 0) - first + 1) > MAX_FUNCTION_LINES:
                    found.append(f"{path.relative_to(root)}: {node.name} has {lines} lines")
    return found


def is_list(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a list that cannot be divided: a parser's options or a kernel."""
    return node.name == "make_parser" or any(
        ast.unparse(d).startswith("triton.jit") for d in node.decorator_list
    )


def too_many_modules(root: Path) -> list[str]:
    """Return the folders with more than MAX_MODULES modules."""
    counts = Counter(path.parent.relative_to(root) for path in sources(root) if path.name != "__init__.py")
    return [f"{folder}: {count} modules" for folder, count in sorted(counts.items()) if count > MAX_MODULES]


def shared_class_names(root: Path) -> list[str]:
    """Return class names that several files define."""
    files: dict[str, list[str]] = {}
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(path.relative_to(root)))
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(files.items()) if len(paths) > 1]


def catch_alls(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in sources(root) if path.name == "utils.py"]


def machine_paths(root: Path, tracked: list[str]) -> list[str]:
    """Return lines of tracked text files that contain an absolute path of a machine."""
    found = []
    for name in tracked:
        path = root / name
        if name.startswith("tests/") or not path.is_file():  # tests contain made-up paths
            continue
        for number, line in enumerate(path.read_bytes().decode("utf-8", errors="ignore").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    return found


# The rules, on this repository


def test_the_folders_are_there_to_be_checked() -> None:
    assert len(list(sources(ROOT))) > 30
    assert "meshwright.models.llama" in imports_of(ROOT / "train" / "config.py", ROOT)


def test_imports_go_in_the_allowed_direction() -> None:
    assert wrong_directions(ROOT) == []


def test_plans_configs_and_errors_import_no_doer() -> None:
    assert above_ground(ROOT) == []


def test_imports_go_by_the_one_importable_name() -> None:
    assert bare_imports(ROOT) == []


def test_commands_go_by_the_one_importable_name() -> None:
    assert bare_commands(ROOT) == []


def test_no_file_imports_itself_through_others() -> None:
    assert import_circles(ROOT) == []


def test_functions_are_small() -> None:
    assert too_large(ROOT) == []


def test_folders_are_one_concept() -> None:
    assert too_many_modules(ROOT) == []


def test_no_two_classes_have_one_name() -> None:
    assert shared_class_names(ROOT) == []


def test_nothing_is_called_utils() -> None:
    assert catch_alls(ROOT) == []


def test_no_tracked_file_names_a_place_of_one_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to know which files are tracked")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert machine_paths(ROOT, listed.split("\0")) == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        (
            "train.main",
            ("PIL", "matplotlib", "torchao", "transformers", "datasets", "pyarrow", "tensorboard"),
        ),
        # a run with a manual plan needs no planner except on rank 0
        ("train.main", tuple(f"{PACKAGE}.parallel.planner.{m}" for m in ("search", "workload", "timeline"))),
        # one process per core imports this module
        ("train.data.prepare.worker_pool", ("torch", "yaml", "filelock", "pyarrow", "rich", "asyncio")),
    ],
)
def test_what_few_need_is_imported_late(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {PACKAGE}.{module}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_page_on_architecture_has_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    packages = [
        path.parent.relative_to(ROOT).as_posix()
        for folder in ("train", "parallel")
        for path in (ROOT / folder).glob("*/__init__.py")
    ]
    assert [name for name in packages if name not in page and f"{name.split('/')[1]}/" not in page] == []


@pytest.mark.slow
def test_what_a_run_executes_is_counted(tmp_path: Path) -> None:
    keys = [*TINY, *EAGER, *write_text(tmp_path), "--train.steps=1", f"--run.dir={tmp_path / 'run'}"]
    done = run(1, *keys, module="tests.support.workers.executed_code")
    assert done.returncode == 0, done.stderr
    (counted,) = re.findall(r"^executed: (\d+) files", done.stdout, re.MULTILINE)
    assert 30 < int(counted) < 150
    assert re.search(r"^train: .* loop \d+ main \d+", done.stdout, re.MULTILINE)
    assert not re.search(r"^tools", done.stdout, re.MULTILINE)


# The checks, on made-up trees


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("models/a.py", "import meshwright.parallel"),
        ("models/a.py", "from meshwright.parallel.plan import Plan"),
        ("models/kernels/a.py", "import meshwright.train.step as s"),
        ("models/a.py", "def f():\n    import meshwright.tools.plan"),
        (
            "models/a.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from meshwright.train.config import Config",
        ),
        ("models/a.py", "import importlib\nimportlib.import_module('meshwright.parallel.plan')"),
        ("models/a.py", "from .. import parallel"),
        ("parallel/a.py", "try:\n    import meshwright.models.llama\nexcept ImportError:\n    pass"),
        ("parallel/planner/a.py", "from meshwright.train import config"),
        ("train/a.py", "from meshwright.tools.command import run_tool"),
        ("train/data/a.py", "class A:\n    import meshwright.tools"),
        ("tools/a.py", "import tests.support.launch"),
        ("train/a.py", "from tests import launch"),
    ],
)
def test_an_import_against_the_direction_is_found(path: str, text: str, tmp_path: Path) -> None:
    (found,) = {line.split(" imports ")[0] for line in wrong_directions(write_tree(tmp_path, {path: text}))}
    assert found == path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("train/a.py", "from parallel.plan import Plan"),
        ("tools/a.py", "def f():\n    import train.main"),
        ("tests/a.py", "import models"),
        ("tests/support/a.py", "import importlib\nimportlib.import_module('tools.plan')"),
    ],
)
def test_an_import_without_the_package_is_found(path: str, text: str, tmp_path: Path) -> None:
    tree = write_tree(tmp_path, {path: text, "train/b.py": "import meshwright.train.a\nimport trainer"})
    assert {line.split(" imports ")[0] for line in bare_imports(tree)} == {path}


def test_a_command_without_the_package_is_found(tmp_path: Path) -> None:
    files = {
        "tools/a.py": 'command = [python, "-m", "train.main", *arguments]',
        "train/b.py": 'run(python_command("tools.bench.worker", 1))',
        "train/c.py": 'run([python, "-m", "meshwright.a"]); print("-m train.main"); run(("-m", MODULE))',
    }
    assert bare_commands(write_tree(tmp_path, files)) == [
        "train/b.py starts tools.bench.worker",
        "tools/a.py starts train.main",
    ]


def test_imports_along_the_direction_are_not_found(tmp_path: Path) -> None:
    allowed = {
        "models/a.py": "import modelsoup\nfrom meshwright.models.b import B\nfrom . import b\nimport "
        "torch.distributed.tensor.parallel",
        "train/a.py": "from meshwright.models.a import A\nfrom meshwright.parallel import plan",
        "tools/a.py": "from meshwright.train.a import A\nfrom meshwright.tools.b import B",
    }
    assert wrong_directions(write_tree(tmp_path, allowed)) == []


CIRCLES = {
    "two": {"train/a.py": "import meshwright.train.b", "train/b.py": "import meshwright.train.a"},
    "three, one late": {
        "train/a.py": "from meshwright.train import b",
        "train/b.py": "def f():\n    from meshwright.train import c",
        "train/c.py": "from meshwright.train.a import A",
    },
    "TYPE_CHECKING": {
        "train/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import meshwright.train.b",
        "train/b.py": "import meshwright.train.a",
    },
    "package": {
        "parallel/__init__.py": "from meshwright.parallel.a import A",
        "parallel/a.py": "from meshwright.parallel import B",
    },
    "relative": {"train/data/a.py": "from .b import B", "train/data/b.py": "from .a import A"},
}


@pytest.mark.parametrize("files", CIRCLES.values(), ids=CIRCLES)
def test_a_circle_is_found_once(files: dict[str, str], tmp_path: Path) -> None:
    assert len(import_circles(write_tree(tmp_path, files))) == 1


def test_two_ways_to_the_same_file_are_no_circle(tmp_path: Path) -> None:
    files = {
        "train/a.py": "import meshwright.train.b\nimport meshwright.train.c",
        "train/b.py": "import meshwright.train.d",
        "train/c.py": "import meshwright.train.d",
        "train/d.py": "import os",
    }
    assert import_circles(write_tree(tmp_path, files)) == []


def test_sizes_are_measured(tmp_path: Path) -> None:
    body = "    x = 1\n"
    files = {
        "train/fits.py": "def f():\n" + body * 59 + "x = 1\n" * 240,
        "train/function.py": "@property\nasync def f():\n" + body * 59,
        "train/method.py": "class A:\n    def f(self):\n" + f"    {body}" * 60,
        "train/parser.py": "def make_parser():\n" + body * 99,
        "train/kernel.py": "@triton.jit\ndef f():\n" + body * 99,
    }
    assert too_large(write_tree(tmp_path, files)) == [
        "train/function.py: f has 61 lines",
        "train/method.py: f has 61 lines",
    ]


def test_an_import_of_a_doer_is_found(tmp_path: Path) -> None:
    files = {name: "import meshwright.parallel.fsdp" for name in GROUND if name.endswith(".py")}
    files["parallel/plan/a.py"] = (
        "from meshwright.parallel.plan.rules import f\nfrom meshwright.parallel import fsdp"
    )
    files["parallel/plan/b.py"] = "import meshwright.parallel.planner.search"
    found = above_ground(write_tree(tmp_path, files))
    assert {line.split(" imports ")[0] for line in found} == set(files)
    doers = {"meshwright.parallel.fsdp", "meshwright.parallel.planner.search"}
    assert {line.split(" imports ")[1] for line in found} == doers


def test_a_folder_of_too_many_modules_is_found(tmp_path: Path) -> None:
    files = {f"train/data/m{i}.py": "" for i in range(20)} | {"train/data/__init__.py": ""}
    assert too_many_modules(write_tree(tmp_path, files)) == []
    files = {f"train/m{i}.py": "" for i in range(21)}
    assert too_many_modules(write_tree(tmp_path, files)) == ["train: 21 modules"]


def test_a_class_name_of_two_files_is_found(tmp_path: Path) -> None:
    files = {
        "train/a.py": "class A:\n    class Inner: ...",
        "tools/b.py": "def f():\n    class A: ...",
        "models/c.py": "class C: ...\nclass Inner: ...",
    }
    assert shared_class_names(write_tree(tmp_path, files)) == [
        "A: train/a.py, tools/b.py",
        "Inner: models/c.py, train/a.py",
    ]


def test_a_file_called_utils_is_found(tmp_path: Path) -> None:
    assert catch_alls(write_tree(tmp_path, {"train/data/utils.py": "", "train/data/order.py": ""})) == [
        "train/data/utils.py"
    ]


def test_a_place_of_one_machine_is_found(tmp_path: Path) -> None:
    files = {
        "README.md": "see /home/me\nfine\n",
        "a.yaml": "x: /tmp/a",
        "b.py": "# read '/root/x' here",
        "c.py": "tmp/x",
        "d.toml": "https://site.org/home/page",
        "e.py": "{folder}/tmp/x and ~/root/x",
        "image.bin": "\x00\x01",
    }
    found = machine_paths(write_tree(tmp_path, files), [*files, "deleted.txt"])
    assert [line.split(":")[0] for line in found] == ["README.md", "a.yaml", "b.py"]
