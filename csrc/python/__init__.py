"""Airside: a distributed server for text and image-to-text models."""
