"""tools.bench ranks: what is counted for simulated ranks equals what real gloo ranks do and real checkpoints
contain."""

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.ranks import command
from meshwright.tools.bench.ranks.command import CONNECTED_WORLDS, meshes, start_rows
from meshwright.tools.bench.ranks.counting_store import CountingStore, StoreTraffic
from meshwright.tools.bench.ranks.resume import make_manifest, write_sparse_file
from meshwright.tools.bench.ranks.startup import (
    PhaseCost,
    count_connections,
    count_groups,
    count_rendezvous,
    predict_connections,
)
from meshwright.tools.processes import BenchError
from meshwright.train.checkpoint.manifest import CheckpointManifest, TrainPosition, rank_file, read_manifest
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config import CheckpointConfig, RunConfig
from meshwright.train.distributed import process_group
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.fault_tolerance.peers import PeerConnections
from meshwright.train.fault_tolerance.shutdown import LOST_S
from tests.support.forks import ROOT
from tests.support.sharded import build_sharded
from tests.support.worlds import run_ranks

WORLD = 4
MESHES = (MeshPlan(1, 4, 1), MeshPlan(2, 2, 1), MeshPlan(1, 2, 2))


def store_of_launcher() -> Any:
    """A new connection to the launcher's store."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]


def leave_group() -> None:
    """Destroy the default group when every rank has connected to the others."""
    dist.barrier()
    dist.destroy_process_group()


def real_start() -> tuple[int, dict[str, int]]:
    """Join a new process group through a counting store; return the number of operations, and the connections
    of two groups as in `count_connections`: a rank reads the address of a peer when it connects to it."""
    leave_group()
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
    simulated = count_rendezvous(8)
    default_group = 1  # the address of this rank
    assert real[0][0] == simulated["rank_0"]["store_operations"] + default_group
    # a rank that comes before rank 0 waits for it first
    for operations, _ in real[1:]:
        assert 4 <= operations - default_group <= 6
    assert 4 <= simulated["other_ranks"]["store_operations"] <= 6


def test_the_operations_of_a_rank_do_not_grow_with_the_world() -> None:
    small, large = count_rendezvous(8), count_rendezvous(256)
    assert small["rank_0"]["store_operations"] == large["rank_0"]["store_operations"]
    assert large["other_ranks"]["store_operations"] <= 6
    assert large["other_ranks"]["bytes"] == small["other_ranks"]["bytes"]


def phases_of_rank() -> list[tuple[dict[str, PhaseCost], dict[str, PhaseCost]]]:
    """The phases for each of MESHES: without other ranks, and with the store of all ranks."""
    rank = dist.get_rank()
    leave_group()
    stores = [dist.PrefixStore(f"counted {i}", store_of_launcher()) for i in range(len(MESHES))]  # type: ignore[attr-defined]
    return [
        (count_groups(mesh, rank, "cpu"), count_groups(mesh, rank, "cpu", store))
        for mesh, store in zip(MESHES, stores, strict=True)
    ]


def test_groups_without_other_ranks_are_those_of_real_ranks() -> None:
    for phases in run_ranks(WORLD, phases_of_rank):
        for mesh, (alone, together) in zip(MESHES, phases, strict=True):
            assert alone.keys() == together.keys()
            for phase in alone:
                assert figures_of(alone[phase], phase) == figures_of(together[phase], phase), (mesh, phase)
                # a store in this process has no connection
                descriptors = alone[phase].descriptors + alone[phase].store_connections
                assert descriptors == together[phase].descriptors, (mesh, phase)


def figures_of(cost: PhaseCost, phase: str) -> tuple[Any, ...]:
    """What is counted, without times. A heartbeat contains one, so its bytes differ."""
    sizes = () if phase == "watchdog" else (cost.set_bytes, cost.got_bytes)
    return cost.store_operations, cost.groups, cost.store_connections, sizes


def test_connections_are_those_of_real_ranks(real: list[tuple[int, dict[str, int]]]) -> None:
    counted = {size: count_connections(size) for size in (8, 16, 32, 64)}
    for group in ("default", "stop"):
        assert max(connections[group] for _, connections in real) == counted[8][group]
        small = {size: counted[size][group] for size in (8, 16, 32)}
        assert predict_connections(64, small) == counted[64][group]
        assert predict_connections(64, {**small, 64: 99}) is None


def save_real(folder: Path, arguments: list[str]) -> None:
    run = build_sharded(arguments)
    config = CheckpointConfig(every=1, asynchronous=False)
    saver = CheckpointSaver(config, folder, run.model, run.optimizer, run.mesh, {})
    saver.save(TrainPosition(step=1, world_size=dist.get_world_size()))
    (saved,) = saver.poll()
    assert saved.path, saved.error


@pytest.mark.parametrize("mesh", [MeshPlan(2, 2, 1), MeshPlan(1, 2, 2)], ids=["HSDP", "FSDP x TP"])
def test_sparse_files_have_the_headers_of_real_ones(mesh: MeshPlan, tmp_path: Path) -> None:
    keys = [f"--parallel.{axis}={degree}" for axis, degree in vars(mesh).items()]
    run_ranks(WORLD, save_real, tmp_path, ["--config=llama_debug", *keys])
    real, simulated = read_manifest(tmp_path / "step-00000001"), make_manifest("llama_debug", mesh)
    assert real.mesh == simulated.mesh
    assert described(real) == described(simulated)
    for rank in range(WORLD):
        sparse = tmp_path / rank_file(rank)
        header_bytes = write_sparse_file(sparse, simulated)
        assert header_of(sparse) == header_of(tmp_path / "step-00000001" / rank_file(rank))
        assert sparse.stat().st_blocks * 512 < header_bytes + 2**13


def described(manifest: CheckpointManifest) -> dict[str, tuple[Any, ...]]:
    """Shape, dtype and sharding of the tensors; a CPU has no random state of a GPU."""
    return {
        name: (tensor.shape, tensor.dtype, tensor.sharding)
        for name, tensor in manifest.tensors.items()
        if not name.startswith("random.cuda.")
    }


def header_of(file: Path) -> dict[str, Any]:
    """The header without random states of GPUs, whose parts are the last ones."""
    with open(file, "rb") as opened:
        header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    offsets = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
    return {
        name: (part, offsets[name]) for name, part in header.items() if not name.startswith("random.cuda.")
    }


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


def test_what_cannot_be_counted() -> None:
    with pytest.raises(BenchError, match=r"--ranks 12 must be a multiple of 8"):
        main(["ranks", "--ranks", "12"])
    with pytest.raises(BenchError, match=r"--ranks 32768: .*at most 16384"):
        main(["ranks", "--ranks", "32768"])


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=f"--folder {tmp_path}/none .*: name another"):
        main(["ranks", "--ranks", "16", f"--folder={tmp_path}/none"])


def test_the_docs_are_what_the_newest_record_says() -> None:
    newest = sorted((ROOT / "tools" / "bench" / "records").glob("????-??-??-ranks.json"))[-1]
    ranks = json.loads(newest.read_text())["figures"]["ranks"]
    text = (ROOT / "docs" / "cluster.md").read_text()
    table = [
        line.split(" | ") for line in text.splitlines() if line.startswith(("| start: ", "| resume on "))
    ]
    for column, size in ((2, "1024"), (4, "4096")):
        start, resume = ranks[size]["start"], ranks[size]["resume"]
        assert [row[column].removesuffix(" |") for row in table] == fsdp_cells(int(size), start, resume)
        assert all(cost["within"] for targets in resume.values() for cost in targets.values())
        assert max(c["metadata_bytes"] for targets in resume.values() for c in targets.values()) < 5.05e6
    at_most = {
        target: {kind: max(r["resume"][kind][target]["files"] for r in ranks.values()) for kind in resume}
        for target in ("same", "half")
    }
    assert at_most == {
        "same": {"FSDP": 2, "HSDP": 9, "FSDP x TP": 3},
        "half": {"FSDP": 6, "HSDP": 27, "FSDP x TP": 6},
    }


def fsdp_cells(world_size: int, start: dict[str, Any], resume: dict[str, Any]) -> list[str]:
    """The cells of the table in docs/cluster.md, from the rows that the command prints."""
    (row,) = [row for row in start_rows(world_size, start) if row[1] == "FSDP"]
    cost = resume["FSDP"]["same"]
    return [
        f"{row[2]} ({row[3]})",
        f"{int(row[4]) / 1e3:.1f}",
        row[5],
        row[7],
        row[8],
        f"{cost['files']}",
        f"{cost['metadata_bytes'] / 1e6:.1f}",
        f"{cost['cpu_s']:.1f}",
    ]
