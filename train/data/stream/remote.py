"""Sizes, versions and bytes of local and remote files, by requests that are repeated while they fail."""

import asyncio
import contextlib
import errno
import os
import random
import ssl
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from meshwright.train.data.sources import fingerprint_file
from meshwright.train.data.stream.shards import redact, split_url
from meshwright.train.errors import DataError

T = TypeVar("T")
REQUEST_BYTES = 8 * 2**20
LONGEST_PAUSE_S = 30.0
# what a file system tells of a file's content, the most exact first
_VERSIONS = (
    "blob_id",
    "md5Hash",
    "ETag",
    "etag",
    "LastModified",
    "last_modified",
    "mtime",
    "modified",
    "created",
)
_HTTP_VERSIONS = ("ETag", "Content-MD5", "Last-Modified")
_AGAIN = "then start the same command again, which resumes"
_ACCESS = f"check its credentials (signed URLs expire), {_AGAIN}"
_MISSING = f"check the name, and restore the file if it was deleted, {_AGAIN}"
_CHANGED = "restore the file, or start a new run (another run.dir) with the new one"
_OTHER_WAY = "use another server, or download the files and prepare them (python -m tools.prepare_data)"
_REFUSES = "the server ignores the range of a request and sends the whole file"
_BUSY = {408, 421, 425, 429}  # statuses below 500 that may pass
_HOPELESS = {errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS, errno.EISDIR, errno.ELOOP}
# libraries whose exceptions, if not of Python's classes, are failures of the network
_LIBRARIES = {"aiohttp", "aiobotocore", "botocore", "gcsfs", "google", "httpx", "httpcore", "huggingface_hub"}


