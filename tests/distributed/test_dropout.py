"""Models with dropout: whose masks are equal, when they go on, and that an evaluation has none."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.resume import Start
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.checkpoint.verify import verify_together
from meshwright.train.config import CheckpointConfig
from meshwright.train.console import Console
from meshwright.train.data.sequences import Batch
from meshwright.train.evaluation import evaluate
from meshwright.train.model.trained_model import model_of
from meshwright.train.run import restore
from meshwright.train.step import train_step
from tests.support.checkpoint_saves import save
from tests.support.factories import RUN, VOCABULARY
from tests.support.hf_models import make_tokens
from tests.support.launch import EAGER, TINY
from tests.support.sharded import Sharded, build_sharded
from tests.support.worlds import run_ranks

DROPPING = [*RUN, *EAGER, "--model.factory=tests.support.factories:dropping", "--model.blocks=[13]"]


def started(arguments: Sequence[str], start: Start, lines: list[str]) -> Sharded:
    """The run as train.main starts it, with the lines that it prints."""
    run = build_sharded(arguments)
    data: Any = SimpleNamespace(start=TrainPosition(), total_steps=9, same_order=lambda _: True)
    console = Console(True)
    console.print = lines.append  # type: ignore[method-assign]
    restore(run.training, start, None, run.config, data, console)
    return run


def masks_of_steps(start: Path | None, folder: Path | None) -> dict[str, Any]:
    """The masks of two steps of this rank, the figures of evaluations between them, and the printed lines;
    in between the state is saved into `folder`."""
    lines, masks = list[str](), list[torch.Tensor]()
    begin = Start(start, verify_together(start, "full")) if start else Start()
    run = started(DROPPING, begin, lines)
    loss_of, ids = model_of(run.config.model).loss(run.plan, 0.0), make_tokens(VOCABULARY, 2, 17)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    run.model[2].register_forward_hook(lambda _m, _i, y: masks.append(y != 0) if y.requires_grad else None)
    figures: list[float] = []
    for _ in range(2):
        train_step(run.sharded, run.optimizer, [batch], 1.0, loss_of)
        trained = len(masks)
        scores = [evaluate(run.model, [batch], run.group, loss_of) for _ in range(2)]
        figures += [score[0].item() for score in scores if score is not None]
        del masks[trained:]
        if folder and not folder.exists():
            saver = CheckpointSaver(CheckpointConfig(), folder, run.model, run.optimizer, run.mesh, {})
            assert not save(saver, 1).error
    return {"masks": masks, "figures": figures, "lines": lines}


def test_each_rank_draws_masks_of_its_own_a_resume_goes_on_and_evaluations_have_none(
    tmp_path: Path,
) -> None:
    first, other = run_ranks(2, masks_of_steps, None, tmp_path / "saved")
    step_1, step_2 = first["masks"][0], first["masks"][2]
    assert 0.3 < step_1.float().mean() < 0.7
    assert not torch.equal(step_1, other["masks"][0])
    assert not torch.equal(step_1, step_2)
    assert first["figures"][0] == first["figures"][1] != first["figures"][2] == first["figures"][3]

    checkpoint = tmp_path / "saved" / "step-00000001"
    for rank, again in enumerate(run_ranks(2, masks_of_steps, checkpoint, None)):
        assert torch.equal(again["masks"][0], (first, other)[rank]["masks"][2])
        assert not any("dropout" in line for line in again["lines"])
    (alone,) = run_ranks(1, masks_of_steps, checkpoint, None)
    assert any("dropout" in line for line in alone["lines"])
    assert not torch.equal(alone["masks"][0], step_1)


def seeds(meshes: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """The data-parallel index and the random seed of this rank on each mesh."""
    runs = (started([*TINY, *EAGER, *mesh], Start(), []) for mesh in meshes)
    return [(run.sharded.data_rank, torch.initial_seed()) for run in runs]


def test_ranks_of_a_tp_or_cp_group_draw_the_same() -> None:
    meshes = [["--parallel.tp=2"], ["--parallel.cp=2"], ["--parallel.dp_replicate=2"]]
    for of_mesh, parts in zip(zip(*run_ranks(4, seeds, meshes), strict=True), (2, 2, 4), strict=True):
        assert len({seed for _, seed in of_mesh}) == len(set(of_mesh)) == parts
