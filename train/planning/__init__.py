"""From a config to the plan of a run: resolve or choose it, check its memory, predict its speed."""
