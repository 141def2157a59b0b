"""From a config to the plan of a run: resolved, chosen, checked against memory, predicted."""
