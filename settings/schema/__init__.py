"""Every setting: name, type, default, bounds and meaning; sections that are read together share a file."""
