"""Settings: schema, layers with provenance, historic names, secrets, presets."""
