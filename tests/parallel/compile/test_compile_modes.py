"""The gate of parallel.compile.mode: other kernels, the same training.

On a CPU max-autotune finds few kernels to choose from, for weights that change; a GPU's many stand before the
same gate in tests/e2e/test_gpu.py.
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
