"""The report of a run: tables, plots, alerts and HTML pages. Does not import jax."""
