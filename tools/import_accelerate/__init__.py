"""`python -m tools.import_accelerate`: convert an accelerate YAML to a config of this trainer."""
