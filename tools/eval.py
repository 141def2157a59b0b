"""`python -m tools.eval CHECKPOINT_OR_RUN_OR_HF_DIR`: measures the loss of a model on text.

Under torchrun the model is sharded over all processes, as in training with FSDP2, and each process evaluates
its share of the sequences.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tokenizers
import torch
import torch.distributed as dist

from meshwright.parallel.compile.apply import check_compiler, use_cache_folder
from meshwright.parallel.mesh import build_mesh, data_parallel_group
from meshwright.parallel.plan.schema import Plan
from meshwright.tools.checkpoint.convert import imported_config
from meshwright.tools.cli import format_table, natural, new_parser, parse_with_keys, positive, run_tool
from meshwright.tools.generate import add_tokenizer_option, find_model_tokenizer
from meshwright.tools.run_reader import value_text
from meshwright.train.checkpoint.commit import find_newest
from meshwright.train.checkpoint.huggingface import open_folder
from meshwright.train.checkpoint.initial_weights import Weights, find_weights, load_weights
from meshwright.train.checkpoint.manifest import CONFIG, MANIFEST
from meshwright.train.config import Config, DataConfig
from meshwright.train.config_keys import leaves
from meshwright.train.config_parser import parse_config
from meshwright.train.data.corpus import Corpus, check_data, load_on_all_ranks
from meshwright.train.data.sequences import make_sequence_shape
from meshwright.train.data.token_store import TokenStream
from meshwright.train.data.tokenizer import JsonTokenizer, Tokenizer
from meshwright.train.data.training_data import make_batch_shape
from meshwright.train.distributed.process_group import choose_device, group_timeout, start_process
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import ConfigError, DataError
from meshwright.train.evaluation import score_sets
from meshwright.train.hooks import Score
from meshwright.train.main import end_with
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.resolve import plan_on_device
from meshwright.train.training import shard_model

DESCRIPTION = """examples:
  python -m tools.eval runs/NAME                        the run's evaluation sets
  python -m tools.eval runs/NAME --data books/ --json   other text
  torchrun --nproc-per-node 8 -m tools.eval HF_DIR --data wiki.jsonl

Measure loss (nats per token), perplexity and bits per byte of a model on text,
of a run or a checkpoint on the run's evaluation sets or on --data. Under
torchrun the model is sharded, and the processes share the sequences.
"""
CONFIG_KEYS = """Config keys of train.main, such as --data.text_field, --data.packing,
--data.document_mask and --parallel.compile.enabled, override those of the run.
"""
FIGURES = ("loss", "perplexity", "bits_per_byte", "tokens")  # of a set, for --json
# The parallelism of the run does not matter for its evaluation: the model is sharded over the processes of
# this tool, and keys that only training needs are reset.
RESET_KEYS = (
    "--run.device=auto",
    "--parallel.plan=manual",
    "--parallel.strategy=null",
    "--parallel.dp_replicate=auto",
    "--parallel.dp_shard=auto",
    "--parallel.cp=auto",
    "--parallel.cp_exchange=auto",
    "--parallel.tp=auto",
    "--parallel.reshard_after_forward=auto",
    "--parallel.activation_checkpoint=none",
    "--parallel.activation_checkpoint_blocks=auto",
    "--parallel.async_tp=false",
    "--parallel.float8.all_gather=false",
    "--parallel.unit_min_params=0",
    "--train.global_batch_size=-1",
    "--train.micro_batch_size=1",
    "--train.freeze=[]",
)


@dataclass(frozen=True)
class EvalTarget:
    """The model to evaluate: the folder of its weights, the config of model and data, the weights."""

    folder: Path
    config: Config
    weights: Weights


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Evaluate a model, and end the process with an exit code."""
    options, overrides = parse_with_keys(make_parser(), arguments)
    end_with(lambda ranks: evaluate_model(options, overrides, ranks))


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("eval", "CHECKPOINT_OR_RUN_OR_HF_DIR", DESCRIPTION, CONFIG_KEYS)
    add = parser.add_argument
    model = "a checkpoint, a run (its newest), or a Hugging Face folder, of a Llama or with --model.factory"
    add("model", metavar="CHECKPOINT_OR_RUN_OR_HF_DIR", help=model)
    data = (
        "evaluate on this source instead: all of a file, folder or glob of text; of a folder made by "
        "tools.prepare_data the held-out documents, or all if none is held out; required for a Hugging Face "
        "model"
    )
    add("--data", metavar="SOURCE", help=data)
    add_tokenizer_option(parser)
    sequences = "evaluate the first N sequences of each set; 0, the default, evaluates all"
    add("--sequences", type=natural, default=0, metavar="N", help=sequences)
    seq_len = "tokens of a sequence (default: the run's train.seq_len)"
    add("--seq_len", type=positive, metavar="T", help=seq_len)
    micro_batch = "sequences per process and forward (default 1)"
    add("--micro_batch_size", type=positive, default=1, metavar="B", help=micro_batch)
    add("--json", action="store_true", help="print one JSON document")
    return parser


