"""The shards of a streamed source: local files and URLs, each with a name that never contains a secret.

The name of a URL is what is shown, stored and hashed: the URL without user, password, query and fragment. Its
location, which requests need, may contain these, and is neither shown nor stored. Imports nothing heavy.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from glob import has_magic
from pathlib import Path

from meshwright.parallel.errors import one_line
from meshwright.train.config import LIST_SUFFIX, is_remote
from meshwright.train.errors import DataError
from meshwright.train.files import read_bounded, user_path

MOST_SHARDS = 1_000_000  # of one line with braces
_LIST_BYTES = 2**28
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PORT = re.compile(r"(arn:.*|\[[^\]]*\]|[^:\[\]]*)(:\d*)?")  # a bucket may be an access point, arn:aws:...
_HTTP = ("http", "https")
_STREAM = "pip install -e '.[stream]'"
_INSTALL = {"http": _STREAM, "https": _STREAM, "s3": "pip install s3fs", "s3a": "pip install s3fs"} | {
    **dict.fromkeys(("gs", "gcs"), "pip install gcsfs"),
    "hf": "pip install huggingface_hub",
}


def is_local(location: str) -> bool:
    """Whether the location of a shard is a path."""
    return not _is_url(location)


def find_shards(source: str, key: str = "data.source") -> dict[str, str]:
    """Return the shards of a source in their order, name -> location: a path, or a URL that may hold secrets.

    A source is what `find_files` reads, with its names; a URL with {00..99} and {a,b}; a folder or glob
    (* and **) of a file system that can list, such as s3://, gs:// and hf://, sorted by name (of the folder
    of a Hugging Face dataset all .parquet files, of every split, or else all .jsonl); or a .urls file: one of
    these, or a path relative to it, a line. Raises DataError if a shard cannot be read by its suffix or
    protocol, if two have one name, and if there is none.
    """
    shards = dict[str, str]()
    for name, location in _find(source, key):
        if name in shards:
            raise DataError(
                f"{key}={_shown(source)} has {name} twice, perhaps with different queries, which are no "
                "part of a name: remove one"
            )
        shards[name] = location
    if not shards:
        raise DataError(f"{key}={_shown(source)} names no file: write one URL or path a line")
    return shards


def split_url(url: str) -> tuple[str, str, str, str]:
    """Return scheme, "USER@" or "", host and path, and "?QUERY" or "", of a URL; its fragment is left out."""
    scheme, _, rest = url.partition("#")[0].partition("://")
    rest, mark, query = rest.partition("?")
    host, slash, path = rest.partition("/")
    user, at, host = host.rpartition("@")
    return scheme.lower(), user + at, host + slash + path, mark + query


def redact(text: str, location: str = "") -> str:
    """Return a message on one line without the users, passwords, queries and fragments of the URLs in it, and
    without those of `location` wherever they are."""
    _, user, _, query = split_url(location)
    for secret in sorted(re.split("[?&=;:@]", user + query), key=len, reverse=True):
        text = text.replace(secret, "...") if len(secret) > 3 else text
    return one_line(re.sub(r"(?<=://)[^/\s@]*@|[?#][^\s'\"<>)]*", "", text), 300)


def _is_url(text: str) -> bool:
    return _SCHEME.match(text) is not None


def _shown(source: str) -> str:
    scheme, _, rest, _ = split_url(source)
    return f"{scheme}://{rest}" if _is_url(source) else source


def _find(source: str, key: str) -> Iterator[tuple[str, str]]:
    from meshwright.train.data.sources import find_files  # imports numpy

    if _is_url(source):
        yield from _find_urls(source, f"{key}=")
    elif source.endswith(LIST_SUFFIX):
        yield from _find_listed(user_path(source, key), key)
    else:
        yield from ((name, str(path)) for name, path in find_files(source, key))


def _find_listed(file: Path, key: str) -> Iterator[tuple[str, str]]:
    """Names and locations of the lines of a .urls file. Local names are relative to its folder, if they are
    below it."""
    from meshwright.train.data.sources import find_files

    try:
        lines = read_bounded(file, _LIST_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise DataError(f"{key}={file} cannot be read as a list of URLs ({one_line(reason)})") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        where = f"{key}={file}, line {number}"
        if not line or line.startswith("#"):
            continue
        if _is_url(line):
            yield from _find_urls(line, f"{where}: ")
            continue
        for path in _expand(line, where):
            if is_remote(path):
                raise DataError(f"{where}: {path} is a list in a list: write its lines here")
            for _, found in find_files(str(file.parent / Path(path).expanduser()), where):
                below = found.is_relative_to(file.parent)
                yield (found.relative_to(file.parent) if below else found).as_posix(), str(found)


def _find_urls(url: str, where: str) -> Iterator[tuple[str, str]]:
    """Names and locations of a URL with braces. `where` starts messages."""
    from meshwright.train.data.sources import READ_SUFFIXES

    scheme, user, rest, query = split_url(url)
    host = rest.partition("/")[0]
    if not _PORT.fullmatch(host) or (scheme in _HTTP and not host):
        raise DataError(
            f"{where}a {scheme} URL has no host and port that can be read: write / ? # @ : of a password as "
            "%2F %3F %23 %40 %3A"
        )
    problem = _protocol_problem(scheme)
    if problem:
        raise DataError(f"{where}{scheme}://{rest}: {problem}")
    for each in _expand(rest, f"{where}{scheme}://{rest}"):
        name, location = f"{scheme}://{each}", f"{scheme}://{user}{each}{query}"
        listed = scheme not in _HTTP and (has_magic(each) or not each.endswith(READ_SUFFIXES))
        if listed:
            yield from _list(name, f"{scheme}://{user}{each}", where, READ_SUFFIXES)
        elif "*" in each:
            raise DataError(
                f"{where}{name}: {scheme} servers cannot list files: write {{000..127}} or {{a,b}} in place "
                f"of *, or a file whose name ends in {LIST_SUFFIX}, one URL a line"
            )
        elif each.endswith(READ_SUFFIXES):
            yield name, location
        else:
            raise DataError(f"{where}{name}: its suffix is none of those read: {' '.join(READ_SUFFIXES)}")


def _list(name: str, location: str, where: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Names and locations of the non-empty, readable and not hidden files of a folder or glob."""
    import fsspec

    try:
        files, pattern = fsspec.core.url_to_fs(location.rstrip("/"), skip_instance_cache=True)
        found = (files.glob if has_magic(pattern) else files.find)(pattern, detail=True)
    except Exception as problem:  # each file system has its own
        reason = f"{type(problem).__name__}: {redact(str(problem), location)}"
        raise DataError(f"{where}{name} cannot be listed ({reason}): check it, and its credentials") from None
    paths = [path for path, info in sorted(found.items()) if info["type"] == "file" and info["size"] != 0]
    kept = [p for p in paths if p.endswith(suffixes) and not p.rpartition("/")[2].startswith(".")]
    if name.startswith("hf://") and not has_magic(pattern):
        json_lines = tuple(suffix for suffix in suffixes if suffix.startswith(".jsonl"))
        kept = [p for p in kept if p.endswith(".parquet")] or [p for p in kept if p.endswith(json_lines)]
    if not kept:
        raise DataError(
            f"{where}{name}: none of {len(paths):,} non-empty files can be read by its suffix: check the name"
        )
    # file systems return paths without the scheme, and some without the host: what precedes them in the URL
    start = location.rstrip("/").removesuffix(pattern) if location.rstrip("/").endswith(pattern) else ""
    for path in kept:
        found_at = f"{start}{path}" if start else files.unstrip_protocol(path)
        yield _shown(found_at.replace("?", "%3F").replace("#", "%23")), found_at


