"""The server's end of the service: a center that answers calls."""
