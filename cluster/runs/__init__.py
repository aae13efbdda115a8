"""One server's life on this machine: up, its state files, down, what is left of it."""
