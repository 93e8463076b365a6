"""Settings of Sphinx, which builds the site in `make docs`."""

import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

# Run notebooks and autodoc on the CPU, which every machine has. The kernels of the
# notebooks inherit this environment.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")  # threads for towers on few cores: notes.md
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
)

from sphinx.application import Sphinx  # noqa: E402

import agn_optax  # noqa: E402

project = "agn_optax"
author = "The agn_optax authors"
copyright = author  # noqa: A001
release = version = agn_optax.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "myst_nb",
    "public_api",
]
exclude_patterns = ["drawings"]

# MyST, the Markdown of the pages.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

# Notebooks run at every build, each in its own temporary folder.
nb_execution_mode = os.environ.get("AGN_OPTAX_NOTEBOOKS", "force")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # s of a cell; the sweep takes a minute if nobody else runs
nb_merge_streams = True

# The reference: docstrings as they are in the source.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
nitpicky = True
nitpick_ignore_regex = [
    # Names of other libraries; with AGN_OPTAX_INTERSPHINX=1, they become links.
    (
        "py:.*",
        r"(collections|concurrent|contextlib|os|pathlib|ssl|threading|types|typing)\..*",
    ),
    ("py:.*", r"(jax|jaxlib|numpy|np|optax|grpc|flax)\b.*"),
    # Type aliases, and types whose objects users get but never make themselves.
    ("py:class", r"PyTree|Metrics|Pem|(.*\.)?LocalState"),
    ("py:class", r"agn_optax\.(\w+\.)*_\w+\..*"),
    ("py:class", r"agn_optax\.service\.center_pb2\..*"),
    ("py:obj", r"agn-optax .*|pull|start|Checkpointer"),
]
if os.environ.get("AGN_OPTAX_INTERSPHINX"):  # needs a network
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "optax": ("https://optax.readthedocs.io/en/latest", None),
    }
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 72

html_theme = "sphinx_book_theme"
html_title = f"agn_optax {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
copybutton_exclude = ".linenos, .gp, .go"


def _links(app: Sphinx, page: str, source: list[str]) -> None:
    """Adapt the links of a page to the site, and inline its drawings.

    The link to SECURITY.md becomes one to its page on the site, and links to files that
    have no page become plain text. Drawings are inlined as SVG, because an image could
    not follow the site's switch between light and dark colors.
    """
    text = source[0].replace("](../SECURITY.md", "](security.md")
    if "/" not in page:  # here ../ leads out of docs/, to files without a page
        text = re.sub(r"\[([^]]+)\]\(\.\./[^)]+\)", r"\1", text)
    inlined = r"```{raw} html\n:file: \1\n```"
    source[0] = re.sub(r"!\[[^]]*\]\((drawings/\w+\.svg)\)", inlined, text)


def setup(app: Sphinx) -> None:
    """Connect the handlers; Sphinx calls this function."""
    app.connect("source-read", _links)
