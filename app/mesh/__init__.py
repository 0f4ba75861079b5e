"""Placement of arrays on devices: topology, axis rules, shardings and submeshes."""
