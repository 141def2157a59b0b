"""Covering arrays: a few cases that contain every legal pair of values of any two factors.

Most faults depend on at most two settings (Kuhn, Wallace and Gallo, IEEE TSE 30(6), 2004). The greedy method
is AETG's (Cohen et al., IEEE TSE 23(7), 1997) without random numbers: the same factors give the same cases.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Case = dict[str, Any]
Pair = frozenset[tuple[str, Any]]  # two (factor, value)
TRIED = 40  # uncovered pairs tried as the start of each next case


@dataclass(frozen=True)
class Rule:
    """A condition for legal cases: `holds(value, ...)` of these factors' values."""

    factors: tuple[str, ...]
    holds: Callable[..., bool]


def cover_pairs(
    factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule], given: Sequence[Case] = ()
) -> list[Case]:
    """Return cases that, together with `given`, contain every legal pair. A factor that no pair needs has its
    first value."""
    wanted = legal_pairs(factors, rules) - {pair for case in given for pair in pairs_of(case)}
    cases: list[Case] = []
    while wanted:
        seeds = sorted(wanted, key=repr_of)[:: max(1, len(wanted) // TRIED)]
        tried = [complete(dict(seed), factors, rules, wanted) for seed in seeds]
        best = max((case for case in tried if case), key=lambda case: len(wanted & pairs_of(case)))
        wanted -= pairs_of(best)
        cases.append(best)
    return cases


def legal_pairs(factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule]) -> set[Pair]:
    """Return every pair of values that some legal case contains."""
    pairs = (
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    )
    return {pair for pair in pairs if complete(dict(pair), factors, rules, set())}


def pairs_of(case: Case) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def is_legal(case: Case, rules: Sequence[Rule]) -> bool:
    """Return whether the case breaks no rule. Rules about a factor without a value are not checked."""
    return all(
        rule.holds(*(case[f] for f in rule.factors)) for rule in rules if case.keys() >= set(rule.factors)
    )


def complete(
    case: Case, factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule], wanted: set[Pair]
) -> Case | None:
    """Return a legal case with these values; other values are chosen one by one to cover the most wanted
    pairs. None if no case is legal."""
    if not is_legal(case, rules):
        return None
    missing = next((name for name in factors if name not in case), None)
    if missing is None:
        return case

    def gain(value: Any) -> int:
        return sum(frozenset({(missing, value), item}) in wanted for item in case.items())

    for value in sorted(factors[missing], key=gain, reverse=True):  # stable: the first of equal values
        if full := complete({**case, missing: value}, factors, rules, wanted):
            return full
    return None


def repr_of(pair: Pair) -> str:
    return repr(sorted(pair, key=repr))
