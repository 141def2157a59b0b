"""docs/architecture.md names files that are there, and every package."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
FOLDERS = ("models", "parallel", "train", "configs", "tools")


def named_paths(page: str) -> set[str]:
    """What stands in backticks and begins with a folder of ours."""
    found = re.findall(r"`([\w./]+)`", page)
    return {name for name in found if name.split("/")[0] in FOLDERS and "/" in name}


@pytest.mark.parametrize("name", sorted(named_paths(PAGE)))
def test_a_named_file_is_there(name: str) -> None:
    path = ROOT / name
    assert path.exists() or path.with_suffix(".py").exists(), f"docs/architecture.md names {name}"


def test_every_package_has_its_paragraph() -> None:
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for folder in ("train", "parallel")
        for path in (ROOT / folder).glob("*/__init__.py")
    }
    assert {name for name in packages if name not in PAGE and f"{name.split('/')[1]}/" not in PAGE} == set()


def test_names_are_found() -> None:
    assert named_paths("`train/main.py`, `Plan` and `parallel/plan`") == {"train/main.py", "parallel/plan"}
