"""What a plan will need, by formula and table, before anything runs."""
