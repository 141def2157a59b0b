"""What happens beside the steps of a run: hooks, each a class in the module of its topic, such as
checkpoint/hook.py. `train.phases.build_hooks` states their order."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshwright.train.checkpoint.layout import STATE
from meshwright.train.distributed.exit import print_error
from meshwright.train.errors import ConfigError
from meshwright.train.user_code import find

if TYPE_CHECKING:  # a hook's room must not import all the others
    from meshwright.train.checkpoint.manifest import TrainPosition
    from meshwright.train.data.sequences import StepData
    from meshwright.train.step import StepResult

Row = Mapping[str, Any]


@dataclass(frozen=True)
class StepDone:
    """An optimizer step that this rank has enqueued.

    Args:
        position: in the run, after the step
        first_sample: position in the data order of the step's first sequence, of all ranks
        data: this rank's micro batches, and how long the step waited for them
        result: loss, gradient norm, whether it was skipped, tokens: on the device
        lr: learning rate
        last: of the run
    """

    position: "TrainPosition"
    first_sample: int
    data: "StepData"
    result: "StepResult"
    lr: float
    last: bool

    @property
    def step(self) -> int:
        """The number of the step, counted from 1."""
        return self.position.step


@dataclass(frozen=True)
class Score:
    """The result of evaluating one set: the sum of the loss in `nats` over its predicted tokens, and the
    bytes of UTF-8 text per predicted token, over the entire set."""

    nats: float
    tokens: int
    bytes_per_token: float

    @property
    def loss(self) -> float:
        """Mean loss over the tokens, in nats."""
        return self.nats / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # a larger exponent overflows float64

    @property
    def bits_per_byte(self) -> float:
        """Loss per byte of text in bits, comparable between models with different tokenizers. Exact if the
        set is evaluated in full, without truncated documents; otherwise the bytes per token of the entire set
        are an approximation."""
        return self.loss / math.log(2) / self.bytes_per_token


def mean_loss(scores: Mapping[str, Score]) -> float:
    """Mean loss over the tokens of all sets, in nats."""
    tokens = sum(score.tokens for score in scores.values())
    return sum(score.nats for score in scores.values()) / max(1, tokens)


def is_due(every: int, step: int, last: bool) -> bool:
    """Whether something that happens after every `every`-th step (0: never), and the last, is due."""
    return every > 0 and (last or step % every == 0)


class Hook:
    """Something that happens beside the steps. A hook overrides the methods that it needs.

    Every rank calls every method of every hook at the same point and in the same order, so a hook may use
    collectives. An error that a method raises ends the run. A class that `train.hooks` names is called with
    the `Run`; it has `request_stop` after that.
    """

    def __init__(self, run: Any) -> None:
        """Called with the `Run`, when its weights and optimizer have their values."""

    request_stop: Callable[[str], None]
    """Ask for a stop, with a reason, from any rank: all ranks agree on it after a step, save, and end."""

    def start(self, position: "TrainPosition") -> None:
        """Called once, before the first step of this process; a checkpoint has been loaded."""

    def before_step(self, step: int) -> None:
        """Called before every step, and before its data; steps count from 1."""

    def before_optimizer(self, step: int) -> None:
        """Called when the gradients of the step are complete: of the global batch, summed over the ranks,
        not yet clipped. A change of them in place counts in the norm and in clipping."""

    def after_step(self, done: StepDone) -> None:
        """Called when a step has been enqueued. Its results are on the device: reading one (`.item()`) waits
        for the device, which training otherwise never does."""

    def on_report(self, row: Row) -> None:
        """Called with every row of metrics.jsonl, the same on all ranks."""

    def on_evaluation(self, step: int, scores: Mapping[str, Score]) -> None:
        """Called with the scores of an evaluation after `step` steps, by set, the same on all ranks."""

    def close(self) -> None:
        """Called once after the last step, and after an error, which may be of this rank alone: it may use no
        collectives."""

    def state(self) -> Mapping[str, Tensor]:
        """Return tensors that go into each checkpoint, by name, with the placements of parameters (DTensor)
        or equal on all ranks: always of the same names, shapes and dtypes. A run that resumes reads them in
        place, before `start`. The checkpoint of a step that is evaluated is written before the evaluation
        and the row of that step."""
        return {}


class Hooks(Hook):
    """Hooks as one, called in order, and closed in reverse order."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._yours: list[Hook] = []

    def make(self, classes: Iterable[Callable[[Any], Hook]], run: Any) -> Sequence[Hook]:
        """Return hooks of these classes. If a later one fails, those before it are closed too."""
        for hook_class in classes:
            self._yours.append(hook_class(run))
        return self._yours

    def extend(self, hooks: Iterable[Hook], request_stop: Callable[[str], None]) -> None:
        """Append hooks, and give each `request_stop`."""
        for hook in hooks:
            hook.request_stop = request_stop
            self._hooks.append(hook)

    def start(self, position: "TrainPosition") -> None:
        for hook in self._hooks:
            hook.start(position)

    def before_step(self, step: int) -> None:
        for hook in self._hooks:
            hook.before_step(step)

    def before_optimizer(self, step: int) -> None:
        for hook in self._hooks:
            hook.before_optimizer(step)

    def after_step(self, done: StepDone) -> None:
        for hook in self._hooks:
            hook.after_step(done)

    def on_report(self, row: Row) -> None:
        for hook in self._hooks:
            hook.on_report(row)

    def on_evaluation(self, step: int, scores: Mapping[str, Score]) -> None:
        for hook in self._hooks:
            hook.on_evaluation(step, scores)

    @contextmanager
    def closed_at_exit(self) -> Iterator[None]:
        """Context at whose end all are closed; an error of that does not hide the one that ended the run."""
        try:
            yield
        except BaseException:
            try:
                self.close()
            except Exception as error:
                print_error(f"warning: a hook was not closed: {type(error).__name__}: {error}")
            raise
        self.close()

    def close(self) -> None:
        """Close all, also if one raises an error."""
        with ExitStack() as closing:
            appended = {id(hook) for hook in self._hooks}
            for hook in [*self._hooks, *(hook for hook in self._yours if id(hook) not in appended)]:
                closing.callback(hook.close)


def find_hooks(names: Iterable[str]) -> Sequence[Callable[[Any], Hook]]:
    """Return the classes that `train.hooks` names. Raises ConfigError."""
    found = []
    for name in names:
        kind = find("train.hooks", name)
        if not (isinstance(kind, type) and issubclass(kind, Hook)):
            raise ConfigError(f"train.hooks: {name} must be a class below meshwright.train.hooks.Hook")
        found.append(kind)
    return found


def state_of(hooks: Iterable[Hook]) -> dict[str, Tensor]:
    """Return the state of hooks as a checkpoint names it, `hook.CLASS.NAME`. Raises ConfigError if two hooks
    with a state have one class."""
    states: dict[str, Tensor] = {}
    for hook in hooks:
        of_hook: Any = hook.state()
        if not (isinstance(of_hook, Mapping) and all(isinstance(each, Tensor) for each in of_hook.values())):
            raise ConfigError(f"train.hooks: state() of {type(hook).__name__} must return tensors by name")
        state = {f"{STATE}{type(hook).__name__}.{name}": tensor for name, tensor in of_hook.items()}
        if state.keys() & states.keys():
            raise ConfigError(
                f"train.hooks: two hooks of class {type(hook).__name__} have a state, and a checkpoint could "
                "not tell them apart: rename one"
            )
        states |= state
    return states
