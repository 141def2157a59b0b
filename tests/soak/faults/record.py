"""What has come of the faults: a JSON file that is written after each, so that a run can go on where it was
stopped."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """Of one fault: the test that caught it and how, "" for none; seconds; how many tests ran; and the commit
    it was tried at."""

    caught: bool
    test: str
    how: str
    seconds: float
    ran: int
    commit: str = ""


@dataclass
class Record:
    """Outcomes by fault, in the order of the table; tests that fail without any fault, which catch nothing;
    and the commit at which the last ones were tried."""

    path: Path
    commit: str
    faults: dict[str, Outcome] = field(default_factory=dict)
    fail_anyway: list[str] = field(default_factory=list)

    def write(self) -> None:
        faults = {name: asdict(one) for name, one in self.faults.items()}
        caught = sum(one.caught for one in self.faults.values())
        content = {
            "commit": self.commit,
            "caught": caught,
            "of": len(faults),
            "fail_anyway": self.fail_anyway,
            "faults": faults,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def read_record(path: Path, commit: str) -> Record:
    """What is there already, or an empty record, that goes on at a commit ("": at its own)."""
    if not path.exists():
        return Record(path, commit)
    plain = json.loads(path.read_text(encoding="utf-8"))
    outcomes = ({"commit": plain["commit"], **one} for one in plain["faults"].values())
    faults = {name: Outcome(**one) for name, one in zip(plain["faults"], outcomes, strict=True)}
    return Record(path, commit or plain["commit"], faults, plain["fail_anyway"])


def to_line(name: str, one: Outcome, width: int = 0) -> str:
    """What became of a fault."""
    return (
        f"{name:{width}}  {one.seconds:5.0f} s  {one.test or f'SURVIVED {one.ran} tests {one.how}'.rstrip()}"
    )


def to_table(record: Record) -> str:
    """A line for each fault, with its commit if that is not the record's."""
    width = max(map(len, record.faults), default=0)
    lines = [
        to_line(name, one, width) + (f"  (at {one.commit})" if one.commit != record.commit else "")
        for name, one in record.faults.items()
    ]
    caught = sum(one.caught for one in record.faults.values())
    return "\n".join([*lines, f"{caught} of {len(record.faults)} caught"])
