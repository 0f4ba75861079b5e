"""Pictures of a run: tables, plots, alerts and pages; without jax."""
