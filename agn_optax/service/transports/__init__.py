"""How what travels gets from one side to the other."""
