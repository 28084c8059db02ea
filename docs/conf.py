"""Settings of Sphinx for the documentation."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "qdo"
author = "the qdo developers"
copyright = author
release = re.search(r'__version__ = "([^"]+)"', (ROOT / "qdo/_version.py").read_text()).group(1)
version = release

extensions = ["sphinx.ext.autodoc", "docs.reference"]
root_doc = "index"
exclude_patterns = ["_build"]
default_role = "literal"
highlight_language = "text"
nitpicky = False
smartquotes = False  # text from the code is shown as the code has it

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = f"qdo {release}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["qdo.css"]
