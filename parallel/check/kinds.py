"""What a wrong tensor looks like: doubled, one rank's part, a partial sum, and so on. Pure functions of what
the ranks of a check have, and of what one process computes."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

import torch
from torch import Tensor

from meshwright.parallel.check.recorded import DATA_AXES, START, RankRecord, Seen, data_rank, groups_over
from meshwright.parallel.plan.schema import AXES, MeshPlan

TOLERANCE = 1e-4  # of a relative difference in float32, which rounding keeps below 1e-5
NARROW = 5e-2  # below it a difference may be the rounding of bfloat16
FLOOR = 1e-2  # share of the largest gradient: smaller ones are compared with it, as they may be mere rounding
Place = tuple[int, Tensor]  # of a part of a tensor: the dim, and the places there


def relative_error(
    tensor: Tensor,
    expected: Tensor,
    floor: float = 0.0,
    tolerance: float = TOLERANCE,
    rounding: float = 0.0,
) -> tuple[float, float]:
    """Return the norm of the difference, less `rounding`, as a share of the norm, or of `floor` if that is
    larger, and the factor between them, NaN if they differ by more than a factor."""
    if tensor.shape != expected.shape:
        return math.inf, math.nan
    if bool(torch.isclose(tensor, expected, 0.0, 0.0, equal_nan=True).all()):
        return 0.0, 1.0
    norm, floor = float(expected.norm()), max(floor, rounding)
    error = (float((tensor - expected).norm()) - rounding) / (max(norm, floor) or 1.0)
    error = max(0.0, error) if math.isfinite(error) else math.inf
    if not norm:
        return error, math.nan
    scale = float((tensor * expected).sum()) / norm**2
    exact = float((tensor - scale * expected).norm()) / norm <= tolerance
    return error, (scale if exact else math.nan)


def floor_of(gradients: Iterable[Tensor | None]) -> float:
    """Return the norm with which smaller gradients are compared."""
    return FLOOR * max((float(g.norm()) for g in gradients if g is not None), default=0.0)


def common_factor(twin: RankRecord, ranks: Sequence[RankRecord], moment: str) -> float:
    """Return the positive factor of most gradients of a moment, on which all ranks agree; 1 if there is
    none."""
    factors: dict[str, list[float]] = {}  # by two digits, which rounding to bfloat16 does not change much
    for name, expected in twin.of(moment, "gradient").items():
        of_ranks = [rank.of(moment, "gradient").get(name) for rank in ranks]
        if expected is None or any(g is None or g.shape != expected.shape for g in of_ranks):
            continue
        scales = [relative_error(g, expected, tolerance=NARROW)[1] for g in of_ranks if g is not None]
        if scales[0] > TOLERANCE and all(abs(scale - scales[0]) < 1e-3 * abs(scales[0]) for scale in scales):
            factors.setdefault(f"{scales[0]:.2g}", []).append(scales[0])
    # of two that are as frequent the smaller: a sum in place of a mean is the likelier fault
    groups = sorted(factors.values(), key=lambda alike: (-len(alike), alike))
    return median(groups[0]) if groups else 1.0


def places_of_slices(twin: RankRecord, ranks: Sequence[RankRecord]) -> dict[tuple[int, str], Place]:
    """Return which part of a parameter the plain tensor of a rank is, by rank and name."""
    found = {}
    whole = twin.of(START, "value") | twin.of(START, "buffer")
    for rank, recorded in enumerate(ranks):
        for name, local in (recorded.of(START, "value") | recorded.of(START, "buffer")).items():
            expected = whole.get(twin.tied.get(name, name))
            if local is None or expected is None or local.shape == expected.shape:
                continue
            if (place := own_slice(local, expected)) is not None:
                found[rank, name] = place
    return found


def joined_gradients(twin: RankRecord, ranks: Sequence[RankRecord], moment: str) -> dict[str, Tensor]:
    """Return the gradients of the ranks at a moment, joined where each has a part."""
    places, found = places_of_slices(twin, ranks), dict[str, Tensor]()
    for rank, recorded in enumerate(ranks):
        for name, gradient in recorded.of(moment, "gradient").items():
            place, whole = places.get((rank, name)), twin.tensors.get(Seen(START, "value", name))
            if gradient is not None and place is not None and whole is not None:
                gradient = found.get(name, torch.zeros_like(whole)).index_copy(*place, gradient)
            if gradient is not None:
                found[name] = gradient
    return found


def own_slice(local: Tensor, whole: Tensor) -> Place | None:
    """Return along which dim, and at which places of it, a plain tensor of one rank has the values of the
    whole one; None: it is no slice."""
    differ = [
        dim
        for dim in range(whole.dim())
        if local.dim() == whole.dim() and local.shape[dim] != whole.shape[dim]
    ]
    if len(differ) != 1:
        return None
    dim, size = differ[0], local.shape[differ[0]]
    for start in range(0, whole.shape[dim] - size + 1, max(size, 1)):
        if torch.equal(whole.narrow(dim, start, size), local):
            return dim, torch.arange(start, start + size)
    rows = {row.numpy().tobytes(): i for i, row in enumerate(whole.movedim(dim, 0).contiguous())}
    places = [rows.get(row.numpy().tobytes(), -1) for row in local.movedim(dim, 0).contiguous()]
    return (dim, torch.tensor(places)) if -1 not in places else None


def kind(expected: Tensor, found: Sequence[Tensor], parts: Tensor | None, mesh: MeshPlan) -> str:
    """Return what a tensor looks like that differs on some rank; "" for nothing known.

    Args:
        expected: what one process has
        found: what each rank has, of the same shape; or one of them
        parts: of a gradient: of each data-parallel rank's micro batches, [ranks, micro batches, *shape]
    """
    if not all(bool(tensor.isfinite().all()) for tensor in found):
        return "not finite"
    if not any(bool(tensor.any()) for tensor in found):
        return "zero"
    scales = [relative_error(tensor, expected)[1] for tensor in found]
    if all(math.isfinite(scale) for scale in scales) and max(scales) - min(scales) < 1e-3 * abs(scales[0]):
        return _of_factor(scales[0], mesh) if abs(scales[0] - 1) > 1e-3 else ""
    if parts is not None and (told := _of_parts(found, parts, mesh)):
        return told
    for axis in ("tp", "cp"):
        if (
            getattr(mesh, axis) > 1
            and len(found) == mesh.world_size
            and _is_partial(expected, found, mesh, axis)
        ):
            return f"a partial sum taken for the whole: the reduction over {axis} is missing"
    if all(_is_reordered(tensor, expected) for tensor in found):
        return "the right numbers in another order"
    if told := _right_slice(expected, found):
        return told
    wrong = [rank for rank, tensor in enumerate(found) if relative_error(tensor, expected)[0] > TOLERANCE]
    if len(wrong) < len(found):
        return f"only on rank {', '.join(map(str, wrong))}: the ranks disagree"
    if any(relative_error(tensor, found[0])[0] > TOLERANCE for tensor in found[1:]):
        return "the ranks disagree"
    return ""


def _of_factor(scale: float, mesh: MeshPlan) -> str:
    text = f"{scale:.3g} times what it should be"
    for axis in (axis for axis in AXES if getattr(mesh, axis) > 1):
        if math.isclose(scale, getattr(mesh, axis), rel_tol=1e-3):
            return f"{text}: not divided by {axis}, or summed over it where each rank has all"
        if math.isclose(scale, 1 / getattr(mesh, axis), rel_tol=1e-3):
            return f"{text}: divided by {axis} once too often, or a mean in place of a sum"
    return text


def _of_parts(found: Sequence[Tensor], parts: Tensor, mesh: MeshPlan) -> str:
    """Return of which parts of the batch each rank's gradient is made, if it is a sum of some of them."""
    ranks, micro_batches = parts.shape[:2]
    flat = parts.flatten(0, 1).flatten(1).double()
    if flat.shape[1] < 3 * len(flat):
        return ""  # too few numbers to tell parts apart
    of_ranks = []
    for tensor in found:
        solved = torch.linalg.lstsq(flat.T, tensor.flatten().double()[:, None]).solution[:, 0]
        if relative_error(flat.T @ solved, tensor.flatten().double(), tolerance=1e-3)[0] > 1e-3:
            return ""
        of_ranks.append((solved / solved.abs().max()).view(ranks, micro_batches).round(decimals=2))
    used = torch.stack(of_ranks)  # [mesh ranks, data-parallel ranks, micro batches]
    of_rank, of_number = used.abs().sum(2) > 0.05, used.abs().sum((0, 1)) > 0.05
    if not bool(of_number.all()):
        return f"only of micro batch {', '.join(str(int(i) + 1) for i in of_number.nonzero())}"
    for axes in (("dp_shard",), ("dp_replicate",), DATA_AXES):
        own = torch.zeros_like(of_rank)
        for group in groups_over(mesh, tuple(axis for axis in AXES if axis not in axes)):
            for rank in group:
                own[rank, [data_rank(mesh, other) for other in group]] = True
        if not bool(own.all()) and torch.equal(own, of_rank):
            return f"only this rank's part: not reduced over {' and '.join(axes)}"
    if torch.equal(of_rank, of_rank[:1].expand_as(of_rank)) and not bool(of_rank.all()):
        return f"only the part of data-parallel rank {', '.join(str(int(i)) for i in of_rank[0].nonzero())}"
    if float(used.max() - used.min()) < 0.02:
        return ""
    if torch.equal(used, used[:1, :1].expand_as(used)):
        most, least = int(used[0, 0].argmax()), int(used[0, 0].argmin())
        times = float(used[0, 0, most] / used[0, 0, least])
        return f"micro batch {most + 1} counts {times:.2g} times as much as micro batch {least + 1}"
    weights = " ".join(f"{weight:g}" for weight in used[0].flatten().tolist())
    return f"the parts of the batch weigh {weights} (by data-parallel rank and micro batch), not alike"


