"""Seeded random mutations of files, and a check of what reading a mutant does."""

import json
import os
import pickle
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

CANARY_MODULE = "meshwright_canary"  # importing it creates a file
LIMIT_S = 30  # far more than a busy machine needs
NUMBERS: list[Any] = [
    0,
    1,
    -1,
    2**31,
    2**63,
    2**64,
    -(10**15),
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
]
TEXTS: list[Any] = [
    "",
    "x" * 2000,
    "1e9",
    "9" * 5000,
    "../../etc/passwd",
    "/dev/zero",
    "~nobody-here/x",
    "<<",
]
SIGNS: list[Any] = ["a\nb", "\0", "\x1b[31m", "\u202e", "\ud800", "layers.[0-9999]", "2001-13-45", "1:1:1.5"]
NESTED: list[Any] = [[], {}, ["a", None], {"": []}, {"class_path": f"{CANARY_MODULE}.X"}]
ODD = [None, True, f"{CANARY_MODULE}.X", *NUMBERS, *TEXTS, *SIGNS, *NESTED]
SNIPPETS = [
    b"!!python/object/apply:os.system ['touch CANARY']",
    b"!!python/name:os.system",
    b"9" * 100_000,
    b"[" * 100_000,
    b"{a: " * 300,
    b"1" + b":1" * 300 + b".5",
    b"0x" + b"f" * 300,
    "\u2028".encode(),
    *b"!!int |!!set |!!binary |&a |*a|<<: |? |- |[|{|]|}|1e999|NaN|\\u0000|%YAML 9.9\n|\n---\n|#|\"|'".split(
        b"|"
    ),
    *(b"\0", b"\x07", b"\t", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80"),
]


Mutator = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """A file from an untrusted source.

    Args:
        name: for messages
        path: of the valid file
        read: reads that path with the real reader, and checks the result
        errors: exceptions that it may raise
        lines: maximum lines of a message: 1, or more for a reader that reports every mistake
        named: strings, one of which must be in a message; empty for a reader that another one calls
    """

    name: str
    path: Path
    read: Callable[[], object]
    errors: tuple[type[Exception], ...]
    lines: int = 1
    named: tuple[str, ...] = ()


class Hang(BaseException):
    """Reading took longer than LIMIT_S."""


class _Commands:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch CANARY",)


def mutate(rng: random.Random, content: bytes) -> bytes:
    """The content with one to three changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice((*_OF_BYTES, *_OF_VALUES))(rng, content)
    return content


def _flip(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content or b"\0")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice((1, 2, 8))) + content[at + 8 :]


def _insert(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice(SNIPPETS) + content[at:]


def _delete(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + content[at + rng.choice((1, 1, 8, 100, len(content))) :]


def _change_lines(rng: random.Random, content: bytes) -> bytes:
    """Repeat, delete, indent or swap a line."""
    lines = content.splitlines(keepends=True) or [b""]
    a, b = (rng.randrange(len(lines)) for _ in range(2))
    kind = rng.randrange(4)
    if kind == 0:
        lines.insert(b, lines[a])
    elif kind == 1:
        del lines[a]
    elif kind == 2:
        lines[a] = b"  " + lines[a]
    else:
        lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines)


def _replace_number(rng: random.Random, content: bytes) -> bytes:
    """Replace a digit with another number."""
    places = [i for i, byte in enumerate(content[:20_000]) if 48 <= byte < 58]
    at = rng.choice(places or [0])
    number = rng.choice((b"-1", b"1e9", b"9" * 25, b"9" * 5000, b"1.5", b"true", b"1_0", b"0o7", b".inf"))
    return content[:at] + number + content[at + 1 :]


def _replace_file(rng: random.Random, content: bytes) -> bytes:
    """Replace the content with another kind of file."""
    pickled, deep = pickle.dumps(_Commands()), b"a: " + b"[" * 100_000
    text = content.decode("latin1").encode("utf-16")
    return rng.choice((b"", b"\0" * 100, pickled, b"PK\x03\x04" + content, text, deep, b"3", content * 2))


def _change_value(rng: random.Random, content: bytes) -> bytes:
    """Valid YAML or JSON in which a value is replaced, deleted, copied, renamed or repeated."""
    try:
        text = content.decode()
        plain = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
    except Exception:  # an earlier mutation made it invalid
        return _flip(rng, content)
    places = list(_places(plain))
    if not places:
        return _insert(rng, content)
    holder, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind < 3:
        holder[key] = rng.choice(ODD)
    elif kind == 3:
        source, source_key = rng.choice(places)
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


_OF_BYTES: list[Mutator] = [_flip, _overwrite, _insert, _delete, _change_lines, _replace_number]
_OF_VALUES: list[Mutator] = [_change_value] * 6 + [_replace_file]


def put_in_place(rng: random.Random, target: Target, content: bytes, outside: Path) -> str:
    """Write a mutant, or replace the file with a folder, pipe or link; return a description."""
    clear(target.path)
    kind = (
        rng.choice(("gone", "folder", "pipe", "endless", "link outside", "loop"))
        if rng.random() < 0.02
        else "bytes"
    )
    if kind == "folder":
        target.path.mkdir()
    elif kind == "pipe":
        os.mkfifo(target.path)
    elif kind == "loop":
        target.path.symlink_to(target.path)
    elif kind == "endless":
        target.path.symlink_to("/dev/zero")
    elif kind == "link outside":
        target.path.symlink_to(outside)
    elif kind == "bytes":
        mutant = mutate(rng, content)
        target.path.write_bytes(mutant)
        return repr(mutant[:300])
    return kind


def clear(path: Path) -> None:
    """Remove a file, link or folder of this name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    with suppress(FileNotFoundError):
        path.unlink()


def judge(target: Target) -> str:
    """Read a mutant, and return what is wrong with the result, or ""."""
    try:
        with warnings.catch_warnings(record=True) as caught, _limited():
            warnings.simplefilter("always")
            target.read()
    except target.errors as error:
        return _message_problem(str(error), target)
    except (Exception, Hang) as error:
        return f"{type(error).__module__}.{type(error).__name__}: {str(error)[:500]}"
    except BaseException as error:  # a panic of a library in Rust
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return f"{type(error).__name__}: {str(error)[:500]}"
    return f"warns: {caught[0].message}" if caught else ""


def _message_problem(message: str, target: Target) -> str:
    lines = message.split("\n")
    shown = message.replace("\n", "")
    if len(lines) > target.lines or any(len(line) >= 1000 for line in lines):
        return f"a message of {len(lines)} lines and {len(message)} characters: {message[:300]}"
    if not shown.isprintable():
        return f"a message that is not printable: {message[:300]!r}"
    if target.named and not any(name in message for name in target.named):
        return f"a message that names no place: {message[:500]}"
    return ""


@contextmanager
def _limited() -> Iterator[None]:
    """Raise Hang after LIMIT_S."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
