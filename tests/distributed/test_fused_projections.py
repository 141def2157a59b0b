"""With fused projections every mesh trains the same model as one plain eager process."""

import pytest

from tests.distributed.parity import Job, Result, check_compiled, check_parity, plain_run, run_jobs
from tests.support.launch import EAGER, write_text

FUSED, TP, AOT = (
    "--parallel.fused_projections=true",
    "--parallel.tp=2",
    "--parallel.compile.backend=aot_eager",
)
INDUCTOR, SELECTIVE = "--parallel.compile.backend=inductor", "--parallel.activation_checkpoint=selective"
FULL = [TP, FUSED, "--parallel.activation_checkpoint=full", "--parallel.sequence_parallel=false"]
JOBS = {
    "eager-tp": Job(2, [*EAGER, TP, FUSED], 0),
    "eager-tp-full": Job(2, [*EAGER, *FULL], 0),
    "eager-fsdp-selective": Job(2, [*EAGER, FUSED, SELECTIVE], 0),
}
COMPILED = {
    "aot-tp-full": Job(2, [AOT, *FULL], 2),
    "inductor-fsdp-selective": Job(2, [INDUCTOR, FUSED, SELECTIVE], 2),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data: list[str]) -> dict[str, Result]:
    return run_jobs(JOBS, data)


@pytest.mark.parametrize("name", JOBS)
def test_one_product_trains_the_same_model(name: str, trained: dict[str, Result], data: list[str]) -> None:
    check_parity(trained[name], plain_run(JOBS[name], data))
    check_compiled(trained[name], JOBS[name].graphs)


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", COMPILED)
def test_one_product_trains_the_same_model_compiled(name: str, data: list[str]) -> None:
    job = COMPILED[name]
    (got,) = run_jobs({name: job}, data).values()
    check_parity(got, plain_run(job, data))
    check_compiled(got, job.graphs)
