"""A model that is exported after its data has been deleted is whole, and the same in transformers 4 and 5."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.tools.checkpoint.__main__ import main as convert
from tests.support.factories import RUN
from tests.support.hf_models import make_hf, save_hf
from tests.support.launch import EAGER, run
from tests.support.texts import train_bpe

WORKER = Path(__file__).parents[1] / "support" / "workers" / "loaded_by_transformers.py"
OLDER = "transformers==4.57.*"
LIMIT_S = 900
FACTORY = "--model.factory=meshwright.models.from_transformers:causal_lm"
VOCABULARY = 601  # of a BPE of 600 ids; no tp degree divides it
# a model's folder to start from, or None; keys; processes
MODELS: dict[str, tuple[bool, list[str], int]] = {
    "bytes": (False, [], 1),
    "llama": (False, ["--model.vocab_size=640", "--data.source=STORE"], 1),
    "llama, padded": (
        True,
        ["--model.vocab_size=640", "--data.source=STORE", "--parallel.tp=2", "--checkpoint.init_from=FOLDER"],
        2,
    ),
    "qwen3": (
        True,
        [
            FACTORY,
            *("--model.args.folder=FOLDER", "--model.args.vocab_size=602", "--parallel.tp=2"),
            *("--data.source=STORE", "--checkpoint.init_from=FOLDER"),
        ],
        2,
    ),
    "gpt2": (
        True,
        [FACTORY, "--model.args.folder=FOLDER", "--data.source=STORE", "--checkpoint.init_from=FOLDER"],
        1,
    ),
}


def save_model(kind: str, folder: Path) -> Path:
    """Save a small model of a kind of `MODELS` with transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
    torch.manual_seed(0)
    if kind.startswith("llama"):
        return save_hf(folder, make_hf(vocab_size=VOCABULARY, rope="llama3"))
    if kind == "gpt2":
        return save_hf(
            folder,
            GPT2LMHeadModel(
                GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=96, vocab_size=VOCABULARY)
            ),
        )
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(
        **shape, head_dim=8, intermediate_size=48, vocab_size=VOCABULARY, max_position_embeddings=128,
        rope_parameters=yarn, eos_token_id=7, tie_word_embeddings=True,
    )  # fmt: skip
    model = save_hf(folder, Qwen3ForCausalLM(config))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "top_k": 20}))
    return model


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models trained for two steps and exported, after their data has been deleted."""
    root = tmp_path_factory.mktemp("exports")
    (root / "text").mkdir()
    for number in range(20):
        (root / "text" / f"{number}.txt").write_text(f"the cat {number} sat on the mat. " * 40)
    tokenizer, store = train_bpe(root / "bpe"), root / "store"
    prepared = run(
        1,
        str(root / "text"),
        str(store),
        f"--tokenizer={tokenizer}",
        "--workers=1",
        module="tools.prepare_data",
    )
    assert prepared.returncode == 0, prepared.stderr
    shape = ["--model.dim=32", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2"]
    for kind, (saved, keys, processes) in MODELS.items():
        folder = root / f"start {kind}"
        given = [key.replace("STORE", str(store)).replace("FOLDER", str(folder)) for key in keys]
        if saved:
            save_model(kind, folder)
        if kind == "llama, padded":
            convert(["import", str(folder), str(root / "imported")])
            given = [f"--config={root / 'imported' / 'config.yaml'}", *given]
        elif FACTORY not in keys:
            given = [*shape, "--model.ffn_dim=64", *given]
        done = run(
            processes,
            *[
                *given,
                *RUN,
                *EAGER,
                "--train.steps=2",
                "--checkpoint.every=-1",
                "--parallel.param_dtype=float32",
            ],
            f"--run.dir={root / f'run {kind}'}",
            *([] if "STORE" in " ".join(keys) else [f"--data.source={root / 'text'}"]),
        )
        assert done.returncode == 0, (kind, done.stderr)
    for folder in (store, root / "bpe", root / "text", *root.glob("start *"), root / "imported"):
        shutil.rmtree(folder)
    for kind in MODELS:
        convert(["export", str(root / f"run {kind}"), str(root / f"hf {kind}")])
    return {kind: root / f"hf {kind}" for kind in MODELS}


def look(exports: dict[str, Path], *first: Path) -> dict[str, Any]:
    """What the transformers in the first of the folders, or here, makes of the exports."""
    arguments = [
        part for kind, folder in exports.items() for part in (str(folder), "256" if kind == "bytes" else "1")
    ]
    done = subprocess.run(
        [sys.executable, str(WORKER), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, first)), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_exports_are_whole_and_the_same_in_transformers_4_and_5(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path / "older"), OLDER]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=LIMIT_S)
    if installed.returncode:
        pytest.skip(f"{OLDER} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    newer, older = look(exports), look(exports, tmp_path / "older")
    assert (newer["version"].split(".")[0], older["version"].split(".")[0]) == ("5", "4")
    assert older["seen"] == newer["seen"]
    for kind, folder in exports.items():
        seen, config = newer["seen"][str(folder)], json.loads((folder / "config.json").read_text())
        assert seen["text"] == "the cat é sat", kind
        assert (seen["added"], seen["use_cache"], seen["strange"]) == (4, True, []), kind
        assert seen["special"][1] == ("<|endoftext|>" if kind == "bytes" else "</s>")
        assert (seen["ids"][0] == 0) is (kind != "bytes"), "its post-processor adds BOS"
        assert seen["bos"] == (256 if kind == "bytes" else 0)
        assert seen["shape"][-1] == {"bytes": 264, "llama": 640}.get(kind, VOCABULARY), "the padding is cut"
        assert str(folder.parent) not in json.dumps(config), kind
        assert config.get("rope_theta") == config.get("rope_parameters", {}).get("rope_theta"), kind
    qwen3 = json.loads((exports["qwen3"] / "generation_config.json").read_text())
    assert (qwen3["eos_token_id"], qwen3["top_k"]) == ([7, 8, 1], 20), "merged with what was imported"
