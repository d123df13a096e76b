"""How Sphinx builds the site: `make docs`, or tests/test_docs_site.py, which also checks what this promises.

Sphinx rather than MkDocs: MkDocs 1 has no releases any more and Material for MkDocs ends in 2027, while Sphinx is
maintained, checks links, anchors and downloads itself, and its pages and search work from a disk, without a network.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout documents itself, not what is installed

from oobleck import __version__

project = "Oobleck"
author = "The Oobleck developers"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
copybutton_prompt_text = "$ "
exclude_patterns = ["images"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
"""Headings have the anchors that they have in a repository's own view of the pages."""
highlight_language = "text"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
default_role = "code"
"""Docstrings put one backtick around code."""
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "Oobleck"
html_copy_source = False
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

_PROSE_CHARS = 60
"""A table with a cell longer than this is to be read, not compared: on a phone its rows become cards (site.css)."""


def name_pages_by_title(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Show the title of a page where a link says its file's name, as links between the files do."""
    for link in doctree.findall(nodes.reference):
        text = link.astext().removeprefix("docs/")
        title = app.env.titles.get(text.removesuffix(".md")) if text.endswith(".md") else None
        if title is not None:
            link.children = []
            link += nodes.inline(text=title.astext())


def label_cells(app: Sphinx, doctree: nodes.document) -> None:
    """Give tables of prose their class, and each of their cells the name of its column, for phones."""
    for table in doctree.findall(nodes.table):
        rows = list(table.findall(nodes.row))
        if max(len(entry.astext()) for entry in table.findall(nodes.entry)) <= _PROSE_CHARS:
            continue
        table["classes"].append("prose")
        names = [entry.astext() for entry in rows[0].children]
        for row in rows[1:]:
            for name, entry in list(zip(names, row.children, strict=True))[1:]:
                if name and entry.astext():
                    entry.children[0].insert(0, nodes.inline(text=f"{name}: ", classes=["column"]))


def setup(app: Sphinx) -> None:
    """Register the above, and take the fences of our own languages for text."""
    app.add_lexer("hostfile", TextLexer)
    app.add_lexer("mermaid", TextLexer)  # a drawing needs a script from a network
    app.connect("doctree-read", label_cells)
    app.connect("doctree-resolved", name_pages_by_title)
