"""The shards of a streamed source: local files and URLs, each with a name that never contains a secret.

The name of a URL is what is shown, stored and hashed: without user, password, query and fragment. Its
location, which requests need, may contain these, and is neither shown nor stored. Imports nothing heavy.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from glob import has_magic
from pathlib import Path

from meshwright.parallel.errors import one_line
from meshwright.train.config import LIST_SUFFIX
from meshwright.train.data.sources import READ_SUFFIXES, find_files
from meshwright.train.errors import DataError
from meshwright.train.files import read_bounded, user_path

MOST_SHARDS = 1_000_000  # of one URL with braces
_LIST_BYTES = 2**28
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HOST = re.compile(r"(arn:.*|\[[^\]]*\]|[^:\[\]]+)(:\d*)?")  # a bucket may be an access point, arn:aws:...
_INSTALL = {"http": "-e '.[stream]'", "s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
_INSTALL |= {"https": _INSTALL["http"], "s3a": _INSTALL["s3"], "gcs": _INSTALL["gs"]}


def is_local(location: str) -> bool:
    """Whether the location of a shard is a path."""
    return _SCHEME.match(location) is None


def find_shards(source: str, key: str = "data.source") -> dict[str, str]:
    """Return the shards of a source in their order, name -> location: a path, or a URL that may hold secrets.

    A source is what `find_files` reads, with its names; a URL with {00..99} and {a,b}; a folder or glob
    (* and **) of a file system that can list, such as s3://, gs:// and hf://, sorted by name (of the folder
    of a Hugging Face dataset all .parquet files, of every split, or else all .jsonl); or a .urls file: one of
    these, or a path relative to it, a line. Raises DataError if a shard cannot be read by its suffix or
    protocol, if two have one name, and if there is none.
    """
    if not is_local(source):
        found = _find_urls(source, f"{key}=")
    elif source.endswith(LIST_SUFFIX):
        found = _find_listed(user_path(source, key), key)
    else:
        found = ((name, str(path)) for name, path in find_files(source, key))
    shards = dict[str, str]()
    for name, location in found:
        if name in shards:
            raise DataError(f"{key}={source} has {name} twice (queries are no part of a name): remove one")
        shards[name] = location
    if not shards:
        raise DataError(f"{key}={source} names no file: write one URL or path a line")
    return shards


def split_url(url: str) -> tuple[str, str, str, str]:
    """Return scheme, "USER@" or "", host and path, and "?QUERY" or "", of a URL, without its fragment."""
    scheme, _, rest = url.partition("#")[0].partition("://")
    rest, mark, query = rest.partition("?")
    host, slash, path = rest.partition("/")
    user, at, host = host.rpartition("@")
    return scheme.lower(), user + at, host + slash + path, mark + query


def redact(text: str, location: str) -> str:
    """Return a message on one line without the users, passwords, queries and fragments of the URLs in it, and
    without those of `location` wherever they are."""
    _, user, _, query = split_url(location)
    for secret in sorted(re.split("[?&=;:@]", user + query), key=len, reverse=True):
        text = text.replace(secret, "...") if len(secret) > 3 else text
    return one_line(re.sub(r"(?<=://)[^/\s@]*@|[?#][^\s'\"<>)]*", "", text), 300)


def _has_host(scheme: str, user: str, rest: str) -> bool:
    """Whether a URL has a valid host; without one, parts of a password may seem to be its path."""
    host = rest.partition("/")[0]
    return scheme == "file" or (_HOST.fullmatch(host) is not None and not (user and "@" in rest))


def _find_listed(file: Path, key: str) -> Iterator[tuple[str, str]]:
    """Names and locations of a .urls file. A local name is relative to its folder, if it is below it."""
    try:
        lines = read_bounded(file, _LIST_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise DataError(f"{key}={file} cannot be read as a list of URLs ({one_line(reason)})") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        where = f"{key}={file}, line {number}"
        if not is_local(line):
            yield from _find_urls(line, f"{where}: ")
        elif ":/" in line:
            raise DataError(f"{where} is no URL, which begins with SCHEME://; not shown: it may be secret")
        elif line.endswith(LIST_SUFFIX):
            raise DataError(f"{where}: {line} is a list in a list: write its lines in its place")
        elif line and not line.startswith("#"):
            for path in _expand(line, f"{where}: {line}"):
                for _, at in find_files(str(file.parent / Path(path).expanduser()), where):
                    name = at.relative_to(file.parent) if at.is_relative_to(file.parent) else at
                    yield name.as_posix(), str(at)


def _find_urls(url: str, where: str) -> Iterator[tuple[str, str]]:
    """Names and locations of a URL with braces. `where` starts messages."""
    from fsspec.registry import get_filesystem_class

    scheme, user, rest, query = split_url(url)
    shown = f"{where}{scheme}://{rest}"
    is_http = scheme in ("http", "https")
    if not _has_host(scheme, user, rest):
        raise DataError(f"{where}a {scheme} URL has no valid host: write / ? # in a password as %2F %3F %23")
    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as problem:
        package = _INSTALL.get(scheme)
        how = f"pip install {package}" if package else "use https://, s3://, gs:// or hf://"
        raise DataError(f"{shown} cannot be read ({one_line(problem)}): {how}") from None
    for each in _expand(rest, shown):
        name = f"{scheme}://{each}"
        if not is_http and (has_magic(each) or not each.endswith(READ_SUFFIXES)):
            yield from _list(name, f"{scheme}://{user}{each}".rstrip("/"), where)
        elif is_http and "*" in each:
            how = f"write {{000..127}} or {{a,b}}, or a file of URLs, whose name ends in {LIST_SUFFIX}"
            raise DataError(f"{where}{name}: a web server does not list its files: {how}")
        elif not each.endswith(READ_SUFFIXES):
            raise DataError(f"{where}{name}: its suffix is none of those read: {' '.join(READ_SUFFIXES)}")
        else:
            yield name, f"{scheme}://{user}{each}{query}"


def _list(name: str, location: str, where: str) -> Iterator[tuple[str, str]]:
    """Names and locations of the non-empty, readable and not hidden files of a folder or glob."""
    import fsspec

    try:
        files, pattern = fsspec.core.url_to_fs(location, skip_instance_cache=True)
        found = (files.glob if has_magic(pattern) else files.find)(pattern, detail=True)
    except Exception as problem:  # each file system has its own
        reason = f"{type(problem).__name__}: {redact(str(problem), location)}"
        raise DataError(f"{where}{name} cannot be listed ({reason}): check it, and its credentials") from None
    paths = [path for path, info in sorted(found.items()) if info["type"] == "file" and info["size"] != 0]
    kept = [p for p in paths if p.endswith(READ_SUFFIXES) and not p.rpartition("/")[2].startswith(".")]
    if name.startswith("hf://") and not has_magic(pattern):  # README.md, scripts, images ...
        kept = [p for p in kept if p.endswith(".parquet")] or [p for p in kept if ".jsonl" in p]
    if not kept:
        raise DataError(f"{where}{name}: none of {len(paths):,} non-empty files has a suffix that is read")
    # paths are without the scheme, and of some file systems without the host
    start = location[: -len(pattern)] if location.endswith(pattern) else name.partition("/")[0] + "//"
    for path in kept:
        scheme, _, rest, _ = split_url((start + path).replace("?", "%3F").replace("#", "%23"))
        yield f"{scheme}://{rest}", start + path


def _expand(text: str, shown: str) -> Iterator[str]:
    """Return every text that the braces of a text stand for, in order: {08..11} is 08 09 10 11."""
    parts = re.split(r"\{([^{}]*)\}", text)
    choices = [_choices(part) if n % 2 else [part] for n, part in enumerate(parts)]
    if not all(choices) or any(letter in part for part in parts[::2] for letter in "{}"):
        raise DataError(f"{shown}: its braces are neither ranges, as {{000..127}}, nor lists, as {{a,b}}")
    if math.prod(map(len, choices)) > MOST_SHARDS:
        raise DataError(f"{shown} stands for more than {MOST_SHARDS:,} files: write several sources or lines")
    return map("".join, itertools.product(*choices))


def _choices(inside: str) -> Sequence[str]:
    """What one pair of braces stands for; nothing if it is neither a range nor a list."""
    bounds = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", inside)
    if not bounds:
        return inside.split(",") if "," in inside else []
    padded = any(len(end) > 1 and end.startswith("0") for end in bounds.groups())
    width = max(map(len, bounds.groups())) if padded else 0
    numbers = range(int(bounds[1]), int(bounds[2]) + 1)
    too_many = [""] * (MOST_SHARDS + 1)
    return too_many if len(numbers) > MOST_SHARDS else [f"{n:0{width}}" for n in numbers]
