"""`bench calibrate`: how fast this machine is, as a hardware file of the planner."""
