"""The gate of parallel.compile.mode: other kernels, the same training.

On a CPU max-autotune finds few kernels to choose from, for weights that change; a GPU's many stand before the same gate in
tests/e2e/test_gpu.py.
"""

import pytest

from tests.distributed.parity import Job, check_compiled, check_parity, plain_run, run_jobs
from tests.support.launch import write_text

MODES = ("default", "max-autotune-no-cudagraphs")


@pytest.mark.slow
def test_a_mode_that_chooses_kernels_by_trying_them_trains_the_same_model(tmp_path):
    data = write_text(tmp_path)
    jobs = {mode: Job(2, [f"--parallel.compile.mode={mode}"], 2) for mode in MODES}
    results = run_jobs(jobs, data)
    for mode, job in jobs.items():
        check_parity(results[mode], plain_run(job, data))
        check_compiled(results[mode], job.graphs)
    check_parity(results[MODES[1]], results[MODES[0]])
