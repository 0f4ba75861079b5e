"""The commands, one file each: parse options, resolve settings, call the package that does the work, and print."""
