"""Which elements and attributes a page really has, whatever its text looks like."""

from __future__ import annotations

from html.parser import HTMLParser

_ELEMENTS = """
html head meta title link script body a header nav div span form input button main p h1 h2 h3 dl dt
dd section ul li table caption thead tbody tr th td code small label select option b figure
figcaption strong svg path rect footer article pre time em
"""
_ATTRIBUTES = """
lang charset name content rel href type src defer class id aria-label aria-labelledby aria-hidden
aria-current role tabindex method action value placeholder maxlength autocomplete spellcheck
selected scope datetime title required autofocus http-equiv viewbox d x y width height
preserveaspectratio hidden
"""
ELEMENTS = frozenset(_ELEMENTS.split())
ATTRIBUTES = frozenset(_ATTRIBUTES.split())


class PageCheck(HTMLParser):
    """Collects what a page must not have.

    :ivar faults: elements, attributes and addresses that no template writes.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ELEMENTS:
            self.faults.append(f"<{tag}>")
        given = dict(attrs)
        for name, value in attrs:
            known = name in ATTRIBUTES or name.startswith("data-")
            local = (value or "").startswith(("/", "#")) and not (value or "").startswith("//")
            if not known or (name in ("href", "src", "action") and not local):
                self.faults.append(f"<{tag} {name}={value!r}>")
        if tag == "script" and not given.get("src", ""):
            self.faults.append("an inline script")
