"""Random faults of real checkpoints: each is detected before a tensor is used, whichever way the checkpoint
is read."""

import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.errors import one_line
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.tools.checkpoint.__main__ import main as checkpoint_tool
from meshwright.train.checkpoint import initial_weights, reader
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.initial_weights import find_weights, load_weights
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.reader import load_checkpoint
from meshwright.train.checkpoint.resume import find_checkpoint, put_damaged_aside
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.checkpoint.verify import verify_alone, verify_together
from meshwright.train.config import CheckpointConfig, Config
from meshwright.train.config_parser import config_to_yaml
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import CheckpointError
from tests.support.checkpoint_faults import Fault, make_faults, make_strays
from tests.support.launch import EAGER, TINY
from tests.support.sharded import Sharded, build_sharded, sharded_alone
from tests.support.worlds import run_ranks

LIMIT_S = 60  # for everything with one fault
EVERYDAY = 40  # faults
ALONE = RankInfo(0, 1, 0, 1, False)
SIZE = [*TINY, *EAGER]
MESHES = {
    "fsdp": (2, ["--parallel.dp_shard=2"]),
    "fsdp_tp": (4, ["--parallel.dp_shard=2", "--parallel.tp=2"]),
}
Ways = dict[str, Callable[[], object]]


@pytest.fixture(
    scope="module",
    params=[
        "fsdp",
        pytest.param("fsdp_tp", marks=[pytest.mark.slow, pytest.mark.sampled(10, together="verify")]),
    ],
)
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


@pytest.fixture
def run() -> Iterator[Sharded]:
    """A model and its optimizer in this process, with NaN in every value."""
    threads = torch.get_num_threads()
    with sharded_alone(SIZE) as run:
        spoil(run)
        yield run
    torch.set_num_threads(threads)


def spoil(run: Sharded) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(torch.nan)


def is_untouched(run: Sharded) -> bool:
    return all(bool(parameter.isnan().all()) for parameter in run.model.parameters())


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


def ways_in(run: Sharded, bad: Path, out: Path) -> Ways:
    """Return every way to read a checkpoint; with auto it is the only checkpoint."""

    def resume(name: str) -> None:
        start = find_checkpoint(CheckpointConfig(resume=name), bad.parent, ALONE)
        if start.checkpoint and start.manifest:
            load_checkpoint(start.checkpoint, start.manifest, run.model, run.optimizer, run.mesh)

    def init_from() -> None:
        weights = find_weights(str(bad), run.config.model)
        assert weights
        load_weights(weights, run.model)

    return {
        "verify": lambda: verify_alone(bad),
        "verify, all ranks": lambda: verify_together(bad, "full"),
        "resume named": lambda: resume(str(bad)),
        "resume auto": lambda: resume("auto"),
        "init_from": init_from,
        "export": lambda: checkpoint_tool(["export", str(bad), str(out / "hf")]),
        "export plain": lambda: checkpoint_tool(["export", str(bad), str(out / "whole.safetensors")]),
        "diff": lambda: checkpoint_tool(["diff", str(bad), str(bad)]),
        "tool verify": lambda: checkpoint_tool(["verify", str(bad)]),
        "tool verify of the run": lambda: checkpoint_tool(["verify", str(bad.parent.parent)]),
    }


def undetected(ways: Ways) -> list[str]:
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
    previous = Path(shutil.copytree(before, bad.with_name(before.name)))
    start, aside = (
        find_checkpoint(CheckpointConfig(), bad.parent, ALONE),
        bad.with_name(f"damaged-{bad.name}"),
    )
    wrong = (
        [] if (start.step, start.checkpoint) == (1, previous) else [f"auto starts from {start.checkpoint}"]
    )
    messages = put_damaged_aside(start, ALONE)
    if len(messages) != 1 or str(bad) not in messages[0] or str(aside) not in messages[0]:
        wrong.append(f"auto logged {messages}")
    if list_checkpoints(bad.parent) != [previous] or not aside.exists():
        wrong.append("the damaged one was not renamed")
    return wrong


