"""From config.json to a ModelConfig: one file per family, found by `registry.py`. Imports no torch."""
