"""YAML that hides a mistake is refused, with file and line."""

import math
import os
from pathlib import Path

import pytest
import yaml

from meshwright.parallel.yaml_io import YamlError, load_mapping, load_value, to_yaml

REFUSED = {
    "duplicate": ("a: 1\nb: 2\na: 3\n", ["line 3", "'a'", "twice", "line 1", "merge them"]),
    "nested duplicate": ("a:\n  b: 1\n  c: 2\n  b: 3\n", ["line 4", "'b'", "line 2"]),
    "alias": ("a: &x [1]\nb: *x\n", ["line 2", "*x", "aliases", "repeat the value"]),
    "list": ("- a\n- b\n", ["mapping", "list"]),
    "unclosed": ("a: [1\nb: 2\n", ["line 2"]),
    "two documents": ("a: 1\n---\nb: 2\n", ["line"]),
    "python object": ("a: !!python/name:os.system\n", ["line 1", "tags", "remove the tag"]),
    "merged mapping": ("a:\n  <<: {b: 1}\n", ["line 2", "<<"]),
    "tag that does not fit": ("a: 1\nb: !!bool x\n", ["line 2", "tags", "bool"]),
    "unfilled template": ("a: {{ b }}\n", ["line 1", "key must be a plain word"]),
    "mapping that holds itself": ("a: &x {b: *x}\n", ["line 1", "aliases"]),
    "many digits": (f"a: {'9' * 100_000}\n", []),
    "deep list": (f"a:\n  {'[' * 1000}{']' * 1000}\n", ["nested too deeply"]),
    "large": ("#" * 600_000, ["larger than", "524,288 bytes"]),
}
UNREADABLE = {
    "UTF-16": "a: 1\n".encode("utf-16"),
    "not UTF-8": b"a: \xff\xfe\n",
}


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "some.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "facts"),
    [*REFUSED.values(), *((text, []) for text in UNREADABLE.values())],
    ids=[*REFUSED, *UNREADABLE],
)
def test_what_hides_a_mistake_is_refused_with_file_and_line(
    text: str | bytes, facts: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(YamlError) as error:
        load_mapping(path)
    assert [fact for fact in (str(path), *facts) if fact not in str(error.value)] == [], str(error.value)
    assert len(str(error.value)) < 1000
    assert str(error.value).isprintable()


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "missing"])
def test_a_file_that_cannot_be_read_is_named(folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "nothing.yaml"
    if folder:
        path.mkdir()
    with pytest.raises(YamlError, match=r"nothing\.yaml"):
        load_mapping(path)


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(YamlError, match=f"{path}: not a regular file"):
            load_mapping(path)


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n"])
def test_an_empty_file_is_an_empty_mapping(text: str, tmp_path: Path) -> None:
    assert load_mapping(write(tmp_path, text)) == {}


SCALARS = {
    "010": 10,
    "0o17": 15,
    "0x10": 16,
    "1e3": 1000.0,
    ".5": 0.5,
    "-.inf": -math.inf,
    "~": None,
    "True": True,
}
TEXTS = ("no", "On", "y", "1:30", "1_000", "0b1", "2024-01-31", "1:1:1.5", "=", "1e", "09x")


def test_scalars_are_those_of_yaml_1_2_and_text_is_text_for_readers_of_1_1_too() -> None:
    assert {text: load_value(text) for text in SCALARS} == SCALARS
    assert [load_value(text) for text in TEXTS] == [*TEXTS]
    texts = [*TEXTS, *SCALARS, "", "#x", "a: b", "<<"]
    for read in (load_value, yaml.safe_load):
        assert read(to_yaml(texts)) == texts
