"""MkDocs hooks for what the site needs and GitHub does not.

Links out of ``docs/`` become plain text, because the site lacks those files. In tables, code loses
the backslash before a vertical bar.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Return the text of a page as it is built."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("..") else link[0]

    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Return the HTML of a page before it is put into the theme."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)
