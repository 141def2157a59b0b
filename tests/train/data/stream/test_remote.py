"""train/data/stream/remote.py: bytes of local and remote files, through a server whose requests fail."""

import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from meshwright.train.data.stream import remote
from meshwright.train.data.stream.remote import Remote
from meshwright.train.errors import DataError
from tests.support.flaky_server import Fault, FlakyServer, Request

CONTENT = random.Random(0).randbytes(5_000)
SIGNED = "?sig=S3CR%2Fet&x=a+b%2B1"
SECRETS = ("S3CR", "pa55", "us3r", "a+b%2B", "0ther")


@pytest.fixture
def server(running: FlakyServer, served: Path, monkeypatch: pytest.MonkeyPatch) -> FlakyServer:
    """A server of `a 1.jsonl`, which is read in requests of at most 1,000 bytes, without faults so far."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(remote, "REQUEST_BYTES", 1_000)
    (served / "a 1.jsonl").write_bytes(CONTENT)
    running.requests.clear()
    running.fail()
    return running


def names_of(server: FlakyServer) -> tuple[str, str]:
    """Name and location of the file."""
    host = server.url.removeprefix("http://")
    return f"http://{host}/a 1.jsonl", f"http://us3r:pa55@{host}/a 1.jsonl{SIGNED}"


def patient() -> Remote:
    return Remote(limit_s=60, stall_s=20, pause_s=0.01)


def refused(request: Callable[[], object]) -> str:
    """The message of a request that fails: one line, without a secret, as is all that a traceback shows."""
    with pytest.raises(DataError) as caught:
        request()
    message = str(caught.value)
    assert "\n" not in message
    assert not [secret for secret in SECRETS if secret in message]
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return message


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


PASSING = {
    "500": Fault(status=500),
    "503": Fault(status=503),
    "429": Fault(status=429),
    "408": Fault(status=408),
    "closed": Fault(close=True),
    "truncated": Fault(truncate=7),
    "empty": Fault(truncate=0),
    "no HTTP": Fault(raw=b"HTTP/1.1 200 OK\r\nS3CR\r\n\r\n"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_failure_that_passes_is_repeated_until_the_bytes_are_there(
    server: FlakyServer, fault: Fault
) -> None:
    # aiohttp itself repeats a request once after a closed connection
    server.fail(*[fault] * 4)
    reader = patient()
    assert reader.read(*names_of(server), 10, 30) == CONTENT[10:30]
    assert reader.retries in ((2, 4) if fault.close else (4,))
    assert reader.fetched_bytes == 20
    assert reader.waiting() == ""


@pytest.mark.parametrize(
    "fault",
    [Fault(stall_s=60), Fault(stall_s=60, truncate=7), Fault(drip_s=0.05)],
    ids=["before the answer", "within the body", "slow body"],
)
def test_a_request_that_takes_too_long_is_given_up_and_repeated(server: FlakyServer, fault: Fault) -> None:
    server.fail(fault)
    reader = Remote(limit_s=60, stall_s=0.3, pause_s=0.01)
    assert reader.read(*names_of(server), 10, 30) == CONTENT[10:30]
    assert reader.retries >= 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 416])
def test_a_failure_that_stays_ends_the_read_at_once(server: FlakyServer, status: int) -> None:
    server.fail(*[Fault(status=status)] * 9)
    name, location = names_of(server)
    reader = patient()
    for request in (lambda: reader.read(name, location, 0, 9), lambda: reader.stat(name, location)):
        message = refused(request)
        assert f"HTTP {status}" in message
        assert message.startswith(name)
    assert server.count() == 2


STAYING = PASSING | {"no byte": Fault(stall_s=60), "no more bytes": Fault(stall_s=60, truncate=7)}


@pytest.mark.parametrize("fault", STAYING.values(), ids=STAYING)
def test_after_the_limit_one_line_says_what_failed_without_secrets(server: FlakyServer, fault: Fault) -> None:
    server.fault_of = lambda request: fault
    reader = Remote(limit_s=0.1, stall_s=0.06 if fault.stall_s else 20, pause_s=0.01)
    message = refused(lambda: reader.read(*names_of(server), 0, 9))
    assert message.startswith(names_of(server)[0])
    assert (f"tried {reader.retries + 1} times" in message) == (reader.retries > 0)
    assert reader.fetched_bytes == 0
    assert reader.waiting() == ""


def test_a_server_that_does_not_listen_yet_is_waited_for(served: Path, server: FlakyServer) -> None:
    with socket.socket() as port:  # bound, and does not listen
        port.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{port.getsockname()[1]}"
        reader = Remote(limit_s=0.5, pause_s=0.2)
        with ThreadPoolExecutor(1) as pool:
            size = pool.submit(reader.stat, "NAME", f"http://us3r:pa55@{host}/a{SIGNED}")
            wait_until(lambda: reader.waiting() or size.done())
            told = reader.waiting()
            assert refused(size.result).startswith("NAME ")
        assert not [secret for secret in SECRETS if secret in told]


def test_an_address_that_is_not_valid_is_refused_at_once(server: FlakyServer) -> None:
    reader = patient()
    refused(lambda: reader.stat("NAME", f"http://us3r:pa55@127.0.0.1:x/a{SIGNED}"))
    assert reader.retries == 0


def test_requests_of_a_large_read_that_succeeded_are_not_repeated(server: FlakyServer) -> None:
    server.fail(None, None, Fault(status=503), Fault(truncate=7), None)
    reader = patient()
    assert reader.read(*names_of(server), 100, 3_300) == CONTENT[100:3_300]
    ranges = [request.headers["range"] for request in server.requests]
    assert ranges == [
        "bytes=100-1099",
        "bytes=1100-2099",
        *["bytes=2100-3099"] * 3,
        "bytes=3100-3299",
    ]
    assert reader.read(*names_of(server), 5, 5) == b""
    assert server.count() == len(ranges)


def test_a_server_without_ranges_can_send_whole_files_only(server: FlakyServer) -> None:
    server.fault_of = lambda request: Fault(ignore_range=True)
    assert patient().read(*names_of(server), 0, 5_000) == CONTENT
    assert server.count() == 1
    for first, last in ((0, 10), (10, 5_000)):
        message = refused(lambda first=first, last=last: patient().read(*names_of(server), first, last))
        assert "range" in message
    assert server.count() == 3
    assert patient().stat(*names_of(server))[0] == 5_000


def test_another_range_than_asked_for_is_refused(server: FlakyServer) -> None:
    head = b"HTTP/1.1 206 Partial\r\nContent-Length: 9\r\nContent-Range: bytes 0-8/5000\r\n\r\n"
    server.fail(Fault(raw=head + CONTENT[:9]))
    assert "range" in refused(lambda: patient().read(*names_of(server), 10, 19))


def test_the_proxy_of_the_environment_is_used(server: FlakyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    assert patient().read("NAME", "http://host.invalid/a 1.jsonl", 0, 9) == CONTENT[:9]
    assert server.requests[0].path == "http://host.invalid/a%201.jsonl"


def test_size_and_version_take_one_request_that_is_not_head(server: FlakyServer) -> None:
    (size, version), other = (patient().stat(*names_of(server)) for _ in range(2))
    assert size == 5_000
    assert version
    assert (size, version) == other
    assert [request.method for request in server.requests] == ["GET", "GET"]
    server.fail(Fault(no_length=True), Fault(no_length=True, ignore_range=True))
    for _ in range(2):
        assert "size" in refused(lambda: patient().stat(*names_of(server)))


def test_an_empty_file_has_size_0(server: FlakyServer, served: Path) -> None:
    (served / "empty.txt").touch()
    assert patient().stat("NAME", f"{server.url}/empty.txt")[0] == 0


def test_a_file_that_changed_is_noticed_by_one_request(server: FlakyServer, served: Path) -> None:
    reader = patient()
    before = reader.stat(*names_of(server))
    reader.check(*names_of(server), *before)
    (served / "a 1.jsonl").write_bytes(CONTENT[:-1] + b"?")
    assert "changed" in refused(lambda: reader.check(*names_of(server), *before))
    (served / "a 1.jsonl").write_bytes(CONTENT[:-1])
    assert "4,999" in refused(lambda: reader.check(*names_of(server), *before))
    assert server.count() == 4
    assert "4,999" in refused(lambda: reader.read(*names_of(server), 4_900, 5_000))
    refused(lambda: reader.read(*names_of(server), 5_000, 5_010))
    assert reader.retries == 0


def test_a_redirect_is_followed_and_its_url_is_not_shown(server: FlakyServer) -> None:
    server.fail(Fault(redirect=f"{server.url}/a%201.jsonl{SIGNED}"))
    assert patient().read(*names_of(server), 0, 9) == CONTENT[:9]
    server.fail(Fault(redirect=f"{server.url}/none?sig=S3CR"))
    assert "HTTP 404" in refused(lambda: patient().read(*names_of(server), 0, 9))
    server.fault_of = lambda request: Fault(redirect=f"{server.url}/a%201.jsonl{SIGNED}")
    refused(lambda: Remote(limit_s=0).read(*names_of(server), 0, 9))


def test_a_query_is_sent_as_it_is_with_the_headers_of_the_users_configuration(
    server: FlakyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = {"https": {"client_kwargs": {"headers": {"X-Own": "S3CR"}}, "headers": {"X-Each": "S3CR"}}}
    monkeypatch.setattr(fsspec.config, "conf", conf)
    monkeypatch.setattr(fsspec.config.apply_config, "__defaults__", (conf,))
    patient().read(*names_of(server), 0, 9)
    (request,) = server.requests
    assert request.path == f"/a%201.jsonl{SIGNED}"
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["x-own"] == request.headers["x-each"] == "S3CR"
    assert request.headers["authorization"].startswith("Basic ")


def test_many_threads_read_at_once_while_requests_fail(server: FlakyServer) -> None:
    faults = {0: Fault(status=503), 3: Fault(truncate=3)}
    server.fault_of = lambda request: faults.get(request.number % 7)
    reader = patient()

    def read(first: int) -> bool:
        return reader.read(*names_of(server), first, first + 2_500) == CONTENT[first : first + 2_500]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(0, 2_500, 100)))
    assert reader.fetched_bytes == 25 * 2_500
    failed = sum(bool(faults.get(request.number % 7)) for request in server.requests)
    assert reader.retries == failed
    assert server.count() == 75 + failed


def test_what_is_failing_is_told_while_it_fails(server: FlakyServer) -> None:
    works = threading.Event()
    server.fault_of = lambda request: None if works.is_set() else Fault(status=503)
    reader = patient()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read, *names_of(server), 0, 9)
        wait_until(lambda: "attempt 3" in reader.waiting())
        told = reader.waiting()
        works.set()
        assert reading.result() == CONTENT[:9]
    assert told.startswith(f"{names_of(server)[0]} has failed for ")
    assert "HTTP 503" in told
    assert not [secret for secret in SECRETS if secret in told]
    assert reader.waiting() == ""


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_local_files_and_other_file_systems_are_read_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setattr(remote, "REQUEST_BYTES", 1_000)
    files = fsspec.filesystem("file" if kind == "local" else "memory")
    start = str(tmp_path) if kind == "local" else "memory://bucket"
    files.pipe(f"{start}/a.jsonl", CONTENT)
    reader, location = patient(), f"{start}/a.jsonl"
    size, version = reader.stat("NAME", location)
    assert size == 5_000
    assert bool(version) == (kind == "local"), "the time of the last change"
    reader.check("NAME", location, size, version)
    assert reader.read("NAME", location, 10, 4_000) == CONTENT[10:4_000]
    files.pipe(location, CONTENT[:-1])
    for request in (
        lambda: reader.check("NAME", location, size, version),
        lambda: reader.read("NAME", location, 4_900, 5_000),
        lambda: reader.stat("NAME", start),
        lambda: reader.stat("NAME", f"{start}/none.jsonl"),
        lambda: reader.read("NAME", f"{start}/none.jsonl", 0, 1),
    ):
        assert refused(request).startswith("NAME ")
    assert reader.retries == 0


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(5, "us3r cannot read memory://us3r:pa55@b/a?sig=S3CR%2Fet"), True),
        (EOFError("S3CR%2Fet"), True),
        (type("OtherLibraryError", (Exception,), {})("a+b%2B1 at http://0ther@h/a?x=0ther"), True),
        (type("WithResponse", (Exception,), {"response": SimpleNamespace(status_code=503)})("pa55"), True),
        (type("WithCode", (Exception,), {"code": 403})("pa55"), False),
        (PermissionError("us3r:pa55"), False),
        (OSError("Forbidden: b/a"), False),
        (ValueError("no such option: pa55"), False),
        (KeyError("pa55"), False),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_any_file_system_become_one_line_without_secrets(
    monkeypatch: pytest.MonkeyPatch, error: Exception, passes: bool
) -> None:
    told = list[str]()

    def fail(*_: object, **__: object) -> bytes:
        told.append(reader.waiting())
        if passes and len(told) == 3:
            return CONTENT[:9]
        raise error

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    reader = patient()
    read = partial(reader.read, "NAME", f"memory://us3r:pa55@b/a{SIGNED}", 0, 9)
    if passes:
        assert read() == CONTENT[:9]
        assert "NAME has failed" in told[-1]
        assert not [secret for secret in SECRETS if secret in told[-1]]
    else:
        refused(read)
        assert len(told) == 1


def test_the_server_of_these_tests_counts_requests_by_file_and_method(server: FlakyServer) -> None:
    patient().read(*names_of(server), 0, 2_000)
    refused(lambda: patient().stat("NAME", f"{server.url}/none"))
    assert (server.count("a 1.jsonl"), server.count("none"), server.count(method="HEAD")) == (2, 1, 0)
    assert isinstance(server.requests[0], Request)
