"""tools/eval.py: scores equal those of the run, of transformers, and those computed by hand; mistakes are one
line."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.tools.checkpoint.convert import checkpoint_config
from meshwright.tools.eval import RESET_KEYS, EvalTarget, find_target, make_parser
from meshwright.tools.generate import load_model
from meshwright.train.checkpoint.commit import find_newest
from meshwright.train.config_parser import config_to_yaml, parse_config
from meshwright.train.data.corpus import check_data
from meshwright.train.data.prepare.prepare import prepare
from meshwright.train.data.prepare.worker import PrepareSettings
from meshwright.train.data.tokenizer import JsonTokenizer
from meshwright.train.errors import CheckpointError, ConfigError, DataError
from meshwright.train.planning.resolve import plan_run
from tests.support.hf_models import make_hf, save_hf
from tests.support.launch import EAGER, TINY, read_metrics
from tests.support.launch import run as launch
from tests.support.texts import odd_texts, train_bpe, write_jsonl

SEQ_LEN = 48
TEXTS, MORE_TEXTS = odd_texts(60, seed=5), odd_texts(30, seed=6)


def evaluate(*arguments: object, processes: int = 1) -> dict[str, Any]:
    """The figures of `tools.eval --json`."""
    done = launch(processes, *map(str, arguments), "--json", module="tools.eval")
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    assert figures["processes"] == processes
    return figures


def find(*arguments: object) -> EvalTarget:
    """The target that the tool would evaluate."""
    return find_target(*make_parser().parse_known_args(list(map(str, arguments))))


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model with grouped heads, rope scaling and a tokenizer whose BOS is <s>."""
    folder = save_hf(tmp_path_factory.mktemp("models") / "hf", make_hf(3, rope="llama3", vocab_size=640))
    train_bpe(folder)
    return folder


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("records") / "odd.jsonl", TEXTS)


def loss_of_transformers(hf_dir: Path) -> tuple[float, int]:
    """Mean loss over the packed stream of the documents, and the number of tokens, by transformers."""
    from transformers import AutoModelForCausalLM  # takes seconds

    tokenizer = JsonTokenizer(hf_dir)
    ids = tokenizer.encode([text.encode() for text in TEXTS if text])
    stream = torch.tensor([i for document in ids for i in (0, *document.tolist(), 1)])
    hf, nats = AutoModelForCausalLM.from_pretrained(hf_dir), 0.0
    for start in range(0, len(stream) - 1, SEQ_LEN):  # the last sequence is shorter
        tokens = stream[start : start + SEQ_LEN + 1]
        with torch.no_grad():
            nats += F.cross_entropy(hf(tokens[None, :-1]).logits[0], tokens[1:], reduction="sum").item()
    return nats / (len(stream) - 1), len(stream) - 1


def test_the_score_of_a_checkpoint_is_its_runs_own_also_on_more_processes(tied_run: Path) -> None:
    """The limit is the run's train.eval_sequences."""
    figures = evaluate(tied_run, "--sequences=8", "--micro_batch_size=3", processes=2)
    row, score = read_metrics(tied_run)[2], figures["sets"]["held_out"]
    assert list(figures["sets"]) == ["held_out"]
    assert score["loss"] == pytest.approx(row["eval_loss"], rel=1e-6)
    assert score["bits_per_byte"] == pytest.approx(row["eval/held_out/bits_per_byte"], rel=1e-6)
    assert figures["model"].endswith("step-00000002")


def test_the_keys_of_how_a_run_was_spread_are_left_behind(tmp_path: Path) -> None:
    """The config of a run on more ranks, with keys that need them."""
    path = tmp_path / "config.yaml"
    spread = [
        "--parallel.tp=2",
        "--parallel.async_tp=true",
        "--parallel.activation_checkpoint=full",
        "--parallel.activation_checkpoint_blocks=1",
        "--parallel.float8.all_gather=true",
    ]
    path.write_text(config_to_yaml(parse_config(spread)))
    plan = plan_run(parse_config([f"--config={path}", *RESET_KEYS]).job, 1)
    assert (plan.async_tp, plan.mesh.tp, plan.units[1].activation_checkpoint) == (False, 1, "none")


