"""Text that cannot be prepared: one message with the place, and no folder under the final name."""

import gzip
import json
import os
import re
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from meshwright.train.data.prepare.partition import cut_source
from meshwright.train.data.prepare.prepare import prepare
from meshwright.train.data.prepare.readers import read_part
from meshwright.train.data.prepare.worker import PrepareSettings
from meshwright.train.errors import DataError
from tests.support.limited import full_at
from tests.support.texts import odd_texts, prepare_texts, texts_of, train_bpe, write_jsonl
from tests.train.data.prepare.test_prepare import write_as

TEXTS = odd_texts(500, seed=3)


def refuses(
    source: object, pattern: str, tmp_path: Path, workers: tuple[int, ...] = (1,), **settings: object
) -> None:
    """Assert that preparing raises this error with each of these numbers of processes, and leaves no
    output."""
    for processes in workers:
        out = tmp_path / "results" / "out"
        with pytest.raises(DataError, match=pattern) as caught:
            prepare_texts(Path(str(source)), out, workers=processes, **settings)
        assert "\n" not in str(caught.value)
        assert not out.exists()
        assert not list(out.parent.glob("*")), "nothing was finished, so nothing is kept"


def lines_with(bad: bytes, at: int = 300) -> bytes:
    lines = [json.dumps({"id": i, "text": text}).encode() for i, text in enumerate(TEXTS)]
    lines[at - 1] = bad
    return b"\n".join(lines) + b"\n"


BAD_LINES = [
    (b'{"text": "cut sho', r"a\.jsonl, line 300: .*JSON \(Unterminated string"),
    (b"[" * 100_000, r"line 300: .*JSON"),
    (b'["text"]', r"line 300: .*JSON list.* field text"),
    (b'{"body": "x", "id": 7}', r"line 300: no field text .*'body', 'id'.*data\.text_field"),
    (b'{"text": 5}', r"line 300: .*field text is int.*data\.text_field"),
    (b'{"text": "\xff"}', r"line 300, byte [\d,]+: not UTF-8 \(invalid start byte\)"),
    (b'{"text": "\\ud800"}', r"line 300: .*field text .*surrogate pair"),
    (b'{"text": "x", "n": ' + b"1" * 5000 + b"}", r"line 300: .*4,300 digits"),
]


@pytest.mark.parametrize(("bad", "pattern"), BAD_LINES)
@pytest.mark.parametrize("form", ["jsonl", "list", "pieces"])
def test_a_bad_line_is_named_by_its_number(bad: bytes, pattern: str, form: str, tmp_path: Path) -> None:
    path, content = tmp_path / "a.jsonl", lines_with(bad)
    path.write_bytes(content)
    if form == "list":
        path, pattern = path.with_suffix(".json"), pattern.replace("line", "item")
        path.write_bytes(b" [ " + b", ".join(content.splitlines()) + b" ]\n")
        if not bad.endswith((b"}", b"]")):
            pattern = r"a\.json cannot be read; .*(item 300: not JSON|item .* byte 40,\d+ does not end)"
    if form == "pieces":  # lines before the piece are not read, but counted for the message
        piece = next(p for p in cut_source(str(path), 0.1, 5000)[1] if p.parts[0].last > content.index(bad))
        assert piece.parts[0].first > 0
        (found,) = (document.bad for document in read_part(piece.parts[0], "text", True) if document.bad)
        assert re.search(pattern, found)
    else:
        refuses(path, pattern, tmp_path, workers=(1, 2) if bad == BAD_LINES[0][0] else (1,))


def test_the_byte_of_invalid_utf8_is_that_of_the_file(tmp_path: Path) -> None:
    content = lines_with(b'{"text": "abc\xff"}')
    (tmp_path / "a.jsonl").write_bytes(content)
    refuses(tmp_path / "a.jsonl", rf"byte {content.index(0xFF):,}: not UTF-8", tmp_path)
    text = "é".encode() * 5000 + b"\xe9 latin"
    (tmp_path / "a.txt").write_bytes(text)
    for tokenizer in ("bytes", str(train_bpe(tmp_path / "bpe"))):
        with pytest.raises(DataError, match=r"a\.txt, byte 10,000: not UTF-8 \(invalid continuation byte\)"):
            prepare_texts(tmp_path / "a.txt", tmp_path / "out", tokenizer)
    refuses(tmp_path / "a.txt", r"a\.txt, byte 10,000: not UTF-8", tmp_path, workers=(2,))


DAMAGED = ("parquet", "arrow", "stream.arrow", "jsonl.gz", "jsonl.zst")


