"""train/data/stream/shards.py: names and locations of the shards of a source, and what is refused."""

import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from meshwright.train.config import check_source, is_remote
from meshwright.train.data.stream.shards import find_shards
from meshwright.train.errors import DataError

# of fsspec, protocol -> class, of the protocols used so far
REGISTRY = sys.modules["fsspec.registry"]._registry
SECRETS = ("S3CR", "pa55", "us3r")


def refused(source: str) -> str:
    """The message by which a source is refused: one line, without a secret."""
    with pytest.raises(DataError) as caught:
        find_shards(source)
    message = str(caught.value)
    assert "\n" not in message
    assert not [secret for secret in SECRETS if secret in message]
    return message


@pytest.mark.parametrize(
    ("braces", "names"),
    [
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{000..002}", ["000", "001", "002"]),
        ("{b,a,}", ["b", "a", ""]),
        ("{x,y}-{1..2}", ["x-1", "x-2", "y-1", "y-2"]),
        ("{7..7}", ["7"]),
    ],
)
def test_braces_stand_for_names_in_their_order(braces: str, names: list[str]) -> None:
    urls = [f"https://host/part-{name}.jsonl" for name in names]
    assert list(find_shards(f"https://host/part-{braces}.jsonl").items()) == list(
        zip(urls, urls, strict=True)
    )


@pytest.mark.parametrize("braces", ["{3..1}", "{a..c}", "{}", "{a}", "{{1..2},3}", "{1..2", "1..2}"])
def test_braces_that_stand_for_nothing_are_refused(braces: str) -> None:
    assert braces in refused(f"https://host/{braces}.jsonl")


def test_braces_for_more_files_than_memory_holds_are_refused_at_once() -> None:
    for braces in ("{0..99999999999999}", "{0..9999}{0..9999}"):
        assert "1,000,000" in refused(f"https://host/{braces}.jsonl")


def test_a_list_has_urls_and_paths_and_its_names_have_no_secrets(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("in/p0.jsonl", "in/p1.jsonl", "in/p2.jsonl", "top.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "all.urls").write_text(
        "\ufeff# a comment\n\n"
        "HTTPS://us3r:pa55@host:8000/a/{1..2}.parquet?sig=S3CR{1..2}%2F&x=1#part\r\n"
        f"in/p{{1,0}}.jsonl\n  top.txt\n{tmp_path}/in/p2.jsonl\n"
    )
    assert list(find_shards(str(tmp_path / "all.urls")).items()) == [
        *(
            (
                f"https://host:8000/a/{n}.parquet",
                f"https://us3r:pa55@host:8000/a/{n}.parquet?sig=S3CR{{1..2}}%2F&x=1",
            )
            for n in (1, 2)
        ),
        *((name, str(tmp_path / name)) for name in ("in/p1.jsonl", "in/p0.jsonl", "top.txt", "in/p2.jsonl")),
    ]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["https://h/a.txt?sig=S3CR1", "https://h/a.txt?sig=S3CR2"], "twice"),
        (["https://us3r:pa55@h/a.tar?sig=S3CR"], "line 1"),
        (["", "https://us3r:pa55/w@h/a.txt"], "line 2"),  # a password with / : the host seems to be us3r
        (["https://us3r:p@pa55/w@h/a.txt"], "line 1"),
        (["https://us3r:pa55?w@h/a.txt"], "line 1"),
        (["https://us3r:pa55@h/{a}.txt?sig=S3CR"], "{a}"),
        (["nothing.txt"], "nothing.txt"),
        (["other.urls"], "list"),
        (["# nothing", ""], "no file"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_without_its_secrets(
    tmp_path: Path, lines: list[str], reason: str
) -> None:
    (tmp_path / "a.urls").write_text("\n".join(lines))
    message = refused(str(tmp_path / "a.urls"))
    assert reason in message
    assert "a.urls" in message


def test_a_line_that_looks_like_a_url_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "a.urls").write_text("https:/host/x.parquet?sig=S3CR\n")
    assert "line 1" in refused(str(tmp_path / "a.urls"))


def test_a_list_that_is_no_text_or_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.urls").write_bytes(b"\xff\xfeh")
    for name in ("a.urls", "b.urls"):
        assert name in refused(str(tmp_path / name))


@pytest.mark.parametrize(
    "source",
    [
        "https://host/a.parquet?sig=S3CR",
        "https://us3r:pa55@host/a.parquet",
        "https://us3r:pa55/w@host/a.parquet",
        "https://host/a.parquet#S3CR",
        "s3://us3r@bucket/a.parquet",
        "sftp://us3r:pa55@host/x/*.jsonl",
    ],
)
def test_a_url_of_a_config_may_not_hold_a_secret(source: str) -> None:
    with pytest.raises(ValueError, match="mixture") as caught:
        check_source("data.mixture", source)
    assert ".urls" in str(caught.value)
    assert not [secret for secret in SECRETS if secret in str(caught.value)]


