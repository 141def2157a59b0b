"""tools/checkpoint.py and tools/whole_weights.py: what they say of checkpoints, and that whole weights are the run's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from models.llama import Llama
from tools.checkpoint import main
from tools.whole_weights import find_newest, load_whole_weights
from train.checkpoint import CheckpointError
from train.config import load_config

Tool = Callable[..., CompletedProcess[str]]


def test_whole_weights_are_the_shards_put_together(run: Path) -> None:
    checkpoint = find_newest(run)
    whole = load_whole_weights(checkpoint)
    seen: dict[str, int] = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in (key for key in file.keys() if key.startswith("model.")):  # noqa: SIM118 (not a dict)
                shard = file.get_tensor(name)
                place = tuple(slice(o, o + n) for o, n in zip(offsets[name]["saved_offsets"], shard.shape, strict=True))
                name = name.removeprefix("model.")
                assert torch.equal(whole[name][place], shard)
                seen[name] = seen.get(name, 0) + shard.numel()
    assert seen == {name: tensor.numel() for name, tensor in whole.items()}


def test_uneven_shards_are_in_the_fixture(sharded_run: Path) -> None:
    rows = []
    for path in find_newest(sharded_run).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            rows.append(file.get_slice("model.tok_embeddings.weight").get_shape()[0])
    assert sorted(rows) == [132, 133]


def test_consolidate_writes_the_models_own_names(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["consolidate", str(run), str(tmp_path / "new" / "folder")])
    target = tmp_path / "new" / "folder" / "model.safetensors"
    assert str(target) in capsys.readouterr().out
    weights = load_file(target)
    model = Llama(load_config(run / "config.yaml").model)
    assert {n: t.shape for n, t in weights.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    whole = load_whole_weights(find_newest(run))
    assert list(whole) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole.items())
    assert [path.name for path in target.parent.iterdir()] == ["model.safetensors"]
    assert target.stat().st_mode & 0o777 == (run / "config.yaml").stat().st_mode & 0o777


def test_consolidate_overwrites_only_by_force(tied_run: Path, tmp_path: Path) -> None:
    target = tmp_path / "one.safetensors"
    target.write_text("precious")
    with pytest.raises(CheckpointError, match=r"one\.safetensors exists: .* --force"):
        main(["consolidate", str(tied_run), str(target)])
    assert target.read_text() == "precious"
    main(["consolidate", str(tied_run), str(target), "--force"])
    assert "tok_embeddings.weight" in load_file(target)


def test_consolidate_says_where_it_cannot_write(tied_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        main(["consolidate", str(tied_run), str(tmp_path / "file" / "out")])


def test_a_checkpoint_can_be_named_directly(tied_run: Path) -> None:
    first = tied_run / "checkpoints" / "step-00000001"
    assert find_newest(first) == first
    assert find_newest(tied_run) == find_newest(tied_run / "checkpoints") == tied_run / "checkpoints" / "step-00000002"
    early, late = load_whole_weights(first), load_whole_weights(find_newest(tied_run))
    assert not torch.equal(early["tok_embeddings.weight"], late["tok_embeddings.weight"])


def test_ls_lists_oldest_first(sharded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls", str(sharded_run), "--json"])
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["samples"], row["processes"]) for row in rows] == [(1, 4, 2), (2, 8, 2)]
    assert all(row["size_bytes"] > 100_000 and 0 <= row["age_s"] < 600 for row in rows)
    main(["ls", str(sharded_run / "checkpoints")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "samples", "processes", "size", "GiB", "age", "path"]
    assert lines[2].startswith("2 ")


def test_ls_shows_the_others_where_one_is_damaged(tied_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(tied_run, tmp_path / "run"))
    (copy / "checkpoints" / "step-00000001" / "state.json").write_text('{"step": 1, "sam')
    main(["ls", str(copy), "--json"])
    damaged, whole = json.loads(capsys.readouterr().out)["checkpoints"]
    assert damaged["step"] == 1
    assert damaged["samples"] is None
    assert "state.json cannot be read" in damaged["problem"]
    assert whole["samples"] == 8


def test_ls_of_a_run_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls", str(tmp_path)])
    assert "no complete checkpoint" in capsys.readouterr().out


def test_show_gives_whole_shapes_and_totals(sharded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("shard", ["shard-00001", "shard-00002"])
def test_a_lost_shard_is_noticed(sharded_run: Path, tmp_path: Path, shard: str) -> None:
    copy = Path(shutil.copytree(find_newest(sharded_run), tmp_path / "step-00000002"))
    next(copy.glob(f"{shard}*")).unlink()
    with pytest.raises(CheckpointError, match="is not whole"):
        load_whole_weights(copy)


def test_a_cut_shard_is_noticed(sharded_run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(find_newest(sharded_run), tmp_path / "step-00000002"))
    path = next(copy.glob("shard-00002*"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_whole_weights(copy)


def test_another_models_config_is_noticed(sharded_run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(find_newest(sharded_run), tmp_path / "step-00000002"))
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("n_layers: 2", "n_layers: 3"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\."):
        load_whole_weights(copy)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.yaml"):
        load_whole_weights(copy)


def test_help_names_everything(tool: Tool) -> None:
    done = tool("checkpoint", "-h")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("ls", "show", "consolidate", "--json", "--force", "RUN_OR_CHECKPOINTS_DIR", "CHECKPOINT", "OUT"):
        assert word in done.stdout


def test_a_bad_path_is_one_line(tool: Tool, tmp_path: Path) -> None:
    done = tool("checkpoint", "consolidate", str(tmp_path), str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("CheckpointError: ")
    with pytest.raises(CheckpointError, match="no such folder"):
        main(["ls", str(tmp_path / "nothing")])
