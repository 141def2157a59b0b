"""`python -m tools.plan`: the plan of a run, chosen or checked, before anything runs."""
