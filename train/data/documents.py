"""Which documents a source has: files of text, in an order that is the same on every machine."""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from train.data.config import DataError

TEXT_SUFFIXES = {".txt", ".md", ".py", ".rst", ".json", ".jsonl", ".csv", ".html", ".xml", ".tex", ".c", ".h",
                 ".cpp", ".cc", ".js", ".ts", ".java", ".go", ".rs", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".ini"}  # fmt: skip


def find_documents(source: str) -> list[tuple[str, Path]]:
    """Name and path of each document of `data.source`, sorted by name; a file is a document.

    Names are relative to the source, so they do not change when it moves. Raises DataError if there is none.
    """
    source = os.path.expanduser(source)
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root) if path.suffix == ".py"]
    elif Path(source).is_dir():
        root = Path(source)
        paths = [path for path in _walk(root) if path.suffix in TEXT_SUFFIXES]
    elif Path(source).is_file():
        root, paths = Path(source).parent, [Path(source)]
    elif glob.has_magic(source):
        paths = [Path(p) for p in glob.glob(source, recursive=True)]
        root = Path(os.path.dirname(source[: next(i for i, c in enumerate(source) if c in "*?[")]))
    else:
        raise DataError(f"data.source={source}: no such file, folder or glob. Use stdlib for built-in text")
    documents = sorted(_named(paths, root))
    if not documents:
        raise DataError(f"data.source={source} holds no text: looked for non-empty files"
                        f"{' ending in ' + ' '.join(sorted(TEXT_SUFFIXES)) if Path(source).is_dir() else ''}")  # fmt: skip
    return documents


def _walk(root: Path) -> Iterator[Path]:
    """Every file below `root`, installed packages left out: they are many, and no part of a standard library."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in ("site-packages", "dist-packages")]
        yield from (Path(folder, name) for name in names)


def _named(paths: Iterable[Path], root: Path) -> Iterator[tuple[str, Path]]:
    for path in paths:
        if path.is_file() and path.stat().st_size > 0:
            name = path.relative_to(root) if path.is_relative_to(root) else path
            yield name.as_posix(), path
