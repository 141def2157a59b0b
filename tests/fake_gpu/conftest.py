"""The fake GPU, installed once per session. If it cannot be installed, the tests are skipped with the
reason."""

import pytest

from tests.fake_gpu.install import AbsentError, FakeGpu, install


@pytest.fixture(scope="session")
def fake_gpu() -> FakeGpu:
    try:
        return install()
    except AbsentError as error:
        pytest.skip(str(error))
