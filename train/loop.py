"""The training loop: batch, step, and between the steps whatever the hooks do."""

from contextlib import closing
from functools import partial

from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.fault_tolerance.shutdown import GracefulShutdown
from meshwright.train.hooks import Hooks, StepDone
from meshwright.train.optim.optimizer import learning_rate, set_learning_rate
from meshwright.train.run import Run


def train_loop(run: Run, hooks: Hooks, stop: GracefulShutdown) -> TrainPosition:
    """Train from `run.data.start` to the last step, or until the ranks agree to stop; return the position
    reached.

    Raises DataError, and what hooks raise: SaveError, NonFiniteError, PeerLostError, RecompileError.
    """
    config, data, training, position = run.config, run.data, run.training, run.data.start
    with closing(data.load_from(position, config.data.prefetch)) as loader:
        hooks.start(position)
        while position.step < data.total_steps and not stop.agreed:
            step, first_sample = position.step + 1, position.samples
            hooks.before_step(step)
            if data.order.lanes and not stop.await_data(loader.is_ready, data.order.fetched):
                break
            step_data, lr = loader.next(), learning_rate(config.optim, step, *data.schedule)
            set_learning_rate(training.optimizer, lr)
            result = training.step(step_data.micro_batches, partial(hooks.before_optimizer, step))
            position = data.advance(position, step_data)
            last = position.step == data.total_steps
            hooks.after_step(StepDone(position, first_sample, step_data, result, lr, last))
    return position
