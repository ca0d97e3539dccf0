"""Where the documentation is on the web. Messages name a page by its URL: an installed package has
no docs folder."""

from __future__ import annotations

import re

#: The home of the project; pyproject.toml has the same.
PROJECT_URL = "https://github.com/slime-rl/slime"
#: Of the main branch: releases have no tags yet.
DOCS_URL = f"{PROJECT_URL}/blob/main/docs"

_PAGE = re.compile(r"\bdocs/([\w-]+\.md(?:#[\w-]+)?)")


def doc_url(page: str) -> str:
    """The URL of a page of ``docs/``, for a message.

    Args:
        page: the file's name, with the anchor of a section if one is meant.

    Example:
        >>> doc_url("serving.md#tools")
        'https://github.com/slime-rl/slime/blob/main/docs/serving.md#tools'
    """
    return f"{DOCS_URL}/{page}"


def with_doc_urls(text: str) -> str:
    """``text`` with each page that it names by its path (docs/index.md) named by its URL.

    Not for text that holds users' own paths.
    """
    return _PAGE.sub(lambda match: doc_url(match[1]), text)
