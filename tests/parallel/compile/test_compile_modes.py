"""parallel.compile.mode changes kernels, not the training.

On a CPU max-autotune has few kernels to choose from for weights that change; tests/e2e/test_gpu.py runs the
same test with the many kernels of a GPU.
"""

import pytest

from tests.distributed.parity import Job, check_compiled, check_parity, plain_run, run_jobs
from tests.support.launch import write_text


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_mode_that_chooses_kernels_by_trying_them_trains_the_same_model(tmp_path):
    job = Job(2, ["--parallel.compile.mode=max-autotune-no-cudagraphs"], 2)
    data = write_text(tmp_path)
    (got,) = run_jobs({"max-autotune": job}, data).values()
    check_parity(got, plain_run(job, data))
    check_compiled(got, job.graphs)
