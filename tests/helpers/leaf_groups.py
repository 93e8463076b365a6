"""Exchanges by groups of leaves for small trees, where the package makes none."""

from agn_optax.round import _leafwise


def allow(monkeypatch):
    """Allow every leaf to be a group, however small it is."""
    monkeypatch.setattr(_leafwise, "LEAST", 1)


def forbid(monkeypatch):
    """Have trees of any size exchanged whole."""
    monkeypatch.setattr(_leafwise, "LEAST", 1 << 40)


def recorded(monkeypatch):
    """Return a list that gets the groups of each exchange that is traced by groups."""
    made, pieces = [], _leafwise._pieces

    def recording(act, carry, params, groups):
        found = pieces(act, carry, params, groups)
        made.append([{piece.leaf for piece in group} for group in groups])
        return found

    monkeypatch.setattr(_leafwise, "_pieces", recording)
    return made
