"""`python -m tools.generate --run RUN_DIR --prompt TEXT`: text from a checkpoint, in one process.

Shapes: T tokens of the context, V vocabulary.
"""

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.models.llama import Llama
from meshwright.models.rope import rope_tables
from meshwright.tools.cli import natural, number_from, run_tool
from meshwright.tools.load_weights import checkpoint_config, find_newest, load_whole_weights
from meshwright.train.config import DataConfig, TrainingJob
from meshwright.train.data.corpus import find_tokenizer, is_prepared
from meshwright.train.data.sources import find_files
from meshwright.train.data.tokenizer import (
    JsonTokenizer,
    Tokenizer,
    TokenizerInfo,
    check_vocabulary,
    load_tokenizer,
)
from meshwright.train.errors import ConfigError, DataError
from meshwright.train.planning.device_defaults import dtype_here

BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet a whole one


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 takes the likeliest; `top_k` 0 takes all into account."""

    temperature: float
    top_k: int
    seed: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the prompt and its continuation. Raises CheckpointError, ConfigError and DataError."""
    options = make_parser().parse_args(arguments)
    checkpoint = find_newest(Path(options.run))
    config = checkpoint_config(checkpoint)
    window = choose_window(options.window, config.job)
    tokenizer = find_model_tokenizer(checkpoint, config.data, options.tokenizer)
    check_vocabulary(tokenizer.info, config.model.vocab_size)
    context = make_context(tokenizer, options.prompt.encode("utf-8", "surrogateescape"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(checkpoint, config.job, device)
    sampling = Sampling(options.temperature, options.top_k, options.seed)
    new_tokens = generate(model, context, options.max_new_tokens, sampling, window, tokenizer.info)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows question marks
    for piece in stream_text(tokenizer, context, new_tokens):
        print(piece, end="", flush=True)


def make_parser() -> argparse.ArgumentParser:
    """The tool's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate",
        description="Print a prompt and its continuation by a trained model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--run",
        required=True,
        metavar="RUN_OR_CHECKPOINT",
        help="folder of a run, whose newest checkpoint is used; or a checkpoint, such as "
        "runs/NAME/checkpoints/step-00000100 or what tools.convert_hf import wrote",
    )
    add_tokenizer_option(parser)
    parser.add_argument("--prompt", default="", help="text to go on with; without it a new document begins")
    parser.add_argument(
        "--max_new_tokens",
        type=natural,
        default=200,
        metavar="N",
        help="tokens to generate at most (default 200); the end of the document ends it earlier",
    )
    parser.add_argument(
        "--temperature",
        type=number_from(0),
        default=0.8,
        metavar="X",
        help="divides the logits (default 0.8); 0 always takes the likeliest token",
    )
    parser.add_argument(
        "--top_k",
        type=natural,
        default=50,
        metavar="K",
        help="sample among the K likeliest tokens (default 50); 0 is all",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument(
        "--window",
        type=natural,
        default=0,
        metavar="T",
        help="tokens of context at most, the oldest are dropped; 0, the default, is the run's "
        "train.seq_len, as it has learned no positions beyond; at most its model.max_seq_len",
    )
    return parser


def add_tokenizer_option(parser: argparse.ArgumentParser) -> None:
    """`--tokenizer`, as `find_model_tokenizer` takes it."""
    parser.add_argument(
        "--tokenizer",
        default="auto",
        metavar="bytes|PATH",
        help="a tokenizer.json or the folder it lies in; auto, the default, is the one beside the weights, "
        "or else that of the run's data",
    )


def find_model_tokenizer(folder: Path, data: DataConfig, asked: str) -> Tokenizer:
    """The tokenizer of the model whose weights lie in `folder`: the one asked for; with auto the one that
    lies beside them, else that of the data it was trained on. Raises DataError."""
    if asked != "auto":
        return load_tokenizer(asked) if asked == "bytes" else load_tokenizer(asked, data.bos, data.eos)
    if (folder / "tokenizer.json").is_file():
        return JsonTokenizer(folder, data.bos, data.eos)
    try:
        source = next(iter(data.mixture), data.source)
        if data.tokenizer == "auto" and not is_prepared(source):
            # if it is not there, nobody knows whether it was text or prepared data with a tokenizer
            find_files(source)
        return find_tokenizer(data)
    except DataError as error:
        raise DataError(
            f"{folder}: the tokenizer of its run cannot be found ({error}): name it with --tokenizer"
        ) from None


def make_context(tokenizer: Tokenizer, prompt: bytes) -> list[int]:
    """The ids to go on from: as a document begins, so with a BOS where the tokenizer has one. Raises
    DataError."""
    if not prompt:
        return [tokenizer.info.start]
    try:
        ids = tokenizer.encode([prompt])[0].tolist()
    except UnicodeDecodeError as error:
        raise DataError(
            f"--prompt is not valid UTF-8 at byte {error.start}, and this tokenizer reads nothing else"
        ) from None
    return ids if tokenizer.info.bos is None else [tokenizer.info.bos, *ids]


def choose_window(asked: int, job: TrainingJob) -> int:
    """How many tokens of context the model gets. Raises ConfigError if there are no position tables for as
    many."""
    if asked > job.model.max_seq_len:
        raise ConfigError(
            f"--window={asked} must not exceed the run's model.max_seq_len={job.model.max_seq_len}"
        )
    return asked or job.seq_len


def load_model(checkpoint: Path, job: TrainingJob, device: torch.device) -> Llama:
    """The plain model of a checkpoint, ready to generate; on a GPU in the dtype it was trained to compute
    in."""
    weights = load_whole_weights(checkpoint)
    if job.model.tie_embeddings:
        weights["head.output.weight"] = weights["tok_embeddings.weight"]
    with torch.device("meta"):
        model = Llama(job.model)
    asked = dtype_here(device) if job.parallel.param_dtype == "auto" else job.parallel.param_dtype
    dtype = getattr(torch, asked) if device.type == "cuda" else torch.float32
    model.load_state_dict({name: weight.to(device, dtype) for name, weight in weights.items()}, assign=True)
    tables = rope_tables(
        model.config.head_dim, model.config.max_seq_len, model.config.rope_theta, model.config.rope_scaling
    )
    model.cos_TH, model.sin_TH = (table.to(device) for table in tables)
    return model.eval()


@torch.inference_mode()
def generate(
    model: Llama,
    tokens: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    window: int,
    tokenizer: TokenizerInfo,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids that follow `tokens`; ends before the tokenizer's EOS. The context is
    the last `window` tokens, recomputed for every new one."""
    generator = torch.Generator().manual_seed(sampling.seed)
    context = list(tokens)
    last_only = model.head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:], *args[1:]))
    try:
        for _ in range(max_new_tokens):
            seen = torch.tensor([context[-window:]], device=model.cos_TH.device)
            token = choose_token(model(seen)[0, -1, : tokenizer.vocab_size], sampling, generator)
            if token == tokenizer.eos:
                return
            context.append(token)
            yield token
    finally:
        last_only.remove()


def choose_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One id drawn from logits[V], on the CPU so that every device draws alike."""
    logits = logits_V.float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    # the largest is 0 before the division: however small the temperature, nothing overflows into NaN
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def stream_text(tokenizer: Tokenizer, context: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
    """The text of the context, then that of each token as it comes; a character of several tokens once its
    last one is there. All ids are decoded together, as a tokenizer may show an id otherwise where it stands
    first."""
    ids, text, shown = list(context), tokenizer.decode(context), 0
    while True:
        # the next token may mend what is broken at the end
        settled = len(text.rstrip(BROKEN))
        if settled > shown:
            yield text[shown:settled]
            shown = settled
        token = next(tokens, None)
        if token is None:
            yield text[shown:] + "\n"
            return
        ids.append(token)
        text = tokenizer.decode(ids)


if __name__ == "__main__":
    run_tool(main)
