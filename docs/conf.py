"""Sphinx configuration of the reference: `make docs` builds it, with every warning an error."""

import gdn_jax

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


def setup(app):
    app.connect("autodoc-process-docstring", mark_code_blocks, priority=100)  # before napoleon
