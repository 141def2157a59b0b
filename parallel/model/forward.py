"""One forward of an example, on fake tensors: what it returns, and what it does on the way."""

import fnmatch
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, _meta_registrations, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.parallel.errors import PlanError
from meshwright.parallel.sharded_model import own_random_state

Example = Mapping[str, Any] | Sequence[Any]  # keyword or positional arguments of the model's forward
EXAMPLE_TOKENS = 16


def example_or_tokens(model: nn.Module, example: Example | None) -> Example:
    """Return the example, or tokens [2, EXAMPLE_TOKENS] if there is none."""
    if example:
        return example
    ids = torch.zeros(2, EXAMPLE_TOKENS, dtype=torch.int64)
    name = getattr(model, "main_input_name", None)  # of a transformers model
    return {name: ids} if name else (ids,)


def call_arguments(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an example as positional and keyword arguments. Raises PlanError for one that is neither."""
    if isinstance(example, Tensor):
        raise PlanError(
            "the example is a tensor, but must be a tuple or dict of a forward's arguments: (ids,)"
        )
    if isinstance(example, Mapping):
        return (), dict(example)
    return tuple(example), {}


def run_on_fakes(
    model: nn.Module,
    example: Example,
    dtype: torch.dtype | None = None,
    around: Callable[[Callable[[], Any]], Any] = lambda call: call(),
) -> Any:
    """Return the result of a forward of the example, on fake tensors of a CPU: nothing is computed. A model
    whose forward looks at values is run as it is, if it has them.

    Args:
        dtype: of the parameters; None: their own
        around: gets the forward as a function, and calls it

    Raises PlanError if the model cannot run so.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    device = next((tensor.device for _, tensor in named), None)

    def fake(tensor: Tensor) -> Tensor:
        changed = dtype and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        made = torch.empty(tensor.shape, dtype=dtype if changed else tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad)

    def real(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().to(device, copy=True)

    def run(on: Callable[[Tensor], Tensor]) -> Any:
        values = {name: on(tensor) for name, tensor in named}
        for own in map(vars, model.modules()):  # tensors that are plain attributes
            own.update({key: on(value) for key, value in own.items() if isinstance(value, Tensor)})
        args, kwargs = call_arguments(tree_map_only(Tensor, on, example))
        return around(lambda: functional_call(model, values, args, kwargs))

    def run_on_either() -> Any:
        try:
            with _nothing_changed(model), fake_tensors():
                return run(fake)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if any(tensor.is_meta for _, tensor in named):
                raise PlanError(
                    f"{type(model).__name__}: its forward looks at the values of tensors, which a model "
                    "without values does not have: build it with values, and use mw.shard"
                ) from error
            with _nothing_changed(model), own_random_state():
                return run(real)

    try:
        return run_on_either()
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"{type(model).__name__} does not run on the example's shapes: {type(error).__name__}: {error}. "
            "Fix the example; describe needs none if modules run in the order in which they are registered"
        ) from error


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Context of fake tensors. In it the shape function of grouped products, of experts, takes any dtype,
    as their kernels do; torch's own refuses all but bfloat16. What does not run is not logged as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logged, logger.disabled = logger.disabled, True
    common: Any = _meta_registrations._meta_grouped_mm_common

    def shape_of(mat_a: Tensor, mat_b: Tensor, scale_a: Any, scale_b: Any, **keys: Any) -> Tensor:
        if scale_a is not None:
            return common(mat_a, mat_b, scale_a, scale_b, **keys)
        return _meta_registrations._create_grouped_mm_output_tensor(
            mat_a, mat_b, keys["offs"], keys["out_dtype"]
        )

    _meta_registrations._meta_grouped_mm_common = shape_of  # type: ignore[assignment]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        _meta_registrations._meta_grouped_mm_common, logger.disabled = common, logged


@contextmanager
def _nothing_changed(model: nn.Module) -> Iterator[None]:
    """Context after which modules have their attributes again, in which a forward may keep tensors; in it
    each row of tokens is one sequence."""
    owns = [vars(module) for module in model.modules()]
    owns += [own["_buffers"] for own in owns if "_buffers" in own]
    before = [(own, dict(own)) for own in owns]
    try:
        with one_sequence_per_row():
            yield
    finally:
        for own, kept in before:
            for new in own.keys() - kept.keys():
                del own[new]
            own.update(kept)


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Context in which transformers' models take each row of tokens as one sequence. They look for several in
    the values of positions: a host waits for these, and fake tensors and a dry run do not have them."""
    masks: Any = sys.modules.get("transformers.masking_utils", SimpleNamespace())
    found = getattr(masks, "find_packed_sequence_indices", None)
    masks.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = found


@dataclass(frozen=True)
class Observed:
    """What a forward does.

    Args:
        finished: the modules that it calls, in the order in which it finishes with them
        written: the buffers that it writes, without those that `model.written_buffers` names
        reads: the modules that run at each place where a parameter is read, by its name
    """

    finished: list[str]
    written: tuple[str, ...] = ()
    reads: Mapping[str, set[frozenset[str]]] = field(default_factory=dict)


class _Reads(TorchFunctionMode):
    """Notes, by the id of a tensor, which modules are `running` whenever an operation reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.of: dict[int, set[frozenset[str]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # not a size or a dtype
            for leaf in tree_leaves((args, kwargs)):
                self.of.setdefault(id(leaf), set()).add(frozenset(self.running))
        return result

    def during(self, call: Callable[[], Any]) -> Any:
        """Call a function within this context."""
        with self:
            return call()


def observe(model: nn.Module, example: Example) -> Observed:
    """Return what a forward of the example does, of which nothing is computed. Raises PlanError if the model
    cannot run so."""
    finished: dict[str, None] = {}
    seen: list[dict[str, tuple[int, int]]] = []
    reads, ids = _Reads(), dict[str, int]()
    saved, known = model.state_dict().keys(), getattr(model, "written_buffers", ())

    def anew(*_: Any) -> None:  # a forward on fakes may have failed before
        for noted in (finished, seen, ids, reads.running, reads.of):
            noted.clear()

    def begin(name: str) -> Any:
        return lambda *_: reads.running.append(name)

    def finish(name: str) -> Any:
        return lambda *_: finished.pop(reads.running.pop(), None) or finished.setdefault(name)

    def look(*_: Any) -> None:
        seen.append({name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()})
        ids.update({name: id(p) for name, p in model.named_parameters(remove_duplicate=False)})

    with ExitStack() as hooks, torch.no_grad():
        hooks.enter_context(model.register_forward_pre_hook(anew))
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(begin(name)))
            hooks.enter_context(module.register_forward_hook(finish(name)))
        hooks.enter_context(model.register_forward_pre_hook(look))
        hooks.enter_context(model.register_forward_hook(look))
        run_on_fakes(model, example, around=reads.during)
    before, after = seen[0], seen[-1]
    changed = [name for name in before if before[name] != after.get(name)]
    # what is assigned anew and not saved, such as RoPE's tables, can be made again
    written = [n for n in changed if n in saved or (n in after and before[n][0] == after[n][0])]
    # torch's norms do not count as a version what they write here
    norms = [n for n, m in model.named_modules() if m.training and getattr(m, "track_running_stats", False)]
    written += [f"{norm}.{key}" for norm in norms for key in ("running_mean", "running_var")]
    unknown = (name for name in written if not any(fnmatch.fnmatchcase(name, each) for each in known))
    of_parameters = {name: reads.of[key] for name, key in ids.items() if key in reads.of}
    return Observed([*finished], tuple(unknown), of_parameters)
