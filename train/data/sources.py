"""The files of a data source, in an order that is the same on every machine."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshwright.parallel.errors import first_of, one_line
from meshwright.train.data.token_store import MANIFEST
from meshwright.train.errors import DataError
from meshwright.train.files import user_path

_TEXT_NAMES = "txt md rst html xml tex py c h cpp cc js ts java go rs sh yaml yml toml cfg ini"
_PACKED = ("", ".gz", ".zst")
RECORD_SUFFIXES = (*(f".{a}{b}" for a in ("jsonl", "json", "csv") for b in _PACKED), ".parquet", ".arrow")
READ_SUFFIXES = (*(f".{name}" for name in _TEXT_NAMES.split()), *RECORD_SUFFIXES)
COMPRESSED_SUFFIXES = {".gz", ".zst", ".zip", ".bz2", ".xz", ".tar", ".7z"}
HF_PREFIX = "hf:"
# the kind of a file that is one document; the other kinds are the suffixes of records without the dot
TEXT = "text"
# Dataset.save_to_disk writes them next to its .arrow files
_HF_FILES = {"dataset_info.json", "state.json"}
_SAMPLE_BYTES = 2**20


def find_files(source: str, key: str = "data.source") -> list[tuple[str, Path]]:
    """Return name and path of each file of a source, sorted by name. Error messages name its config `key`.

    Names are relative to the source, so that they stay the same if it moves. Raises DataError if there is no
    file.
    """
    if source.startswith(HF_PREFIX):
        raise DataError(
            f"{key}={source} is a Hugging Face dataset, which must be tokenized first: run "
            f"`python -m tools.prepare_data {source} FOLDER` and use FOLDER instead"
        )
    source = str(user_path(source, key))
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root) if path.suffix == ".py"]
    elif Path(source).is_dir():
        root = Path(source)
        paths = [path for path in _walk(root) if path.name.endswith(READ_SUFFIXES)]
    elif Path(source).is_file():
        root, paths = Path(source).parent, [Path(source)]
    elif glob.has_magic(source):
        paths = [Path(p) for p in glob.glob(source, recursive=True)]
        root = Path(os.path.dirname(source[: next(i for i, c in enumerate(source) if c in "*?[")]))
    else:
        raise DataError(
            f"{key}={source}: no such file, folder or glob: check the path, or use stdlib, the source code "
            "of Python's library"
        )
    files = sorted(_named(paths, root))
    if not files:
        ending = f" ending in {' '.join(READ_SUFFIXES)}" if Path(source).is_dir() else ""
        raise DataError(f"{key}={source} contains no text: looked for non-empty files{ending}")
    for _, path in files:
        if path.suffix in COMPRESSED_SUFFIXES and file_kind(path) == TEXT:
            raise DataError(
                f"{key}={source}: {path} is compressed, and only .jsonl, .json and .csv are read compressed, "
                f"as {' or '.join(_PACKED[1:])}: unpack it first"
            )
    return files


def find_unread(source: str) -> dict[str, int]:
    """Return what is not read of a folder, with its bytes, the largest first: files of other suffixes, and
    without bytes linked folders, links to nothing, and what is no file."""
    root = user_path(source, "data.source")
    sizes = []
    for path in _walk(root):
        size = path.stat().st_size if path.is_file() else 0
        if not path.is_file() or (size and not path.name.endswith(READ_SUFFIXES)):
            sizes.append((-size, path.relative_to(root).as_posix()))
    return {name: -size for size, name in sorted(sizes)}


def describe_unread(unread: dict[str, int]) -> str:
    """Return the files of find_unread as one line."""
    files = [f"{one_line(name)} ({size:,} bytes)" for name, size in unread.items()]
    total = f"{len(files):,} file{'s' if len(files) > 1 else ''}, {sum(unread.values()):,} bytes"
    return f"not read, because of the suffix, or as a link or no file: {total}: {first_of(files, most=10)}"


def file_kind(path: Path) -> str:
    """Return the kind of a file by its name: TEXT for one document, else the suffix of records, without the
    dot. A .json file may also hold JSON lines: see detect_kind of the preparation."""
    return next((suffix[1:] for suffix in RECORD_SUFFIXES if path.name.endswith(suffix)), TEXT)


def fingerprint_file(path: Path) -> str:
    """Return the sha256, in hexadecimal, of a file's size, first MiB and last MiB. Raises OSError."""
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(f"{size_bytes}:".encode())
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size_bytes - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _walk(root: Path) -> Iterator[Path]:
    """Every file and linked folder below `root`, except hidden ones (.git, .ipynb_checkpoints, ._NAME of
    macOS, unfinished data), installed packages (not part of the standard library), prepared data, and the
    metadata of saved datasets."""
    for folder, subfolders, names in os.walk(root):
        names_of_packages = ("site-packages", "dist-packages")
        subfolders[:] = [f for f in subfolders if not (f.startswith(".") or f in names_of_packages)]
        linked = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        names = [name for name in (*names, *linked) if not name.startswith(".")]
        of_dataset = any(name.endswith(".arrow") for name in names)
        if not (MANIFEST in names and any(name.endswith(".ends") for name in names)):
            yield from (Path(folder, name) for name in names if not (of_dataset and name in _HF_FILES))


def _named(paths: Iterable[Path], root: Path) -> Iterator[tuple[str, Path]]:
    for path in paths:
        if path.is_file() and path.stat().st_size > 0:
            name = path.relative_to(root) if path.is_relative_to(root) else path
            yield name.as_posix(), path
