"""`python -m tools.generate --run RUN_DIR --prompt TEXT`: generates text with a checkpoint, in one process.

Shapes: T tokens of the context, V vocabulary.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.tools.checkpoint.convert import checkpoint_config, own_weights
from meshwright.tools.cli import natural, new_parser, number_from, parse_with_keys, run_tool
from meshwright.train.checkpoint.commit import find_newest
from meshwright.train.checkpoint.initial_weights import load_weights
from meshwright.train.checkpoint.manifest import read_origin
from meshwright.train.config import DataConfig, TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.data.corpus import find_tokenizer, is_prepared
from meshwright.train.data.sequences import Batch
from meshwright.train.data.sources import find_files
from meshwright.train.data.tokenizer import (
    FILE,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    TokenizerInfo,
    check_vocabulary,
    load_tokenizer,
)
from meshwright.train.errors import ConfigError, DataError
from meshwright.train.model.trained_model import TrainedModel, model_of
from meshwright.train.planning.resolve import dtype_on_device

DESCRIPTION = """examples:
  python -m tools.generate --run runs/NAME --prompt "Once upon a time"
  python -m tools.generate --run runs/NAME/checkpoints/step-00000100 --temperature 0 --max_new_tokens 50

Print a prompt and a trained model's continuation. A model of yours needs its
--model.factory=MODULE:FUNCTION again, because reading a checkpoint runs no code.
"""
LogitsOf = Callable[[Tensor], Tensor]  # tokens[1, T] -> logits[1, T or 1, V]
BROKEN = "\ufffd"  # a decoder's character for bytes that are not, or not yet, a character


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. `temperature` 0 takes the likeliest; `top_k` 0 samples from all."""

    temperature: float
    top_k: int
    seed: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the prompt and its continuation. Raises CheckpointError, ConfigError and DataError."""
    options, overrides = parse_with_keys(make_parser(), arguments)
    checkpoint = find_newest(Path(options.run))
    checkpoint_config(checkpoint)  # raises CheckpointError if there is none
    config = parse_config([f"--config={checkpoint / 'config.yaml'}", *overrides])
    source = model_of(config.model)
    source.check(config.job)
    window = choose_window(options.window, config.job)
    tokenizer = find_model_tokenizer(checkpoint, config.data, options.tokenizer)
    check_vocabulary(tokenizer.info, source.vocab_size)
    context = make_context(tokenizer, options.prompt.encode("utf-8", "surrogateescape"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits_of = last_logits(source, load_model(checkpoint, config.job, device, config.run.seed), device)
    sampling = Sampling(options.temperature, options.top_k, options.seed)
    new_tokens = generate(logits_of, context, options.max_new_tokens, sampling, window, tokenizer.info)
    for piece in stream_text(tokenizer, context, new_tokens):
        print(piece, end="", flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("generate", "--run RUN_OR_CHECKPOINT", DESCRIPTION)
    add = parser.add_argument
    run = (
        "folder of a run, whose newest checkpoint is used; or a checkpoint, such as "
        "runs/NAME/checkpoints/step-00000100 or the output of tools.checkpoint import"
    )
    add("--run", required=True, metavar="RUN_OR_CHECKPOINT", help=run)
    add_tokenizer_option(parser)
    add("--prompt", default="", help="text to continue (default: a new document)")
    most = "maximum number of tokens to generate (default 200); the end of the document ends it earlier"
    add("--max_new_tokens", type=natural, default=200, metavar="N", help=most)
    temperature = "divides the logits (default 0.8); 0 always takes the likeliest token"
    add("--temperature", type=number_from(0), default=0.8, metavar="X", help=temperature)
    top_k = "sample from the K likeliest tokens (default 50); 0 samples from all"
    add("--top_k", type=natural, default=50, metavar="K", help=top_k)
    add("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    window = (
        "maximum tokens of context, the oldest are dropped; 0, the default, is the run's "
        "train.seq_len, because the model has not learned later positions; at most its positions"
    )
    add("--window", type=natural, default=0, metavar="T", help=window)
    return parser


def add_tokenizer_option(parser: argparse.ArgumentParser) -> None:
    tokenizer = (
        "a tokenizer.json or its folder; auto, the default, is the tokenizer in the folder of the "
        "weights, or else that of the run's data"
    )
    parser.add_argument("--tokenizer", default="auto", metavar="bytes|PATH", help=tokenizer)


def find_model_tokenizer(folder: Path, data: DataConfig, requested: str) -> Tokenizer:
    """Load the tokenizer of the model whose weights are in `folder`.

    With `requested` auto it is the one that a checkpoint keeps, the tokenizer in that folder, or else that of
    the training data. Raises DataError.
    """
    if requested == "bytes":
        return ByteTokenizer()
    if requested != "auto":
        return load_tokenizer(requested, data.bos, data.eos)
    info = read_origin(folder).tokenizer
    if info and not info.sha256:
        return ByteTokenizer()
    if (folder / FILE).is_file():
        return JsonTokenizer(folder, data.bos, data.eos, info)
    try:
        source = next(iter(data.mixture), data.source)
        if data.tokenizer == "auto" and not is_prepared(source):
            # raises if the source is missing, which may have been prepared data with a tokenizer
            find_files(source)
        return find_tokenizer(data)
    except DataError as error:
        raise DataError(
            f"{folder}: the tokenizer of its run cannot be found ({error}): set it with --tokenizer"
        ) from None


def make_context(tokenizer: Tokenizer, prompt: bytes) -> list[int]:
    """Return the prompt's ids as the beginning of a document, with BOS if there is one. Raises DataError."""
    if not prompt:
        return [tokenizer.info.start]
    try:
        ids = tokenizer.encode([prompt])[0].tolist()
    except UnicodeDecodeError as error:
        raise DataError(
            f"--prompt is not valid UTF-8 at byte {error.start}, but this tokenizer needs UTF-8: correct it"
        ) from None
    return ids if tokenizer.info.bos is None else [tokenizer.info.bos, *ids]


