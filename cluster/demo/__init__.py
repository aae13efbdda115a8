"""`airside demo`."""