class RequestFault(Exception):
    """A request that failed: the reason, without secrets, and what a person must do, or "" if it may pass."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


class Files(Protocol):
    """The files of one file system."""

    def stat(self, location: str, fresh: bool) -> tuple[int, str]:
        """Return size in bytes and version, "" if unknown. `fresh`: not from a listing made before."""
        ...

    def read(self, location: str, first: int, last: int, end: int) -> bytes:
        """Return bytes first to last, without last; those to `end`, if only the whole file can be had."""
        ...


@dataclass(frozen=True)
class _Failing:
    """A request that has failed, and is to be repeated."""

    name: str
    since: float  # time.monotonic()
    reason: str
    attempts: int


class Remote:
    """Reads files, from any number of threads.

    A request that fails in a way that may pass is repeated, after 0.5 s, then twice as long each time, up to
    30 s, until `limit_s` seconds after its first start. One request, of at most 8 MiB, may take `stall_s`.
    DataErrors name files by the `name` given, never by their location, which may hold secrets.
    """

    def __init__(self, limit_s: float, stall_s: float = 60.0, pause_s: float = 0.5) -> None:
        self.fetched_bytes = 0
        self.retries = 0
        self._limit_s, self._stall_s, self._pause_s = limit_s, stall_s, pause_s
        self._files = dict[str, Files]()
        self._failing = dict[int, _Failing]()  # by thread
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._random = random.Random()  # not the generator of the run

    def stat(self, name: str, location: str, fresh: bool = False) -> tuple[int, str]:
        """Return a file's size in bytes and its version: checksum, ETag or time of its change; "" if unknown.

        `fresh`: ask again if a listing made before has the answer. Raises DataError.
        """
        return self._insist(name, location, lambda files: files.stat(location, fresh))

    def read(self, name: str, location: str, first: int, last: int) -> bytes:
        """Return the bytes of a file from `first` up to, without, `last`. Raises DataError."""
        parts = list[bytes]()
        while first < last:
            upto = min(first + REQUEST_BYTES, last)
            request = _range(location, first, upto, last)
            parts.append(self._insist(name, location, request))
            first += len(parts[-1])
            with self._lock:
                self.fetched_bytes += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check(self, name: str, location: str, size: int, version: str) -> None:
        """Raise DataError unless a file still has this size and version, by one request."""
        new_size, new_version = self.stat(name, location, fresh=True)
        if new_size != size or (version and new_version and new_version != version):
            what = f"{new_size:,} bytes" if new_size != size else "another content or date"
            raise DataError(f"{name} has changed: it had {size:,} bytes, and now has {what}: {_CHANGED}")

    def waiting(self) -> str:
        """Return the request that has failed for longest, as one clause, or "" if none is failing."""
        with self._lock:
            failing = min(self._failing.values(), key=lambda each: each.since, default=None)
        if failing is None:
            return ""
        for_s = time.monotonic() - failing.since
        return (
            f"{failing.name} has failed for {for_s:.0f} s ({failing.reason}), attempt {failing.attempts + 1}"
        )

    def close(self) -> None:
        """End the pauses of all threads: what they are reading then raises DataError at its next failure."""
        self._closed.set()

    def _insist(self, name: str, location: str, request: Callable[[Files], T]) -> T:
        """Return the result of a request, which is repeated while it fails in a way that may pass."""
        since, pause_s, attempts = time.monotonic(), self._pause_s, 0
        try:
            while True:
                try:
                    return request(self._files_of(location))
                except Exception as error:  # each file system has its own
                    fault = explain(error, location, self._stall_s)
                attempts += 1
                for_s = time.monotonic() - since
                if fault.advice or for_s >= self._limit_s or self._closed.is_set():
                    tried = f", tried {attempts} times in {for_s:.0f} s" if attempts > 1 else ""
                    advice = fault.advice or f"see that its server can be reached, {_AGAIN}"
                    raise DataError(f"{name} cannot be read ({fault.reason}{tried}): {advice}")
                with self._lock:
                    self.retries += 1
                    self._failing[threading.get_ident()] = _Failing(name, since, fault.reason, attempts)
                self._closed.wait(min(pause_s * self._random.uniform(0.5, 1), self._limit_s - for_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            with self._lock:
                self._failing.pop(threading.get_ident(), None)

    def _files_of(self, location: str) -> Files:
        scheme, user, rest, _ = split_url(location) if "://" in location else ("", "", "", "")
        # a file system may log in to a host; all HTTP servers share one session
        key = scheme if scheme in ("", "http", "https") else f"{scheme}://{user}{rest.partition('/')[0]}"
        with self._lock:
            if key not in self._files:
                self._files[key] = (
                    LocalFiles()
                    if not scheme
                    else HttpFiles(self._stall_s)
                    if key == scheme
                    else StoreFiles(location, self._stall_s)
                )
            return self._files[key]


class LocalFiles:
    """Files of this machine."""

    def stat(self, location: str, fresh: bool) -> tuple[int, str]:
        found = os.stat(location)
        if not stat.S_ISREG(found.st_mode):
            raise RequestFault("it is not a file", _MISSING)
        return found.st_size, fingerprint_file(Path(location))  # nodes may have copies with other times

    def read(self, location: str, first: int, last: int, end: int) -> bytes:
        with open(location, "rb") as file:
            file.seek(first)
            return file.read(last - first)


class HttpFiles:
    """Files of HTTP servers, by the session of one fsspec file system, which has the headers and logins of
    fsspec's conf files. The proxies and .netrc of the environment are used too."""

    def __init__(self, stall_s: float) -> None:
        import aiohttp
        import fsspec

        given = fsspec.config.apply_config(fsspec.get_filesystem_class("https"), {}).get("client_kwargs", {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s)
        client = {"trust_env": True, "timeout": timeout, **given, "auto_decompress": False}
        client["headers"] = {**given.get("headers", {}), "Accept-Encoding": "identity"}
        self._fs = fsspec.filesystem("https", skip_instance_cache=True, encoded=True, client_kwargs=client)
        self._stall_s = stall_s

    def stat(self, location: str, fresh: bool) -> tuple[int, str]:
        return self._sync(self._stat, location)

    def read(self, location: str, first: int, last: int, end: int) -> bytes:
        return self._sync(self._read, location, first, last, end)

    def _sync(self, ask: Any, *arguments: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self._fs.loop, ask, *arguments, timeout=self._stall_s)

    async def _stat(self, location: str) -> tuple[int, str]:
        """By a request of the first byte: HEAD is refused by some servers, and by signed URLs for GET."""
        async with self._ask(location, 0, 1) as answer:
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            if answer.status == 200:
                total = answer.headers.get("Content-Length", "")
            elif answer.status != 206 and not (answer.status == 416 and total == "0"):
                raise _fault_of(answer.status)
            if not total.isdigit():
                raise RequestFault("the server does not tell its size", _OTHER_WAY)
            if answer.status == 206:
                await answer.content.read(1)  # so that the connection is used again
            version = next(filter(None, map(answer.headers.get, _HTTP_VERSIONS)), "")
            return int(total), version.removeprefix("W/")

    async def _read(self, location: str, first: int, last: int, end: int) -> bytes:
        async with self._ask(location, first, last) as answer:
            if answer.status == 200 and first == 0 and answer.content_length == end:
                last = end
            elif answer.status == 200:
                raise RequestFault(_REFUSES, _OTHER_WAY)
            elif answer.status != 206:
                raise _fault_of(answer.status)
            elif not answer.headers.get("Content-Range", f"bytes {first}-").startswith(f"bytes {first}-"):
                raise RequestFault("the server sends another range than the one asked for", _OTHER_WAY)
            try:
                return await answer.content.readexactly(last - first)
            except asyncio.IncompleteReadError as short:
                return short.partial

    @contextlib.asynccontextmanager
    async def _ask(self, location: str, first: int, last: int) -> AsyncIterator[Any]:
        session = await self._fs.set_session()
        options = dict(self._fs.kwargs)
        options["headers"] = {**options.get("headers", {}), "Range": f"bytes={first}-{last - 1}"}
        # encoded as it stands: a signed query must not change
        url = self._fs.encode_url(quote(location, safe="%/:?#[]@!$&'()*+,;=~"))
        async with session.get(url, **options) as answer:
            yield answer


class StoreFiles:
    """Files of any other file system of fsspec: s3, gs, hf ..."""

    def __init__(self, location: str, stall_s: float) -> None:
        import fsspec

        self._fs, _ = fsspec.core.url_to_fs(location, skip_instance_cache=True)
        self._stall_s = stall_s

    def stat(self, location: str, fresh: bool) -> tuple[int, str]:
        # Hugging Face's answers from the listing of a folder, with one request for all its files
        options = {"refresh": True, "expand_info": True} if fresh and location.startswith("hf://") else {}
        info = self._call("info", location, **options)
        if info["type"] != "file" or info["size"] is None:
            raise RequestFault("it is not a file of known size", _MISSING)
        return int(info["size"]), next((str(info[key]) for key in _VERSIONS if info.get(key)), "")

    def read(self, location: str, first: int, last: int, end: int) -> bytes:
        options = {"cache_type": "none"} if location.startswith("hf://") else {}  # reads ahead otherwise
        return self._call("cat_file", location, start=first, end=last, **options)

    def _call(self, method: str, location: str, **options: Any) -> Any:
        from fsspec.asyn import sync

        path = self._fs._strip_protocol(location)
        if not self._fs.async_impl:  # it has time limits of its own
            return getattr(self._fs, method)(path, **options)
        return sync(self._fs.loop, getattr(self._fs, f"_{method}"), path, timeout=self._stall_s, **options)


def explain(error: Exception, location: str, stall_s: float) -> RequestFault:
    """Return what an exception of a request means: its reason without secrets, and whether it may pass."""
    if isinstance(error, RequestFault):
        return error
    response = getattr(error, "response", None)
    statuses = (getattr(error, "status", 0), getattr(error, "code", 0), getattr(response, "status_code", 0))
    library = type(error).__module__.partition(".")[0]
    for status in statuses:
        if isinstance(status, int) and status >= 300:
            return _fault_of(status)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return RequestFault("no such file", _MISSING)
    if isinstance(error, PermissionError):
        return RequestFault("no permission", _ACCESS)
    if isinstance(error, TimeoutError):
        return RequestFault(f"no complete answer within {stall_s:g} s")
    # the texts of aiohttp contain URLs and headers
    text = getattr(error, "strerror", None) or ("" if library == "aiohttp" else str(error))
    reason = ": ".join(filter(None, (type(error).__name__, redact(text, location))))
    hopeless = isinstance(error, ValueError | TypeError | ssl.SSLCertVerificationError)
    if hopeless or "Credentials" in reason or getattr(error, "errno", None) in _HOPELESS:
        return RequestFault(reason, f"check the URL and its credentials, {_AGAIN}")
    if isinstance(error, OSError | EOFError) or library in _LIBRARIES:
        return RequestFault(reason)
    return RequestFault(reason, f"check the URL and its credentials, {_AGAIN}")


def _fault_of(status: int) -> RequestFault:
    if status in _BUSY or status >= 500:
        return RequestFault(f"HTTP {status}")
    advice = {401: _ACCESS, 403: _ACCESS, 404: _MISSING, 410: _MISSING, 416: _CHANGED}.get(status, _OTHER_WAY)
    return RequestFault(f"HTTP {status}", advice)


def _range(location: str, first: int, last: int, end: int) -> Callable[[Files], bytes]:
    """A request of bytes of a file, whose answer has exactly these, or all to `end`."""

    def request(files: Files) -> bytes:
        data = files.read(location, first, last, end)
        if len(data) == last - first or (first == 0 and len(data) == end):
            return data
        if len(data) > last - first:
            raise RequestFault(_REFUSES, _OTHER_WAY)
        size_bytes, _ = files.stat(location, fresh=True)
        if size_bytes < last:
            raise RequestFault(f"it has {size_bytes:,} bytes, and was longer before", _CHANGED)
        raise RequestFault(f"{len(data):,} of {last - first:,} bytes came")

    return request
