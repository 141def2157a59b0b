"""`bench calibrate`: measure this machine and write a hardware file for the planner."""
