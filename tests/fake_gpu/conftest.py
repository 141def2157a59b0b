"""The fake GPU, installed once per session. If it cannot be installed, the tests are skipped with the
reason."""

import pytest

from meshwright.tools.dryrun.install import FakeGpu, FakeGpuError
from tests.fake_gpu.commands import install_for_tests


@pytest.fixture(scope="session")
def fake_gpu() -> FakeGpu:
    try:
        return install_for_tests()
    except FakeGpuError as error:
        pytest.skip(str(error))
