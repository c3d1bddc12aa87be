"""Measurements of what this package claims; run from the root of the repository."""
