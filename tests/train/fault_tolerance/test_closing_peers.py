"""The connections between ranks that notice a dead peer."""

import time

import torch.distributed as dist

from meshwright.train.fault_tolerance.peers import Kind, LostPeer, PeerConnections
from tests.support.worlds import run_ranks

LATE_S = 1.0  # until a hello is sent: the thread of a busy machine starts late
LIMIT_S = 60.0


class LateHello(PeerConnections):
    """Connections of a rank whose hello comes after the rank has begun to close them."""

    def _send(self, peer: int, kind: Kind, text: str = "") -> None:
        if kind == "hello" and dist.get_rank() == 0:
            time.sleep(LATE_S)
        super()._send(peer, kind, text)


def close_at_once() -> tuple[float, list[LostPeer]]:
    """Connect and close; return the seconds of both, and the ranks found lost."""
    lost: list[LostPeer] = []
    start_s = time.monotonic()
    connections = LateHello(dist.group.WORLD, lost.append)  # type: ignore[arg-type]
    connections.close(LIMIT_S)
    seconds = time.monotonic() - start_s
    dist.barrier()
    return seconds, lost


def test_a_hello_that_comes_late_does_not_delay_the_end() -> None:
    """After the goodbye nobody receives it, and its sender waited for the full limit."""
    for seconds, lost in run_ranks(2, close_at_once):
        assert seconds < LIMIT_S / 2
        assert lost == []
