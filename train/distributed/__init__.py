"""The processes of a run: ranks, process group, and process exit."""
