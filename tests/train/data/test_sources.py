"""train/data/sources.py and prepare/partition.py: the files of a source, and their division into pieces."""

import sysconfig
from pathlib import Path

import pytest

from meshwright.train.data.prepare.partition import choose_held_out
from meshwright.train.data.sources import file_kind, find_files, find_unread, fingerprint_file
from meshwright.train.errors import DataError

MIB = 2**20


def write(folder: Path, **files: str) -> Path:
    """Write files; the keys are their names, with __ for the dot."""
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def names(source: object) -> list[str]:
    return [name for name, _ in find_files(str(source))]


def test_a_folder_gives_texts_and_records_sorted_by_name_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", z__txt="z", a__parquet="a")
    kinds = {
        "b": "md",
        "c": "jsonl",
        "d": "jsonl__gz",
        "e": "jsonl__zst",
        "f": "arrow",
        "g": "json",
        "h": "csv__gz",
    }
    write(tmp_path, **{f"{name}__{kind}": "x" for name, kind in kinds.items()})
    write(tmp_path, empty__txt="", empty__png="", g__png="gg")
    write(tmp_path, h__gz="h", __hidden__txt="h")
    for folder in (".git", ".ipynb_checkpoints", ".data.partial"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, i__txt="i")
    (tmp_path / "._c.jsonl").write_bytes(b"\0\5\x16\7")  # macOS, on other file systems
    assert [(name, file_kind(path)) for name, path in find_files(str(tmp_path))] == [
        ("b.md", "text"),
        ("c.jsonl", "jsonl"),
        ("d.jsonl.gz", "jsonl.gz"),
        ("e.jsonl.zst", "jsonl.zst"),
        ("f.arrow", "arrow"),
        ("g.json", "json"),
        ("h.csv.gz", "csv.gz"),
        ("sub/a.parquet", "parquet"),
        ("sub/z.txt", "text"),
    ]
    (tmp_path / "linked").symlink_to(tmp_path / "sub")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    unread = {"g.png": 2, "h.gz": 1, "linked": 0, "gone.txt": 0}
    assert find_unread(str(tmp_path)) == unread, "neither hidden nor empty files"
    assert find_unread(str(tmp_path / "b.md")) == {} == find_unread("hf:some/set")


def test_names_are_relative_and_a_glob_finds_what_it_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, a__txt="a", b__txt="b", c__log="c")
    assert names(tmp_path / "a.txt") == ["a.txt"]
    assert names(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert names(tmp_path / "c.*") == ["c.log"], "a file given by name is text, whatever its suffix"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/[ab].txt") == ["a.txt", "b.txt"]


def test_stdlib_is_python_source_without_installed_packages() -> None:
    found = find_files("stdlib")
    root = Path(sysconfig.get_path("stdlib"))
    assert ("os.py", root / "os.py") in found
    assert all(name.endswith(".py") and "-packages" not in name for name, _ in found)


def test_a_saved_dataset_is_its_arrow_files_only(tmp_path: Path) -> None:
    write(tmp_path, state__json="{}", dataset_info__json="{}", data__arrow="x")
    assert names(tmp_path) == ["data.arrow"]


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ("nowhere", "no such file, folder or glob"),
        ("hf:some/set", r"python -m tools\.prepare_data hf:some/set"),
        ("folder", r"data\.source=.*no text: .*\.jsonl\.gz"),
        ("empty.txt", "empty file"),
        ("packed.gz", r"packed\.gz is compressed.*\.jsonl.*unpack it first"),
        ("*.gz", r"data\.source=\*\.gz: packed\.gz is compressed.*unpack it first"),
        ("*.none", r"data\.source=.*(no such|no text)"),
        ("~nosuchuser/x", r"data\.source='~nosuchuser/x' is no usable path"),
        (
            "s" * 5000,
            r"data\.source='s{80}\.\.\. \(5,000 letters\)' is no usable path \(File name too long\): name "
            r"another",
        ),
        ("", r"data\.source is empty"),
    ],
)
def test_a_source_without_text_is_refused(
    source: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path, empty__txt="", packed__gz="x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=pattern):
        find_files(source)


def test_a_fingerprint_shows_a_change_of_size_beginning_or_end(tmp_path: Path) -> None:
    path, seen = tmp_path / "file", set()
    content = bytearray(3 * MIB)
    for place in (None, 0, MIB - 1, 2 * MIB, 3 * MIB - 1):
        path.write_bytes(content if place is None else content[:place] + b"x" + content[place + 1 :])
        seen.add(fingerprint_file(path))
    path.write_bytes(content[:-1])
    seen.add(fingerprint_file(path))
    assert len(seen) == 6


# Pieces


def test_of_several_documents_some_are_held_out_and_about_the_share_asked_for() -> None:
    for count, share in ((2, 0.001), (2, 0.999), (50, 0.001), (50, 0.999), (3, 0.5)):
        assert 1 <= len(choose_held_out([f"{i}.txt" for i in range(count)], share)) <= count - 1
    every = [f"{i}.txt" for i in range(5000)]
    assert len(choose_held_out(every, 0.1)) == pytest.approx(500, abs=80)
    assert choose_held_out(every, 0.1) < choose_held_out(every, 0.2), "a larger share adds documents"
    assert choose_held_out(every, 0.0) == set() == choose_held_out(["only"], 0.5)
