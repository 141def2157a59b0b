"""tools.checkpoint: import and export are bitwise the same, transformers loads the export, and no partial
folder is left."""

import dataclasses
import json
import re
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from meshwright.models.hf import config_from_hf
from meshwright.tools.checkpoint.__main__ import main
from meshwright.tools.checkpoint.convert import checkpoint_config, write_files
from meshwright.tools.generate import load_model
from meshwright.train.checkpoint.commit import find_newest
from meshwright.train.checkpoint.huggingface import make_export
from meshwright.train.checkpoint.initial_weights import find_weights
from meshwright.train.checkpoint.manifest import (
    MANIFEST,
    Origin,
    SavedTensor,
    TrainPosition,
    beside_weights,
    hash_file,
    manifest_to_text,
    read_manifest,
)
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.config import Config
from meshwright.train.config_parser import parse_config
from meshwright.train.data.tokenizer import ByteTokenizer, TokenizerInfo, load_tokenizer
from meshwright.train.errors import CheckpointError
from tests.support.checkpoint_saves import saved_weights
from tests.support.hf_models import make_hf, make_tokens, save_hf
from tests.support.launch import run as launch

Tool = Callable[..., CompletedProcess[str]]
SMALL_FILES = "--shard_gb=0.00004"  # 40 kB: about ten files


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def load_hf(folder: Path) -> Any:
    """Load a folder with transformers, without missing or unexpected weights."""
    from transformers import AutoModelForCausalLM  # takes seconds

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {key: list(found) for key, found in info.items() if found} == {}
    return model.eval()


def check_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("hf") / "model", make_hf(rope="llama3"))


