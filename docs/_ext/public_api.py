"""A Sphinx extension for the reference: the public names of this package.

Each name in the ``__all__`` of a public module is documented once, under the shortest
name that users write (``agn_optax.LocalCenter``, not ``agn_optax.center.LocalCenter``).
The extension warns of public names that no page documents, resolves references in
docstrings that leave out the path, and documents the fields of a NamedTuple by the
comments beside them.
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
# Parts of `ops` are yielded separately; the public names of `round` are in `agn_optax`.
_NOT_FOR_USERS = {"ops", "round"}
_FIELD = "Alias for field number"


def public_modules() -> Iterator[ModuleType]:
    """Yield the modules with names for users, the package itself first."""
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
    """Map each public name to the full name that is documented.

    A name may be given by its last part or in full.
    """
    found: dict[str, list[str]] = {}
    for module in public_modules():
        # `agn_optax.rules.codecs` and the like have a shorter name, `agn_optax.codecs`.
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
    # A last part can belong to two names, as of a drop-in and its rule. The first one,
    # which is that of the package itself, is taken.
    return {name: full[0] for name, full in found.items()} | {
        each: each for full in found.values() for each in full
    }


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of every public name that no page documents."""
    objects = env.domains.python_domain.objects
    for full in sorted(set(public_names().values()) - set(objects)):
        _log.warning("%s is public: add it to a page of docs/reference/", full)


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element
) -> nodes.Element | None:
    """Resolve a reference by its last part, its owner, or its module."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].split("(")[0]  # without arguments
    objects = env.domains.python_domain.objects
    names = {full.rpartition(".")[2]: full for full in objects} | public_names()
    head, last = (["", *target.split(".")])[-2:]
    owner = names.get(head, "")
    # In order: a public object, a member of one, the owner of a member that only the
    # owner's docstring describes, a module.
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
    """Replace docstrings of modules, and of the fields of NamedTuples.

    The page that shows a module describes it, so its docstring is dropped. A field gets
    the comment beside it.
    """
    if what == "module":
        if name == "agn_optax.errors":  # keep the tree of exceptions for the page
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
    """Connect the handlers; Sphinx calls this function."""
    app.connect("env-check-consistency", check)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
