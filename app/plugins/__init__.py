"""User plug-ins in processes that can be killed: the code shared by rewards and environments."""
