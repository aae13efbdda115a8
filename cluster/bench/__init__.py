"""`airside bench`: how fast this machine runs a model, and how near that is to what the machine can do."""
