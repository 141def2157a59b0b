"""Seeded random mutations of files, and a check of what reading a mutant does."""

import json
import os
import pickle
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

CANARY_MODULE = "meshwright_canary"  # importing it creates a file
LIMIT_S = 30  # far more than a busy machine needs
ODD: list[Any] = [
    *(None, True, 0, 1, -1, 2**31, 2**64, -(10**15), 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x" * 2000, "1e9", "9" * 5000, "../../etc/passwd", "/dev/zero", "~nobody-here/x", "<<"),
    *("a\nb", "\0", "\x1b[31m", "\u202e", "\ud800", "layers.[0-9999]", "2001-13-45", "1:1:1.5"),
    *([], {}, ["a", None], {"": []}, {"class_path": f"{CANARY_MODULE}.X"}, f"{CANARY_MODULE}.X"),
]
SNIPPETS = [
    *(b"!!python/object/apply:os.system ['touch CANARY']", b"!!python/name:os.system", b"{a: " * 300),
    *(b"9" * 100_000, b"[" * 100_000, b"1" + b":1" * 300 + b".5", b"0x" + b"f" * 300, "\u2028".encode()),
    *b"!!int |!!set |!!binary |&a |*a|<<: |? |- |[|{|]|}|1e999|NaN|\\u0000|%YAML 9.9\n|\n---\n|#|\"|'".split(
        b"|"
    ),
    *(b"\0", b"\x07", b"\t", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"-1", b"1e9", b"1_0", b".inf"),
]
PLACED = ("gone", "folder", "pipe", "link", "loop")  # in place of the file; a link leads out of the folder


class _Commands:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch CANARY",)


@dataclass(frozen=True)
class Target:
    """A file from an untrusted source.

    Args:
        path: of the valid file
        read: reads that path with the real reader, and checks the result
        error: the exception that it may raise
        named: strings, one of which must be in its message
    """

    path: Path
    read: Callable[[], object]
    error: type[Exception]
    named: tuple[str, ...]


def put_in_place(rng: random.Random, path: Path, content: bytes, outside: Path) -> str:
    """Write a mutant of the content, or sometimes replace the file; return a description."""
    clear(path)
    kind = rng.choice(PLACED) if rng.random() < 0.04 else "bytes"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("link", "loop"):
        path.symlink_to(path if kind == "loop" else rng.choice((outside, Path("/dev/zero"))))
    elif kind == "bytes":
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            content = rng.choice((_change_bytes, _change_lines, _change_value, _change_value))(rng, content)
        path.write_bytes(content)
        return repr(content[:300])
    return kind


def clear(path: Path) -> None:
    """Remove a file, link or folder of this name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip a bit, overwrite, insert or delete bytes, or replace all by another kind of file."""
    at = rng.randrange(len(content) + 1)
    kind = rng.randrange(5)
    if kind == 0 and at < len(content):
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if kind == 1:
        return content[:at] + rng.randbytes(rng.choice((1, 2, 8))) + content[at + 8 :]
    if kind == 2:
        return content[:at] + rng.choice(SNIPPETS) + content[at:]
    if kind == 3:
        return content[:at] + content[at + rng.choice((1, 8, 100, len(content))) :]
    others = (
        b"",
        bytes(100),
        pickle.dumps(_Commands()),
        b"PK\x03\x04" + content,
        b"a: " + b"[" * 100_000,
        b"3",
    )
    return rng.choice((*others, content * 2, content.decode("latin1").encode("utf-16")))


def _change_lines(rng: random.Random, content: bytes) -> bytes:
    """Repeat, delete, indent or swap a line."""
    lines = content.splitlines(keepends=True) or [b""]
    a, b = (rng.randrange(len(lines)) for _ in range(2))
    changed = ([lines[b], lines[a]], [], [b"  " + lines[a]], [lines[b]])
    return b"".join([*lines[:a], *rng.choice(changed), *lines[a + 1 :]])


def _change_value(rng: random.Random, content: bytes) -> bytes:
    """Valid YAML or JSON in which a value is replaced, deleted, copied, renamed or repeated."""
    try:
        text = content.decode()
        plain = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
        holder, key = rng.choice(list(_places(plain)))
    except Exception:  # binary, or an earlier mutation made it invalid
        return _change_bytes(rng, content)
    kind = rng.randrange(6)
    if kind < 3:
        holder[key] = rng.choice(ODD)
    elif kind == 3:
        source, source_key = rng.choice(list(_places(plain)))
        holder[key] = json.loads(json.dumps(source[source_key], default=str))
    elif kind == 4:
        del holder[key]
    elif isinstance(holder, dict):
        holder[str(rng.choice(ODD))] = holder.pop(key)
    else:
        holder.extend(holder[:1] * rng.choice((1, 100)))
    if text.startswith("{") or rng.random() < 0.5:
        return json.dumps(plain, default=str, skipkeys=True).encode()
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")


def _places(plain: Any) -> Iterator[tuple[Any, Any]]:
    """Every (list or mapping, index or key) of nested data."""
    entries = (
        plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    )
    for key, value in list(entries):
        yield plain, key
        yield from _places(value)


class Hang(BaseException):
    """Reading took longer than LIMIT_S."""


def judge(target: Target) -> str:
    """Read a mutant, and return what is wrong with the result, or ""."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            target.read()
        return f"warns: {caught[0].message}" if caught else ""
    except target.error as error:
        message = str(error)
        lines = message.splitlines()
        readable = len(lines) < 12 and all(line.isprintable() and len(line) < 1000 for line in lines)
        if readable and any(name in message for name in target.named):
            return ""
        return f"an unreadable message, or one that names no place: {message[:500]!r}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        return f"{type(error).__module__}.{type(error).__name__}: {str(error)[:500]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
