"""Freeze schedules: what is frozen at which iteration, and how it is frozen."""
