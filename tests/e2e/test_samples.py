"""A run that is measured in epochs trains exactly the sequences asked for, whatever its starts."""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from meshwright.models.loss import IGNORE_INDEX
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.config_parser import load_config
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import make_sequence_shape, read_batch
from meshwright.train.data.training_data import hash_tokens
from tests.support.launch import read_status, rows_in, run
from tests.support.run_faults import LIMIT_S, started, steps_of, tiny
from tests.support.stores import load_corpus

DOCUMENTS = 160  # of different lengths


@pytest.mark.parametrize(
    "draw", [0, *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.sampled(7)]) for n in range(1, 8))]
)
def test_random_starts_kills_batches_and_meshes_train_exactly_the_sequences_asked_for(draw, tmp_path):
    name = f"{os.environ['MESHWRIGHT_TESTS_SEED']} {draw}"
    rng, folder = random.Random(name), tmp_path / "run"
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"{n} " * rng.randint(4, 20)}) + "\n" for n in range(DOCUMENTS))
    )
    keys = [f"--data.source={text}", "--data.eval_fraction=0", f"--data.cache_dir={tmp_path}"]
    epochs = rng.choice([0.7, 1, 1.5])
    keys += [f"--data.packing={rng.choice(['true', 'false'])}", f"--train.epochs={epochs}"]
    starts, batches = rng.randint(2, 5) if draw else 2, [2, 3, 4, 5, 6]
    rng.shuffle(batches)
    for n, batch in zip(range(1, starts + 1), batches, strict=False):
        processes = rng.choice([1, 2]) if batch % 2 == 0 else 1
        start = [f"--train.micro_batch_size={batch // processes}", f"--train.global_batch_size={batch}"]
        start += [
            "--optim.schedule=linear",
            f"--checkpoint.every={rng.choice([-1, 1, 5] if draw else [1, 5])}",
        ]
        with started(processes, folder, [*tiny(keys), *start]) as launch:
            until = epochs * (n - rng.uniform(0.2, 0.6)) / starts
            if n < starts and launch.wait_until(lambda: logged_epoch(folder) > until, poll_s=0.02):  # noqa: B023
                launch.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
            code = launch.wait(LIMIT_S)
        assert n < starts or code == 0, launch.output()
    config = load_config(folder / "config.yaml")
    corpus = load_corpus(config.data)
    shape = make_sequence_shape(config.data, corpus.tokenizer, 32, config.model.vocab_size)
    order, end, written = SampleOrder(corpus.sources, shape, 0), read_status(folder)["step"], rows_in(folder)
    metrics = {row["step"]: row for row in written if row["step"] <= end}  # a killed start may have had more
    asked, done = round(config.train.epochs * order.sizes[0]), 0
    assert sorted(metrics) == [*range(1, end + 1)], name
    for step, row in sorted(metrics.items()):
        first, done = done, round(row["epoch"] * order.sizes[0])
        read = read_batch(order.splits, order.rows(first, done - first), shape)
        seen = sum(hash_tokens(tokens, first + n) for n, tokens in enumerate(read.tokens))
        assert row["data_hash"] == f"{seen:016x}", f"{name}: step {step}"
        trained = round(row["trained_tokens_per_s"] * row["step_time_s"])
        assert trained == (read.targets != IGNORE_INDEX).sum(), f"{name}: step {step}"
        if step > 2:  # after the warm-up
            batch = done - first
            share = (done - 2 * batch) / (asked - 2 * batch)
            rate, tolerance = 1 - 0.9 * min(max(share, 0), 1), 1.1 * batch / (asked - 2 * batch)
            assert row["lr"] / 3e-3 == pytest.approx(rate, abs=tolerance), f"{name}: step {step}"
    assert done - batch < asked <= done, name
    last = list_checkpoints(folder / "checkpoints")[-1]
    assert verify_alone(last).position.samples == done
    again = run(1, *tiny(keys), "--train.global_batch_size=2", f"--run.dir={folder}")
    assert (again.returncode, rows_in(folder)) == (0, written), "nothing is left to do"
    assert f"finished: step {step} of {step}, saved in {last};" in again.stdout


def logged_epoch(folder: Path) -> float:
    return rows_in(folder)[-1]["epoch"] if steps_of(folder) else 0.0
