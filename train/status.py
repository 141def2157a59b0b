"""status.json: what became of a run, for whoever looks at its folder."""

import json
import os
from pathlib import Path
from typing import Literal

State = Literal["running", "finished", "stopped", "failed"]


def write_status(folder: Path, state: State, step: int, resumed_from: int | None, saved: bool, reason: str = "") -> None:
    """Write status.json by one rename, so that a reader never sees half of it. `saved`: there is a checkpoint."""
    again = "run the same command again" if saved else "nothing was saved: the same command starts from the beginning"
    how_to_go_on = {"running": "", "finished": "a larger train.steps continues it"}.get(state, again)
    status = {"state": state, "step": step, "resumed_from": resumed_from, "reason": reason, "how_to_go_on": how_to_go_on}
    partial = folder / ".status.json.partial"
    partial.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / "status.json")
