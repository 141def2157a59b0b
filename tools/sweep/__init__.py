"""`python -m tools.sweep SPEC.yaml`: runs that differ in a few keys, one after another, and a page that
compares them."""
