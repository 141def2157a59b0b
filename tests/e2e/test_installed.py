"""meshwright installed, as a wheel and editable, next to a project with its own models/, train/ and
tools/."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.forks import ROOT, environment

PACKAGES = Path(torch.__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "*.egg-info")
# Files of a user's project whose names clash with the folders of a checkout, by kind.
PROJECTS = {
    "folders": ("models/llama.py", "tools/plan.py", "utils/a.py", "train/config.py"),
    "packages": ("models/__init__.py", "tools/__init__.py", "utils/__init__.py", "train/__init__.py"),
    "a file": ("models/llama.py", "tools/plan.py", "utils/a.py", "train.py"),
}
# None of these imports torch, which would slow the test down.
OURS = """
import meshwright.models, meshwright.tools.processes
from meshwright.parallel.config import ParallelConfig
from meshwright.train.errors import ConfigError
assert ConfigError.__module__ == "meshwright.train.errors"
"""
RUN = (
    "--config=llama_debug.yaml",
    "--train.steps=2",
    "--train.seq_len=32",
    "--parallel.compile.enabled=false",
)


def run(command: list[str], folder: Path) -> str:
    env = environment(PYTHONPATH="")
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[pytest.mark.slow, pytest.mark.sampled(10, day=day)])
        for kind, day in {"wheel": 4, "editable": 1}.items()
    ],
)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment in which only meshwright is installed, from a copy of the checkout; its
    dependencies are those of the tests' environment."""
    place = tmp_path_factory.mktemp(request.param)
    shutil.copytree(ROOT, place / "source", symlinks=True, ignore=NOT_COPIED)
    run([sys.executable, "-m", "venv", str(place / "venv")], place)
    executable = str(place / "venv" / "bin" / "python")
    editable = ["-e"] if request.param == "editable" else []
    run([executable, "-m", "pip", "install", "-q", "--no-deps", *editable, str(place / "source")], place)
    site_packages = run([executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], place)
    (Path(site_packages.strip()) / "beside.pth").write_text(f"{PACKAGES}\n")
    return executable


@pytest.mark.parametrize("names", PROJECTS.values(), ids=PROJECTS)
def test_both_sides_imports_work_in_both_orders(python: str, names: tuple[str, ...], tmp_path: Path) -> None:
    theirs = "import importlib\n"
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("X = 'mine'\n")
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        theirs += f"assert importlib.import_module({module!r}).X == 'mine'\n"
    run([python, "-c", OURS + theirs], tmp_path)
    run([python, "-c", theirs + OURS], tmp_path)


def test_nothing_else_is_installed(python: str, tmp_path: Path) -> None:
    names = ("models", "parallel", "train", "tools", "configs", "tests", "benchmarks")
    code = f"import importlib.util as u; print([name for name in {names} if u.find_spec(name)])"
    assert run([python, "-c", code], tmp_path) == "[]\n"


def test_a_run_from_any_folder_is_that_of_the_checkout(python: str, tmp_path: Path) -> None:
    checkout = run([sys.executable, "-m", "train.main", *RUN, "--print_config"], ROOT)
    assert run([python, "-m", "meshwright.train.main", *RUN, "--print_config"], tmp_path) == checkout
    text = tmp_path / "text.txt"
    text.write_text("a text that repeats itself, " * 2000)
    data = [f"--data.source={text}", "--data.eval_fraction=0", "--train.eval_every=0"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run([python, *torchrun, "-m", "meshwright.train.main", *RUN, *data], tmp_path)
    verified = run([python, "-m", "meshwright.tools.checkpoint", "verify", "runs/llama_debug"], tmp_path)
    assert "step-00000002: every byte matches the manifest" in verified
