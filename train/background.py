"""A thread that does one thing after another in the background."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class BackgroundThread:
    """A thread that does one call after the other, so that whoever submits them can stop waiting for one.

    It is a daemon, unlike those of concurrent.futures: a store or disk that never answers must not keep a
    process alive.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Have a function called; its result or exception arrives in the future."""
        future: Future[Any] = Future()
        self._queue.put((function, future))
        return future

    def close(self, limit_s: float) -> None:
        """Wait for what was submitted, and for the thread, no longer than the limit."""
        self._queue.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            function, future = item
            try:
                future.set_result(function())
            except BaseException as error:  # the sender decides what it means
                future.set_exception(error)
