"""Helpers of the tests: problems, centers, processes, networks, waits."""
