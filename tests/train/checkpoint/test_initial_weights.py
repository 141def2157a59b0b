"""checkpoint.init_from: a run starts from the weights of a Hugging Face folder or a checkpoint, and refuses
weights of another model."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.models.config import LlamaConfig, RopeScaling
from meshwright.models.hf import config_from_hf
from meshwright.tools.checkpoint.__main__ import main as convert
from meshwright.train.checkpoint.changes import refuse_other_model
from meshwright.train.checkpoint.huggingface import INDEX
from meshwright.train.checkpoint.initial_weights import find_weights
from meshwright.train.checkpoint.resume import Start, choose_weights, describe_start
from meshwright.train.config import CheckpointConfig
from meshwright.train.errors import CheckpointError, ConfigError
from tests.support.hf_models import make_hf, save_hf
from tests.support.launch import EAGER, read_metrics, run, write_text
from tests.support.tables import try_each

BATCH = [*EAGER, "--train.micro_batch_size=2", "--train.global_batch_size=4", "--metrics.every=1"]


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("hf") / "model", make_hf(tied=True, vocab_size=264))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in several files."""
    return save_hf(
        tmp_path_factory.mktemp("hf") / "sharded", make_hf(tied=True, vocab_size=264), shard_size="20KB"
    )


@pytest.fixture(scope="module")
def ours(hf_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as one of our checkpoints."""
    folder = tmp_path_factory.mktemp("ours") / "imported"
    convert(["import", str(hf_dir), str(folder)])
    return folder


def config_of(folder: Path) -> LlamaConfig:
    return config_from_hf(json.loads((folder / "config.json").read_text()))


@pytest.mark.sampled(3, day=0)
def test_runs_start_from_hugging_face_and_from_the_checkpoint_of_another_run(
    hf_dir: Path, ours: Path, tmp_path: Path
) -> None:
    """Two processes train the weights; then one process starts from their checkpoint."""
    common = [f"--config={ours / 'config.yaml'}", *write_text(tmp_path), *BATCH, "--train.eval_every=2"]
    common += ["--train.seq_len=32", "--model.max_seq_len=48"]  # fewer positions than the source has
    first = [f"--run.dir={tmp_path / 'run'}", f"--checkpoint.init_from={hf_dir}", "--checkpoint.every=2"]
    done = run(2, *common, *first, "--train.steps=2")
    assert done.returncode == 0, done.stderr
    assert f"weights: from {hf_dir}, with a new optimizer at step 0" in done.stdout
    losses = {step: row["eval_loss"] for step, row in read_metrics(tmp_path / "run").items() if step != 1}
    assert abs(losses[2] - losses[0]) > 1e-3
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    second = [f"--run.dir={tmp_path / 'other'}", f"--checkpoint.init_from={saved}", "--train.steps=1"]
    done = run(1, *common, *second)
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "other")[0]["eval_loss"] == pytest.approx(losses[2], abs=1e-5)


def test_without_it_or_with_a_run_to_resume_nothing_is_read(tmp_path: Path) -> None:
    assert choose_weights(CheckpointConfig(), LlamaConfig(), Start()) is None
    asked = CheckpointConfig(init_from=str(tmp_path / "nothing"))
    assert choose_weights(asked, LlamaConfig(), Start(tmp_path)) is None
    assert describe_start(None, None) == []
    (line,) = describe_start("x", tmp_path)
    assert f"is not read, because the run resumes from {tmp_path}" in line


def test_a_larger_vocabulary_is_padded(tmp_path: Path) -> None:
    """That of a Hugging Face folder and of a checkpoint; but for the resume of a run it is another model."""
    folder = save_hf(tmp_path / "hf", make_hf(vocab_size=263))
    convert(["import", str(folder), str(tmp_path / "ours")])
    model = dataclasses.replace(
        config_from_hf(json.loads((folder / "config.json").read_text())), vocab_size=384
    )
    for source, names in (
        (folder, ("model.embed_tokens.weight", "lm_head.weight")),
        (tmp_path / "ours", ("model.tok_embeddings.weight", "model.head.output.weight")),
    ):
        weights = find_weights(str(source), model)
        assert weights is not None
        assert weights.padded == dict.fromkeys(names, 263)
    with pytest.raises(ConfigError, match=r"vocab_size=384 \(saved: 263\)"):
        refuse_other_model("x", folder, [("model.vocab_size", 263, 384)], "", False, pads=False)


OTHER_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"n_layers": 3, "norm_eps": 1e-6}, r"model.n_layers=3 .*2\); model.norm_eps=1e-06 .*1e-05\)"),
    ({"vocab_size": 256}, r"model.vocab_size=256 .*264\)"),
    ({"tie_embeddings": False}, r"model.tie_embeddings=False .*True\)"),
    ({"rope_scaling": RopeScaling("linear", 2.0)}, r"model.rope_scaling.kind=linear .*None\)"),
    ({"max_seq_len": 97}, r"model.max_seq_len=97 .*96\)"),
]


def test_another_model_is_refused_key_by_key(hf_dir: Path, ours: Path) -> None:
    def refused(change: dict[str, Any], message: str) -> None:
        model = dataclasses.replace(config_of(hf_dir), **change)
        with pytest.raises(ConfigError, match=message + r"[;.] .*`python -m .* import .* --config"):
            find_weights(str(hf_dir), model)
        with pytest.raises(ConfigError, match=message + r".*Use the model section of .*/config\.yaml"):
            find_weights(str(ours), model)

    try_each(OTHER_MODELS, refused)


def test_two_tensors_of_a_checkpoint_are_not_one_of_the_model(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", make_hf(tied=False, vocab_size=264))
    convert(["import", str(folder), str(tmp_path / "untied")])
    tied = dataclasses.replace(config_of(folder), tie_embeddings=True)
    with pytest.raises(CheckpointError, match=r"head.output.weight and .* are one tensor of the model"):
        find_weights(str(tmp_path / "untied"), tied, changed_model=True)


Tensors = dict[str, torch.Tensor]
BAD_TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (
        lambda t: [t.pop(name) for name in list(t) if "layers.1." in name],
        r"missing: model.layers.1.input_layernorm.weight, .* and 6 more",
    ),
    "unexpected": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(4)}),
        r"unexpected: model.layers.0.self_attn.q_proj.bias",
    ),
    "another shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(31)}),
        r"model.norm.weight is float32\[31\], not float32\[32\]",
    ),
    "a dtype": (
        lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.float8_e4m3fn)}),
        r"dtype that is not converted: model.norm.weight is float8_e4m3fn\[32\], not float32",
    ),
    "copies that differ": (
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        "lm_head.weight and model.embed_tokens.weight differ, .*tie_word_embeddings=false",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors_that_are_not_the_configs_are_refused(
    spoil: Callable[[Tensors], object], message: str, hf_dir: Path, tmp_path: Path
) -> None:
    tensors = load_file(hf_dir / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(hf_dir / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=message):
        find_weights(str(tmp_path), config_of(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        convert(["import", str(tmp_path), str(tmp_path / "ours")])
    assert not (tmp_path / "ours").exists()


def unpickled(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"x")
    for file in folder.glob("model*"):
        file.unlink()


def cut_short(folder: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def point_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../other/model.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), r"config.json cannot be read \(not a mapping"),
    "pickle": (unpickled, r"only pytorch_model\.bin, .*by its name.*save_pretrained"),
    "nothing": (lambda f: [file.unlink() for file in f.glob("model*")], "no weights.*save_pretrained"),
    "a file is gone": (
        lambda f: min(f.glob("*.safetensors")).unlink(),
        r"lacks model-00001-of-\d+\.safetensors, which its",
    ),
    "cut short": (cut_short, r"model-00001-of-\d+\.safetensors cannot be read"),
    "outside": (
        point_outside,
        r"index\.json .*\.\./other/model\.safetensors, which is not a safetensors file in this folder",
    ),
    "empty index": (lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
    "twice": (
        lambda f: shutil.copy(max(f.glob("*.safetensors")), min(f.glob("*.safetensors"))),
        "is in .* and in model-0",
    ),
    "another family": (
        lambda f: (f / "config.json").write_text('{"model_type": "mistral"}'),
        "model_type=mistral .only llama",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_a_folder_that_cannot_be_used_is_refused(
    spoil: Callable[[Path], object], message: str, hf_dir: Path, sharded: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(sharded, tmp_path / "hf")
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        find_weights(str(folder), config_of(hf_dir))


def test_files_that_the_index_does_not_name_are_left_alone(
    hf_dir: Path, sharded: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(sharded, tmp_path / "hf")
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "consolidated.safetensors")
    weights = find_weights(str(folder), config_of(hf_dir))
    assert weights.tensors
    files = {tensor.file for tensor in weights.tensors.values()}
    assert len(files) > 3
    assert folder / "consolidated.safetensors" not in files


def test_a_run_in_place_of_its_checkpoint_is_answered_with_its_newest(
    hf_dir: Path, ours: Path, tmp_path: Path
) -> None:
    shutil.copytree(ours, tmp_path / "run" / "checkpoints" / "step-00000003")
    with pytest.raises(CheckpointError, match=r"name one, such as .*/step-00000003"):
        find_weights(str(tmp_path / "run"), config_of(hf_dir))