def sweep(
    faults: list[Fault], good: Path, before: Path, run: Sharded, opened: list[Any], folder: Path
) -> None:
    """Apply each fault to a copy of `good`, in folder / "run"; every way to read it must detect the fault."""
    bad, wrong = folder / "run" / "checkpoints" / good.name, []
    ways = ways_in(run, bad, folder / "out")
    shutil.copytree(good, bad)
    weights = find_weights(str(bad), run.config.model)
    assert weights
    # Also a reader that read manifest and config before the tensors were damaged.
    of_tensors = {**ways, "init_from": lambda: load_weights(weights, run.model)}
    shutil.rmtree(bad.parent)
    for fault in faults:
        shutil.copytree(good, bad)
        fault.damage(bad)
        with limited():
            problems = undetected(of_tensors if fault.of_tensors else ways)
            problems += [] if is_untouched(run) else ["the model was changed"]
            problems += [f"tensors were read from {opened}"] if opened else []
            problems += passed_over_wrongly(bad, before)
        wrong += [f"{fault.name}: {'; '.join(problems)}"] if problems else []
        shutil.rmtree(bad.parent)
        opened.clear()
    assert not wrong, f"{len(wrong)} of {len(faults)} faults:\n" + "\n".join(wrong)
    assert not (folder / "out").exists()


def test_no_fault_goes_undetected(
    saved: Path, run: Sharded, opened: list[Any], parsed_once: None, tmp_path: Path
) -> None:
    """Bit flips of tensors and a sample of the other kinds; after a save by four ranks all kinds, and as many
    other faults."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    before, good, outside = saved / "step-00000001", saved / "step-00000002", tmp_path / "outside"
    shutil.copytree(good, outside / "copy")
    faults = list(make_faults(good, before, outside, rng))
    rng.shuffle(faults)
    kinds = list({fault.kind: fault for fault in faults}.values())
    if "fsdp_tp" in saved.name:
        chosen = [*kinds, *rng.sample(faults, len(kinds))]
    else:
        flips = [fault for fault in kinds if fault.of_tensors]
        chosen = [*flips, *rng.sample(kinds, EVERYDAY)]
    sweep(chosen, good, before, run, opened, tmp_path)
    assert [path.name for path in outside.iterdir()] == ["copy"], "code in a pickle was run"


def test_what_no_manifest_names_is_a_warning_at_a_resume_and_an_error_for_the_tool(
    saved: Path, run: Sharded, tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    outside = tmp_path / "outside"
    outside.mkdir()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    resumes = ("resume named", "resume auto", "init_from")
    ways = {name: way for name, way in ways_in(run, checkpoint, tmp_path).items() if name in resumes}
    rng = random.Random(seed)
    for stray in rng.sample([*make_strays(outside, rng)], 4):
        shutil.copytree(saved / checkpoint.name, checkpoint)
        stray.damage(checkpoint)
        (name,) = {path.name for path in checkpoint.iterdir()} - {*os.listdir(saved / checkpoint.name)}
        for way, read in ways.items():
            spoil(run)
            read()
            assert not is_untouched(run), (way, name)
        start = find_checkpoint(CheckpointConfig(), checkpoint.parent, ALONE)
        (line,) = put_damaged_aside(start, ALONE)
        assert line == f"warning: {checkpoint}: {one_line(name)} is not in the manifest; not read"
        with pytest.raises(CheckpointError, match=re.escape(f"{one_line(name)} is not in the manifest")):
            checkpoint_tool(["verify", str(checkpoint)])
        shutil.rmtree(checkpoint)
    assert not [*outside.iterdir()], "code in a pickle was run"


def test_without_a_fault_all_ways_are_open(
    saved: Path, run: Sharded, opened: list[Any], tmp_path: Path
) -> None:
    """What the sweep takes for a refusal is caused by the fault."""
    bad = tmp_path / "run" / "checkpoints" / "step-00000002"
    shutil.copytree(saved / bad.name, bad)
    for name, read in ways_in(run, bad, tmp_path / "out").items():
        opened.clear()
        read()
        assert bool(opened) == ("verify" not in name), name
        assert is_untouched(run) == (name not in ("resume named", "resume auto", "init_from")), name
        spoil(run)
