"""`python -m tools.import_accelerate`: a config of ours from an accelerate YAML."""
