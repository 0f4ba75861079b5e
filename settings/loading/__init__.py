"""Reads settings from their sources, with provenance, and derives what was left null."""
