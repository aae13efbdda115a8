"""Airside package."""
