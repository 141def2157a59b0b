"""Weights of a model of one's own go out of a checkpoint as its state_dict, and into a run from every kind of
file, without its code and bitwise."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.parallel.fsdp import full_tensor
from meshwright.tools.checkpoint.__main__ import main as checkpoint_tool
from meshwright.train.checkpoint.commit import find_newest
from meshwright.train.checkpoint.initial_weights import find_weights, load_weights
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import CheckpointError
from tests.support.factories import RUN, NanoGPT
from tests.support.launch import EAGER, run
from tests.support.sharded import build_sharded
from tests.support.worlds import run_ranks

NANO = [*RUN, *EAGER, "--model.factory=tests.support.factories:NanoGPT"]
TIED = "lm_head.weight", "transformer.wte.weight"
BUFFER = "transformer.scaled.scale"
SECOND = "transformer.h.1."  # of the second block's names


@pytest.fixture(scope="module")
def trained(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of two steps on two ranks, whose shards differ in size. It starts from a file
    that lacks a block, which keeps its initial values."""
    folder = tmp_path_factory.mktemp("nano")
    torch.save(
        {n: t for n, t in NanoGPT().state_dict().items() if not n.startswith(SECOND)}, folder / "part.pt"
    )
    part = [f"--checkpoint.init_from={folder / 'part.pt'}", "--checkpoint.init_strict=false"]
    options = ["--train.steps=2", "--checkpoint.every=-1", f"--run.dir={folder / 'run'}"]
    done = run(2, *NANO, *data, *part, *options)
    assert done.returncode == 0, done.stderr
    assert "warning: weights: 6 tensors of the model are not in" in done.stdout
    found = find_newest(folder / "run")
    assert all(tensor.isfinite().all() for tensor in assembled(found).values())
    return found


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its weights."""
    folder = tmp_path_factory.mktemp("exported") / "folder"
    checkpoint_tool(["export", str(trained), str(folder)])
    return folder


def assembled(checkpoint: Path) -> dict[str, Tensor]:
    """The model's tensors, put together from the shards in the ranks' files."""
    tensors: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in sorted(checkpoint.glob("rank-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensors.setdefault(name, []).append((offsets[name]["saved_offsets"], file.get_tensor(name)))
    ordered = {name: sorted(parts, key=lambda part: part[0]) for name, parts in tensors.items()}
    return {
        name.removeprefix("model."): torch.cat([shard for _, shard in parts])
        for name, parts in ordered.items()
        if name.startswith("model.")
    }


def check_state(model: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert model.keys() == expected.keys()
    assert [name for name in model if not torch.equal(model[name], expected[name])] == []


def test_an_export_is_the_state_dict_of_the_plain_model(
    trained: Path, exported: Path, tmp_path: Path
) -> None:
    """Of a folder of one file and of several, and of a file; tied weights by both names, saved buffers, and
    no other."""
    parts, file = tmp_path / "parts", tmp_path / "nano.safetensors"
    checkpoint_tool(["export", str(trained), str(parts), "--shard_gb=0.00002"])
    checkpoint_tool(["export", str(trained), str(file)])
    shards = assembled(trained)
    assert len([name for name in TIED if name in shards]) == 1
    assert len(list(parts.glob("*.safetensors"))) > 2
    assert [path.name for path in exported.iterdir()] == ["model.safetensors"]
    for files in ([exported / "model.safetensors"], parts.glob("*.safetensors"), [file]):
        plain = NanoGPT()
        plain.load_state_dict({name: t for each in files for name, t in load_file(each).items()}, strict=True)
        state = plain.state_dict()
        assert BUFFER in state
        check_state(state, {name: shards.get(name, shards[TIED[1]]) for name in state})
    with pytest.raises(CheckpointError, match=r"nano\.pt: only safetensors are written: name FILE\.saf"):
        checkpoint_tool(["export", str(trained), str(tmp_path / "nano.pt")])


def started_from(cases: dict[str, tuple[Path, bool]], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors after a start from each source, all of which were 7 before, and the lines about it;
    and save the first start with mw.save."""
    results, built = {}, build_sharded(NANO)
    tensors = built.model.state_dict(keep_vars=True)
    for case, (source, strict) in cases.items():
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(7)
        weights = find_weights(str(source), built.config.model, strict=strict)
        load_weights(weights, built.model)
        state = {name: full_tensor(tensor).detach().clone() for name, tensor in tensors.items()}
        results[case] = {"state": state, "lines": list(weights.describe())}
        if case == "0":
            mw.save(folder, built.sharded, built.optimizer, 1)
    return results


