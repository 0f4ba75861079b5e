"""The commands of the program, one file each: parse, resolve settings, call, print."""
