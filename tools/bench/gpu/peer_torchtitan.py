"""torchtitan as a peer on one GPU: its Llama 3 at our shape, its defaults but for compilation, which is on.

Only torchtitan's own process imports torchtitan (0.3). It is given a module with a config, a tokenizer and
some text.
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import tokenizers

from meshwright.tools.bench.gpu.cases import SHAPES, STEPS
from meshwright.tools.bench.train_run import WARM_UP_STEPS, spread
from meshwright.tools.processes import BenchError
from meshwright.train.data.sources import find_files

MODULE = "bench_torchtitan"
TEXTS, TEXT_CHARACTERS = 2000, 20_000
_STEP = re.compile(r"memory:\s*(-?[\d.]+)GiB.*tps:\s*([\d,]+)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def prepare(folder: Path, shape: str, layers: int, checkpoint: str) -> list[str]:
    """Write what it reads below `folder`, in which it is to run; returns its command."""
    texts = [file.read_bytes().decode(errors="ignore")[:TEXT_CHARACTERS] for _, file in find_files("stdlib")][
        :TEXTS
    ]
    data, words = folder / "tests" / "assets" / "c4_test", folder / "tests" / "assets" / "tokenizer"
    for path in (data, words):
        path.mkdir(parents=True)
    (data / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=258,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts[:1], trainer)
    tokenizer.save(str(words / "tokenizer.json"))
    names = {"bos_token": special[0], "eos_token": special[1], "add_bos_token": True, "add_eos_token": True}
    (words / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    call = f"make_config({shape!r}, {layers}, {checkpoint!r})"
    text = (
        "from meshwright.tools.bench.gpu.peer_torchtitan import make_config\n\n\ndef bench():\n    return "
        f"{call}\n"
    )
    (folder / f"{MODULE}.py").write_text(text, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"]
    return [sys.executable, *launcher, "torchtitan.train", "--module", MODULE, "--config", "bench"]


def make_config(shape_name: str, layers: int, checkpoint: str) -> Any:
    """torchtitan's own config object, from its `llama3_8b` with our width, depth and text. Raises what
    torchtitan raises."""
    from torchtitan.config import CompileConfig  # type: ignore[import-not-found]
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # type: ignore[import-not-found]
    from torchtitan.models import llama3  # type: ignore[import-not-found]
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # type: ignore[import-not-found]
    from torchtitan.models.llama3 import config_registry as registry  # type: ignore[import-not-found]

    shape = SHAPES[shape_name]
    config = registry.llama3_debugmodel()
    rope = ComplexRoPE.Config(
        dim=shape.dim // shape.heads, max_seq_len=shape.seq_len, theta=500000, scaling="llama"
    )
    model = llama3.Llama3Model.Config(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=shape.dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=shape.dim,
            out_features=shape.vocab_size,
            param_init=llama3._output_linear_init(shape.dim),
        ),
        layers=llama3._build_llama3_layers(
            fuse_qkv=True,
            n_layers=layers,
            dim=shape.dim,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            hidden_dim=shape.ffn_dim,
            rope=rope,
            attn_backend="flex",
        ),
    )
    config.model_spec.model, config.model_spec.flavor = model, "bench"
    config.loss.loss_fn.global_vocab_size = shape.vocab_size
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 1, shape.seq_len, STEPS
    config.activation_checkpoint = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[
        checkpoint
    ]
    config.compile = CompileConfig(enable=True)
    config.validator.enable = False
    config.checkpoint.interval = 10 * STEPS
    return config


def read_log(log: Path, tokens: int) -> dict[str, Any]:
    """Figures of its log, where every step says memory and tokens per second. Raises BenchError where none
    does."""
    lines = _COLOUR.sub("", log.read_text(encoding="utf-8", errors="replace"))
    steps = [(float(gib), float(rate.replace(",", ""))) for gib, rate in _STEP.findall(lines)]
    if not steps:
        raise BenchError("torchtitan ended without a line that says memory and tps")
    counted = [rate for _, rate in steps[WARM_UP_STEPS:]] or [steps[-1][1]]
    median = statistics.median(counted)
    return {
        "tokens_per_s_per_rank": median,
        "tokens_per_s_per_rank_best": max(counted),
        "spread": spread(counted, median),
        "peak_memory_gib": None,
        "reserved_memory_gib": max(gib for gib, _ in steps),
        "step_times_s": [tokens / rate for rate in counted],
    }