def choose_window(requested: int, job: TrainingJob) -> int:
    """Return the maximum context; 0 is the run's seq_len. ConfigError if the model's positions end before."""
    longest = model_of(job.model).max_seq_len
    if longest is not None and requested > longest:
        raise ConfigError(f"--window={requested} must not exceed the {longest} positions of the run's model")
    return requested or job.seq_len


def load_model(checkpoint: Path, job: TrainingJob, device: torch.device, seed: int = 0) -> nn.Module:
    """Load the model of a checkpoint, unsharded and in eval mode: on a GPU in the run's compute dtype, on a
    CPU in float32. `seed`: of the run, which made what no checkpoint has. Raises CheckpointError and
    ConfigError."""
    name = dtype_on_device(device) if job.parallel.param_dtype == "auto" else job.parallel.param_dtype
    dtype = getattr(torch, name) if device.type == "cuda" else torch.float32
    model = model_of(job.model).unsharded(device, seed, dtype).eval()
    load_weights(own_weights(checkpoint, job.model), model)
    return model


def last_logits(source: TrainedModel, model: nn.Module, device: torch.device) -> LogitsOf:
    """Return the function of tokens[1, T] whose result[1, T or 1, V] ends with the next token's logits."""
    if source.computes_loss:  # the other tokens' logits take the most memory
        head = model.get_submodule(source.logits[0])
        head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:], *args[1:]))
    narrow = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())

    def logits_of(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, narrow):  # buffers stay in float32
            return source.logits_of_batch(model, Batch(tokens.to(device), tokens))

    return logits_of


@torch.inference_mode()
def generate(
    logits_of: LogitsOf,
    tokens: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    window: int,
    tokenizer: TokenizerInfo,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids that follow `tokens`, and stop at the tokenizer's EOS. The context is
    the last `window` tokens, recomputed for every new token."""
    generator = torch.Generator().manual_seed(sampling.seed)
    context = list(tokens)
    for _ in range(max_new_tokens):
        logits = logits_of(torch.tensor([context[-window:]]))[0, -1, : tokenizer.vocab_size]
        token = choose_token(logits, sampling, generator)
        if token == tokenizer.eos:
            return
        context.append(token)
        yield token


def choose_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample one id from logits[V], on the CPU so that all devices draw the same random numbers."""
    logits = logits_V.float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    # the largest is 0 before the division, so that a small temperature does not overflow into NaN
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def stream_text(tokenizer: Tokenizer, context: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
    """Yield the text of the context, then that of each token as soon as its characters are complete.

    All ids are decoded together, because some tokenizers decode the first id of a text differently.
    """
    ids, text, shown = list(context), tokenizer.decode(context), 0
    while True:
        # the next token may complete a character at the end
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
