"""Every mesh trains the same model as one plain eager process: losses, norms, first gradients, initial weights, data."""

import itertools

import pytest

from tests.distributed import matrix
from tests.distributed.matrix import FAST, SHAPE, SLOW, arguments, graphs, name
from tests.distributed.parity import check_compiled, check_parity, plain_run, run_cases
from tests.launch import write_text

AOT = "--parallel.compile.backend=aot_eager"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A function from a case of a list to its result: all cases of a list that have as many ranks run in one launch."""
    results = {}

    def result(cases, case):
        if name(case) not in results:
            alike = {name(c): [*SHAPE, *data, *arguments(c)] for c in cases if c["ranks"] == case["ranks"]}
            results.update(run_cases(case["ranks"], alike, tmp_path_factory.mktemp("cases")))
        return results[name(case)]

    return result


def check(case, got, data):
    check_parity(got, plain_run(data, arguments(case)))
    check_compiled(got, graphs(case))


@pytest.mark.parametrize("case", FAST, ids=name)
def test_a_mesh_trains_the_same_model_as_one_plain_process(case, trained, data):
    check(case, trained(FAST, case), data)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=name)
def test_every_pair_of_settings_trains_the_same_model_as_one_plain_process(case, trained, data):
    check(case, trained(SLOW, case), data)