def evaluate_model(options: argparse.Namespace, overrides: Sequence[str], ranks: RankInfo) -> int:
    """Find, load and evaluate the model, print the scores, and return the exit code. Raises the classes of
    train.errors.USER_ERRORS."""
    target = find_target(options, overrides)
    config = target.config
    device, device_name = choose_device(config.run, ranks)
    plan = plan_on_device(config.job, ranks, device, device_name)
    use_cache_folder(plan.compile)
    check_compiler(plan, device.type, ranks.local_world_size)
    source = model_of(config.model)
    source.check(config.job)
    check_data(config.data, source.vocab_size)
    warnings = start_process(config.run, ranks, device)

    def print_progress(*lines: str) -> None:
        if ranks.is_main:
            print(*lines, sep="\n", file=sys.stderr, flush=True)

    corpus = load_on_all_ranks(config.data, ranks, None, print_progress)
    sets = choose_sets(corpus, options.data)
    processes = f"{ranks.world_size} process{'es' if ranks.world_size > 1 else ''}"
    sequences = f"sequences of {config.train.seq_len}: {', '.join(sets)}"
    print_progress(*warnings, f"{target.folder} on {device_name}, {processes}, {sequences}")
    scores = score_model(target, plan, corpus, sets, options.sequences, device)
    if ranks.is_main:
        figures = {
            "model": str(target.folder),
            "processes": ranks.world_size,
            "seq_len": config.train.seq_len,
            "sets": {name: {key: getattr(score, key) for key in FIGURES} for name, score in scores.items()},
        }
        print(json.dumps(figures, indent=2) if options.json else to_text(scores), flush=True)
    dist.destroy_process_group()
    return 0


def find_target(options: argparse.Namespace, overrides: Sequence[str]) -> EvalTarget:
    """Return the model that the options name, with its config.

    Raises CheckpointError, ConfigError and DataError.
    """
    path = Path(options.model).expanduser()
    is_hf = (path / CONFIG).is_file() and not (path / MANIFEST).is_file()
    folder = path if is_hf else find_newest(path)
    if is_hf and any(key.partition("=")[0] == "--model.factory" for key in overrides):
        keys = []
    elif is_hf:  # a Llama, whose config is what tools.checkpoint writes for it
        model = imported_config(open_folder(folder), None)
        keys = [f"--{key}={value_text(value)}" for key, value in leaves(model)]
    else:
        keys = [f"--config={folder / 'config.yaml'}"]
    keys += [*RESET_KEYS, f"--train.micro_batch_size={options.micro_batch_size}"]
    keys += [f"--train.seq_len={options.seq_len}"] if options.seq_len else []
    config = parse_config([*keys, *overrides])
    saves = config.checkpoint
    weights = find_weights(str(folder), config.model, saves.changed_model, saves.init_strict)
    if is_hf and not options.data:
        raise ConfigError(f"{folder} is a Hugging Face model and has no evaluation sets: add --data SOURCE")
    if is_hf and options.tokenizer == "auto" and not (folder / "tokenizer.json").is_file():
        raise DataError(f"{folder} has no tokenizer.json: add the model's tokenizer with --tokenizer PATH")
    if options.data or options.tokenizer != "auto":
        tokenizer = find_model_tokenizer(folder, config.data, options.tokenizer)
        data = with_tokenizer(config.data, tokenizer)
        if options.data:
            data = dataclasses.replace(
                data, source=options.data, mixture={}, validation={}, eval_fraction=0.0
            )
        config = dataclasses.replace(config, data=data)
    return EvalTarget(folder, config, weights)


def with_tokenizer(data: DataConfig, tokenizer: Tokenizer) -> DataConfig:
    """Return a data config with this tokenizer, and with its BOS and EOS by name, because the files next to
    it may not name them."""
    if not isinstance(tokenizer, JsonTokenizer):
        return dataclasses.replace(data, tokenizer="bytes", bos="auto", eos="auto")
    library = tokenizers.Tokenizer.from_file(str(tokenizer.path))
    bos, eos = (
        None if i is None else library.id_to_token(i) for i in (tokenizer.info.bos, tokenizer.info.eos)
    )
    return dataclasses.replace(data, tokenizer=str(tokenizer.path), bos=bos or "none", eos=str(eos))


def choose_sets(corpus: Corpus, source: str | None) -> dict[str, TokenStream]:
    """Return the sets to evaluate: the run's held-out and validation sets, or the held-out documents of
    `source`, or all of it. DataError if a run has no set."""
    if source:
        return {source: corpus.evaluation_sets.get("held_out", corpus.sources[0].split)}
    sets = corpus.evaluation_sets
    if not sets:
        raise DataError("the run has neither held-out documents nor data.validation: add --data SOURCE")
    return sets


def score_model(
    target: EvalTarget,
    plan: Plan,
    corpus: Corpus,
    sets: dict[str, TokenStream],
    limit: int,
    device: torch.device,
) -> dict[str, Score]:
    """Build the sharded model, load its weights and score every set. Collective: every rank must call it, and
    all get the same scores."""
    config = target.config
    sequences = make_sequence_shape(
        config.data, corpus.tokenizer, config.train.seq_len, model_of(config.model).vocab_size
    )
    timeout = group_timeout(config.run)
    mesh = build_mesh(plan.mesh, device.type, timeout, plan.cpu_offload)
    source, sharded = model_of(config.model), shard_model(config.job, plan, mesh, timeout)
    source.initialise(sharded, config.run.seed, loaded=not target.weights.missing)
    model = sharded.model
    load_weights(target.weights, model)
    shape = make_batch_shape(plan, mesh)
    with torch.no_grad():  # save no activations
        group = data_parallel_group(mesh, timeout)
        loss_of = source.loss(plan, 0.0)
        return score_sets(model, sets, sequences, shape, limit, device, group, loss_of)


def to_text(scores: dict[str, Score]) -> str:
    """Return the scores as a table with a row for each set."""
    head = ("set", "loss (nats/token)", "perplexity", "bits/byte", "tokens")
    rows = [
        (name, f"{s.loss:.4f}", f"{s.perplexity:.4g}", f"{s.bits_per_byte:.4f}", f"{s.tokens:,}")
        for name, s in scores.items()
    ]
    return format_table(head, rows)


if __name__ == "__main__":
    run_tool(main)
