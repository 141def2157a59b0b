"""The plan as data: how it is made from a config, the rules that it must keep, and its file."""
