"""Workers on other machines, through Ray."""
