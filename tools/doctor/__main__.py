"""`python -m tools.doctor`: whether a run will fail or be slow here, how to fix it, and the facts."""

import sys
from collections.abc import Sequence

from meshwright.parallel.yaml_io import to_yaml
from meshwright.tools.cli import EXIT_INTERRUPTED, new_parser, run_tool, to_json
from meshwright.tools.doctor.facts import look
from meshwright.tools.doctor.rules import Finding, judge
from meshwright.train.distributed.exit import end_process
from meshwright.train.errors import ConfigError
from meshwright.train.files import user_path

EXIT_WILL_FAIL = 1
DESCRIPTION = """examples:
  python -m tools.doctor                                   on each machine, before the first run
  python -m tools.doctor --json --run_dir=/shared/runs     one JSON document; writes to the disk of your runs

Will a run fail or be slow on this machine? It prints the verdict, the problems with their fixes, the facts.
It compiles a matrix product and all-reduces over two processes: some seconds, more on a busy machine.
Exit code 0 if nothing will fail, else 1.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the verdict, each finding with its remedy, and the facts; exit with 1 if something will fail."""
    parser = new_parser("doctor", "", DESCRIPTION)
    add = parser.add_argument
    add("--run_dir", default="runs", metavar="FOLDER", help="folder of your runs (default runs)")
    add("--json", action="store_true", help="print one JSON document: verdict, findings, facts")
    options = parser.parse_args(arguments)
    try:
        facts = look(user_path(options.run_dir, "--run_dir", ConfigError))
    except KeyboardInterrupt:
        end_process(EXIT_INTERRUPTED)  # at once: Python takes seconds to unload torch
    findings = judge(facts)
    if options.json:
        print(to_json({"verdict": verdict(findings), "findings": findings, "facts": facts}))
    else:
        lines = [f"  {each.kind.upper():<6}{each.what}\n        {each.remedy}" for each in findings]
        shown = to_yaml(facts, allow_unicode=True, width=110)
        print("\n".join([verdict(findings), *lines, "", shown.rstrip()]))
    sys.stdout.flush()
    sys.exit(EXIT_WILL_FAIL if any(finding.kind == "fails" for finding in findings) else 0)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the answer in one line."""
    kinds = [finding.kind for finding in findings]
    if "fails" in kinds:
        return f"not ready: a run will fail ({kinds.count('fails')} of {len(kinds)} problems)"
    if "slow" in kinds:
        return f"ready, but slow: {next(finding.what for finding in findings if finding.kind == 'slow')}"
    if findings:
        return f"ready: nothing known should fail or be slow, but see: {findings[0].what}"
    return "ready: nothing here should fail or be slow"


if __name__ == "__main__":
    run_tool(main)
