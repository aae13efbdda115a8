"""The YAML file: every key, and from text to checked values."""
