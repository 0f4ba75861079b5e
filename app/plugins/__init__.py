"""Plug-ins of users, in processes that can be killed: what rewards and environments share."""
