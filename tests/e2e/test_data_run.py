"""A run on prepared data as its user sees it: the same sequences whatever the mesh, also after a kill; mixtures; sets to
evaluate; documents kept apart; mistakes."""

import json
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.launch import EAGER, ROOT, TINY, command, environment, read_metrics, read_status, run
from tests.train.texts import train_bpe
from train.board_tags import tag_of
from train.data.store import MANIFEST

VOCABULARY = ["--model.vocab_size=640"]


def write_jsonl(path: Path, word: str, count: int) -> Path:
    rng = np.random.default_rng(len(word))
    lines = ({"text": " ".join(f"{word} {n}" for n in rng.integers(0, 50, rng.integers(1, 40)))} for _ in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def prepare(source: Path, out: Path, tokenizer: Path, *more: str) -> Path:
    result = run(1, str(source), str(out), f"--tokenizer={tokenizer}", "--workers=1", *more, module="tools.prepare_data")
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Path]:
    """Two prepared sources with one tokenizer, and raw text for a validation set."""
    folder = tmp_path_factory.mktemp("stores")
    tokenizer = train_bpe(folder / "bpe")
    made = {name: prepare(write_jsonl(folder / f"{name}.jsonl", name, 400), folder / name, tokenizer, "--held_out=0.1")
            for name in ("web", "code")}  # fmt: skip
    write_jsonl(folder / "wiki.jsonl", "wiki", 30)
    return {**made, "wiki": folder / "wiki.jsonl", "tokenizer": tokenizer, "cache": folder / "cache"}


def arguments(folder: Path, stores: dict[str, Path], *more: str) -> list[str]:
    return [*TINY, *VOCABULARY, *EAGER, f"--run.dir={folder}", f"--data.cache_dir={stores['cache']}", "--train.steps=8", *more]


def mixture(stores: dict[str, Path]) -> str:
    return f"--data.mixture={json.dumps({str(stores['web']): 3, str(stores['code']): 1})}"


def hashes(folder: Path) -> dict[int, str]:
    return {step: row["data_hash"] for step, row in read_metrics(folder).items() if "data_hash" in row}