def test_the_loss_of_a_hugging_face_folder_is_that_of_transformers(
    hf_dir: Path, records: Path, tmp_path: Path
) -> None:
    loss, tokens = loss_of_transformers(hf_dir)
    sizes = [f"--seq_len={SEQ_LEN}", "--micro_batch_size=4"]
    figures = evaluate(hf_dir, f"--data={records}", *sizes, *EAGER, f"--data.cache_dir={tmp_path}")
    assert (figures["seq_len"], list(figures["sets"])) == (SEQ_LEN, [str(records)])
    score = figures["sets"][str(records)]
    assert score["tokens"] == tokens
    assert score["loss"] == pytest.approx(loss, abs=1e-4, rel=0)
    assert score["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_bits_per_byte_by_hand(tied_run: Path, tmp_path: Path) -> None:
    """17 characters of 19 bytes, three times, each with its EOS: 60 tokens, of which 59 are predicted, the
    last 11 in a shorter sequence."""
    text = "h\xe9llo w\xf6rld, twice"[:17]
    assert len(text.encode()) == 19
    source = write_jsonl(tmp_path / "three.jsonl", [text] * 3)
    stream = torch.tensor([*text.encode(), 256] * 3)
    checkpoint = find_newest(tied_run)
    model = load_model(checkpoint, checkpoint_config(checkpoint).job, torch.device("cpu"))
    with torch.no_grad():
        logits = [model(stream[None, first : min(first + 16, 59)])[0] for first in range(0, 59, 16)]
    nats = F.cross_entropy(torch.cat(logits), stream[1:]).item()
    data = [f"--data={source}", "--seq_len=16", f"--data.cache_dir={tmp_path}"]
    done = launch(1, str(checkpoint), *data, module="tools.eval")
    assert done.returncode == 0, done.stderr
    head, row = done.stdout.splitlines()
    assert head.split() == ["set", "loss", "(nats/token)", "perplexity", "bits/byte", "tokens"]
    wanted = [f"{nats:.4f}", f"{math.exp(nats):.4g}", f"{nats / math.log(2) * 59 / 57:.4f}", "59"]
    assert row.split() == [str(source), *wanted]


@pytest.fixture(scope="module")
def store_run(tmp_path_factory: pytest.TempPathFactory, hf_dir: Path, records: Path) -> Path:
    """A run on prepared data without BOS, with a validation set; its data is in `store` in the same
    folder."""
    folder = tmp_path_factory.mktemp("store_run")
    extra = write_jsonl(folder / "extra.jsonl", MORE_TEXTS)
    for source, name, held_out in ((records, "store", 0.3), (extra, "more", 0.0)):
        prepare(str(source), str(hf_dir), "none", "auto", folder / name, PrepareSettings(held_out=held_out))
    data = [
        f"--data.source={folder / 'store'}",
        f"--data.validation={{more: {folder / 'more'}}}",
        f"--data.cache_dir={folder / 'cache'}",
    ]
    training = ["--train.steps=2", "--train.eval_every=2", "--train.eval_sequences=0", "--checkpoint.every=2"]
    plan = ["--parallel.activation_checkpoint=full", "--train.freeze=[layers.0.*]"]
    run = [f"--run.dir={folder / 'run'}", "--model.vocab_size=640"]
    done = launch(1, *TINY, *EAGER, *data, *training, *plan, *run)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_every_set_of_a_run_and_other_data_with_its_tokenizer(store_run: Path) -> None:
    row = read_metrics(store_run)[2]
    sets = evaluate(store_run)["sets"]
    assert list(sets) == ["held_out", "more"]
    for name, score in sets.items():
        for figure in ("loss", "perplexity", "bits_per_byte"):
            assert score[figure] == pytest.approx(row[f"eval/{name}/{figure}"], rel=1e-5)
    extra = str(store_run.parent / "extra.jsonl")
    of_extra = evaluate(store_run, f"--data={extra}")["sets"]
    assert of_extra[extra] == pytest.approx(sets["more"], rel=1e-5), "without BOS, like the run's data"


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_compiled_evaluation_and_one_of_a_store_are_the_same(store_run: Path) -> None:
    sets = evaluate(store_run)["sets"]
    compiled = evaluate(store_run, "--parallel.compile.enabled=true", "--parallel.compile.backend=aot_eager")[
        "sets"
    ]
    assert compiled["more"] == pytest.approx(sets["more"], rel=1e-5)
    store = str(store_run.parent / "store")
    of_store = evaluate(store_run, f"--data={store}")["sets"]
    assert of_store[store] == pytest.approx(sets["held_out"], rel=1e-5), "its held-out documents"


def test_what_cannot_be_evaluated_is_said(
    hf_dir: Path, records: Path, tied_run: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(hf_dir, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    for error, message, arguments in (
        (ConfigError, rf"{hf_dir} is a Hugging Face model .*: add --data", [hf_dir]),
        (DataError, rf"{bare} has no tokenizer\.json: .*--tokenizer", [bare, f"--data={records}"]),
        (CheckpointError, "no such folder", [tmp_path / "gone"]),
        (
            ConfigError,
            r"train\.seq_len=97 must not exceed model\.max_seq_len=96",
            [hf_dir, f"--data={records}", "--seq_len=97"],
        ),
        (ConfigError, "unknown key data.cache_dri", [tied_run, "--data.cache_dri=x"]),
    ):
        with pytest.raises(error, match=message):
            find(*arguments)
    data = find(tied_run, f"--data={records}", "--data.text_field=body", f"--tokenizer={hf_dir}").config.data
    assert (data.source, data.text_field, data.bos, data.eos) == (str(records), "body", "<s>", "</s>")
    with pytest.raises(DataError, match=r"model\.vocab_size=265 is smaller than the \d+ ids"):
        check_data(data, 265)