@pytest.mark.parametrize(
    ("tied", "ratio", "rope", "head_dim", "dtype", "sharded"),
    [
        (False, 1, "linear", 12, torch.float32, False),
        (True, 4, "llama3", 8, torch.float32, True),
        (True, 2, "linear", 8, torch.bfloat16, True),
    ],
)
def test_the_checkpoint_is_the_model_of_its_source_and_the_export_is_its_source_bitwise(
    tied: bool, ratio: int, rope: str, head_dim: int, dtype: torch.dtype, sharded: bool, tmp_path: Path
) -> None:
    """Compare logits and greedy text; with tied embeddings tools.generate uses the tied weight as
    head.output."""
    files = [SMALL_FILES] * sharded
    hf = make_hf(2, tied, ratio, rope, head_dim)
    source = save_hf(tmp_path / "hf", hf, dtype, "10KB" if sharded else "5GB")
    assert (len(list(source.glob("*.safetensors"))) > 3) is sharded
    main(["import", str(source), str(tmp_path / "ours"), *files])
    assert (len(list((tmp_path / "ours").glob("rank-*.safetensors"))) > 1) is sharded
    main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), *files])
    check_same(read_all(tmp_path / "back"), read_all(source))
    assert (tmp_path / "back" / "model.safetensors.index.json").exists() is sharded
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")]
    assert config_from_hf(configs[0]) == config_from_hf(configs[1])
    assert configs[0]["dtype"] == configs[1]["dtype"]
    back, tokens = load_hf(tmp_path / "back").float(), make_tokens(batch=2, seq_len=40)
    model = load_model(tmp_path / "ours", checkpoint_config(tmp_path / "ours").job, torch.device("cpu"))
    with torch.no_grad():
        theirs = load_hf(source).float()(tokens).logits
        assert torch.equal(back(tokens).logits, theirs)
        assert (model(tokens) - theirs).abs().max() < 1e-4
        ours = tokens[:, :8]
        for _ in range(20):
            ours = torch.cat([ours, model(ours)[:, -1:].argmax(-1)], 1)
        text = back.generate(tokens[:, :8], max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(ours, text)


def test_the_import_is_a_checkpoint_like_any_other(hf_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours"
    main(["import", str(hf_dir), str(out)])
    assert verify_alone(out).position == TrainPosition()
    assert find_newest(out) == out
    config = parse_config([f"--config={out / 'config.yaml'}"])
    assert config.model == config_from_hf(json.loads((hf_dir / "config.json").read_text()))
    assert config.train.seq_len == config.model.max_seq_len == 96, "the default would not fit"
    assert config.checkpoint.every > 0, "its config saves on the way, although the default is only at the end"
    weights = saved_weights(out)
    whole = tmp_path / "whole.safetensors"
    main(["export", str(out), str(whole)])
    check_same(load_file(whole), weights)
    assert len(list((out).glob(".*"))) == len(list(tmp_path.glob(".*"))) == 0


def test_a_run_is_exported_as_its_newest_checkpoint(run: Path, tmp_path: Path) -> None:
    """A run of one process with tied embeddings, and a run of two processes with shards of different
    sizes."""
    main(["export", str(run), str(tmp_path / "hf"), SMALL_FILES])
    config, weights = checkpoint_config(find_newest(run)), saved_weights(find_newest(run))
    ours, theirs = load_model(find_newest(run), config.job, torch.device("cpu")), load_hf(tmp_path / "hf")
    tokens = make_tokens(config.model.vocab_size, 2, 32)
    assert len(read_all(tmp_path / "hf")) == len(weights)
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (256, 256), "of the bytes"
    tokenizer, text = load_tokenizer(str(tmp_path / "hf")), bytes(range(1, 128)) + "é漢😀".encode()
    assert (tokenizer.info.bos, tokenizer.info.eos) == (None, 256)
    assert tokenizer.encode([text])[0].tolist() == ByteTokenizer().encode([text])[0].tolist()
    assert tokenizer.decode([*text, 256]) == text.decode()
    with pytest.raises(CheckpointError, match=r"run, which needs no import: .* tools.checkpoint export"):
        main(["import", str(run), str(tmp_path / "no")])


def test_another_dtype_is_the_rounded_weights(hf_dir: Path, tmp_path: Path) -> None:
    main(["import", str(hf_dir), str(tmp_path / "ours")])
    for dtype in ("bfloat16", "float16"):
        back = tmp_path / dtype
        main(["export", str(tmp_path / "ours"), str(back), f"--dtype={dtype}"])
        check_same(read_all(back), {n: t.to(getattr(torch, dtype)) for n, t in read_all(hf_dir).items()})
        assert json.loads((back / "config.json").read_text())["dtype"] == dtype


def test_a_value_too_large_for_float16_is_refused(hf_dir: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(hf_dir, tmp_path / "hf")
    tensors = read_all(changed)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = 1e6
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    main(["import", str(changed), str(tmp_path / "ours")])
    with pytest.raises(
        CheckpointError, match=r"layers.1.mlp.up_proj.weight has values beyond 65504.*bfloat16"
    ):
        main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--dtype=float16"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


def test_tokenizer_and_special_ids_go_along(hf_dir: Path, tmp_path: Path) -> None:
    source = shutil.copytree(hf_dir, tmp_path / "hf")
    (source / "generation_config.json").unlink()
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "tokenizer_config.json").write_text('{"b": 2}')
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "bos_token_id": 5, "eos_token_id": [6, 7]}))
    main(["import", str(source), str(tmp_path / "ours")])
    assert yaml.safe_load((tmp_path / "ours" / "config.yaml").read_text())["data"] == {
        "tokenizer": str(tmp_path / "ours")
    }
    main(["export", str(tmp_path / "ours"), str(tmp_path / "back")])
    for folder in (tmp_path / "ours", tmp_path / "back"):
        assert (folder / "tokenizer.json").read_text() == '{"a": 1}'
        assert (folder / "tokenizer_config.json").read_text() == '{"b": 2}'
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (5, [6, 7], None)
    # a run trained from it has these files only in the folder of its data.tokenizer
    trained = shutil.copytree(tmp_path / "ours", tmp_path / "trained")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (trained / name).unlink()
    commit_again(trained)
    main(["export", str(trained), str(tmp_path / "again")])
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == written
    assert (tmp_path / "again" / "tokenizer.json").exists()


