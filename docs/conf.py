"""How Sphinx builds the site: `sphinx-build -W docs out/site`, in an environment with the extra `docs`."""

import contextlib
import inspect
import re
from importlib.metadata import version as installed
from typing import NamedTuple

from sphinx.addnodes import pending_xref

project = "kvpatch_jax"
author = "the authors of kvpatch_jax"
project_copyright = f"{author}; Apache 2.0"
version = release = installed("kvpatch_jax")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
default_role = "code"
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Some fields are called as a builtin type is, such as `bytes`: which of them an annotation means is asked in vain.
suppress_warnings = ["ref.python"]

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False

html_theme = "furo"
html_title = "kvpatch_jax"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["narrow.css"]

ROOT_PAGES = {
    "README": "index",
    "ARCHITECTURE": "project/architecture",
    "CONTRIBUTING": "project/contributing",
    "CHANGELOG": "project/changelog",
}
SECTION = re.compile(r"(Args|Arguments|Attributes|Example|Examples|Note|Raises|Returns|Yields|Warning):\n")
PACKAGES = ("kvpatch_jax", "pallas_kernels")
TUPLE_FIELD = type(NamedTuple("OneField", [("field", int)]).field)
"""What autodoc would call "Alias for field number 0", a second time."""


HEADERS = ("Args:", "Attributes:", "Raises:", "Returns:")
ENTRY = re.compile(r"\*{0,2}\w+(, \*{0,2}\w+)*: ")


def one_row_each(what, name, obj):
    """Returns the pattern before which an entry of a section begins: a parameter, an attribute or an error.

    Docstrings may put several entries on one line; the site gives each its own row.
    """

    def pattern(header):
        if header == "Raises:":
            return r"(?<=[.;]) (?=(?:[A-Z]\w*Error(?:, )?)+: )"
        names = set(getattr(obj, "__annotations__", {}))
        if callable(obj):
            with contextlib.suppress(TypeError, ValueError):  # a builtin without a signature
                names |= set(inspect.signature(obj).parameters)
        found = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
        return rf"(?<=[.;]) (?=(?:{found})(?:, (?:{found}))*: )" if found else None

    return pattern


def split_rows(app, what, name, obj, options, lines):
    """Puts every parameter, attribute and error of a docstring's sections on a line of its own."""
    pattern, made, section, entry = one_row_each(what, name, obj), [], None, []

    def end_entry():
        if entry:
            text = " ".join(line.strip() for line in entry)
            if section == "Returns:":
                # Napoleon would take what precedes a colon, as in {channel: [L, T, K, H]}, for a type.
                made.append(f":returns: {text}")
                entry.clear()
                return
            found = pattern(section)
            indent = " " * (len(entry[0]) - len(entry[0].lstrip()))
            made.extend(indent + part for part in (re.split(found, text) if found else [text]))
            entry.clear()

    for line in lines:
        if line.strip() in HEADERS and not line.startswith(" "):
            end_entry()
            section = line.strip()
            made.append(line if section != "Returns:" else "")
        elif section and line.startswith("  ") and line.strip():
            if section != "Returns:" and len(line) - len(line.lstrip()) == 2 and ENTRY.match(line.strip()):
                end_entry()
            entry.append(line)
        else:
            end_entry()
            section = section if not line.strip() else None
            made.append(line)
    end_entry()
    lines[:] = made


def from_elsewhere(app, what, name, obj, skip, options):
    """Leaves out what a module only imports from other libraries, and fields of tuples, which the class describes."""
    home = getattr(obj, "__module__", None)
    foreign = what == "module" and isinstance(home, str) and not home.startswith(PACKAGES)
    return skip or foreign or isinstance(obj, TUPLE_FIELD)


def as_rst(app, what, name, obj, options, lines):
    """Makes reStructuredText of a docstring: code, code spans in single backticks, lists, plain stars."""
    blocks, code = re.split(r"\n{2,}", "\n".join(lines)), False
    for index, block in enumerate(blocks):
        # Code is indented by four and may have empty lines: such blocks are one.
        continued, code = code, all(line.startswith("    ") for line in block.split("\n"))
        if code:
            blocks[index] = block if continued else f".. code-block:: python\n    :force:\n\n{block}"  # some have "…"
            continue

        if "\n  " in block and not block.startswith(" ") and not SECTION.match(block):
            heading, *rows = block.rstrip("\n").split("\n")
            if heading.endswith(":") and all(re.match(r"  \S", row) for row in rows):
                block = "\n".join([heading, "", *map(as_item, rows)])
            else:
                block = re.sub(r"(?m)^(?=\S)", "- ", block)  # fields, with their next lines indented
        blocks[index] = as_inline(block)
    lines[:] = "\n\n".join(blocks).split("\n")

    # Napoleon takes what precedes a colon in the first line of a property or a field for its type. A line that shows
    # nothing goes before it.
    if what in {"attribute", "data", "property"}:
        lines.insert(0, "\\")


def as_item(row):
    """Returns an item of a list: names, and after three spaces or more what they are."""
    names, *meaning = re.split(r" {3,}", row.strip())
    return ": ".join(["- " + ", ".join(f"`{name}`" for name in names.split(", ")), *meaning])


def as_inline(text):
    """Returns text with double backticks around code, and plain stars, bars and underscores."""
    parts = re.split(r"(`[^`]+`)", text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"`{part}`" + ("\\ " if parts[index + 1][:1].isalnum() else "")
        else:
            parts[index] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", re.sub(r"([*|])", r"\\\1", part))
    return "".join(parts)


def between_root_pages(app, doctree):
    """Points links between the pages of the repository's root, which the site includes, at their copies here."""
    for node in doctree.findall(pending_xref):
        name = (node.get("reftarget") or "").removesuffix(".md")
        if name in ROOT_PAGES and node.get("refdomain") != "doc":
            node.attributes.update({"refdomain": "doc", "reftarget": ROOT_PAGES[name], "reftargetid": None})


def setup(app):
    """Connects the hooks above; those of docstrings run before napoleon's."""
    app.connect("doctree-read", between_root_pages)
    app.connect("autodoc-skip-member", from_elsewhere)
    app.connect("autodoc-process-docstring", split_rows, priority=90)
    app.connect("autodoc-process-docstring", as_rst, priority=100)
