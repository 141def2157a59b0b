"""tools/checkpoint/: what they report about checkpoints, and that full weights
are those of the run."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors.torch import load_file

from meshwright.models.llama import Llama
from meshwright.tools.checkpoint.__main__ import main
from meshwright.tools.checkpoint.differences import compare_checkpoints
from meshwright.train.checkpoint.commit import find_newest
from meshwright.train.checkpoint.manifest import hash_file, manifest_to_text, read_manifest
from meshwright.train.checkpoint.reader import load_checkpoint
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.config import CheckpointConfig
from meshwright.train.config_parser import load_config
from meshwright.train.errors import CheckpointError
from tests.support.checkpoint_saves import saved_weights
from tests.support.sharded import sharded_alone

Tool = Callable[..., CompletedProcess[str]]
Output = pytest.CaptureFixture[str]


def test_an_export_to_a_file_has_the_names_of_the_models_state_dict(
    run: Path, tmp_path: Path, capsys: Output
) -> None:
    target = tmp_path / "new" / "folder" / "model.safetensors"
    main(["export", str(run), str(target)])
    assert str(target) in capsys.readouterr().out
    weights = load_file(target)
    model = Llama(load_config(run / "config.yaml").model)
    model.load_state_dict(weights)  # a tied weight by both of its names
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    whole = saved_weights(find_newest(run))
    assert list(whole) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole.items())
    assert [path.name for path in target.parent.iterdir()] == ["model.safetensors"]
    assert target.stat().st_mode & 0o777 == (run / "config.yaml").stat().st_mode & 0o777


def test_a_file_is_overwritten_only_by_force(tied_run: Path, tmp_path: Path) -> None:
    target = tmp_path / "one.safetensors"
    target.write_text("precious")
    with pytest.raises(CheckpointError, match=r"one\.safetensors exists: .* --force"):
        main(["export", str(tied_run), str(target)])
    assert target.read_text() == "precious"
    main(["export", str(tied_run), str(target), "--force"])
    assert "tok_embeddings.weight" in load_file(target)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        main(["export", str(tied_run), str(tmp_path / "file" / "out.safetensors")])
    with pytest.raises(CheckpointError, match="omit --shard_gb"):
        main(["export", str(tied_run), str(target), "--force", "--shard_gb=1"])


def test_a_checkpoint_can_be_named_directly(tied_run: Path) -> None:
    first = tied_run / "checkpoints" / "step-00000001"
    assert find_newest(first) == first
    assert (
        find_newest(tied_run)
        == find_newest(tied_run / "checkpoints")
        == tied_run / "checkpoints" / "step-00000002"
    )
    early, late = saved_weights(first), saved_weights(find_newest(tied_run))
    assert not torch.equal(early["tok_embeddings.weight"], late["tok_embeddings.weight"])


def test_ls_lists_oldest_first(sharded_run: Path, tmp_path: Path, capsys: Output) -> None:
    main(["ls", str(sharded_run), "--json"])
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["samples"], row["processes"]) for row in rows] == [(1, 4, 2), (2, 8, 2)]
    assert all(row["size_bytes"] > 100_000 and row["age_s"] >= 0 for row in rows)
    main(["ls", str(sharded_run / "checkpoints")])
    head, _, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "samples", "processes", "size", "GiB", "age", "path"]
    assert last.startswith("2 ")
    main(["ls", str(tmp_path)])
    assert "no committed checkpoint" in capsys.readouterr().out


def test_ls_shows_the_others_where_one_is_damaged(tied_run: Path, tmp_path: Path, capsys: Output) -> None:
    copy = Path(shutil.copytree(tied_run, tmp_path / "run"))
    manifest = copy / "checkpoints" / "step-00000001" / "manifest.json"
    manifest.write_text('{"step": 1, "sam')
    main(["ls", str(copy), "--json"])
    damaged, whole = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (damaged["step"], damaged["samples"], whole["samples"]) == (1, None, 8)
    assert "manifest.json is damaged" in damaged["problem"]
    manifest.unlink()
    main(["ls", str(copy)])
    assert "step-00000001 is not a checkpoint" in capsys.readouterr().out


def test_show_gives_whole_shapes_and_totals(sharded_run: Path, capsys: Output) -> None:
    main(["show", str(sharded_run), "--json"])
    shown = json.loads(capsys.readouterr().out)
    tensors = {tensor["name"]: tensor for tensor in shown["tensors"]}
    assert tensors["model.head.output.weight"]["shape"] == [265, 32]
    assert tensors["optim.head.output.weight.exp_avg"]["dtype"] == "float32"
    parameters = sum(p.numel() for p in Llama(load_config(sharded_run / "config.yaml").model).parameters())
    assert shown["totals"]["model"]["elements"] == parameters
    assert shown["totals"]["model"]["size_bytes"] == 4 * parameters
    assert shown["position"]["step"] == 2
    main(["show", str(sharded_run)])
    assert "265 x 32" in capsys.readouterr().out


def damaged_copy(run: Path, folder: Path, change: Callable[[Path], object]) -> Path:
    copy = Path(shutil.copytree(find_newest(run), folder / "run" / "checkpoints" / "step-00000002"))
    change(copy)
    return copy


def test_another_models_config_is_noticed(sharded_run: Path, tmp_path: Path) -> None:
    """Even if the manifest was changed to fit it."""

    def change(folder: Path) -> None:
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace("n_layers: 2", "n_layers: 3"))
        manifest = read_manifest(folder)
        files = {**manifest.files, "config.yaml": hash_file(config)}
        (folder / "manifest.json").write_text(manifest_to_text(dataclasses.replace(manifest, files=files)))

    copy = damaged_copy(sharded_run, tmp_path, change)
    message = r"model of its config\.yaml: model\.layers\.2\..* is not in it: use another checkpoint"
    with pytest.raises(CheckpointError, match=message):
        main(["export", str(copy), str(tmp_path / "hf")])


def test_verify_says_what_it_has_read(sharded_run: Path, capsys: Output) -> None:
    main(["verify", str(sharded_run), "--json"])
    verified = json.loads(capsys.readouterr().out)
    paths = [sharded_run / "checkpoints" / name for name in ("step-00000001", "step-00000002")]
    assert verified["verified"] == [str(path) for path in paths]
    assert verified["size_bytes"] == sum(
        f.stat().st_size for path in paths for f in path.iterdir() if f.name != "manifest.json"
    )
    main(["verify", str(paths[1])])
    assert f"{paths[1]}: every byte matches the manifest" in capsys.readouterr().out


def test_diff_tells_what_training_has_changed(sharded_run: Path, tied_run: Path, capsys: Output) -> None:
    first, second = (sharded_run / "checkpoints" / name for name in ("step-00000001", "step-00000002"))
    main(["diff", str(sharded_run), str(second)])
    assert "tensors are equal" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        main(["diff", str(first), str(second), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["position"], found["config"]) == (
        False,
        {"step": [1, 2], "samples": [4, 8]},
        [],
    )
    changed = {tensor["name"]: tensor["largest"] for tensor in found["tensors"]}
    early, late = saved_weights(first), saved_weights(second)
    assert changed["model.head.output.weight"] == pytest.approx(
        (early["head.output.weight"] - late["head.output.weight"]).abs().max().item()
    )
    assert changed["optim.head.output.weight.step"] == 1
    with pytest.raises(SystemExit, match="1"):
        main(["diff", str(sharded_run), str(tied_run)])
    output = capsys.readouterr().out
    assert "+  tie_embeddings: true" in output
    assert "model.head.output.weight" in output
    assert "missing" in output


def test_the_same_tensors_of_another_mesh_are_no_difference(sharded_run: Path, tmp_path: Path) -> None:
    """Read on one process and saved there again: one file instead of two."""
    copy = save_alone(find_newest(sharded_run), tmp_path / "alone")
    assert [path.name for path in copy.glob("*.safetensors")] == ["rank-00000.safetensors"]
    differences = compare_checkpoints(find_newest(sharded_run), copy)
    assert (differences["same"], differences["tensors"], differences["compared"] > 20) == (True, [], True)


def save_alone(checkpoint: Path, folder: Path) -> Path:
    """Return the checkpoint that this process, alone, saves after loading one of several ranks."""
    manifest, texts = verify_alone(checkpoint), {"config.yaml": (checkpoint / "config.yaml").read_text()}
    with sharded_alone([f"--config={checkpoint / 'config.yaml'}"]) as run:
        load_checkpoint(checkpoint, manifest, run.model, run.optimizer, run.mesh)
        saver = CheckpointSaver(
            CheckpointConfig(), folder, run.model, run.optimizer, run.mesh, texts, lambda: 2**30
        )
        saver.save(dataclasses.replace(manifest.position, world_size=1))
        saver.wait()
        (saved,) = saver.poll()
        assert saved.path, saved.error
        return saved.path


def test_verify_and_diff_as_commands(tool: Tool, tied_run: Path, tmp_path: Path) -> None:
    """Scripts rely on the exit codes."""
    copy = damaged_copy(tied_run, tmp_path, lambda folder: os.truncate(folder / "rank-00000.safetensors", 5))
    assert tool("checkpoint", "verify", str(tied_run)).returncode == 0
    done = tool("checkpoint", "verify", str(copy))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    first = tied_run / "checkpoints" / "step-00000001"
    done = tool("checkpoint", "diff", str(first), str(tied_run))
    assert (done.returncode, done.stderr) == (1, "")
