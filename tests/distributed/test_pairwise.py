"""The covering array covers all legal pairs, obeys its rules and is deterministic; so does the parity
matrix."""

import itertools

import pytest

from tests.distributed import matrix
from tests.distributed.pairwise import Rule, cover_pairs, is_legal, legal_pairs, pairs_of

FACTORS = {"engine": ["petrol", "electric"], "gears": [1, 5, 6], "tank": [0, 40, 60], "doors": [3, 5]}
RULES = [
    Rule(("engine", "gears"), lambda engine, gears: (engine == "electric") == (gears == 1)),
    Rule(("engine", "tank"), lambda engine, tank: (engine == "electric") == (tank == 0)),
]


def every_legal_case(factors, rules):
    cases = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in cases if is_legal(case, rules)]


def test_legal_pairs_are_those_of_all_legal_cases_also_where_two_rules_meet():
    pairs = legal_pairs(FACTORS, RULES)
    assert pairs == set().union(*map(pairs_of, every_legal_case(FACTORS, RULES)))
    assert frozenset({("gears", 5), ("tank", 0)}) not in pairs, (
        "two rules together exclude this pair, though neither does alone"
    )


@pytest.mark.parametrize("given", [[], [{"engine": "electric", "gears": 1, "tank": 0, "doors": 5}]])
def test_every_legal_pair_is_in_some_case_and_every_case_is_legal(given):
    cases = cover_pairs(FACTORS, RULES, given)
    assert set().union(*map(pairs_of, cases + given)) == legal_pairs(FACTORS, RULES)
    assert all(is_legal(case, RULES) and case.keys() == FACTORS.keys() for case in cases)
    assert len(cases) < len(every_legal_case(FACTORS, RULES))
    assert cases == cover_pairs(FACTORS, RULES, given)


def test_the_parity_matrix_holds_every_legal_pair():
    cases = matrix.FAST + matrix.SLOW
    assert set().union(*map(pairs_of, cases)) == legal_pairs(matrix.FACTORS, matrix.RULES)
    assert all(is_legal(case, matrix.RULES) for case in cases)
    assert len({matrix.name(case) for case in cases}) == len(cases) <= 60


def test_every_value_of_every_factor_is_in_the_parity_matrix():
    for factor, values in matrix.FACTORS.items():
        assert {repr(case[factor]) for case in matrix.FAST + matrix.SLOW} == set(map(repr, values))


def test_samples_of_the_slow_cases_are_all_of_them_after_a_round_of_seeds():
    cases = {matrix.name(case): case for case in matrix.SLOW}
    parts = [
        matrix.sample(cases, matrix.PARITY_PARTS, str(seed)) for seed in range(100, 100 + matrix.PARITY_PARTS)
    ]
    assert sorted(name for part in parts for name in part) == sorted(cases)
    assert matrix.sample(cases, matrix.PARITY_PARTS, "all") == cases
