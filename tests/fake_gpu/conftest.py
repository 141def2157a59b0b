"""The fake GPU, once for all of a session's tests; where it cannot be had they are skipped with the
reason."""

import pytest

from tests.fake_gpu.install import AbsentError, FakeGpu, install


@pytest.fixture(scope="session")
def fake_gpu() -> FakeGpu:
    try:
        return install()
    except AbsentError as error:
        pytest.skip(str(error))
