"""floats -> credit: advantages of each sample and token."""
