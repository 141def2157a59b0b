"""Runs on prepared data: the same sequences on every mesh, also after a kill; mixtures; validation sets;
document masks."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from meshwright.train.config_parser import load_config
from meshwright.train.data.prepare.prepare import prepare as prepare_store
from meshwright.train.data.prepare.worker import PrepareSettings
from meshwright.train.data.token_store import MANIFEST
from meshwright.train.metrics.tensorboard import tag_of
from tests.support.launch import EAGER, TINY, read_metrics, read_status, run
from tests.support.run_faults import started, wait_for_commit
from tests.support.stores import load_corpus
from tests.support.texts import train_bpe

STEPS = 2
QUIET = "--metrics.tensorboard=false"


def write_jsonl(path: Path, word: str, count: int) -> Path:
    rng = np.random.default_rng(len(word))
    lines = (
        {"text": " ".join(f"{word} {n}" for n in rng.integers(0, 50, rng.integers(1, 40)))}
        for _ in range(count)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Path]:
    """Two prepared sources with one tokenizer, and raw text for a validation set."""
    folder = tmp_path_factory.mktemp("stores")
    tokenizer = train_bpe(folder / "bpe")
    for name in ("web", "code"):
        source = write_jsonl(folder / f"{name}.jsonl", name, 120)
        settings = PrepareSettings(held_out=0.1, workers=1)
        prepare_store(str(source), str(tokenizer), "auto", "auto", folder / name, settings)
    wiki = write_jsonl(folder / "wiki.jsonl", "wiki", 8)
    return {"web": folder / "web", "code": folder / "code", "wiki": wiki, "tokenizer": tokenizer}


def arguments(folder: Path, *more: str) -> list[str]:
    return [*TINY, "--model.vocab_size=640", *EAGER, f"--run.dir={folder}", f"--train.steps={STEPS}", *more]


def mixture(stores: dict[str, Path]) -> list[str]:
    """Three of four sequences from the first source, with a document mask."""
    return [
        f"--data.mixture={json.dumps({str(stores['web']): 3, str(stores['code']): 1})}",
        "--data.document_mask=true",
    ]


def sets(stores: dict[str, Path]) -> list[str]:
    """Three sets to evaluate: the held-out documents of both sources, and another text."""
    return [
        f"--data.validation={json.dumps({'wiki': str(stores['wiki'])})}",
        f"--data.tokenizer={stores['tokenizer']}",
        f"--train.eval_every={STEPS}",
        "--train.eval_sequences=0",
    ]


def hashes(folder: Path) -> dict[int, str]:
    return {step: row["data_hash"] for step, row in read_metrics(folder).items() if "data_hash" in row}


@pytest.fixture(scope="module")
def whole(stores, tmp_path_factory) -> Path:
    """An uninterrupted run of one process on a mixture, with a document mask and three sets to evaluate."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = run(1, *arguments(folder, *mixture(stores), *sets(stores)))
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_scores_and_counters_of_every_source_are_in_the_rows_and_in_tensorboard(whole):
    row = read_metrics(whole)[STEPS]
    assert {
        f"eval/{name}/{figure}"
        for name in ("web", "code", "wiki")
        for figure in ("loss", "perplexity", "bits_per_byte")
    } <= row.keys()
    assert row["sequences/web"] + row["sequences/code"] == 8 * STEPS
    assert row["sequences/web"] > row["sequences/code"]
    assert 0 < row["epoch/code"] < row["epoch/web"] * 3
    board = EventAccumulator(str(whole / "tb")).Reload()
    for key in ("eval/wiki/bits_per_byte", "sequences/web", "epoch/code", "eval_loss"):
        assert board.Scalars(tag_of(key))[-1].value == pytest.approx(row[key], rel=1e-6)


@pytest.mark.sampled(3, day=2)
def test_killed_and_resumed_on_another_mesh_the_sequences_are_those_of_an_uninterrupted_run(stores, tmp_path):
    folder, longer = tmp_path / "run", tmp_path / "longer"
    more = [*mixture(stores), "--checkpoint.every=1", QUIET]
    with started(1, folder, arguments(folder, *more, "--train.steps=1000")) as launch:
        wait_for_commit(launch, folder, 2)
        launch.ranks[0].kill()
        launch.ranks[0].wait()
    done = max(step_of(path) for path in list_checkpoints(folder / "checkpoints"))
    last = f"--train.steps={done + 2}"
    assert run(2, *arguments(folder, *more, last)).returncode == 0
    assert read_status(folder)["resumed_from"] == done
    assert run(1, *arguments(longer, *more, "--checkpoint.every=0", last)).returncode == 0
    seen = hashes(folder)
    assert sorted(seen) == list(range(1, done + 3))
    assert seen == hashes(longer)
    assert len(set(seen.values())) == len(seen)


def test_other_data_than_the_checkpoints_begins_its_order_anew_and_says_so(stores, tmp_path):
    folder = tmp_path / "run"
    base = arguments(folder, "--checkpoint.every=1", QUIET)
    assert run(1, *base, f"--data.source={stores['web']}", "--train.steps=1").returncode == 0
    result = run(1, *base, f"--data.source={stores['code']}", "--train.steps=2")
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if "since the checkpoint" in line)
    for fact in (
        f"data.source {stores['web']} -> {stores['code']}",
        "data order",
        "restarts from the beginning",
    ):
        assert fact in line
    sequences = (load_corpus(load_config(folder / "config.yaml").data).sources[0].split.tokens - 1) // 32
    assert read_metrics(folder)[2]["epoch"] == pytest.approx(8 / sequences), "the sequences of one step"


def test_an_id_beyond_the_vocabulary_stops_the_run_before_the_model_sees_it(stores, tmp_path):
    """The shard matches its manifest: the checksums are right, only the ids are wrong."""
    store = shutil.copytree(stores["web"], tmp_path / "store")
    shard, manifest = store / "train-00000.bin", json.loads((store / MANIFEST).read_text())
    ids = np.fromfile(shard, np.uint16)
    ids[:] = np.minimum(ids, 599)
    ids[len(ids) // 2 :] = 60_000
    ids.tofile(shard)
    manifest["splits"]["train"][0]["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (store / MANIFEST).write_text(json.dumps(manifest))
    result = run(1, *arguments(tmp_path / "run", f"--data.source={store}"))
    assert result.returncode == 2, result.stderr
    assert re.search(r"token id 60000 .*model\.vocab_size=640", result.stderr)
    assert "train-00000.bin, byte" in result.stderr