def _is_partial(expected: Tensor, found: Sequence[Tensor], mesh: MeshPlan, axis: str) -> bool:
    totals = [
        sum((found[rank] for rank in group), torch.zeros_like(expected))
        for group in groups_over(mesh, (axis,))
    ]
    return all(math.isfinite(relative_error(total, expected)[1]) for total in totals)


def _is_reordered(tensor: Tensor, expected: Tensor) -> bool:
    return relative_error(tensor.flatten().sort().values, expected.flatten().sort().values)[0] <= TOLERANCE


def _right_slice(expected: Tensor, found: Sequence[Tensor]) -> str:
    """Return along which dim only some places are right, on all ranks."""
    near = 1e-3 * float(expected.abs().max())
    right = torch.stack([(tensor - expected).abs() <= near for tensor in found]).all(0)
    for dim in range(right.dim()):
        of_dim = right.movedim(dim, 0).reshape(right.shape[dim], -1)
        places = of_dim.all(1).nonzero().flatten().tolist()
        first, last = (places[0], places[-1]) if places else (0, 0)
        together = last - first + 1 == len(places) and 4 * len(places) >= len(of_dim)
        if together and len(places) < len(of_dim):
            return f"right only from {first} to {last} of the {len(of_dim)} places of dim {dim}"
    return ""
