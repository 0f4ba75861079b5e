"""Reads settings from their sources, with provenance, and derives values for settings left null."""
