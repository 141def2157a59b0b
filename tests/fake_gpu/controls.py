"""Copies of the project with injected faults, which the tests on the fake GPU must detect."""

import shutil
from pathlib import Path

from meshwright.tools.dryrun.install import ROOT
from tests.soak.faults.fault import Fault
from tests.soak.faults.source import PRODUCT, find_places

READ = Fault(
    "loss-is-read",
    "the step reads its loss on the host",
    "loss += micro_loss.detach()",
    "loss += micro_loss.detach().item()",
)
NO_WAIT = Fault(
    "fetched-is-not-awaited",
    "the backward reads offloaded activations before their copy is complete",
    "self._torch_device.current_stream().wait_event(block.copied)",
    "pass",
)
WRONG_STREAM = Fault(
    "sent-on-the-computing-stream",
    "activations are copied on the stream on which the step computes",
    "with self._torch_device.stream(self._copies):\n                for storage in block.storages.values():\n"
    "                    self.sent_bytes",
    "if True:\n                for storage in block.storages.values():\n                    self.sent_bytes",
)
NOT_AWAITED = Fault(
    "batches-are-not-awaited",
    "a step reads batches before their copy to the GPU is complete",
    "stream.wait_event(copied)",
    "pass",
)
READ_AT_ONCE = Fault(
    "flag-is-read-at-once",
    "every step waits for its own flag of non-finite values",
    "return self._read(0 if copied is None else 1)",
    "return self._read(0)",
)
SAVED_TOO_EARLY = Fault(
    "copies-are-not-awaited",
    "a checkpoint is written before its values are copied",
    "torch.cuda.synchronize()\n        return copied",
    "pass\n        return copied",
)
NO_DEVICE = Fault(
    "thread-on-device-0",
    "the loader's thread does not set its rank's device",
    "torch.cuda.set_device(self._stream.device)",
    "pass",
)


def broken_copy(folder: Path, *faults: Fault) -> Path:
    """Copy the project with the faults. Raises FaultError if a snippet does not occur exactly once."""
    places = find_places(ROOT, faults)
    for name in (*PRODUCT, "configs", "tests"):
        if (ROOT / name).exists():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for fault in faults:
        path = folder / places[fault.name].path
        path.write_text(path.read_text().replace(fault.found, fault.becomes))
    return folder
