"""URLs of the documentation. Messages name a page by its URL, because an installed package has no
docs folder."""

from __future__ import annotations

import re

#: The same as in pyproject.toml.
PROJECT_URL = "https://github.com/slime-rl/slime"
#: Pages of the main branch, because releases have no tags yet.
DOCS_URL = f"{PROJECT_URL}/blob/main/docs"

_PAGE = re.compile(r"\bdocs/([\w-]+\.md(?:#[\w-]+)?)")


def doc_url(page: str) -> str:
    """Return the URL of a page of ``docs/``, for a message.

    Args:
        page: the file's name, optionally with the anchor of a section.

    Example:
        >>> doc_url("serving.md#tools")
        'https://github.com/slime-rl/slime/blob/main/docs/serving.md#tools'
    """
    return f"{DOCS_URL}/{page}"


def with_doc_urls(text: str) -> str:
    """``text`` with the path of each page (docs/index.md) replaced by its URL.

    Do not use it for text that contains users' own paths.
    """
    return _PAGE.sub(lambda match: doc_url(match[1]), text)
