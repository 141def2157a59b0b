"""tools/generate.py: the run's model is loaded, sampling follows its options, and the text streams."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from meshwright.models.config import LlamaConfig
from meshwright.models.llama import Llama
from meshwright.tools.checkpoint.__main__ import main as convert
from meshwright.tools.checkpoint.convert import checkpoint_config
from meshwright.tools.generate import (
    Sampling,
    choose_token,
    choose_window,
    find_model_tokenizer,
    generate,
    last_logits,
    load_model,
    main,
    make_context,
    stream_text,
)
from meshwright.train.checkpoint.commit import find_newest
from meshwright.train.config import DataConfig
from meshwright.train.config_parser import load_config, parse_config
from meshwright.train.data.prepare.prepare import prepare
from meshwright.train.data.prepare.worker import PrepareSettings
from meshwright.train.data.sequences import make_sequence_shape
from meshwright.train.data.tokenizer import ByteTokenizer, JsonTokenizer
from meshwright.train.data.training_data import BatchShape
from meshwright.train.errors import ConfigError, DataError
from meshwright.train.evaluation import set_batches
from meshwright.train.model.trained_model import model_of
from tests.support.factories import RUN, causal_lm
from tests.support.hf_models import make_hf, save_hf
from tests.support.launch import EAGER, TINY
from tests.support.launch import run as launch
from tests.support.stores import load_corpus
from tests.support.texts import train_bpe, write_jsonl

Tool = Callable[..., CompletedProcess[str]]
GREEDY = Sampling(temperature=0.0, top_k=0, seed=0)
CPU = torch.device("cpu")
BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def model() -> Llama:
    model = Llama(
        LlamaConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=264, max_seq_len=64)
    )
    model.initialise(seed=0)
    return model.eval()


def test_the_loaded_model_has_the_runs_own_loss(run: Path) -> None:
    checkpoint = find_newest(run)
    config = checkpoint_config(checkpoint)
    model = load_model(checkpoint, config.job, CPU)
    corpus = load_corpus(config.data)
    sequences = make_sequence_shape(
        config.data, corpus.tokenizer, config.train.seq_len, config.model.vocab_size
    )
    limit = config.train.eval_sequences
    batches = list(
        set_batches(corpus.evaluation_sets["held_out"], sequences, BatchShape(1, 1, 0, 1), limit, CPU)
    )
    with torch.no_grad():
        loss = sum(model(b.tokens, b.targets).item() for b in batches) / sum(
            b.targets.numel() for b in batches
        )
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2
    assert loss == pytest.approx(last["eval_loss"], rel=1e-5)


def test_greedy_is_the_argmax_of_the_whole_forward(model: Llama) -> None:
    tokens = list(b"def f(x):")
    expected = list(tokens)
    with torch.no_grad():
        for _ in range(20):
            expected.append(int(model(torch.tensor([expected]))[0, -1, :257].argmax()))
    assert list(generate(model, tokens, 20, GREEDY, 64, BYTES.info)) == expected[len(tokens) :]


def test_a_qwen3_goes_on_as_transformers_own_generate() -> None:
    source = model_of(parse_config([*RUN, *causal_lm("qwen3")]).model)
    qwen3 = source.unsharded(CPU).eval()
    tokens = list(b"def f(x):")
    ours = [*generate(last_logits(source, qwen3, CPU), tokens, 20, GREEDY, 64, BYTES.info)]
    theirs = qwen3.generate(  # type: ignore[operator]
        torch.tensor([tokens]),
        max_new_tokens=20,
        do_sample=False,
        use_cache=True,
        suppress_tokens=[*range(257, 264)],
    )
    assert ours == theirs[0, len(tokens) :].tolist()


def test_the_context_slides(model: Llama) -> None:
    tokens = [i % 200 for i in range(100)]  # longer than max_seq_len
    long, short = (list(generate(model, t, 30, GREEDY, 16, BYTES.info)) for t in (tokens, tokens[-16:]))
    assert len(long) == 30
    assert long == short


def test_a_separator_ends_the_text_and_ids_without_text_are_never_chosen() -> None:
    model = Llama(
        LlamaConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=264, max_seq_len=64)
    )
    model.initialise(seed=0)
    # blocks add nothing and every input is ones, so the logits are the row sums of the output weight
    with torch.no_grad():
        model.layers[0].attention.wo.weight.zero_()
        model.layers[0].feed_forward.w2.weight.zero_()
        model.tok_embeddings.weight.fill_(1.0)
        model.head.output.weight.zero_()
        model.head.output.weight[ord("a")] = 1.0
        model.head.output.weight[260] = 2.0  # an id in the padding of the vocabulary
    assert bytes(generate(model, [1], 5, GREEDY, 64, BYTES.info)) == b"aaaaa"
    with torch.no_grad():
        model.head.output.weight[BYTES.info.eos] = 1.5
    assert list(generate(model, [1], 5, GREEDY, 64, BYTES.info)) == []


def test_sampling_follows_seed_temperature_and_top_k(model: Llama) -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    generator = torch.Generator().manual_seed(1)

    def shares(sampling: Sampling) -> list[float]:
        drawn = torch.tensor([choose_token(logits, sampling, generator) for _ in range(2000)])
        return (drawn.bincount(minlength=4) / 2000).tolist()

    assert shares(Sampling(1.0, 0, 0)) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.04)
    assert shares(Sampling(0.5, 2, 0)) == pytest.approx([25 / 34, 9 / 34, 0, 0], abs=0.04)
    assert {choose_token(logits, Sampling(1.0, 1, 0), generator) for _ in range(20)} == {0}
    assert {choose_token(logits * 1e4, Sampling(1e-6, 0, 0), generator) for _ in range(20)} == {0}
    texts = [bytes(generate(model, [40], 20, Sampling(1.0, 50, seed), 64, BYTES.info)) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_characters_of_several_bytes_are_written_whole() -> None:
    tokens = iter("é€😀".encode() + b"\xc3" + b"x" + b"\xe2\x82")
    written = stream_text(BYTES, "ü".encode()[:1], iter(["ü".encode()[1], *tokens]))
    assert [*written] == ["ü", "é", "€", "😀", "\ufffdx", "\ufffd\n"]


def test_tokens_of_a_vocabulary_are_written_as_they_settle(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(train_bpe(tmp_path / "bpe"))
    text = "the quick brown 漢字 e\u0301 👩\u200d👩\u200d👧 ก็ 鯨 end"
    ids = tokenizer.encode([text.encode()])[0].tolist()
    context = make_context(tokenizer, b"the quick")
    assert context[0] == tokenizer.info.bos
    assert make_context(tokenizer, b"") == [tokenizer.info.bos]
    start = len(tokenizer.encode([b"the quick"])[0])
    written = [*stream_text(tokenizer, context, iter(ids[start:]))]
    assert "".join(written) == text + "\n"
    assert len(written) > 10, "streamed, not printed at the end"
    assert not any("\ufffd" in part for part in written)
    assert "鯨" in "".join(written), "its bytes are separate tokens, which no merge joins"
    with pytest.raises(DataError, match="--prompt is not valid UTF-8 at byte 1"):
        make_context(tokenizer, b"a\xff")


def test_the_window_is_what_was_trained(tied_run: Path) -> None:
    config = load_config(tied_run / "config.yaml")
    assert (choose_window(0, config.job), choose_window(64, config.job)) == (32, 64)
    with pytest.raises(ConfigError, match="64 positions"):
        choose_window(65, config.job)


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on prepared data with a small vocabulary and BOS; the data is in `store` in the same folder."""
    folder = tmp_path_factory.mktemp("bpe_run")
    source = write_jsonl(folder / "text.jsonl", ["漢字 the quick brown é 😀 fox " * 8] * 40)
    tokenizer = train_bpe(folder / "bpe")
    prepare(str(source), str(tokenizer), "auto", "auto", folder / "store", PrepareSettings())
    data = [f"--data.source={folder / 'store'}", f"--data.cache_dir={folder / 'cache'}"]
    run = [f"--run.dir={folder / 'run'}", "--model.vocab_size=640", "--checkpoint.every=30"]
    training = ["--train.steps=30", "--train.global_batch_size=2", "--optim.lr=2e-2", "--metrics.every=10"]
    done = launch(1, *TINY, *EAGER, *data, *run, *training)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_a_run_with_a_vocabulary_has_learnt_its_text(
    bpe_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([f"--run={bpe_run}", "--prompt=漢字 the", "--temperature=0", "--max_new_tokens=30"])
    assert capsys.readouterr().out.startswith("漢字 the quick brown é 😀 fox 漢字 the quick brown")
    main([f"--run={bpe_run}", "--temperature=0", "--max_new_tokens=8"])
    assert capsys.readouterr().out.startswith("漢字 the quick"), (
        "a text that begins after BOS, like a document"
    )


def test_a_tokenizer_is_asked_for_or_beside_the_weights_or_of_the_data(bpe_run: Path, tmp_path: Path) -> None:
    checkpoint = find_newest(bpe_run)
    data = checkpoint_config(checkpoint).data
    of_run = find_model_tokenizer(checkpoint, data, "auto").info
    assert (of_run.vocab_size, of_run.bos, of_run.eos) == (600, 0, 1)
    assert find_model_tokenizer(checkpoint, data, "bytes").info == BYTES.info
    assert (
        find_model_tokenizer(checkpoint, data, str(train_bpe(tmp_path / "other", 400))).info.vocab_size == 400
    )
    beside = shutil.copytree(checkpoint, tmp_path / "beside")
    train_bpe(beside, 500)
    assert find_model_tokenizer(beside, data, "auto").info.vocab_size == 500
    for name in ("origin.json", "tokenizer.json"):  # as of an older version
        (beside / name).unlink()
    assert find_model_tokenizer(beside, data, "auto").info == of_run
    for gone in (
        DataConfig(source=str(tmp_path / "gone")),
        DataConfig(tokenizer=str(tmp_path / "gone" / "tokenizer.json")),
    ):
        with pytest.raises(DataError, match=r"the tokenizer of its run cannot be found .*gone.*--tokenizer"):
            find_model_tokenizer(beside, gone, "auto")
        assert find_model_tokenizer(checkpoint, gone, "auto").info == of_run
    with pytest.raises(DataError, match=r"model\.vocab_size=640 is smaller than the \d+ ids"):
        main([f"--run={bpe_run}", f"--tokenizer={train_bpe(tmp_path / 'large', 900)}"])


def test_an_imported_model_goes_on_as_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf(2, vocab_size=600)
    source = save_hf(tmp_path / "hf", hf)
    tokenizer = JsonTokenizer(train_bpe(source))
    convert(["import", str(source), str(tmp_path / "ours")])
    context = make_context(tokenizer, "fox é".encode())
    theirs = hf.generate(
        torch.tensor([context]), max_new_tokens=20, do_sample=False, eos_token_id=1, pad_token_id=1
    )[0].tolist()
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    main([f"--run={tmp_path / 'ours'}", "--prompt=fox é", "--temperature=0", "--max_new_tokens=20"])
    assert out.getvalue() == tokenizer.decode(theirs) + "\n"


def test_as_a_command(tool: Tool, sharded_run: Path, tmp_path: Path) -> None:
    done = tool(
        "generate", "--run", str(sharded_run), "--prompt", "def é", "--max_new_tokens", "40", "--seed", "1"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("def é")
    assert len(done.stdout) > len("def é\n")
    done = tool("generate", "--run", str(tmp_path), "--prompt", "x")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert re.match("CheckpointError: .*no complete checkpoint", done.stderr)
