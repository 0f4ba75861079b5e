"""Where arrays live: topology, the one rule table, placement, the report behind `inspect-mesh`."""