@functools.cache
def _protocol_problem(scheme: str) -> str:
    """Why no file of a protocol can be read, and what to do; "" if they can."""
    from fsspec.registry import get_filesystem_class

    if scheme in ("file", "local"):
        return f"write the path without {scheme}://"
    try:
        get_filesystem_class(scheme)
    except ValueError:
        return f"the protocol {scheme}:// is unknown: use {' '.join(f'{name}://' for name in _INSTALL)}"
    except ImportError as problem:
        how = _INSTALL.get(scheme) or one_line(str(problem) or f"install fsspec's package for {scheme}")
        return f"the protocol {scheme}:// needs a package that is not installed: {how}"
    return ""


def _expand(text: str, where: str) -> Iterable[str]:
    """Return every text that the braces of a text stand for, in order: {08..11} is 08 09 10 11."""
    parts = re.split(r"\{([^{}]*)\}", text)
    if any(letter in part for part in parts[::2] for letter in "{}"):
        raise DataError(f"{where}: braces are nested or not closed: write {{000..127}} or {{a,b}}")
    choices = [[part] if n % 2 == 0 else _choices(part, where) for n, part in enumerate(parts)]
    if math.prod(map(len, choices)) > MOST_SHARDS:
        raise DataError(
            f"{where}: braces name more than {MOST_SHARDS:,} files: write several lines or sources"
        )
    return map("".join, itertools.product(*choices))


def _choices(inside: str, where: str) -> Sequence[str]:
    bounds = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", inside)
    if bounds and int(bounds[1]) <= int(bounds[2]):
        padded = any(len(end) > 1 and end.startswith("0") for end in bounds.groups())
        width = max(map(len, bounds.groups())) if padded else 0
        numbers = range(int(bounds[1]), int(bounds[2]) + 1)
        return [f"{n:0{width}}" for n in numbers[: MOST_SHARDS + 1]]
    if "," in inside:
        return inside.split(",")
    raise DataError(f"{where}: {{{inside}}} is no range such as {{000..127}} and no list such as {{a,b}}")
