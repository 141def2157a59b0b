"""Sizes, versions and bytes of local and remote files, by requests that are repeated while they fail."""

import asyncio
import contextlib
import errno
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from meshwright.train.data.sources import fingerprint_file
from meshwright.train.data.stream.shards import is_local, redact, split_url
from meshwright.train.errors import DataError

T = TypeVar("T")
REQUEST_BYTES = 8 * 2**20
LONGEST_PAUSE_S, STALL_S = 30.0, 60.0
# what file systems tell of the content of a file, the most exact first
_VERSIONS = ("blob_id", "md5Hash", "ETag", "etag", "Content-MD5", "Last-Modified", "LastModified", "mtime")
_AGAIN = "then start the same command again, which resumes"
_ACCESS = f"check its credentials (signed URLs expire), {_AGAIN}"
_MISSING = f"check the name, and restore the file if it was deleted, {_AGAIN}"
_CHANGED = "restore the file, or start a new run (another run.dir and data.cache_dir)"
_OTHER_WAY = "use another server, or download the files and prepare them (python -m tools.prepare_data)"
_ADVICE = {401: _ACCESS, 403: _ACCESS, 404: _MISSING, 410: _MISSING, 416: _CHANGED}
_MAY_PASS = {408, 421, 425, 429}  # and 500 and above
_REFUSES = "the server ignores the range of a request and sends the whole file"
_HOPELESS = {errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS, errno.EISDIR, errno.ELOOP}
# neither the network's nor the server's: bugs, certificates, addresses that are not valid
_FINAL = (ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError)


