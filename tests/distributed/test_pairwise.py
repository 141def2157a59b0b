"""The covering array covers all legal pairs, obeys its rules and is deterministic; the everyday cases of the
parity matrix have every value of its factors."""

import itertools

import pytest

from tests.distributed import matrix
from tests.distributed.pairwise import Rule, cover_pairs, is_legal, pairs_of

FACTORS = {"engine": ["petrol", "electric"], "gears": [1, 5, 6], "tank": [0, 40, 60], "doors": [3, 5]}
RULES = [
    Rule(("engine", "gears"), lambda engine, gears: (engine == "electric") == (gears == 1)),
    Rule(("engine", "tank"), lambda engine, tank: (engine == "electric") == (tank == 0)),
]


# Everyday cases have few ranks, and no inductor, which takes as long as all others.
RARE = {"dp_shard": {4}, "dp_replicate": {4}, "cp": {4}, "backend": {"inductor"}, "recompute": {"budget"}}


def every_legal_case(factors, rules):
    cases = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in cases if is_legal(case, rules)]


@pytest.mark.parametrize("given", [[], [{"engine": "electric", "gears": 1, "tank": 0, "doors": 5}]])
def test_every_legal_pair_is_in_some_case_and_every_case_is_legal(given):
    cases = cover_pairs(FACTORS, RULES, given)
    legal = set().union(*map(pairs_of, every_legal_case(FACTORS, RULES)))
    assert set().union(*map(pairs_of, cases + given)) == legal
    assert all(is_legal(case, RULES) and case.keys() == FACTORS.keys() for case in cases)
    assert len(cases) < len(every_legal_case(FACTORS, RULES))
    assert cases == cover_pairs(FACTORS, RULES, given)


def test_the_everyday_cases_are_legal_and_have_every_value_but_the_rare():
    assert all(is_legal(case, matrix.RULES) for case in matrix.EVERYDAY)
    for factor, values in matrix.FACTORS.items():
        missing = set(values) - {case[factor] for case in matrix.EVERYDAY}
        assert missing <= RARE.get(factor, set()), factor


def test_samples_of_cases_are_all_of_them_after_a_round_of_seeds():
    cases = {str(number): number for number in range(50)}
    parts = [matrix.sample(cases, 7, str(seed)) for seed in range(100, 107)]
    assert sorted(name for part in parts for name in part) == sorted(cases)
    assert matrix.sample(cases, 7, "all") == cases
