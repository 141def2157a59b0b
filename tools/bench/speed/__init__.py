"""How fast, how big, how soon: runs, their parts, and their peers."""