def test_a_run_starts_from_every_kind_of_file_bitwise(trained: Path, exported: Path, tmp_path: Path) -> None:
    state = load_file(exported / "model.safetensors")
    torch.save(state, tmp_path / "nano.pt")
    training = {"model": {f"module._orig_mod.{name}": t for name, t in state.items()}, "step": 2}
    torch.save(training, tmp_path / "ckpt.pt")
    part = {name: tensor for name, tensor in state.items() if not name.startswith(SECOND)}
    save_file({**part, "probe.weight": torch.ones(2)}, tmp_path / "part.safetensors")
    files = exported, exported / "model.safetensors", tmp_path / "nano.pt", tmp_path / "ckpt.pt", trained
    cases = {f"{number}": (file, True) for number, file in enumerate(files)}
    cases["part"] = tmp_path / "part.safetensors", False
    first, second = run_ranks(2, started_from, cases, tmp_path / "own")
    for case, result in first.items():
        missing = {name for name in state if case == "part" and name.startswith(SECOND)}
        kept = {name: torch.full_like(t, 7) if name in missing else t for name, t in state.items()}
        check_state(result["state"], kept)
        check_state(second[case]["state"], kept)
    assert [first[case]["lines"] for case in "0124"] == [[]] * 4
    assert "begin with module._orig_mod., which is left out" in first["3"]["lines"][0]
    (absent, extra) = first["part"]["lines"]
    assert "warning: weights: 6 tensors of the model are not in" in absent
    assert "transformer.h.1.qkv.weight" in absent
    assert extra.endswith("part.safetensors are not in the model, and are left out: probe.weight")

    checkpoint_tool(["export", str(tmp_path / "own"), str(tmp_path / "again.safetensors")])
    check_state(load_file(tmp_path / "again.safetensors"), state)
    own = find_weights(str(tmp_path / "own" / "step-00000001"), parse_config(NANO).model)
    assert len(own.names) == len(state) - 1


def test_weights_that_are_not_the_models_are_refused_by_name(exported: Path, tmp_path: Path) -> None:
    model, state = parse_config(NANO).model, load_file(exported / "model.safetensors")
    refusals: list[tuple[bool, dict[str, Tensor], str]] = [
        (
            True,
            {name.replace("h.0.", "blocks.0."): tensor for name, tensor in state.items()},
            r"missing: transformer\.h\.0\.norm\.weight \(there is transformer\.blocks\.0\.norm\.weight\), .* "
            r"3 more\. unexpected: transformer\.blocks\.0\..* 3 more\. checkpoint\.init_strict=false takes",
        ),
        (False, {"x": torch.ones(1)}, r"missing: .* unexpected: x$"),
        (False, {**state, BUFFER: torch.ones(3)}, rf"{BUFFER} is float32\[3\], not float32\[32\]$"),
        (False, {**state, BUFFER: torch.ones(32, dtype=torch.int8)}, rf"{BUFFER} is int8\[32\]"),
        (False, {**state, TIED[0]: state[TIED[0]] + 1}, r"differ, but are one tensor .* does not tie them"),
    ]
    for strict, tensors, message in refusals:
        save_file(tensors, tmp_path / "other.safetensors")
        with pytest.raises(CheckpointError, match=message):
            find_weights(str(tmp_path / "other.safetensors"), model, strict=strict)


class Harmful:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_pickle_that_would_run_code_is_refused_in_one_line(data: list[str], tmp_path: Path) -> None:
    torch.save({"model": Harmful(f"touch {tmp_path / 'ran'}")}, tmp_path / "bad.pt")
    start = [f"--checkpoint.init_from={tmp_path / 'bad.pt'}", f"--run.dir={tmp_path / 'run'}"]
    done = run(1, *NANO, *data, "--train.steps=1", *start)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "bad.pt cannot be read (it calls posix.system, and no code in a file is run" in done.stderr
    assert not (tmp_path / "ran").exists()
    files: dict[str, Any] = {"list": [1], "other": {"net": {"a": torch.ones(1)}}}
    for name, content in files.items():
        torch.save(content, tmp_path / f"{name}.pt")
        with pytest.raises(
            CheckpointError, match=r"no tensors, alone or under model or state_dict, but (list|net)"
        ):
            find_weights(str(tmp_path / f"{name}.pt"), parse_config(NANO).model)
