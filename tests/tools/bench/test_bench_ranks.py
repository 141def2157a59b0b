"""tools.bench ranks: what is counted for simulated ranks is what real gloo ranks do."""

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.ranks import command
from meshwright.tools.bench.ranks.command import CONNECTED_WORLDS, meshes
from meshwright.tools.bench.ranks.counting_store import CountingStore, StoreTraffic
from meshwright.tools.bench.ranks.startup import count_connections, count_rendezvous, predict_connections
from meshwright.train.config import RunConfig
from meshwright.train.distributed import process_group
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.fault_tolerance.peers import PeerConnections
from meshwright.train.fault_tolerance.shutdown import LOST_S
from tests.support.worlds import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, together="bench-ranks")]


def store_of_launcher() -> Any:
    """A new connection to the launcher's store."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]


def real_start() -> tuple[int, dict[str, int]]:
    """Join a new process group through a counting store; return the number of operations, and the connections
    of two groups as in `count_connections`: a rank reads the address of a peer when it connects to it."""
    dist.barrier()  # until every rank has connected to the others
    dist.destroy_process_group()
    ranks, traffic = read_rank_info(), StoreTraffic()
    store = CountingStore(store_of_launcher(), traffic)

    def launcher(url: str, timeout: timedelta) -> Iterator[tuple[CountingStore, int, int]]:
        yield store, ranks.rank, ranks.world_size

    with mock.patch.object(process_group, "launcher_rendezvous", launcher):
        process_group.start_process(RunConfig(), ranks, torch.device("cpu"))
    operations, reads = traffic.total, traffic.operations["get"]
    dist.broadcast(torch.zeros(1), 0)
    dist.all_reduce(torch.zeros(1))
    connections = {"default": traffic.operations["get"] - reads}
    group = dist.new_group(timeout=timedelta(seconds=60))
    reads = traffic.operations["get"]
    neighbors = PeerConnections(group, lambda lost: None)
    dist.all_reduce(torch.zeros(1), group=group)
    neighbors.close(60)
    connections["stop"] = traffic.operations["get"] - reads
    dist.barrier()  # no rank ends before the others have used their connections
    return operations, connections


@pytest.fixture(autouse=True)
def lazy_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting sets this variable; after a test it has its earlier value."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")


@pytest.fixture(scope="module")
def real() -> list[tuple[int, dict[str, int]]]:
    """`real_start` of 8 ranks."""
    return run_ranks(8, real_start)


def test_the_rendezvous_of_threads_is_that_of_real_ranks(real: list[tuple[int, dict[str, int]]]) -> None:
    """And does not grow with the world."""
    simulated = count_rendezvous(8)
    default_group = 1  # the address of this rank
    assert real[0][0] == simulated["rank_0"]["store_operations"] + default_group
    # a rank that comes before rank 0 waits for it first
    for operations, _ in real[1:]:
        assert 4 <= operations - default_group <= 6
    large = count_rendezvous(256)
    assert simulated["rank_0"]["store_operations"] == large["rank_0"]["store_operations"]
    assert 4 <= simulated["other_ranks"]["store_operations"] <= 6
    assert large["other_ranks"]["store_operations"] <= 6


def test_connections_are_those_of_real_ranks(real: list[tuple[int, dict[str, int]]]) -> None:
    counted = {size: count_connections(size) for size in (8, 16, 32, 64)}
    for group in ("default", "stop"):
        assert max(connections[group] for _, connections in real) == counted[8][group]
        small = {size: counted[size][group] for size in (8, 16, 32)}
        assert predict_connections(64, small) == counted[64][group]
        assert predict_connections(64, {**small, 64: 99}) is None


@pytest.mark.usefixtures("forked_commands")
def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "HELD_PROCESSES", 2)
    main(["ranks", "--ranks", "16", "--config=llama_debug", "--json"])
    figures = json.loads(capsys.readouterr().out)["figures"]
    counted = figures["connections_counted"]
    assert list(counted["default"]) == [str(size) for size in CONNECTED_WORLDS]
    start, resume = figures["ranks"]["16"]["start"], figures["ranks"]["16"]["resume"]
    assert start["connections_predicted"] == {group: counted[group]["16"] for group in counted}
    # one entry of each group with a gloo half: default, stop and checkpoints; and the watchdog's two
    for total in (phases["total"] for phases in start["meshes"].values()):
        assert (total["store_operations"], total["store_connections"]) == (5, 1)
        assert total["descriptors"] == 3 * 4
    # FSDP: the rank's own file; HSDP: one of two ranks writes a part; tp: whole parameters are elsewhere
    for kind, targets in resume.items():
        for cost in targets.values():
            assert cost["within"]
            assert 1 <= cost["files"] <= 6, kind
            assert cost["metadata_bytes"] > cost["files"] * 1000
    assert start["meshes"].keys() == meshes(16).keys() > resume.keys()
    dead = figures["dead_rank"]
    assert LOST_S <= dead["first_s"] <= dead["last_s"]
