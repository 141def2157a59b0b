"""FAKE: whether the tests run on the fake GPU (tests/fake_gpu), which computes nothing."""

import os

FAKE = "FAKE_CUDA_DEVICES" in os.environ
