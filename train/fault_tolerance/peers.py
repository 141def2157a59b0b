"""Detection of dead peers without a collective: each rank holds open connections to a few others, and reports
to all ranks when one of them closes.

A collective of NCCL waits endlessly for a dead rank, and the main thread with it. A closed connection proves
that a process has ended; a peer that is late, stopped or busy keeps its connections open. The ranks form a
binary tree, so that each has at most three connections, and a report passes at most 22 of 4,096 ranks.
"""

import contextlib
import os
import platform
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from meshwright.train.errors import COMMITS_INTACT, PeerLostError, UnreachableError

_PEER_DIED = r"[Cc]onnection (closed|reset|refused)|Broken pipe|remote process exited"  # gloo, NCCL
# gloo's, and NCCL's socketPollConnect and socketStartConnect
_NO_CONNECTION = r"timed out connecting:.*?remote=\[(.+?)\]|[Cc]onnect to ([^\s<]+)<\d+> (?:returned|failed)"
Kind = Literal["hello", "goodbye", "lost", "signal"]  # lost, and lost by a signal
MESSAGE_BYTES = 2048  # of every message; longer reports are cut
TAG = 1
NEVER = timedelta(days=3650)  # gloo closes all connections of a group when one wait exceeds its timeout
SEND_S = 2.0  # a report that a stopped peer does not receive must not delay the exit


@dataclass(frozen=True)
class LostPeer:
    """A rank that has exited with an error, was killed or has crashed. `text`: which, and why; `found`: this
    rank saw its connection close (otherwise another rank reported it); `by_signal`: it was asked to end."""

    text: str
    found: bool
    by_signal: bool = False


class PeerConnections:
    """This rank's connections to its neighbors in a tree of all ranks of a gloo group, whose collectives they
    do not affect. `on_lost` is called once at most, from a thread, with the first rank that is lost."""

    def __init__(self, group: dist.ProcessGroup, on_lost: Callable[[LostPeer], None]) -> None:
        self._group, self._on_lost = group, on_lost
        self._reported = self._closing = False
        self._sent: list[dist.Work] = []  # gloo sends from its buffer until the message has left
        self._lock = threading.Lock()
        neighbors = tree_neighbors(group.rank(), group.size())
        self._greeted = {peer: threading.Event() for peer in neighbors}
        self._threads = {
            peer: threading.Thread(target=self._watch, args=(peer,), name=f"peer-{peer}", daemon=True)
            for peer in neighbors
        }
        for thread in self._threads.values():
            thread.start()

    def report(self, reason: str, by_signal: bool = False) -> None:
        """Report to all ranks that this rank is about to exit for a reason. Only the first report counts."""
        with self._lock:
            first, self._reported = not self._reported, True
        if first:
            kind: Kind = "signal" if by_signal else "lost"
            self._send_to_others(kind, f"rank {self._group.rank()}: {reason}")
            self._wait_for_sent(SEND_S)

    def close(self, limit_s: float) -> None:
        """End without an error: after this call this rank may exit. Wait for the neighbors to end too, for at
        most `limit_s` seconds."""
        self._closing = True
        deadline_s = time.monotonic() + limit_s
        for greeted in self._greeted.values():  # nobody receives a hello after the goodbye
            greeted.wait(max(0.0, deadline_s - time.monotonic()))
        self._send_to_others("goodbye")
        self._wait_for_sent(max(0.0, deadline_s - time.monotonic()))
        for thread in self._threads.values():
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _watch(self, peer: int) -> None:
        """The thread of a neighbor: receive its messages until it ends."""
        name = f"rank {peer}"
        try:
            try:
                self._send(peer, "hello", f"process {os.getpid()} on {platform.node()}")
            finally:
                self._greeted[peer].set()
            while True:
                kind, text = self._receive(peer)
                if kind == "hello":
                    name = f"{name} ({text})"
                elif kind in ("lost", "signal"):
                    return self._lose(LostPeer(text, False, by_signal=kind == "signal"), peer)
                else:
                    return None
        except RuntimeError as error:
            if not self._closing and re.search(_PEER_DIED, str(error)):
                self._lose(
                    LostPeer(f"{name} was killed or has crashed: its connection is closed", True), peer
                )

    def _lose(self, lost: LostPeer, source: int) -> None:
        with self._lock:
            first, self._reported = not self._reported, True
        if first:
            self._on_lost(lost)  # first: a message to a stopped neighbor may wait
            self._send_to_others("signal" if lost.by_signal else "lost", lost.text, source)

    def _send_to_others(self, kind: Kind, text: str = "", source: int | None = None) -> None:
        for peer in self._threads:
            if peer != source:
                with contextlib.suppress(RuntimeError):  # this neighbor is dead too
                    self._send(peer, kind, text)

    def _send(self, peer: int, kind: Kind, text: str = "") -> None:
        content = f"{kind} {text}".encode(errors="replace")[:MESSAGE_BYTES]
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        message[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._sent.append(self._group.send([message], peer, TAG))

    def _receive(self, peer: int) -> tuple[str, str]:
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        self._group.recv([message], peer, TAG).wait(NEVER)
        kind, _, text = message.numpy().tobytes().rstrip(b"\0").decode(errors="replace").partition(" ")
        return kind, text

    def _wait_for_sent(self, limit_s: float) -> None:
        """Wait until all messages have left, for at most `limit_s` seconds, in a thread: gloo would close all
        connections of the group after a wait that times out."""

        def wait() -> None:
            for work in self._sent:
                with contextlib.suppress(RuntimeError):
                    work.wait(NEVER)

        thread = threading.Thread(target=wait, name="peer-messages", daemon=True)
        thread.start()
        thread.join(limit_s)


def tree_neighbors(rank: int, world_size: int) -> list[int]:
    """Return a rank's parent and children in a binary tree of all ranks, whose root is rank 0."""
    parent = [(rank - 1) // 2] if rank else []
    return parent + [child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size]


def as_peer_lost_error(error: BaseException) -> PeerLostError | None:
    """Return a PeerLostError if the error is that of a collective after another process died, an
    UnreachableError if no connection to it could be made, otherwise None."""
    if isinstance(error, PeerLostError):
        return error
    text = str(error).strip()
    library = next((name for name in ("gloo", "NCCL") if name in text), None)
    if not isinstance(error, RuntimeError) or not library:
        return None
    if failed := re.search(_NO_CONNECTION, text):
        return UnreachableError(_explain_address(failed[1] or failed[2], library))
    if not re.search(_PEER_DIED, text):
        return None
    return PeerLostError(explain_loss(f"a process of this run has died ({text.splitlines()[-1]})"))


def _explain_address(address: str, library: str) -> str:
    variable = f"{library.upper()}_SOCKET_IFNAME"
    if address.startswith(("127.", "::1")):
        address += ", an address within one machine"
    return (
        f"a process of this run cannot be reached at {address}: it uses a wrong network interface, or has "
        f"ended; on every machine set {variable} to the interface whose address the others reach, such as "
        f"eth0 (here: {os.environ.get(variable, 'not set')}; docs/cluster.md); {COMMITS_INTACT}"
    )


def explain_loss(text: str) -> str:
    """Return the message of a rank that ends because of the loss of another; `text` names that one."""
    return (
        f"{text}; all ranks end, without saving: {COMMITS_INTACT}, and the same command resumes from the "
        "last one"
    )
