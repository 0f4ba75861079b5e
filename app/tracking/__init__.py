"""Metrics, run log, console, timers and profiler of a run."""
