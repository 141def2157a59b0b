"""Whether the tests have a GPU, and whether that is the fake one (tests/fake_gpu), which computes nothing."""

import os

import torch

GPU = torch.cuda.is_available()
FAKE = "FAKE_CUDA_DEVICES" in os.environ
