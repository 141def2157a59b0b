"""Evaluation on held-out text and validation sets, each distributed over the data-parallel ranks, and the
hook that decides when a run is evaluated."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.models.head import LinearCrossEntropySum
from meshwright.models.loss import LogitsLoss
from meshwright.parallel.sharded_model import evaluating, summed
from meshwright.train.checkpoint.hook import Checkpoints
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.data.sequences import Batch, BatchShape, SequenceShape, read_batch
from meshwright.train.data.token_store import TokenStream
from meshwright.train.data.training_data import to_device
from meshwright.train.fault_tolerance.supervision import Supervision
from meshwright.train.hooks import Hook, Hooks, Score, StepDone, is_due
from meshwright.train.metrics.collector import StepClock
from meshwright.train.model.trained_model import LossOf
from meshwright.train.run import Run
from meshwright.train.step import count_targets


class Evaluation(Hook):
    """Evaluates a run every so many steps, the first time before training, and reports the scores to all
    `hooks`. A stop ends an evaluation, without scores."""

    def __init__(
        self,
        run: Run,
        hooks: Hooks,
        checkpoints: Checkpoints,
        supervision: Supervision,
        clock: StepClock,
    ) -> None:
        self._config, self._training, self._data = run.config.train, run.training, run.data
        self._stop, self._watchdog = supervision.stop, supervision.watchdog
        self._hooks, self._checkpoints, self._clock = hooks, checkpoints, clock

    def start(self, position: TrainPosition) -> None:
        if self._config.eval_every and position.step == 0:
            self._evaluate(0)

    def after_step(self, done: StepDone) -> None:
        if is_due(self._config.eval_every, done.step, done.last) and not self._stop.agreed:
            with self._clock.paused():
                # an evaluation must not cost what has been trained
                self._checkpoints.save_if_due(done.position, done.last)
                self._evaluate(done.step)

    def _evaluate(self, step: int) -> None:
        self._watchdog.enter("evaluation", step)
        data, training = self._data, self._training
        scores = score_sets(
            training.sharded.model,
            data.corpus.evaluation_sets,
            data.sequences,
            data.batch,
            limit=self._config.eval_sequences,
            device=data.device,
            data_parallel=data.group,
            loss_of=training.score_of,
            should_stop=self._stop.should_stop,
        )
        if scores:
            self._hooks.on_evaluation(step, scores)


def score_sets(
    model: nn.Module,
    sets: Mapping[str, TokenStream],
    sequences: SequenceShape,
    shape: BatchShape,
    limit: int,
    device: torch.device,
    data_parallel: dist.ProcessGroup,
    loss_of: LossOf,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Score]:
    """Return the score of every set: identical on all ranks and, except for rounding, on every mesh. `limit`:
    evaluate at most the first `limit` sequences of each set; 0 is all; none if `should_stop` returns
    True, the same on all ranks, before a batch."""
    scores = {}
    for name, split in sets.items():
        batches = set_batches(split, sequences, shape, limit, device)
        if (sums := evaluate(model, batches, data_parallel, loss_of, should_stop)) is None:
            return {}
        nats, tokens = sums.tolist()
        scores[name] = Score(
            nats, int(tokens), max(1, split.text_bytes) / max(1, _predicted(split, sequences))
        )
    return scores


def set_batches(
    split: TokenStream, sequences: SequenceShape, shape: BatchShape, limit: int, device: torch.device
) -> Iterator[Batch]:
    """Yield this rank's share of the first `limit` sequences of a set (0: all), in batches of one shape.
    Every rank yields the same number of batches; the last ones are padded."""
    count = -(-(split.tokens - 1) // sequences.seq_len) if sequences.packing else split.documents
    count = min(limit, count) if limit else count
    per_round = shape.micro_batch_size * shape.data_parallel
    for first in range(0, count, per_round):
        index = first + shape.data_rank * shape.micro_batch_size + np.arange(shape.micro_batch_size)
        rows = np.stack((np.zeros_like(index), np.where(index < count, index, -1)), axis=1)
        batch = read_batch([split], rows, sequences, device.type == "cuda")
        yield to_device(shape.local_tokens(batch), device)


def _predicted(split: TokenStream, shape: SequenceShape) -> int:
    """Number of tokens of a set that are targets: all but the first token of the set, or of each document if
    documents are separate; all if each document gets a start token."""
    if shape.packing:
        return split.tokens - (split.documents if shape.document_mask else 1)
    return split.tokens - (split.documents if shape.start_id is None else 0)


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    data_parallel: dist.ProcessGroup,
    loss_of: LossOf,
    should_stop: Callable[[], bool] = lambda: False,
) -> Tensor | None:
    """Return (sum of the loss in nats, number of targets) over all batches of `data_parallel`, float64 [2] on
    the device; None if `should_stop`, called before every batch, returns True. The z-loss is not included;
    weights and gradients do not change.

    Every rank needs the same number of batches, at least one. Training calls it with autograd enabled,
    because without it the compiled blocks would need a second graph.
    """
    totals = None
    with evaluating(model), _loss_only(model, loss_of):
        for batch in batches:
            if should_stop():
                return None
            loss = loss_of(model, batch, None).detach()
            add = torch.stack((loss, count_targets(batch).float())).double()
            totals = add if totals is None else totals + add
    assert totals is not None, "a set has at least one batch on every rank"
    return summed(totals, data_parallel)


@contextmanager
def _loss_only(model: nn.Module, loss_of: LossOf) -> Iterator[None]:
    """Context in which the loss excludes the z-loss and computes no gradients."""
    outside = loss_of.modules() if isinstance(loss_of, nn.Module) else ()
    switches = [
        module.learning
        for module in (*model.modules(), *outside)
        if isinstance(module, LinearCrossEntropySum | LogitsLoss)
    ]
    for switch in switches:
        switch.zero_()
    try:
        yield
    finally:
        for switch in switches:
            switch.fill_(1.0)
