"""A checkpoint saved on one mesh is read on any other, equal to the bit: parameters and the optimizer's state."""

from pathlib import Path

import pytest

from tests.support.launch import EAGER, TINY, run

SIZE = " ".join([*TINY, "--model.n_kv_heads=4", "--train.global_batch_size=8", "--model.vocab_size=1024"])
MESHES = {
    4: {"tp": "--parallel.tp=2 --parallel.compile.enabled=false",
        "shards": "--parallel.dp_shard=4 --parallel.activation_checkpoint=full --parallel.compile.enabled=false",
        "hsdp": "--parallel.dp_replicate=2 --parallel.dp_shard=2 --parallel.compile.backend=aot_eager",
        "hsdp_tp": "--parallel.dp_replicate=2 --parallel.dp_shard=1 --parallel.tp=2 --parallel.compile.enabled=false"},
    2: {"shards": "--parallel.dp_shard=2 --parallel.compile.enabled=false"},
    1: {"alone": " ".join(EAGER)},
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Saved by two FSDP shards times tensor parallelism of two."""
    folder = tmp_path_factory.mktemp("mesh") / "checkpoints"
    result = run(4, str(folder), "save", f"{SIZE} {MESHES[4]['tp']}", module="tests.distributed.checkpoint_worker")
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize("processes", MESHES)
def test_a_checkpoint_is_the_same_on_every_mesh(processes: int, saved: Path) -> None:
    meshes = MESHES[processes].values()
    result = run(processes, str(saved), "load", *(f"{SIZE} {mesh}" for mesh in meshes),
                 module="tests.distributed.checkpoint_worker")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count('"compared": ') == len(meshes)


def test_hsdp_writes_each_element_once(tmp_path: Path) -> None:
    result = run(4, str(tmp_path / "checkpoints"), "save", f"{SIZE} {MESHES[4]['hsdp_tp']}",
                 module="tests.distributed.checkpoint_worker")  # fmt: skip
    assert result.returncode == 0, result.stderr
