"""Sphinx configuration of Kernel Book. The source folder is docs/, the chapters are gallery/."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs" / "_ext")]
os.environ.setdefault("MPLBACKEND", "agg")

import kernelbook  # noqa: E402, F401  (here, so that its line about the interpreter is on no page)

project = "Kernel Book"
author = "The authors of Kernel Book"
copyright = "2026, the authors of Kernel Book"
language = "en"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "myst_parser",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "chapters",
    "animations",
    "recorded",
    "support",
    "downloads",
    "tilemap",
    "sharing",
]
templates_path = ["docs/_templates"]
exclude_patterns = ["_dark/**", "_ext/**", "figures/**", "chapters/index.rst"]
show_warning_types = True
nitpicky = False

# -- prose ----------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

# -- API reference --------------------------------------------------------------------------------

autodoc_typehints = "none"
autodoc_member_order = "bysource"
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = True
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"

# -- mathematics, shipped with the site by docs/_ext/downloads.py ---------------------------------

mathjax_path = "mathjax/tex-chtml.js"
mathjax3_config = {
    "options": {"enableMenu": False},
    # its size is ours: measured beside a font that still loads, it would differ from visit to visit
    "chtml": {"matchFontHeight": False, "scale": 1.08},
}

# -- chapters -------------------------------------------------------------------------------------

sphinx_gallery_conf = {
    "examples_dirs": "../gallery",
    "gallery_dirs": "chapters",
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"(^|[/\\])_",
    "within_subsection_order": "chapters.reading_order",
    "image_scrapers": ("chapters.save_figures",),
    "reset_modules": ("matplotlib", "chapters.reset"),
    "reset_modules_order": "both",
    "capture_repr": ("_repr_html_",),
    "remove_config_comments": True,
    "run_stale_examples": True,
    "abort_on_example_error": True,
    "doc_module": ("kernelbook",),
    "backreferences_dir": "api",
    "prefer_full_module": {r"kernelbook\.lab"},
    "download_all_examples": False,
    "write_computation_times": False,
    "min_reported_time": 1e9,
    "css": (),
    "show_signature": False,
    "show_memory": False,
    "parallel": False,
    "log_level": {"backreference_missing": "debug"},
}

# -- the site -------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "Kernel Book"
html_baseurl = os.environ.get("KERNELBOOK_URL", "").strip()
if html_baseurl:
    html_baseurl = html_baseurl.rstrip("/") + "/"
html_static_path = ["docs/_static"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_favicon = "docs/_static/favicon.svg"
html_show_sourcelink = False
html_copy_source = False
html_context = {"default_mode": "auto"}
html_sidebars = {"**": []}
html_theme_options = {
    "logo": {"text": "Kernel Book"},
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "footer_start": ["copyright", "colophon"],
    "footer_end": [],
    "show_prev_next": True,
    "show_toc_level": 2,
    "search_bar_text": "Search the book",
    "back_to_top_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_exclude = ".linenos, .gp"
copybutton_selector = "div.highlight:not(.no-copy) pre"
