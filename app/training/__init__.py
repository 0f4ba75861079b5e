"""The only stateful room: the loop and what it keeps on disk."""
