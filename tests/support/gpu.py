"""Whether the GPU that tests see, if any, is the fake one (tests/fake_gpu), which computes nothing."""

import os

FAKE = "FAKE_CUDA_DEVICES" in os.environ
