"""The connections between ranks that notice a dead peer: what an ending rank reports, and how they close."""

import time

import torch.distributed as dist

from meshwright.train.config import RunConfig
from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import PeerLostError, UnreachableError
from meshwright.train.fault_tolerance.peers import Kind, LostPeer, PeerConnections, as_peer_lost_error
from meshwright.train.fault_tolerance.supervision import UNNAMED, supervised
from tests.support.worlds import run_ranks

MANY_S = 60
LATE_S = 0.3  # until a hello is sent: the thread of a busy machine starts late
LIMIT_S = 60.0


def reported(error: Exception) -> str:
    """Rank 1 ends with the error; return what is reported to this rank, and on rank 1 the error's type."""
    ranks = RankInfo(dist.get_rank(), 3, dist.get_rank(), 3, True)
    try:
        with supervised(RunConfig(), ranks, Console(False)) as supervision:
            supervision.connect()
            if ranks.rank == 1:
                raise error
            lost = supervision.stop.lost_peer(MANY_S)
            assert lost
            raise KeyboardInterrupt  # not the normal end, which would wait for rank 1
    except (Exception, KeyboardInterrupt) as ended:
        return lost.text if ranks.rank != 1 else type(ended).__name__


def test_a_rank_that_has_lost_another_and_has_no_report_of_it_is_not_reported_as_killed() -> None:
    """Its collective may fail before the report comes, such as one that has to pass a stopped rank."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert run_ranks(3, reported, lost) == [f"rank 1: {UNNAMED}", "RuntimeError", f"rank 1: {UNNAMED}"]


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


UNREACHED = [  # what names the address, and the last line of the library's error; gloo's are recorded
    (
        "127.0.0.1, an address within one machine",
        "timed out connecting: SO_ERROR: Connection refused, remote=[{}]:91",
    ),
    ("10.0.0.2:", "timed out connecting: SO_ERROR: No route to host, remote=[{}]:9121$1"),
    ("10.0.0.2:", "socketPollConnect: connect to {}<51> returned Connection refused"),
    ("10.0.0.2:", "socketStartConnect: Connect to {}<51> failed : No route to host"),
]


def test_an_address_that_no_connection_reaches_is_named_with_the_variable() -> None:
    """tests/e2e/test_launch_nodes.py does it with two nodes."""
    for address, text in UNREACHED:
        library = "NCCL" if "<" in text else "gloo"
        error = as_peer_lost_error(
            RuntimeError(f"[{library}/x.cc]\n" + text.format(address.strip(":").split(",")[0]))
        )
        assert isinstance(error, UnreachableError), text
        facts = (address, f"{library.upper()}_SOCKET_IFNAME", "interface")
        assert [fact for fact in facts if fact not in str(error)] == [], error
    closed = as_peer_lost_error(RuntimeError("[gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:9121"))
    assert type(closed) is PeerLostError
