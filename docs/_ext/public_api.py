"""What Sphinx's reference needs to know of this package: its public names.

What ``__all__`` of a public module names is documented once, under the shortest name
that users write (``agn_optax.LocalCenter``, not ``agn_optax.center.LocalCenter``). This
checks that all of it is, finds the targets of docstrings that were written without such
paths, and takes what is said of the fields of a NamedTuple from the comments beside
them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import agn_optax

_log = logging.getLogger(__name__)
_NOT_FOR_USERS = {"ops", "round"}  # see below; and names of `agn_optax` itself
_FIELD = "Alias for field number"


def public_modules() -> Iterator[ModuleType]:
    """Those with names for users, the package itself first."""
    yield agn_optax
    yield agn_optax.center_optimizers
    yield agn_optax.codecs
    yield agn_optax.robust
    for info in pkgutil.iter_modules(agn_optax.__path__):
        if info.name[0] != "_" and info.name not in _NOT_FOR_USERS:
            yield importlib.import_module(f"agn_optax.{info.name}")
    for name in ("engines", "launch", "planning"):
        yield importlib.import_module(f"agn_optax.ops.{name}")


def public_names() -> dict[str, str]:
    """All of them, as the last part of a name: the whole name that is documented."""
    found: dict[str, list[str]] = {}
    for module in public_modules():
        # These are also, and shorter, `agn_optax.codecs` and the like.
        prefix = re.sub(r"rules\.(?=center_|codecs|robust)", "", module.__name__)
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType) or name == "__version__":
                continue
            if getattr(agn_optax, name, None) is value:
                prefix_of_name = "agn_optax"
            else:
                prefix_of_name = prefix
            found.setdefault(name, []).append(f"{prefix_of_name}.{name}")
    # Of several (a drop-in and its rule), the first: that of the package itself.
    return {name: full[0] for name, full in found.items()} | {
        each: each for full in found.values() for each in full
    }


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Every public name is documented somewhere."""
    objects = env.domains.python_domain.objects
    for full in sorted(set(public_names().values()) - set(objects)):
        _log.warning("%s is public: add it to a page of docs/reference/", full)


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element
) -> nodes.Element | None:
    """Targets by their last part, or by the private module where they are made."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].split("(")[0]  # without arguments
    objects = env.domains.python_domain.objects
    names = {full.rpartition(".")[2]: full for full in objects} | public_names()
    head, last = (["", *target.split(".")])[-2:]
    owner = names.get(head, "")
    # A public object; a member of one; what only its docstring tells of it; a module.
    module = (f"agn_optax.{target}", f"agn_optax.ops.{target}")
    for full in (names.get(last, ""), f"{owner}.{last}", owner, *module):
        if full in objects:
            found = objects[full]
            return make_refnode(
                app.builder, node["refdoc"], found.docname, found.node_id, contnode
            )
    return None


def describe(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Modules by their page; a field of a NamedTuple by the comment beside it."""
    if what == "module":
        if name == "agn_optax.errors":  # whose tree is for readers of the page, too
            lines[0] = lines[0].removesuffix(".") + "::"
        else:
            lines.clear()
        return
    if not lines or not lines[0].startswith(_FIELD):
        return
    owner_name, field = name.rsplit(".", 1)
    module, owner = owner_name.rsplit(".", 1)
    source = inspect.getsource(getattr(_imported(module), owner))
    comment = re.search(rf"^    {field}:.*?#\s*(.+(?:\n    +# .+)*)", source, re.M)
    text = re.sub(r"\s*\n\s+#\s*", " ", comment.group(1)) if comment else ""
    lines[:] = [text, ""]


def _imported(name: str) -> Any:
    value: Any = agn_optax
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("env-check-consistency", check)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
