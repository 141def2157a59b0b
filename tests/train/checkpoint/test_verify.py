"""Hundreds of faults on real checkpoints: each is detected before a tensor is used, whichever way the
checkpoint is read."""

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.tools.checkpoint import main as checkpoint_tool
from meshwright.tools.convert_hf import main as convert
from meshwright.train.checkpoint import initial_weights, reader
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.initial_weights import find_weights, load_weights
from meshwright.train.checkpoint.load import Start, find_checkpoint, load_checkpoint
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.checkpoint.verify import verify_alone, verify_together
from meshwright.train.config import CheckpointConfig, Config
from meshwright.train.config_parser import config_to_yaml, parse_config
from meshwright.train.distributed.process_group import start_process
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import CheckpointError
from meshwright.train.model.build import build_model
from meshwright.train.optim.optimizer import build_optimizer
from meshwright.train.planning.resolve import plan_run
from tests.support.checkpoint_faults import Fault, make_faults
from tests.support.launch import EAGER, TINY
from tests.support.sharded import build_sharded
from tests.support.worlds import run_ranks

LIMIT_S = 60  # for everything with one fault
ALONE = RankInfo(0, 1, 0, 1, False)
SIZE = [*TINY, *EAGER]
MESHES = {
    "fsdp": (2, ["--parallel.dp_shard=2"]),
    "fsdp_tp": (4, ["--parallel.dp_shard=2", "--parallel.tp=2"]),
}


