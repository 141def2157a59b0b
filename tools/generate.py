"""`python -m tools.generate --run RUN_DIR --prompt TEXT`: text from a checkpoint, in one process.

Shapes: T tokens of the context, V vocabulary.
"""

import argparse
import codecs
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.llama import Llama
from models.rope import rope_tables
from tools.command import run_tool
from tools.whole_weights import checkpoint_config, find_newest, load_whole_weights
from train.config import Config, ConfigError
from train.data.tokenise import SEPARATOR, VOCAB_SIZE


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 takes the likeliest; `top_k` 0 takes all into account."""

    temperature: float
    top_k: int
    seed: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the prompt and its continuation. Raises CheckpointError and ConfigError."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not (options.run or options.checkpoint):
        parser.error("--run RUN_DIR or --checkpoint PATH is needed")
    checkpoint = find_newest(Path(options.checkpoint or options.run))
    config = checkpoint_config(checkpoint)
    window = choose_window(options.window, config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(checkpoint, config, device)
    prompt = options.prompt.encode("utf-8", "surrogateescape")
    sampling = Sampling(options.temperature, options.top_k, options.seed)
    new_tokens = generate(model, list(prompt) or [SEPARATOR], options.max_new_tokens, sampling, window)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows question marks
    print_stream(prompt, new_tokens, sys.stdout.write, sys.stdout.flush)


def make_parser() -> argparse.ArgumentParser:
    """The tool's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate", description="Print a prompt and its continuation by a trained model.", allow_abbrev=False
    )
    parser.add_argument("--run", metavar="RUN_DIR", help="folder of a run; its newest checkpoint is used")
    parser.add_argument("--checkpoint", metavar="PATH",
                        help="instead: this checkpoint, such as runs/NAME/checkpoints/step-00000100")  # fmt: skip
    parser.add_argument("--prompt", default="", help="text to go on with; without it a new document begins")
    parser.add_argument("--max_new_tokens", type=_count, default=200, metavar="N",
                        help="tokens to generate at most (default 200); the end of the document ends it earlier")  # fmt: skip
    parser.add_argument("--temperature", type=_temperature, default=0.8, metavar="X",
                        help="divides the logits (default 0.8); 0 always takes the likeliest token")  # fmt: skip
    parser.add_argument("--top_k", type=_count, default=50, metavar="K",
                        help="sample among the K likeliest tokens (default 50); 0 is all")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument("--window", type=_count, default=0, metavar="T",
                        help="tokens of context at most, the oldest are dropped; 0, the default, is the run's "
                             "train.seq_len, as it has learned no positions beyond; at most its model.max_seq_len")  # fmt: skip
    return parser


def choose_window(asked: int, config: Config) -> int:
    """How many tokens of context the model gets. Raises ConfigError if there are no position tables for as many."""
    if asked > config.model.max_seq_len:
        raise ConfigError(f"--window={asked} must not exceed the run's model.max_seq_len={config.model.max_seq_len}")
    return asked or config.train.seq_len


def load_model(checkpoint: Path, config: Config, device: torch.device) -> Llama:
    """The plain model of a checkpoint, ready to generate; on a GPU in the dtype it was trained to compute in."""
    weights = load_whole_weights(checkpoint)
    if config.model.tie_embeddings:
        weights["head.output.weight"] = weights["tok_embeddings.weight"]
    with torch.device("meta"):
        model = Llama(config.model)
    dtype = getattr(torch, config.parallel.param_dtype) if device.type == "cuda" else torch.float32
    model.load_state_dict({name: weight.to(device, dtype) for name, weight in weights.items()}, assign=True)
    tables = rope_tables(model.config.head_dim, model.config.max_seq_len, model.config.rope_theta, model.config.rope_scaling)
    model.cos_TH, model.sin_TH = (table.to(device) for table in tables)
    return model.eval()


@torch.inference_mode()
def generate(model: Llama, tokens: Sequence[int], max_new_tokens: int, sampling: Sampling, window: int) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids that follow `tokens`; ends before a separator. The context is the last
    `window` tokens, recomputed for every new one."""
    generator = torch.Generator().manual_seed(sampling.seed)
    context = list(tokens)
    last_only = model.head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:], *args[1:]))
    try:
        for _ in range(max_new_tokens):
            seen = torch.tensor([context[-window:]], device=model.cos_TH.device)
            token = choose_token(model(seen)[0, -1], sampling, generator)
            if token == SEPARATOR:
                return
            context.append(token)
            yield token
    finally:
        last_only.remove()


def choose_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One id drawn from logits[V], on the CPU so that every device draws alike; ids no text has are left out."""
    logits = logits_V[:VOCAB_SIZE].float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    # the largest is 0 before the division: however small the temperature, nothing overflows into NaN
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def print_stream(prompt: bytes, tokens: Iterator[int], write: Callable[[str], object], flush: Callable[[], object]) -> None:
    """Write the prompt, then each token as it comes; a character of several bytes once its last byte is there."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    write(decoder.decode(prompt))
    flush()
    for token in tokens:
        text = decoder.decode(bytes([token]))
        if text:
            write(text)
            flush()
    write(decoder.decode(b"", final=True) + "\n")
    flush()


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be 0 or a positive number")
    return value


if __name__ == "__main__":
    run_tool(main)
