"""`pytest --changed`: a test is chosen if it imports what has changed, starts it by name, or mentions it."""

from tests.support.changed import ROOT, distance


def of(test: str, *changed: str) -> int | None:
    return distance(ROOT / test, frozenset(ROOT / name for name in changed))


def test_a_test_is_as_far_from_a_change_as_there_are_imports_in_between():
    here = "tests/support/test_changed.py"
    assert of(here, here, "parallel/fsdp.py") == 0
    assert of(here, "tests/support/changed.py") == 1
    assert of("tests/train/test_step.py", "train/step.py") == 1
    assert of("tests/train/test_step.py", "parallel/sharded_model.py") == 2


def test_a_command_that_is_started_by_name_counts_and_what_nothing_reaches_does_not():
    assert of("tests/tools/test_eval.py", "tools/eval.py") is not None
    assert of("tests/models/test_rope_kinds.py", "train/main.py", "parallel/fsdp.py") is None


def test_other_files_affect_the_tests_that_mention_them():
    assert of("tests/e2e/test_docs.py", "README.md") is not None
    assert of("tests/models/test_rope_kinds.py", "README.md") is None
