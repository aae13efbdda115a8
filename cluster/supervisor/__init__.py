"""Ray: starts, watches, restarts and scales the processes of one run."""