@pytest.mark.parametrize(("ids", "rows"), [(200, 250), (252, 252)])
def test_the_padding_of_a_vocabulary_is_cut_but_for_rows_of_the_runs_tokens(
    hf_dir: Path, tmp_path: Path, ids: int, rows: int
) -> None:
    main(["import", str(hf_dir), str(tmp_path / "ours")])
    tokenizer = {"name": "bytes", "sha256": "", "vocab_size": ids, "bos": None, "eos": 1}
    padded = {"tok_embeddings.weight": 250, "head.output.weight": 250}
    (tmp_path / "ours" / "origin.json").write_text(json.dumps({"tokenizer": tokenizer, "padded": padded}))
    with pytest.raises(CheckpointError, match=r"origin.json is not a file that the manifest names"):
        main(["export", str(tmp_path / "ours"), str(tmp_path / "back")])
    commit_again(tmp_path / "ours")
    main(["export", str(tmp_path / "ours"), str(tmp_path / "back")])
    expected = read_all(hf_dir)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        expected[name] = expected[name][:rows]
    check_same(read_all(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == rows


GENERATIONS: list[tuple[dict[str, Any], int | None, dict[str, Any]]] = [
    ({}, 3, {"bos_token_id": 3, "eos_token_id": 4}),
    ({}, None, {"bos_token_id": 4, "eos_token_id": 4}),
    ({"eos_token_id": 4, "bos_token_id": 9}, 3, {"bos_token_id": 3, "eos_token_id": 4}),
    ({"eos_token_id": [7, 4], "top_k": 20}, None, {"bos_token_id": 4, "eos_token_id": [7, 4], "top_k": 20}),
    (
        {"eos_token_id": 7, "bos_token_id": 9, "pad_token_id": 0},
        None,
        {"bos_token_id": 9, "eos_token_id": [7, 4], "pad_token_id": 0},
    ),
    (
        {"eos_token_id": 50256, "bos_token_id": 50256, "pad_token_id": 50256},
        None,
        {"bos_token_id": 4, "eos_token_id": 4},
    ),
]


@pytest.mark.parametrize(("imported", "bos", "expected"), GENERATIONS)
def test_generation_ends_at_the_separator_too(
    imported: dict[str, Any], bos: int | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    origin = Origin(TokenizerInfo("small", "0" * 64, 8, bos, 4))
    for name, content in beside_weights(origin, None, []).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "generation_config.json").write_text(json.dumps(imported))
    made = make_export({"vocab_size": 12, "eos_token_id": 2}, tmp_path, None)
    assert json.loads(made["generation_config.json"]) == expected
    config = json.loads(made["config.json"])
    assert {key: config.get(key) for key in expected if key != "top_k"} == {
        key: value for key, value in expected.items() if key != "top_k"
    }


def test_old_tables_and_equal_copies_are_left_out(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "hf", make_hf(tied=True))
    tensors = read_all(source)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**tensors, **extra}, source / "model.safetensors", metadata={"format": "pt"})
    main(["import", str(source), str(tmp_path / "ours")])
    main(["export", str(tmp_path / "ours"), str(tmp_path / "back")])
    check_same(read_all(tmp_path / "back"), tensors)


