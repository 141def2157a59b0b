"""status.json: what became of a run, for whoever looks at its folder."""

import json
import os
from pathlib import Path
from typing import Literal

State = Literal["running", "finished", "stopped", "failed"]


def write_status(folder: Path, state: State, step: int, resumed_from: int | None, reason: str = "") -> None:
    """Write status.json by one rename, so that a reader never sees half of it."""
    how_to_go_on = {"running": "", "finished": "a larger train.steps continues it"}.get(state, "run the same command again")
    status = {"state": state, "step": step, "resumed_from": resumed_from, "reason": reason, "how_to_go_on": how_to_go_on}
    partial = folder / ".status.json.partial"
    partial.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / "status.json")


def read_status(folder: Path) -> dict[str, object] | None:
    """The last status of a run's folder, or None if it has none."""
    path = folder / "status.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