@pytest.mark.parametrize("form", DAMAGED)
@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_file_is_named(form: str, damage: str, tmp_path: Path) -> None:
    path = write_as(form, tmp_path, TEXTS)
    content = path.read_bytes()
    place = len(content) // 2
    if damage == "cut":
        path.write_bytes(content[:place])
    elif damage == "other":
        path.write_bytes(b"this is no such file" * 10)
    elif form.endswith("arrow"):
        pytest.skip("Arrow files have no checksums")
    else:
        flipped = bytes(byte ^ 0x55 for byte in content[place : place + 60])
        path.write_bytes(content[:place] + flipped + content[place + 60 :])
    pattern = rf"{path.name}.*cannot be read; it may be damaged or cut short \(.+\): restore it"
    refuses(path, pattern, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "pattern"),
    [
        ("a.json", b'[{"text": "x"}, {"text"', "item .* byte 15 does not end"),
        ("a.json", b'[{"text": "x"}]\n[{"text": "y"}]', "text after the end"),
        ("a.json", b'[{"text": "x"},]', "item 2: not JSON"),
        ("a.json", b"[{'text': 'a'}, {'text': 'b'}]", "item 1: not JSON"),
        ("a.json", b'{\n "text": "x"\n}\n', "line 1: not JSON"),
        ("a.csv", b'text\nx\n"y\nz\n', "line 3 .*unexpected end"),
        ("a.csv", b'text\n"x" y\n', "line 2 "),
        ("a.csv", b"id,body\n1,x\n", "no field text .*id, body.*text_field"),
        ("a.csv.gz", gzip.compress(b"text\n" + bytes(range(10, 256)) * 99)[:-50], "cut short"),
    ],
)
def test_a_file_whose_records_cannot_be_told_apart_is_refused(
    name: str, content: bytes, pattern: str, tmp_path: Path
) -> None:
    """However many bad records are left out."""
    (tmp_path / name).write_bytes(content)
    refuses(tmp_path / name, rf"{re.escape(name)}.*{pattern}", tmp_path, skip_bad=2)


def test_a_column_that_is_not_there_or_is_no_text_is_named(tmp_path: Path) -> None:
    table = pyarrow.table({"body": TEXTS, "text": range(len(TEXTS))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    refuses(tmp_path / "a.parquet", r"a\.parquet: .*field text is int64.*data\.text_field", tmp_path)
    refuses(
        tmp_path / "a.parquet",
        r"a\.parquet has no field words .*body, text.*text_field",
        tmp_path,
        text_field="words",
    )
    bad = pyarrow.array([b"good", b"bad \xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "b.parquet")
    refuses(tmp_path / "b.parquet", r"b\.parquet, row 2, byte 4: not UTF-8", tmp_path)


@pytest.mark.parametrize("content", [b"\n\n", b'{"text": ""}\n{"text": null}\n'])
def test_a_source_without_text_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    message = r"data\.source=.*a\.jsonl .*no text: 1 files? .*[02] empty documents"
    with pytest.raises(DataError, match=message):
        prepare_texts(tmp_path / "a.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_that_the_tokenizer_has_no_id_for_is_refused(tmp_path: Path) -> None:
    words, source = tmp_path / "words.json", write_jsonl(tmp_path / "a.jsonl", ["known", "unknown"])
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "known": 1})).save(str(words))
    message = r"data\.source: document a\.jsonl:27: .*words\.json cannot encode a text \(.*UNK"
    for workers in (1, 2):
        with pytest.raises(DataError, match=message):
            prepare_texts(source, tmp_path / "out", words, workers=workers)


def test_no_dataset_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match=r"hf:.*nowhere cannot be loaded by the datasets library"):
        prepare(f"hf:{tmp_path}/nowhere", "bytes", "auto", "auto", tmp_path / "out", PrepareSettings())


def test_a_missing_library_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for source in (str(tmp_path / "a.parquet"), "hf:x"):
        with pytest.raises(DataError, match=r"pip install -e '\.\[hf\]'"):
            prepare(source, "bytes", "auto", "auto", tmp_path / "out", PrepareSettings())


@pytest.mark.parametrize("form", ["jsonl", "txt", "parquet"])
def test_a_file_that_changes_while_it_is_read_is_refused(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    else:
        write_jsonl(path, TEXTS)
    (part,) = cut_source(str(path), 0.1, 2**20)[1][0].parts
    documents = read_part(part, "text", True)
    next(documents)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=rf"a\.{form} changed while it was being read"):
        list(documents)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_error_and_the_next_start_goes_on(workers: int, tmp_path: Path) -> None:
    """A limit on the file size simulates a full disk: small shards fit, a large one does not."""
    source = tmp_path / "source"
    source.mkdir()
    write_jsonl(source / "a.jsonl", ["x" * 1000] * 50)
    (source / "b.txt").write_bytes(b"y" * 400_000)
    settings, out = {"shard_bytes": 60_000, "workers": workers}, tmp_path / "out"
    message = r"cannot write to .*out.* \(File too large\), which keeps the finished shards: free space"
    with full_at(300_000), pytest.raises(DataError, match=message):
        prepare_texts(source, out, **settings)
    assert not out.exists()
    assert not list((tmp_path / ".out.partial" / "data").glob(".*")), "the partial shard is deleted"
    found = texts_of(out, prepare_texts(source, out, **settings))
    assert sum(map(len, found["train"] + found["held_out"])) == 450_000
    assert not list(tmp_path.glob(".*"))