def test_files_are_as_few_as_the_limit_allows_and_written_one_after_another(tmp_path: Path) -> None:
    sizes, written = {"a": 400, "b": 400, "c": 900, "d": 400, "e": 400, "f": 400}, list[int]()
    tensors = {name: SavedTensor((size // 4,), "float32") for name, size in sizes.items()}

    def read(name: str) -> torch.Tensor:
        written.append(len(list(tmp_path.iterdir())))
        return torch.full((sizes[name] // 4,), float(ord(name)))

    write_files(tmp_path, tensors, read, 800)
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 3, "f": 4}
    assert places == {name: f"model-0000{number}-of-00004.safetensors" for name, number in files.items()}
    assert written == [1, 1, 2, 3, 3, 4], "a file is written before the next one's tensors are read"
    assert {name: tensor[0].item() for name, tensor in read_all(tmp_path).items()} == {
        n: ord(n) for n in sizes
    }


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see a process's memory")
def test_memory_is_bounded_by_a_file(tmp_path: Path) -> None:
    """Import and export a model of 88 MB in files of 10 MB: the process never grows by half of it."""
    source = save_hf(
        tmp_path / "hf", make_hf(head_dim=128, intermediate_size=4096, num_hidden_layers=3, ratio=1)
    )
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert size > 85e6
    for command in (
        ["import", str(source), str(tmp_path / "ours")],
        ["export", str(tmp_path / "ours"), str(tmp_path / "back")],
    ):
        done = launch(1, *command, "--shard_gb=0.01", module="tests.support.workers.measured_convert")
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.split()[-1]) < size / 2
    check_same(read_all(tmp_path / "back"), read_all(source))


def commit_again(checkpoint: Path) -> None:
    """Write the manifest that a changed checkpoint would have if it had been saved like this."""
    files = {path.name: hash_file(path) for path in sorted(checkpoint.iterdir()) if path.name != MANIFEST}
    (checkpoint / MANIFEST).write_text(
        manifest_to_text(dataclasses.replace(read_manifest(checkpoint), files=files))
    )


def test_what_is_there_is_kept_unless_forced(hf_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    main(["import", str(hf_dir), str(out)])  # an existing empty folder is accepted
    (out / "mine").write_text("x")
    with pytest.raises(CheckpointError, match=r"out is not empty: .*--force"):
        main(["import", str(hf_dir), str(out)])
    assert (out / "mine").exists()
    main(["import", str(hf_dir), str(out), "--force"])
    assert not (out / "mine").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for inside in (hf_dir, hf_dir.parent):
        with pytest.raises(
            CheckpointError, match=rf"{inside} is or contains the source {hf_dir}: .*another folder"
        ):
            main(["import", str(hf_dir), str(inside), "--force"])
    assert (hf_dir / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"manifest\.json is a file"):
        main(["import", str(hf_dir), str(out / "manifest.json"), "--force"])


def test_a_failure_leaves_what_was_there(hf_dir: Path, tmp_path: Path) -> None:
    """A tensor that cannot be read."""
    main(["import", str(hf_dir), str(tmp_path / "ours"), SMALL_FILES])
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "mine").write_text("x")
    first = sorted((tmp_path / "ours").glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"ours is damaged: rank-.*bytes"):
        main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--force"])
    assert (tmp_path / "back" / "mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "ours"]


def test_a_full_disk_leaves_nothing_behind(hf_dir: Path, tmp_path: Path) -> None:
    """A limit on the file size simulates it: writing fails in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"^cannot write \S+/ours \([^/]*\): use"):
            main(["import", str(hf_dir), str(tmp_path / "ours")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_as_a_command(tool: Tool, hf_dir: Path, tmp_path: Path) -> None:
    done = tool("checkpoint", "import", str(hf_dir), str(tmp_path / "ours"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    written = json.loads(done.stdout)
    assert written["elements"] == sum(tensor.numel() for tensor in read_all(hf_dir).values())
    assert (written["dtype"], written["files"]) == ("float32", 1)
    assert "config.yaml" in written["beside"]
    done = tool("checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "back"))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{written['elements']:,} elements, float32" in done.stdout
    with pytest.raises(CheckpointError, match="is a Hugging Face folder, not a checkpoint"):
        main(["export", str(hf_dir), str(tmp_path / "no")])
    wrong = json.loads((hf_dir / "config.json").read_text()) | {"model_type": "qwen2", "attention_bias": True}
    other = shutil.copytree(hf_dir, tmp_path / "qwen")
    (other / "config.json").write_text(json.dumps(wrong))
    done = tool("checkpoint", "import", str(other), str(tmp_path / "no"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "model_type=qwen2 (only llama); attention_bias=True" in done.stderr


def test_a_config_that_cannot_be_is_refused_before_a_block_is_built(hf_dir: Path, tmp_path: Path) -> None:
    """A billion blocks would take hours."""
    ours = config_from_hf(json.loads((hf_dir / "config.json").read_text()))
    source = shutil.copytree(hf_dir, tmp_path / "hf")
    for key, value, message in (
        ("num_hidden_layers", "10000000", "num_hidden_layers=10,000,000, but the files contain 21 tensors"),
        (
            "num_hidden_layers",
            "1000000000",
            "num_hidden_layers=1000000000 (only an integer from 1 to 16,777,216)",
        ),
        ("tie_word_embeddings", '"false"', "tie_word_embeddings='false' (only true or false)"),
        ("deep", "[" * 10**5 + "]" * 10**5, "cannot be read (nested too deeply)"),
    ):
        config = json.loads((hf_dir / "config.json").read_text()) | {key: None}
        (source / "config.json").write_text(json.dumps(config).replace(f'"{key}": null', f'"{key}": {value}'))
        with pytest.raises(CheckpointError, match=re.escape(message)):
            main(["import", str(source), str(tmp_path / "ours")])
        with pytest.raises(CheckpointError, match=re.escape(message)):
            find_weights(str(source), ours)
    assert not (tmp_path / "ours").exists()


def test_a_name_that_no_folder_can_have_is_refused(hf_dir: Path) -> None:
    for source, out, message in (
        ("~nosuchuser/x", "out", "HF_DIR='~nosuchuser/x' is no usable path"),
        ("", "out", "HF_DIR is empty"),
        (str(hf_dir), "o" * 5000, r"OUT='o{80}\.\.\. \(5,000 letters\)' is no usable path .*too long"),
    ):
        with pytest.raises(CheckpointError, match=message):
            main(["import", source, out])
    with pytest.raises(CheckpointError, match=r"checkpoint\.init_from='~nosuchuser/x' is no usable path"):
        find_weights("~nosuchuser/x", Config().model)
