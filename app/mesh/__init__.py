"""Where arrays are placed: topology, the table of axis rules, placement, submeshes."""
