"""What is to be: the plan as data, how it is made from a config, its rules, its file."""
