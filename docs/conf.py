"""Sphinx configuration of the reference: `make docs` builds it, with every warning an error."""

import pathlib
import re

from flax import nnx
from sphinx.util.inspect import signature, stringify_signature

import gdn_jax

ROOT = pathlib.Path(__file__).parent.parent

project = "gdn_jax"
author = "the gdn_jax authors"
version = release = gdn_jax.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"gdn_jax {version}"

# The docstrings mark code with single backticks, as Markdown does.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes of dataclasses, which autodoc lists too
myst_heading_anchors = 3


def mark_code_blocks(app, what, name, obj, options, lines):
    """Makes literal blocks of the indented paragraphs that hold code and equations.

    In a section such as `Args:` the first indented line follows its heading directly, so an indentation that begins
    after an empty line is always code.
    """
    marked, base, in_code = [], 0, False
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip():
            in_code = in_code and indent > base
            if not in_code and indent >= base + 4 and i > 0 and not lines[i - 1].strip():
                marked += [" " * base + "::", ""]
                in_code = True
            if not in_code:
                base = indent
        marked.append(line)
    lines[:] = marked


def readme_first(app, docname, source):
    """Puts the README in front of the index page, its links seen from here; one to a directory becomes plain text."""
    if docname != "index":
        return

    def from_here(link):
        text, path, fragment = link.groups()
        if (ROOT / path).is_dir():
            return text
        return f"[{text}](../{path}{fragment or ''})" if (ROOT / path).exists() else link[0]

    readme = ROOT / "README.md"
    app.env.note_dependency(readme)
    source[0] = re.sub(r"\[([^\]]*)\]\(([\w./-]+)(#[\w-]*)?\)", from_here, readme.read_text()) + "\n" + source[0]


def arguments_of_init(app, what, name, obj, options, args, return_annotation):
    """The signature of a Flax module, whose metaclass hides it behind `*args, **kwargs`."""
    if what == "class" and isinstance(obj, nnx.Module.__class__):
        init = signature(obj.__init__, bound_method=True)
        text = stringify_signature(init, unqualified_typehints=True, show_return_annotation=False)
        return re.sub(r"<class '([\w.]+)'>", r"\1", text), None
    return None


def setup(app):
    app.connect("autodoc-process-signature", arguments_of_init)
    app.connect("source-read", readme_first)
    app.connect("autodoc-process-docstring", mark_code_blocks, priority=100)  # before napoleon
