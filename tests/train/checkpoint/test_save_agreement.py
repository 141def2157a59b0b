"""The agreement of all ranks on a save, and the disk space that is needed for all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.checkpoint.shards import needed_bytes, random_state, training_tensors
from meshwright.train.config import CheckpointConfig
from tests.support.checkpoint_saves import save


def make_saver(folder: Path) -> tuple[CheckpointSaver, dict[str, Tensor]]:
    """Return a saver, and the tensors that it saves."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    saver = CheckpointSaver(CheckpointConfig(), folder, model, optimizer, mesh, {}, lambda: 2**30)
    return saver, training_tensors(model, optimizer)


def test_room_is_asked_for_the_headers_of_all_ranks(group: None, tmp_path: Path) -> None:
    """Each header names all tensors, as this rank's does, and each rank has its own random state."""
    saver, tensors = make_saver(tmp_path)
    saved = save(saver, 1).path
    assert saved
    file = saved / "rank-00000.safetensors"
    values_bytes = sum(tensor.nbytes for tensor in tensors.values())
    beyond_bytes = file.stat().st_size - values_bytes
    assert (
        1000 * beyond_bytes < needed_bytes(tensors, random_state(), 1000) - values_bytes < 2000 * beyond_bytes
    )


def test_nothing_is_saved_after_one_that_was_cut_off(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective that failed on this rank may have succeeded on the others."""
    saver = make_saver(tmp_path)[0]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    with monkeypatch.context() as patched:
        patched.setattr(dist, "all_gather_object", fail)
        error = save(saver, 1).error
    assert error.startswith("the save of step 1 was cut off")
    assert "(Connection reset by peer)" in error
    assert save(saver, 2).error == error
    assert list_checkpoints(tmp_path) == []