@pytest.mark.parametrize(
    ("source", "remote"),
    [
        ("https://host:80/{0..9}.parquet", True),
        ("https://[::1]:8000/a.parquet", True),
        ("hf://datasets/org/name@v1.0/**/*.parquet", True),
        ("s3://arn:aws:s3:us-west-2:1:accesspoint/x/a.parquet", True),
        ("my.urls", True),
        ("data/part-?.txt", False),
        ("hf:org/name", False),
        ("stdlib", False),
    ],
)
def test_other_sources_pass_the_check(source: str, remote: bool) -> None:
    check_source("data.source", source)
    assert is_remote(source) == remote


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("https://host/a.tar", ".parquet"),
        ("https://host/folder/", ".parquet"),
        ("https://host/*.parquet", ".urls"),
        ("nope://host/a.parquet", "nope"),
    ],
)
def test_urls_that_cannot_be_read_are_refused(source: str, advice: str) -> None:
    assert advice in refused(source)


@pytest.mark.parametrize(
    ("protocol", "module", "package"),
    [
        ("s3", "s3fs", "pip install s3fs"),
        ("gs", "gcsfs", "pip install gcsfs"),
        ("hf", "huggingface_hub", "pip install huggingface_hub"),
        ("https", "fsspec.implementations.http", "'.[stream]'"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, protocol: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # its import fails
    monkeypatch.delitem(REGISTRY, protocol, raising=False)
    assert package in refused(f"{protocol}://datasets/x/a.parquet")


@pytest.fixture
def bucket() -> Iterator[MemoryFileSystem]:
    """A file system with a bucket of a few files."""
    files = fsspec.filesystem("memory")
    names = (
        "a.parquet",
        "b.jsonl",
        "_SUCCESS",
        "sub/c.parquet",
        ".hidden.parquet",
        "q?#.jsonl",
        "d.parquet/e",
    )
    files.pipe({f"/bucket/x/{name}": b"text" for name in names} | {"/bucket/x/empty.parquet": b""})
    yield files
    files.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("x", ["a.parquet", "b.jsonl", "q%3F%23.jsonl", "sub/c.parquet"]),
        ("x/", ["a.parquet", "b.jsonl", "q%3F%23.jsonl", "sub/c.parquet"]),
        ("x/*.parquet", ["a.parquet"]),
        ("x/**/*.parquet", ["a.parquet", "sub/c.parquet"]),
        ("x/{b.jsonl,a.parquet}", ["b.jsonl", "a.parquet"]),  # as they stand, without a listing
        ("x/{sub,*.jsonl}", ["sub/c.parquet", "b.jsonl", "q%3F%23.jsonl"]),
    ],
)
def test_folders_and_globs_are_listed_by_name(
    bucket: MemoryFileSystem, pattern: str, names: list[str]
) -> None:
    shards = find_shards(f"memory://bucket/{pattern}")
    assert list(shards) == [f"memory://bucket/x/{name}" for name in names]
    assert all(bucket.exists(location) for location in shards.values())


def test_the_order_is_that_of_names_whatever_a_file_system_answers(
    bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bucket.find("/bucket/x", detail=True)
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: dict(reversed(found.items())))
    shards = list(find_shards("memory://bucket/x"))
    assert shards == sorted(shards)


def test_a_folder_without_readable_files_is_refused(bucket: MemoryFileSystem) -> None:
    for pattern in ("nothing", "x/*.tar", "x/d.parquet/"):
        assert pattern.rstrip("/") in refused(f"memory://bucket/{pattern}")


class FakeHub(MemoryFileSystem):
    """Files in memory, as hf:// names them."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.removeprefix('hf://').strip('/')}"


def test_the_folder_of_a_hugging_face_dataset_is_its_parquet_files_or_else_its_json_lines(
    bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY, "hf", FakeHub)
    bucket.pipe({f"/bucket/org/{name}": b"x" for name in ("README.md", "a.jsonl", "b.jsonl.gz", "c.json")})
    start = "hf://bucket/org"
    assert list(find_shards(start)) == [f"{start}/a.jsonl", f"{start}/b.jsonl.gz"]
    assert list(find_shards(f"{start}/*.md")) == [f"{start}/README.md"]
    bucket.pipe("/bucket/org/data/d.parquet", b"x")
    assert list(find_shards(start)) == [f"{start}/data/d.parquet"]


def test_a_listing_that_fails_is_one_line_without_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("cannot connect to memory://us3r:pa55@bucket/x?sig=S3CR\nas pa55")

    monkeypatch.setattr(MemoryFileSystem, "find", fail)
    (tmp_path / "a.urls").write_text("memory://us3r:pa55@bucket/x?sig=S3CR")
    assert "cannot connect" in refused(str(tmp_path / "a.urls"))


def test_local_sources_have_the_names_of_the_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl"):
        (tmp_path / name).write_text("x")
    assert find_shards(str(tmp_path)) == {name: str(tmp_path / name) for name in ("a.jsonl", "b.txt")}
    assert find_shards(f"{tmp_path}/*.txt") == {"b.txt": str(tmp_path / "b.txt")}
    (tmp_path / "c.txt").mkdir()
    assert list(find_shards(f"file://{tmp_path}/*.txt")) == [f"file://{tmp_path}/b.txt"]
