"""A background thread that runs submitted calls in order."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class BackgroundThread:
    """A thread that runs submitted calls one after another; the caller may stop waiting for any of them.
    Several `threads` begin them in order.

    They are daemon threads, unlike those of concurrent.futures: a hanging store or disk must not keep the
    process alive.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a call; the returned future receives its result or exception."""
        future: Future[Any] = Future()
        self._queue.put((function, future))
        return future

    def close(self, limit_s: float | None = None) -> None:
        """Wait at most `limit_s` seconds (None: any time) for the queued calls, apart from those whose future
        was cancelled, and the end of the thread."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(limit_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            function, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # the caller of submit() handles it
                future.set_exception(error)
