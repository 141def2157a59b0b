"""A streamed corpus over HTTP: the same sequences as from local files, while requests, files, worker
processes and disks fail; and one sentence if that cannot be."""

import contextlib
import errno
import gzip
import hashlib
import itertools
import json
import os
import random
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from meshwright.parallel.memory_breakdown import GIB
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.data.prepare.worker import PrepareSettings, TokenizeJob
from meshwright.train.data.sequences import BatchShape, SequenceShape
from meshwright.train.data.stream import index, lanes, token_cache
from meshwright.train.data.stream.index import read_index
from meshwright.train.data.stream.order import StreamOrder, StreamReader
from meshwright.train.data.stream.remote import Remote
from meshwright.train.data.stream.shards import find_shards
from meshwright.train.data.stream.token_cache import CachedSource, CacheLimits
from meshwright.train.data.tokenizer import ByteTokenizer
from meshwright.train.distributed.ranks import ALONE
from meshwright.train.errors import DataError
from tests.support.dying_workers import always_killed, killed_once
from tests.support.flaky_server import Fault, FlakyServer, Request

UNPACKED = SequenceShape(96, packing=False, document_mask=False, start_id=256, vocab_size=257)
PACKED = SequenceShape(64, packing=True, document_mask=True, start_id=None, vocab_size=257)
LANES = 4
SIGNED = "?X-Signature=S3CRETTOKEN"


def texts_of(kind: str, count: int) -> list[str]:
    """Different documents of 10 to 80 letters, some of two bytes."""
    chosen = random.Random(kind)
    return [f"{kind} {number} " + "xé"[number % 2] * chosen.randrange(30) for number in range(count)]