@pytest.fixture(scope="module", params=["fsdp", pytest.param("fsdp_tp", marks=pytest.mark.slow)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, saved by the ranks of the mesh."""
    folder, (processes, mesh) = tmp_path_factory.mktemp(request.param), MESHES[request.param]
    run_ranks(processes, save_two_steps, [*SIZE, *mesh], folder)
    return folder


def save_two_steps(arguments: list[str], folder: Path) -> None:
    run = build_sharded(arguments)
    texts = {"config.yaml": config_to_yaml(run.config), "plan.yaml": plan_to_yaml(run.plan)}
    saver = CheckpointSaver(
        run.config.checkpoint, folder, run.model, run.optimizer, run.mesh, texts, lambda: 2**30
    )
    for step in (1, 2):
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(step)
        saver.save(TrainPosition(step, 8 * step, 0, 32, dist.get_world_size(), "data"))
        saver.wait()
        assert saver.failed == ""


class Trainer:
    """A model and its optimizer in this process, with NaN in every value, and the ways to read a checkpoint
    into them."""

    def __init__(self, config: Config) -> None:
        plan = plan_run(config.job, 1)
        self.config = config
        self.model: nn.Module = build_model(
            config.model,
            config.train,
            plan,
            build_mesh(plan.mesh, "cpu"),
            config.run.seed,
        )
        self.optimizer = build_optimizer(self.model, config.optim)
        self.spoil()

    def spoil(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(torch.nan)

    def is_untouched(self) -> bool:
        return all(bool(parameter.isnan().all()) for parameter in self.model.parameters())

    def resume(self, resume: str, folder: Path) -> Start:
        start = find_checkpoint(CheckpointConfig(resume=resume), folder, ALONE)
        if start.checkpoint and start.manifest:
            load_checkpoint(start.checkpoint, start.manifest, self.model, self.optimizer)
        return start

    def init_from(self, checkpoint: Path) -> None:
        weights = find_weights(str(checkpoint), self.config.model, None)
        assert weights
        load_weights(weights, self.model)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    config, threads = parse_config(SIZE), torch.get_num_threads()
    start_process(config.run, ALONE, torch.device("cpu"))
    yield Trainer(config)
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The files that tensors were read from, whichever way."""
    seen: list[Any] = []
    really = reader.safe_open

    def counted(file: Path, framework: str) -> Any:
        seen.append(file)
        return really(file, framework=framework)

    monkeypatch.setattr(reader, "safe_open", counted)
    return seen


@pytest.fixture
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache configs of init_from by their bytes: parsing one takes ten times as long as the rest of a
    fault."""
    really, known = initial_weights.load_config, dict[bytes, Config]()

    def load(path: Path) -> Config:
        content = path.read_bytes()
        known[content] = known.get(content) or really(path)
        return known[content]

    monkeypatch.setattr(initial_weights, "load_config", load)


@contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError after LIMIT_S: no file in the folder may cause a hang."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ways_in(trainer: Trainer, bad: Path, out: Path) -> dict[str, Callable[[], object]]:
    """Return every way to read a checkpoint; with auto it is the only checkpoint."""
    return {
        "verify": lambda: verify_alone(bad),
        "verify, all ranks": lambda: verify_together(bad, "full"),
        "resume named": lambda: trainer.resume(str(bad), bad.parent),
        "resume auto": lambda: trainer.resume("auto", bad.parent),
        "init_from": lambda: trainer.init_from(bad),
        "export": lambda: convert(["export", str(bad), str(out / "hf")]),
        "consolidate": lambda: checkpoint_tool(["consolidate", str(bad), str(out / "whole.safetensors")]),
        "diff": lambda: checkpoint_tool(["diff", str(bad), str(bad)]),
        "tool verify": lambda: checkpoint_tool(["verify", str(bad)]),
        "tool verify of the run": lambda: checkpoint_tool(["verify", str(bad.parent.parent)]),
    }


def undetected(ways: dict[str, Callable[[], object]]) -> list[str]:
    """Return the ways that did not end with a CheckpointError of one line."""
    wrong = []
    for name, read in ways.items():
        try:
            read()
            wrong.append(f"{name} took it")
        except CheckpointError as error:
            if "\n" in str(error):
                wrong.append(f"{name} raised {str(error)!r}")
        except BaseException as error:
            wrong.append(f"{name} ended with {type(error).__name__}: {error}")
    return wrong


def passed_over_wrongly(bad: Path, before: Path) -> list[str]:
    """With the previous step present, auto resumes from it, logs which checkpoint it skipped, and renames
    that one."""
    shutil.copytree(before, bad.with_name(before.name))
    start = find_checkpoint(CheckpointConfig(), bad.parent, ALONE)
    aside = bad.with_name(f"damaged-{bad.name}")
    wrong = (
        []
        if (start.step, start.checkpoint) == (1, bad.with_name(before.name))
        else [f"auto starts from {start.checkpoint}"]
    )
    if len(start.messages) != 1 or str(bad) not in start.messages[0] or str(aside) not in start.messages[0]:
        wrong.append(f"auto logged {start.messages}")
    if list_checkpoints(bad.parent) != [bad.with_name(before.name)] or not aside.exists():
        wrong.append("the damaged one was not renamed")
    return wrong


def sweep(
    faults: list[Fault], good: Path, before: Path, trainer: Trainer, opened: list[Any], folder: Path
) -> None:
    """Apply each fault to a copy of `good`, in folder / "run"; every way to read it must detect the fault."""
    bad, wrong = folder / "run" / "checkpoints" / good.name, []
    ways = ways_in(trainer, bad, folder / "out")
    shutil.copytree(good, bad)
    weights = find_weights(str(bad), trainer.config.model, None)
    assert weights
    # Also a reader that read manifest and config before the tensors were damaged.
    tensors = {**ways, "init_from": lambda: load_weights(weights, trainer.model)}
    shutil.rmtree(bad.parent)
    for fault in faults:
        shutil.copytree(good, bad)
        fault.damage(bad)
        with limited():
            problems = undetected(tensors if fault.of_tensors else ways)
            problems += [] if trainer.is_untouched() else ["the model was changed"]
            problems += [f"tensors were read from {opened}"] if opened else []
            problems += passed_over_wrongly(bad, before)
        wrong += [f"{fault.name}: {'; '.join(problems)}"] if problems else []
        shutil.rmtree(bad.parent)
        opened.clear()
    print(f"{len(faults)} faults, {len(wrong)} undetected or wrongly handled")
    assert not wrong, f"{len(wrong)} of {len(faults)} faults:\n" + "\n".join(wrong)
    assert not (folder / "out").exists()


def of_the_seed(faults: list[Fault]) -> list[Fault]:
    """Return a third of the faults: three consecutive seeds cover all, and so does "all"."""
    seed = os.environ["MESHWRIGHT_TESTS_SEED"]
    return faults if seed == "all" else faults[int(seed) % 3 :: 3]


def test_no_fault_goes_undetected(
    saved: Path, trainer: Trainer, opened: list[Any], parsed_once: None, tmp_path: Path
) -> None:
    """One fault of each kind; after a save by four ranks also a third of all others, by the seed."""
    before, good, outside = saved / "step-00000001", saved / "step-00000002", tmp_path / "outside"
    shutil.copytree(good, outside / "copy")
    faults = list(make_faults(good, before, outside, random.Random(6)))
    assert len(faults) >= 270
    random.Random(6).shuffle(faults)
    chosen = list({fault.kind: fault for fault in faults}.values())
    assert len(chosen) >= 100
    if len(list(good.glob("rank-*"))) == 4:
        chosen += of_the_seed([fault for fault in faults if fault not in chosen])
    sweep(chosen, good, before, trainer, opened, tmp_path)
    assert [path.name for path in outside.iterdir()] == ["copy"], "code in a pickle was run"


def test_without_a_fault_all_ways_are_open(
    saved: Path, trainer: Trainer, opened: list[Any], tmp_path: Path
) -> None:
    """What the sweep takes for a refusal is caused by the fault."""
    bad = tmp_path / "run" / "checkpoints" / "step-00000002"
    shutil.copytree(saved / bad.name, bad)
    for name, read in ways_in(trainer, bad, tmp_path / "out").items():
        opened.clear()
        read()
        assert bool(opened) == ("verify" not in name), name
        assert trainer.is_untouched() == (name not in ("resume named", "resume auto", "init_from")), name
        trainer.spoil()