class RequestFault(Exception):
    """A request that failed: the reason, without secrets, and what a person must do, or "" if it may pass."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


class Remote:
    """Reads files, from any number of threads.

    A request that fails in a way that may pass is repeated, after `pause_s`, then twice as long each time, up
    to 30 s, until `limit_s` seconds after its first start. One request, of at most 8 MiB, may take `stall_s`,
    by default STALL_S, or `limit_s` if that is less.
    DataErrors name files by the `name` given, never by their location, which may hold secrets.
    """

    def __init__(self, limit_s: float, stall_s: float = 0.0, pause_s: float = 0.5) -> None:
        self.fetched_bytes = 0
        self.retries = 0
        self._limit_s, self._stall_s, self._pause_s = limit_s, stall_s or min(STALL_S, limit_s), pause_s
        self._systems = dict[str, Any]()
        self._failing = dict[int, tuple[float, str, str, int]]()  # thread -> since, name, reason, attempts
        self._lock = threading.Lock()
        self._random = random.Random()  # not the generator of the run

    def stat(self, name: str, location: str, fresh: bool = False) -> tuple[int, str]:
        """Return a file's size in bytes and its version: checksum, ETag or time of its change; "" if unknown.

        `fresh`: ask again if the listing of a folder has told it before. Raises DataError.
        """
        return self._insist(name, location, partial(self._stat, location, fresh))

    def read(self, name: str, location: str, first: int, last: int) -> bytes:
        """Return the bytes of a file from `first` up to, without, `last`. Raises DataError."""
        parts = list[bytes]()
        while first < last:
            request = partial(self._read, location, first, min(first + REQUEST_BYTES, last), last)
            parts.append(self._insist(name, location, request))
            first += len(parts[-1])
            with self._lock:
                self.fetched_bytes += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check(self, name: str, location: str, size: int, version: str) -> None:
        """Raise DataError unless a file still has this size and version, by one request."""
        new_size, new_version = self.stat(name, location, fresh=True)
        if new_size != size or (version and new_version and new_version != version):
            now = f"{new_size:,} bytes" if new_size != size else "another ETag, checksum or date"
            raise DataError(f"{name} has changed: it had {size:,} bytes, and now has {now}: {_CHANGED}")

    def waiting(self) -> str:
        """Return the request that has failed for longest, as one clause, or "" if none is failing."""
        with self._lock:
            since, name, reason, attempts = min(self._failing.values(), default=(0.0, "", "", 0))
        for_s = time.monotonic() - since
        return name and f"{name} has failed for {for_s:.0f} s ({reason}), attempt {attempts + 1}"

    def _insist(self, name: str, location: str, request: Callable[[Any], T]) -> T:
        """Return the result of a request to a file system, repeated while it fails in a way that may pass."""
        since, pause_s, attempts = time.monotonic(), self._pause_s, 0
        try:
            while True:
                try:
                    return request(self._system_of(location))
                except Exception as error:  # each file system has its own
                    fault = explain(error, location, self._stall_s)
                attempts += 1
                for_s = time.monotonic() - since
                if fault.advice or for_s >= self._limit_s:
                    tried = f", tried {attempts} times in {for_s:.0f} s" if attempts > 1 else ""
                    advice = fault.advice or f"see that it can be reached, {_AGAIN}"
                    raise DataError(f"{name} cannot be read ({fault.reason}{tried}): {advice}")
                with self._lock:
                    self.retries += 1
                    self._failing[threading.get_ident()] = (since, name, fault.reason, attempts)
                time.sleep(min(pause_s * self._random.uniform(0.5, 1), self._limit_s - for_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            with self._lock:
                self._failing.pop(threading.get_ident(), None)

    def _system_of(self, location: str) -> Any:
        """The file system of a location. All web servers share one; others may log in to a host."""
        import fsspec

        scheme, user, rest, _ = split_url(location) if "://" in location else ("file", "", "", "")
        key = "https" if scheme in ("http", "https") else f"{scheme}://{user}{rest.partition('/')[0]}"
        with self._lock:
            if key == "https" and key not in self._systems:
                self._systems[key] = WebServers(self._stall_s)
            elif key not in self._systems:
                self._systems[key], _ = fsspec.core.url_to_fs(location, skip_instance_cache=True)
            return self._systems[key]

    def _call(self, system: Any, method: str, location: str, **options: Any) -> Any:
        if system.async_impl:  # others have time limits of their own
            options["timeout"] = self._stall_s
        return getattr(system, method)(location, **options)

    def _stat(self, location: str, fresh: bool, system: Any) -> tuple[int, str]:
        # Hugging Face's answers from the listing of a folder, one request for all its files
        options = {"refresh": True, "expand_info": True} if fresh and location.startswith("hf://") else {}
        info = self._call(system, "info", location, **options)
        if info["type"] != "file" or info["size"] is None:
            raise RequestFault("it is no file of a known size", _OTHER_WAY)
        if is_local(location):  # nodes may have copies with other times
            return int(info["size"]), fingerprint_file(Path(location))
        return int(info["size"]), next((str(info[key]) for key in _VERSIONS if info.get(key)), "")

    def _read(self, location: str, first: int, last: int, end: int, system: Any) -> bytes:
        """The bytes of a file from `first` to `last`, or all of it to `end` if the server sends only that."""
        options: dict[str, Any] = {"whole": end} if isinstance(system, WebServers) else {}
        if location.startswith("hf://"):
            options["cache_type"] = "none"  # it reads ahead otherwise
        data = self._call(system, "cat_file", location, start=first, end=last, **options)
        if len(data) == last - first or (first == 0 and len(data) == end):
            return data
        if len(data) > last - first:
            raise RequestFault(_REFUSES, _OTHER_WAY)
        size_bytes, _ = self._stat(location, True, system)
        if size_bytes < last:
            raise RequestFault(f"it has {size_bytes:,} bytes, and was longer before", _CHANGED)
        raise RequestFault(f"{len(data):,} of {last - first:,} bytes came")


class WebServers:
    """What `Remote` uses of a file system, for HTTP: fsspec's own takes every failure for a missing file, and
    a whole file for a range of it. Headers and logins are of fsspec's conf files, proxies and .netrc of the
    environment."""

    async_impl = True

    def __init__(self, stall_s: float) -> None:
        import aiohttp
        import fsspec

        given = fsspec.config.apply_config(fsspec.get_filesystem_class("https"), {}).get("client_kwargs", {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s)
        client = {"trust_env": True, "timeout": timeout, **given, "auto_decompress": False}
        client["headers"] = {**given.get("headers", {}), "Accept-Encoding": "identity"}
        self._http = fsspec.filesystem("https", skip_instance_cache=True, encoded=True, client_kwargs=client)
        self._sync = partial(fsspec.asyn.sync, self._http.loop)
        self._invalid = aiohttp.ClientResponseError

    def info(self, location: str, timeout: float) -> dict[str, Any]:
        return self._sync(self._info, location, timeout=timeout)

    def cat_file(self, location: str, start: int, end: int, whole: int, timeout: float) -> bytes:
        return self._sync(self._cat_file, location, start, end, whole, timeout=timeout)

    async def _info(self, location: str) -> dict[str, Any]:
        # not by HEAD, which some servers refuse, as do signed URLs for GET
        async with self._ask(location, 0, 1) as answer:
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            if answer.status == 200:
                total = answer.headers.get("Content-Length", "")
            elif answer.status != 206 and not (answer.status == 416 and total == "0"):
                raise _fault(answer.status)
            if answer.status == 206:
                await answer.content.read(1)  # so that the connection is used again
            told = {key: answer.headers[key] for key in _VERSIONS if key in answer.headers}
            return {**told, "type": "file", "size": int(total) if total.isdigit() else None}

    async def _cat_file(self, location: str, start: int, end: int, whole: int) -> bytes:
        async with self._ask(location, start, end) as answer:
            if answer.status == 200 and start == 0 and answer.content_length == whole:
                end = whole
            elif answer.status == 200:
                raise RequestFault(_REFUSES, _OTHER_WAY)
            elif answer.status != 206:
                raise _fault(answer.status)
            elif not answer.headers.get("Content-Range", f"bytes {start}-").startswith(f"bytes {start}-"):
                raise RequestFault("the server sends another range than the one asked for", _OTHER_WAY)
            try:
                return await answer.content.readexactly(end - start)
            except asyncio.IncompleteReadError as short:
                return short.partial

    @contextlib.asynccontextmanager
    async def _ask(self, location: str, start: int, end: int) -> AsyncIterator[Any]:
        options = self._http.kwargs
        headers = {**options.get("headers", {}), "Range": f"bytes={start}-{end - 1}"}
        # a signed query is sent as it is
        url = self._http.encode_url(quote(location, safe="%/:?#[]@!$&'()*+,;=~"))
        session = await self._http.set_session()
        try:
            async with session.get(url, **{**options, "headers": headers}) as answer:
                yield answer
        except self._invalid as problem:  # its text contains headers
            raise RequestFault(f"its answer is not valid HTTP ({type(problem).__name__})") from None


def explain(error: Exception, location: str, stall_s: float) -> RequestFault:
    """Return what an exception of a request means: its reason without secrets, and whether it may pass."""
    if isinstance(error, RequestFault):
        return error
    http = getattr(error, "response", None)
    told = ((error, "status"), (http, "status_code"), (error, "code"))
    status = next((getattr(holder, field) for holder, field in told if hasattr(holder, field)), 0)
    if isinstance(status, int) and status >= 300:
        return _fault(status)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return RequestFault("no such file", _MISSING)
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden:"):  # as gcsfs says it
        return RequestFault("no permission", _ACCESS)
    if isinstance(error, TimeoutError):
        return RequestFault(f"no complete answer within {stall_s:g} s")
    text = getattr(error, "strerror", None) or str(error)
    reason = ": ".join(filter(None, (type(error).__name__, redact(text, location))))
    final = isinstance(error, _FINAL) or getattr(error, "errno", None) in _HOPELESS or "Credentials" in reason
    return RequestFault(reason, f"check its name and credentials, {_AGAIN}" if final else "")


def _fault(status: int) -> RequestFault:
    may_pass = status in _MAY_PASS or status >= 500
    return RequestFault(f"HTTP {status}", "" if may_pass else _ADVICE.get(status, _OTHER_WAY))
