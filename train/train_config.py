"""What the user says about the training loop."""

from dataclasses import dataclass

from meshwright.train.bounds import bounded


@dataclass(frozen=True)
class TrainConfig:
    """The training loop.

    Args:
        steps: optimizer steps
        epochs: instead of steps: passes over the training text (may be a fraction); of a mixture, as many
            sequences as its sources have together; 0 means steps counts
        seq_len: tokens per sequence
        micro_batch_size: sequences per rank in one forward and backward; auto is a rank's whole share of
            global_batch_size, or 1 where that is -1; under parallel.plan=auto the planner chooses it, and
            with it the global batch where that is -1
        global_batch_size: sequences per optimizer step over all ranks; -1 is micro_batch_size x data-parallel
            degree
        grad_clip: largest global gradient norm; 0 does not clip
        z_loss: weight of the squared log-partition of the logits, which keeps them from drifting (PaLM:
            1e-4); counted in the reported loss, but not in evaluations; 0 is none
        max_skipped_steps: steps that may go without an update because their loss or gradient is not finite,
            before the run stops; 0 stops at the first
        eval_every: optimizer steps between evaluations on held-out text and data.validation, the first before
            training; 0 is never
        eval_sequences: sequences of each held-out or validation set in one evaluation, at most; 0 is all
        gc_every: optimizer steps between collections of Python's cyclic garbage, on all ranks after the same
            step; 0 leaves it to Python, which stops a rank whenever it likes
        freeze: fqn patterns of parameters that are not trained, such as tok_embeddings.* or layers.0.*
    """

    steps: int = bounded(1000, low=1)
    epochs: float = bounded(0.0, low=0)
    seq_len: int = bounded(1024, low=1)
    micro_batch_size: int | str = "auto"
    global_batch_size: int = -1
    grad_clip: float = bounded(1.0, low=0)
    z_loss: float = bounded(0.0, low=0)
    max_skipped_steps: int = bounded(5, low=0)
    eval_every: int = bounded(0, low=0)
    eval_sequences: int = bounded(64, low=0)
    gc_every: int = bounded(50, low=0)
    freeze: tuple[str, ...] = ()
