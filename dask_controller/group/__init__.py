"""The handle that the controller holds: groups of ranks, their calls, their beginning and end."""
