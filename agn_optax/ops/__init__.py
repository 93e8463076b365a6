"""The operations wing: commands, launching, engines, planning, watching, checks, keys.

Nothing outside this folder imports it, and the library works without it.
"""
