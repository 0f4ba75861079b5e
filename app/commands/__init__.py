"""The commands, one file each: a command parses options, resolves settings, calls its package and prints the result."""
