"""The captures that come with the package are what the code traces."""

import lzma
import os
import random

import msgspec
import pytest

from benchmarks.captures import cases_by_file, cases_of_config, is_stale, llamas
from meshwright.train.planning.captures import SHIPPED, shipped_key

RENEW = "the captures are stale: python -m benchmarks.captures --write"


def test_a_capture_is_what_the_code_traces() -> None:
    draw = random.Random(os.environ["MESHWRIGHT_TESTS_SEED"])
    cases = cases_of_config(draw.choice(llamas()), draw.choice((1, 2, 4)))
    assert not is_stale(draw.choice([case for case in cases if case.compiled])), RENEW


@pytest.mark.slow
@pytest.mark.sampled(5)
def test_the_package_has_what_the_searches_of_its_configs_trace_and_nothing_else() -> None:
    files, draw = cases_by_file(), random.Random(os.environ["MESHWRIGHT_TESTS_SEED"])
    assert {*SHIPPED.rglob("*.*")} == {*files, *(path.parent for path in files)}
    for path, cases in files.items():
        keys = msgspec.json.decode(lzma.decompress(path.read_bytes()), type=dict[str, msgspec.Raw])
        assert list(keys) == sorted(map(shipped_key, cases)), RENEW
        assert not is_stale(draw.choice(cases)), RENEW