@pytest.fixture(scope="module")
def whole(stores, tmp_path_factory) -> Path:
    """One process, uninterrupted, a mixture with documents kept apart and three sets to evaluate."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    sets = [f"--data.validation={json.dumps({'wiki': str(stores['wiki'])})}", f"--data.tokenizer={stores['tokenizer']}",
            "--train.eval_every=4", "--train.eval_sequences=0"]  # fmt: skip
    result = run(1, *arguments(folder, stores, mixture(stores), "--data.document_mask=true", *sets))
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize(("processes", "mesh"), [(4, ["--parallel.tp=2"]), (2, ["--train.micro_batch_size=1"])])
def test_every_step_has_the_same_sequences_and_scores_on_every_mesh(processes, mesh, whole, stores, tmp_path):
    sets = [f"--data.validation={json.dumps({'wiki': str(stores['wiki'])})}", f"--data.tokenizer={stores['tokenizer']}",
            "--train.eval_every=4", "--train.eval_sequences=0"]  # fmt: skip
    more = [mixture(stores), "--data.document_mask=true", *sets, *mesh]
    result = run(processes, *arguments(tmp_path / "run", stores, *more))
    assert result.returncode == 0, result.stderr
    assert hashes(tmp_path / "run") == hashes(whole)
    assert len(set(hashes(whole).values())) == 8
    expected, found = read_metrics(whole), read_metrics(tmp_path / "run")
    for step, row in expected.items():
        for key in ("loss", "grad_norm", *(key for key in row if key.startswith("eval"))):
            assert key not in row or found[step][key] == pytest.approx(row[key], rel=2e-5), (step, key)


def test_scores_and_counters_of_every_source_are_in_the_rows_and_in_tensorboard(whole):
    row = read_metrics(whole)[8]
    assert {f"eval/{name}/{figure}" for name in ("web", "code", "wiki")
            for figure in ("loss", "perplexity", "bits_per_byte")} <= row.keys()  # fmt: skip
    assert row["sequences/web"] + row["sequences/code"] == 8 * 8
    assert row["sequences/web"] > row["sequences/code"]
    assert 0 < row["epoch/code"] < row["epoch/web"] * 3
    board = EventAccumulator(str(whole / "tb")).Reload()
    for key in ("eval/wiki/bits_per_byte", "sequences/web", "epoch/code", "eval_loss"):
        assert board.Scalars(tag_of(key))[-1].value == pytest.approx(row[key], rel=1e-6)


def test_killed_and_resumed_on_another_mesh_the_sequences_are_those_of_an_uninterrupted_run(whole, stores, tmp_path):
    folder = tmp_path / "run"
    more = [mixture(stores), "--data.document_mask=true", "--checkpoint.every=1"]
    process = subprocess.Popen(command(1, *arguments(folder, stores, *more, "--train.steps=1000")), cwd=ROOT, env=environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    while not (folder / "checkpoints" / "step-00000003").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
    assert run(4, *arguments(folder, stores, *more, "--parallel.tp=2", f"--train.steps={done + 5}")).returncode == 0
    assert read_status(folder)["resumed_from"] == done
    seen = hashes(folder)
    assert sorted(seen) == list(range(1, done + 6))
    longer = tmp_path / "longer"
    assert run(1, *arguments(longer, stores, *more, f"--train.steps={done + 5}")).returncode == 0
    assert seen == hashes(longer)
    assert {step: seen[step] for step in range(1, 4)} == {step: hashes(whole)[step] for step in range(1, 4)}


def test_other_data_than_the_checkpoints_begins_its_order_anew_and_says_so(stores, tmp_path):
    base = arguments(tmp_path / "run", stores, "--train.steps=2", "--checkpoint.every=1")
    assert run(1, *base, f"--data.source={stores['web']}").returncode == 0
    result = run(1, *base, f"--data.source={stores['code']}", "--train.steps=3")
    assert result.returncode == 0, result.stderr
    assert "its order begins anew" in result.stdout
    assert read_metrics(tmp_path / "run")[3]["epoch"] == pytest.approx(8 / (8 / read_metrics(tmp_path / "run")[3]["epoch"]))


def test_without_packing_it_trains_on_a_document_a_sequence(stores, tmp_path):
    folder = tmp_path / "run"
    store = json.loads((stores["web"] / MANIFEST).read_text())
    documents = sum(shard["documents"] for shard in store["splits"]["train"])
    assert run(1, *arguments(folder, stores, f"--data.source={stores['web']}", "--data.packing=false")).returncode == 0
    assert read_metrics(folder)[8]["epoch"] == pytest.approx(64 / documents)


@pytest.mark.parametrize(("mistake", "words"), [
    (["--data.tokenizer=bytes"], ["data.tokenizer=bytes", "was made with bpe"]),
    (["--model.vocab_size=512"], ["model.vocab_size=512", "600 ids", "640"]),
    (["--data.document_mask=true", "--data.packing=false"], ["data.document_mask", "data.packing=false"]),
    (["--data.mixture={'/nowhere': 1.0}"], ["/nowhere"]),
    (["--data.mixture={'stdlib': 0}"], ["data.mixture", "greater than 0"]),
    (["--data.validation={'x': '/nowhere'}"], ["/nowhere"]),
    (["--data.source=~nosuchuser/x"], ["data.source", "nosuchuser"]),
    ([f"--data.source={'long/' * 1000}"], ["data.source", "too long"]),
    (["--data.verify=some"], ["data.verify=some", "full or size"]),
    (["--data.source=hf:some/name"], ["tools.prepare_data"]),
])  # fmt: skip
def test_a_mistake_is_one_clear_message_and_exit_code_2(mistake, words, stores, tmp_path):
    result = run(1, *arguments(tmp_path / "run", stores, f"--data.source={stores['web']}", *mistake))
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_an_id_beyond_the_vocabulary_stops_the_run_before_the_model_sees_it(stores, tmp_path):
    """A shard whose manifest was made for it: checksums say nothing, ids do."""
    import hashlib
    import shutil

    store = shutil.copytree(stores["web"], tmp_path / "store")
    shard, manifest = store / "train-00000.bin", json.loads((store / MANIFEST).read_text())
    ids = np.fromfile(shard, np.uint16)
    ids[:] = np.minimum(ids, 599)
    ids[len(ids) // 2 :] = 60_000
    ids.tofile(shard)
    manifest["splits"]["train"][0]["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (store / MANIFEST).write_text(json.dumps(manifest))
    result = run(1, *arguments(tmp_path / "run", stores, f"--data.source={store}"))
    assert result.returncode == 2, result.stderr
    assert "token id 60000 is beyond model.vocab_size=640" in result.stderr
    assert "train-00000.bin, byte" in result.stderr
