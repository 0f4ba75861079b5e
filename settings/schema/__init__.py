"""Every setting: name, type, default, bounds and meaning; one section a file."""
