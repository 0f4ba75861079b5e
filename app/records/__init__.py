"""The records that cross packages, and the files they are written to."""
