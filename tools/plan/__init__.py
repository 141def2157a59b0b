"""`python -m tools.plan`: choose, predict, check and compare plans without running them."""
