"""What the site does that the pages themselves do not: links out of ``docs/`` become their words.

On the page in the repository such a link leads to the file; on the site there is no such file.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """A page's text as it is built; MkDocs calls this for every page."""
    folder = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("..") else link[0]

    return _LINK.sub(shown, markdown)
