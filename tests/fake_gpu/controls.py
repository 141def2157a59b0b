"""The project with one fault put in: what the tests on the fake GPU must notice."""

import shutil
from pathlib import Path

from tests.fake_gpu.install import ROOT
from tests.soak.faults.fault import Fault
from tests.soak.faults.source import PRODUCT, find_places

READ = Fault("loss-is-read", "the step reads its loss on the host",
             "loss += micro_loss.detach()",
             "loss += micro_loss.detach().item()")  # fmt: skip
NO_WAIT = Fault("fetched-is-not-awaited", "the backward reads offloaded activations that are still on their way",
                "self._torch_device.current_stream().wait_event(block.copied)",
                "pass")  # fmt: skip
WRONG_STREAM = Fault("sent-on-the-computing-stream", "activations are copied where the step computes",
                     "with self._torch_device.stream(self._copies):\n                for storage in block.storages.values():\n"
                     "                    self.sent_bytes",
                     "if True:\n                for storage in block.storages.values():\n"
                     "                    self.sent_bytes")  # fmt: skip
NO_DEVICE = Fault("thread-on-device-0", "the loader's thread does not take its rank's device",
                  "torch.cuda.set_device(self._stream.device)",
                  "pass")  # fmt: skip


def broken_copy(fault: Fault, folder: Path) -> Path:
    """A copy of the project with the fault; FaultError where its snippet is not there any more, exactly once."""
    place = find_places(ROOT, [fault])[fault.name]
    for name in (*PRODUCT, "configs", "tests"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / place.path
    path.write_text(path.read_text().replace(fault.found, fault.becomes))
    return folder