def json_lines(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def pack(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


def seekable(content: bytes, frame_bytes: int) -> bytes:
    """Content in zstd's seekable format: frames, which cut lines, and a skippable frame with their sizes."""
    parts = [content[at : at + frame_bytes] for at in range(0, len(content), frame_bytes)]
    frames = list(map(pack, parts))
    entries = [struct.pack("<II", len(frame), len(part)) for frame, part in zip(frames, parts, strict=True)]
    table = b"".join(entries) + struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)
    return b"".join(frames) + struct.pack("<II", 0x184D2A5E, len(table)) + table


def write_parquet(path: Path, texts: Sequence[str]) -> None:
    """Row groups of ten texts, beside a column that is larger."""
    others = [random.Random(text).randbytes(900) for text in texts]
    table = pyarrow.table({"other": others, "text": texts, "third": others})
    pyarrow.parquet.write_table(table, path, row_group_size=10, write_statistics=False)


def write_files(folder: Path) -> dict[str, list[str]]:
    """Write one file of each kind; return the texts of each."""
    texts = {
        "a.jsonl": texts_of("lines", 60),
        "b.jsonl.gz": texts_of("gzip", 9),
        "c.jsonl.zst": texts_of("seekable", 40),
        "d.jsonl.zst": texts_of("zstd", 9),
        "e.parquet": texts_of("rows", 35),
        "f.txt": ["one document\nof two lines\n"],
        "g.txt": ["and another"],
    }
    write_parquet(folder / "e.parquet", texts["e.parquet"])
    contents = {
        "a.jsonl": json_lines(texts["a.jsonl"]).removesuffix(b"\n"),
        "b.jsonl.gz": gzip.compress(json_lines(texts["b.jsonl.gz"])),
        "c.jsonl.zst": seekable(json_lines(texts["c.jsonl.zst"]), 100),
        "d.jsonl.zst": pack(json_lines(texts["d.jsonl.zst"])),
        **{name: texts[name][0].encode() for name in ("f.txt", "g.txt")},
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return texts


@pytest.fixture
def server(running: FlakyServer, monkeypatch: pytest.MonkeyPatch) -> FlakyServer:
    """A server without faults so far; blocks and tails are small."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(index, "_LEAST_BLOCK", 250)
    monkeypatch.setattr(index, "_MOST_BLOCK", 250)
    monkeypatch.setattr(index, "TAIL_BYTES", 3_000)
    running.fail()
    running.requests.clear()
    return running


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenize in threads of this process, which start at once."""
    monkeypatch.setattr(token_cache, "start_workers", ThreadPoolExecutor)


@pytest.fixture
def folder(served: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder that is served."""
    path = served / hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    path.mkdir()
    yield path
    shutil.rmtree(path)


def urls_of(server: FlakyServer, folder: Path, at: Path) -> Path:
    """Write a list with signed URLs of the folder's files."""
    urls = [f"{server.url}/{folder.name}/{path.name}{SIGNED}\n" for path in sorted(folder.iterdir())]
    at.mkdir(parents=True, exist_ok=True)
    (at / "list.urls").write_text("".join(urls))
    return at / "list.urls"


def patient() -> Remote:
    return Remote(limit_s=60, stall_s=20, pause_s=0.01)


def order_of(
    cache: Path,
    source: Path,
    remote: Remote | None = None,
    skip_bad: int = 0,
    folder_bytes: float = GIB,
    share_bytes: float = GIB,
) -> StreamOrder:
    remote, shards = remote or patient(), find_shards(str(source))
    described = read_index(str(source), shards, "text", remote, cache, ALONE)
    settings = PrepareSettings(held_out=0.0, skip_bad=skip_bad)
    job = TokenizeJob("bytes", "auto", "auto", "", settings, cache / "stream", check_text=True)
    data = CachedSource("text", described, shards, job, ByteTokenizer.info.vocab_size)
    limits = CacheLimits(folder_bytes, share_bytes, workers=1)
    return StreamOrder([data], (1.0,), LANES, 5, limits, remote)


def read_packed(order: StreamOrder, steps: int = 30) -> list[list[int]]:
    """The sequences of some steps: about two epochs of `write_files`."""
    with closing(StreamReader(order, TrainPosition(), BatchShape(LANES, 1, 0, 1), PACKED)) as reader:
        batches = [reader.read(step * LANES, pinned=False)[0] for step in range(steps)]
    return [row for batch in batches for row in batch.tokens.tolist()]


def read_epoch(order: StreamOrder) -> list[str]:
    """The documents of the first epoch."""
    documents, lanes_read = list[str](), order.counts[0]
    with closing(StreamReader(order, TrainPosition(), BatchShape(lanes_read, 1, 0, 1), UNPACKED)) as reader:
        unread = True
        while unread:
            batch = reader.read(0, pinned=False)[0]
            epochs = [reader.mark().places[f"0/{lane}"].split()[0] for lane in range(lanes_read)]
            for epoch, tokens in zip(epochs, batch.tokens.tolist(), strict=True):
                documents += [bytes(tokens[1 : [*tokens, 256].index(256, 1)]).decode()] * (epoch == "0")
            unread = "0" in epochs
    return documents


def refused(read: Callable[[], object]) -> str:
    """The message of a DataError: one line without a secret."""
    with pytest.raises(DataError) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    assert "S3CRET" not in message
    return message


KEPT = (".bin", ".ends", ".json")


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ranges_of(server: FlakyServer, name: str) -> list[tuple[int, int]]:
    """First and last byte of each request of a file."""
    asked = [each.headers["range"] for each in server.requests if f"/{name}?" in each.path]
    return [(int(first), int(last)) for first, _, last in (text[6:].partition("-") for text in asked)]


def test_each_document_is_read_once_an_epoch_by_few_requests(
    server: FlakyServer, threads: None, folder: Path, tmp_path: Path
) -> None:
    texts = write_files(folder)
    urls = urls_of(server, folder, tmp_path / "lists")
    order = order_of(tmp_path / "cache", urls)
    counts = {name: server.count(f"{folder.name}/{name}") for name in texts}
    assert counts == {name: 1 + name.endswith((".zst", ".parquet")) for name in texts}
    groups = list(map(order.sources[0].index.group, range(len(order.sources[0].index.groups))))
    of_shard = Counter(group.shard for group in groups)
    assert (of_shard[1], of_shard[3], of_shard[4]) == (1, 1, 4)
    assert min(of_shard[0], of_shard[2]) > 4
    content = (folder / "a.jsonl").read_bytes()
    assert sum(content[group.begin - 1] != 10 for group in groups if group.shard == 0 and group.begin) > 5

    documents = [text for of_kind in texts.values() for text in of_kind]
    assert Counter(read_epoch(order)) == Counter(documents)
    row_group = pyarrow.parquet.read_metadata(folder / "e.parquet").row_group(0)
    other, end = row_group.column(0), row_group.column(1).dictionary_page_offset
    first = other.dictionary_page_offset or other.data_page_offset
    assert not [a for a, b in ranges_of(server, "e.parquet")[1:] if a < end - 1 and b > max(first, 1)]
    server.requests.clear()
    again = order_of(tmp_path / "cache", urls)
    assert not server.requests
    assert Counter(read_epoch(again)) == Counter(documents)
    assert not server.requests, "all tokens are in the cache"
    assert "S3CRET" not in str(files_below(tmp_path / "cache"))


def schedule(request: Request) -> Fault | None:
    """Every second request fails, in one way after another."""
    faults = [
        Fault(status=503),
        Fault(truncate=7),
        Fault(close=True),
        Fault(status=429),
        Fault(truncate=0),
        Fault(stall_s=60, truncate=3),
        Fault(status=500),
    ]
    turn = request.number // 2 % (3 * len(faults))  # stalls cost time
    fault = faults[turn % len(faults)]
    return fault if request.number % 2 == 0 and (not fault.stall_s or turn < len(faults)) else None


def test_sequences_are_those_of_local_files_while_requests_fail(
    server: FlakyServer, threads: None, folder: Path, tmp_path: Path
) -> None:
    write_files(folder)
    local = read_packed(order_of(tmp_path / "local", folder))
    server.fault_of = schedule
    remote = Remote(limit_s=60, stall_s=0.3, pause_s=0.01)
    urls = urls_of(server, folder, tmp_path / "lists")
    assert read_packed(order_of(tmp_path / "cache", urls, remote)) == local
    assert remote.retries > 20
    assert len({tuple(row) for row in local}) > 60


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def write_lines(folder: Path, files: int = 3, lines: int = 30) -> None:
    for number in range(files):
        (folder / f"{number}.jsonl").write_bytes(json_lines(texts_of(f"file {number}", lines)))


@pytest.mark.parametrize("change", ["other content", "fewer bytes", "more bytes", "deleted"])
def test_a_file_that_changes_ends_the_run(
    server: FlakyServer, threads: None, folder: Path, tmp_path: Path, change: str
) -> None:
    write_lines(folder, files=1)
    order = order_of(tmp_path / "cache", urls_of(server, folder, tmp_path / "lists"))
    file = folder / "0.jsonl"
    content = file.read_bytes()
    if change == "deleted":
        file.unlink()
    else:
        changed = {
            "other content": content.replace(b"x", b"y"),
            "fewer bytes": content[:-20],
            "more bytes": content + content[:20],
        }
        file.write_bytes(changed[change])
    message = refused(lambda: read_packed(order))
    assert message.startswith(f"{server.url}/{folder.name}/0.jsonl ")
    stream, looks = tmp_path / "cache" / "stream", 0
    while list((stream / "raw").iterdir()):  # what was fetched ahead at the same time fails too
        looks += 1
        assert looks < 1000
        time.sleep(0.01)
    assert not list((stream / "results").iterdir())


def test_a_worker_that_is_killed_is_replaced(
    server: FlakyServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(folder)
    urls = urls_of(server, folder, tmp_path / "lists")
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "start_workers", ThreadPoolExecutor)
        undisturbed = read_packed(order_of(tmp_path / "undisturbed", urls), steps=20)
    monkeypatch.setattr(token_cache, "tokenize_in_worker", killed_once)
    assert read_packed(order_of(tmp_path / "cache", urls), steps=20) == undisturbed
    assert (tmp_path / "cache" / "stream" / "killed").exists()


def test_a_worker_that_is_killed_always_ends_the_run(
    server: FlakyServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(folder, files=1, lines=3)
    monkeypatch.setattr(token_cache, "tokenize_in_worker", always_killed)
    monkeypatch.setattr(token_cache, "KILLED", 2)
    order = order_of(tmp_path / "cache", urls_of(server, folder, tmp_path / "lists"))
    message = refused(lambda: read_packed(order))
    assert "data.workers" in message
    assert f"{server.url}/{folder.name}/0.jsonl" in message


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_is_damaged_or_deleted_in_the_cache_is_made_again(threads: None, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    write_lines(tmp_path / "text", files=12, lines=3)
    cache = tmp_path / "cache"
    undisturbed = read_packed(order_of(cache, tmp_path / "text"), steps=14)
    groups = [path.stem for path in (cache / "stream" / "results").glob("[!.]*")]
    before = {name: content for name, content in files_below(cache).items() if name.endswith(KEPT)}
    assert len(groups) >= 9
    ways = itertools.product(
        (damage, Path.unlink, lambda path: path.write_bytes(b"")), ("bin", "ends", "json")
    )
    for group, (how, kind) in zip(groups, ways, strict=False):
        how(next((cache / "stream").rglob(f"*{group.removeprefix('train-')}.{kind}")))
    assert len(before.items() - files_below(cache).items()) == 9
    assert read_packed(order_of(cache, tmp_path / "text"), steps=14) == undisturbed
    assert before.items() <= files_below(cache).items()


def test_closing_ends_a_wait_for_a_source(
    server: FlakyServer, threads: None, folder: Path, tmp_path: Path
) -> None:
    write_lines(folder, files=4, lines=3)
    order = order_of(tmp_path / "cache", urls_of(server, folder, tmp_path / "lists"))
    waits = threading.Event()
    server.fault_of = lambda request: waits.set() or Fault(stall_s=600)
    reader = StreamReader(order, TrainPosition(), BatchShape(LANES, 1, 0, 1), PACKED)
    with ThreadPoolExecutor(1) as pool:
        reading = [pool.submit(reader.read, step * LANES, pinned=False) for step in range(3)]
        assert waits.wait(60)
        reader.close()
        for step in reading:
            with pytest.raises(CancelledError):
                step.result(60)
    server.released.set()
    server.released.clear()


def test_groups_without_text_are_passed_over_and_sources_without_text_refused(
    threads: None, tmp_path: Path
) -> None:
    write_lines(made(tmp_path / "text"), files=2, lines=3)
    for folder, number in itertools.product((tmp_path / "text", made(tmp_path / "none")), range(2, 12)):
        (folder / f"{number}.jsonl").write_bytes(json_lines([""] * 3))
    documents = texts_of("file 0", 3) + texts_of("file 1", 3)
    assert Counter(read_epoch(order_of(tmp_path / "cache", tmp_path / "text"))) == Counter(documents)
    assert "data.source" in refused(lambda: read_epoch(order_of(tmp_path / "cache", tmp_path / "none")))


def tokens_bytes(cache: Path) -> int:
    """Bytes of finished groups; threads may still delete some."""
    total = 0
    for path in (cache / "stream" / "data").glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def index_names(order: StreamOrder) -> list[str]:
    return [shard.name.rpartition("/")[2] for shard in order.sources[0].index.shards]


def in_use(order: StreamOrder, lane: int, places: dict[str, str]) -> tuple[str, int]:
    """Name of the file and first byte that is asked for of the group at a lane's place; a window has one."""
    epoch, number, *_ = map(int, places[f"0/{lane}"].split())
    described = order.sources[0].index
    dealt = lanes.deal(len(described.groups), LANES, lane, epoch, order.seed)
    group = described.group(dealt[number])
    return index_names(order)[group.shard], max(0, group.begin - 1)


def test_old_groups_are_deleted_and_those_in_use_are_not(
    server: FlakyServer, threads: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "WINDOW_GROUPS", 1)
    write_lines(folder, files=6, lines=20)
    urls = urls_of(server, folder, tmp_path / "lists")
    undisturbed = read_packed(order_of(tmp_path / "all", urls), steps=50)
    most = tokens_bytes(tmp_path / "all") // 3
    order = order_of(tmp_path / "cache", urls, folder_bytes=most)
    sequences, places, stays = list[list[int]](), [dict[str, str]()], list[int]()
    shape = BatchShape(LANES, 1, 0, 1)
    with closing(StreamReader(order, TrainPosition(), shape, PACKED)) as reader:
        while len(sequences) < len(undisturbed) or not stays:
            step = len(sequences) // LANES
            sequences += reader.read(step * LANES, pinned=False)[0].tokens.tolist()
            assert tokens_bytes(tmp_path / "cache") < 2 * most
            places.append(dict(reader.mark().places))
            windows = [{lane: place.split()[:2] for lane, place in each.items()} for each in places[-2:]]
            stays = [step] if windows[0] == windows[1] else []  # no lane has opened another window
    assert sequences[: len(undisturbed)] == undisturbed
    server.requests.clear()
    (step,) = stays
    start = TrainPosition(samples=step * LANES, places=places[step])
    again = order_of(tmp_path / "cache", urls, folder_bytes=most)
    with closing(StreamReader(again, start, shape, PACKED)) as reader:
        assert reader.read(step * LANES, pinned=False)[0].tokens.tolist() == sequences[step * LANES :][:LANES]
    asked = {(name, first) for name in index_names(again) for first, _ in ranges_of(server, name)}
    assert not asked & {in_use(again, lane, places[step]) for lane in range(LANES)}


def test_windows_that_do_not_fit_the_cache_end_the_run(threads: None, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    write_lines(tmp_path / "text")
    order = order_of(tmp_path / "cache", tmp_path / "text", share_bytes=1_000)
    assert "data.cache_gib" in refused(lambda: read_packed(order))


@pytest.mark.parametrize("fails", ["fetching", "tokenizing", "folder"])
def test_a_cache_that_cannot_be_written_ends_the_run(
    server: FlakyServer,
    threads: None,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    write_lines(folder, files=1)
    cache, urls = tmp_path / "cache", urls_of(server, folder, tmp_path / "lists")
    if fails == "folder":
        cache.mkdir()
        (cache / "stream").touch()
        assert str(cache) in refused(lambda: read_packed(order_of(cache, urls)))
        return

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite" if fails == "fetching" else "fsync", full)
        message = refused(lambda: read_packed(order_of(cache, urls)))
    assert os.strerror(errno.ENOSPC) in message
    assert str(cache) in message
    assert not tokens_bytes(cache)
    assert read_packed(order_of(cache, urls), 4) == read_packed(order_of(tmp_path / "other", urls), 4)


BAD = b'{"text": 7}\n'


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_bad_records_are_named_by_url_and_byte_and_can_be_left_out(
    server: FlakyServer, threads: None, folder: Path, tmp_path: Path, kind: str
) -> None:
    texts = texts_of("lines", 120)
    before = json_lines(texts[:90])
    content = before + BAD + json_lines(texts[90:])
    packed = {"jsonl": content, "jsonl.gz": gzip.compress(content), "jsonl.zst": seekable(content, 300)}
    (folder / f"0.{kind}").write_bytes(packed[kind])
    cache, urls = tmp_path / "cache", urls_of(server, folder, tmp_path / "lists")
    message = refused(lambda: read_epoch(order_of(cache, urls)))
    assert f"{server.url}/{folder.name}/0.{kind}, byte {len(before):,}" in message
    assert str(tmp_path) not in message
    assert Counter(read_epoch(order_of(cache, urls, skip_bad=1))) == Counter(texts)
    assert message == refused(lambda: read_epoch(order_of(cache, urls))), "what is cached is checked too"
