"""The client's end of the service: the center as workers and observers see it."""
