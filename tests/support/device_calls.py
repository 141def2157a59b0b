"""Records which thread uses which device, without CUDA, with torch.cuda's own Python code.

CUDA's current device is per thread, and 0 in a new thread. A thread that creates or enters a stream without
setting the device first creates a second context, of some 0.5 GiB, on another rank's GPU. The arguments that
torch.cuda passes to its C code are recorded.
"""

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class FakeStream:
    """A substitute for torch.cuda.Stream."""

    device: torch.device
    stream_id: int = 7
    device_type: int = 1  # CUDA in C++

    @property
    def device_index(self) -> int:
        return int(self.device.index)

    def record_event(self) -> None:
        """Return no event: copies complete immediately."""


class DeviceCalls:
    """Records until the test ends, by thread, the devices that it sets or uses, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_thread: dict[str, list[int]] = defaultdict(list)
        self._current = threading.local()
        fakes = {
            "set_device": self._set,
            "_get_device_index": self._index,
            "current_stream": self._stream,
            "Stream": self._stream,
            "_set_stream_by_id": lambda stream_id, device_index, device_type: self._set(device_index),
            "_exchange_device": self._exchange,
            "_maybe_exchange_device": self._exchange,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def _set(self, device: Any) -> None:
        self._current.index = (
            torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index
        )
        self.by_thread[threading.current_thread().name].append(self._current.index)

    def _index(self, device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
        return int(getattr(self._current, "index", 0) if device is None else torch.device(device).index)

    def _stream(self, device: Any = None) -> FakeStream:
        index = self._index(device)
        self.by_thread[threading.current_thread().name].append(index)
        return FakeStream(torch.device("cuda", index))

    def _exchange(self, index: int) -> int:
        before = self._index(None)
        if index >= 0:
            self._set(index)
        return before
