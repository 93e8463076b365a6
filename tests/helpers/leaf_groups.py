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
    made, plan = [], _leafwise._plan

    def planned(*args):
        if (found := plan(*args)) is not None:
            made.append([{piece.leaf for piece in group} for group in found.groups])
        return found

    monkeypatch.setattr(_leafwise, "_plan", planned)
    return made
