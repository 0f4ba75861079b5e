"""Generalized advantage estimation as one linear recurrence over time, and the backends that solve it."""
