"""The Hugging Face hub: models and data sets by name, and uploads.

huggingface_hub does the work and reads ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and
``HF_HUB_OFFLINE``. A local folder of the same name always takes precedence.
"""

from __future__ import annotations

import http.client
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from slime import deadlines
from slime.data_path import ROW_SUFFIXES, split_name
from slime.errors import UserError
from slime.log import get_logger

logger = get_logger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken")


def is_hub_name(path: str) -> bool:
    """Tell whether ``path`` can only be a name on the hub: it has the form org/name, and no local
    folder org exists.

    Example:
        >>> (is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("./Qwen/Qwen3-0.6B"),
        ...  is_hub_name("data/train.jsonl"))
        (True, False, False)
    """
    if not _NAME.fullmatch(path) or path.endswith(ROW_SUFFIXES):
        return False
    return not Path(path).exists() and not Path(path).parent.is_dir()


def hub_name(path: str) -> str | None:
    """Return the hub name of a file or folder in the hub's local cache; None for any other path.

    Example:
        >>> hub_name("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/0a1b")
        'Qwen/Qwen3-0.6B'
    """
    found = re.search(r"/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/[^/]+", path)
    return f"{found.group(1)}/{found.group(2)}" if found else None


def shown_path(path: str) -> str:
    """``path`` as a user would write it: a path in the hub's local cache becomes its hub name.

    Example:
        >>> shown_path(
        ...     "/home/me/.cache/huggingface/hub/datasets--openai--gsm8k/snapshots/0a1b/main")
        'openai/gsm8k/main'
    """
    found = re.fullmatch(r".*/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/[^/]+(/.*)?", path)
    return f"{found[1]}/{found[2]}{found[3] or ''}" if found else path


def dataset_name(path: str) -> str | None:
    """Return the hub data set in ``org/name[/inside][:split][@[a:b]]``; None for a local path.

    Example:
        >>> dataset_name("openai/gsm8k/main:test@[:100]"), dataset_name("train.jsonl")
        ('openai/gsm8k', None)
    """
    base, _ = split_name(path.partition("@[")[0])
    name = "/".join(base.split("/")[:2])
    return name if is_hub_name(name) and not Path(base).exists() else None


def local_data(path: str, *, download: bool = True) -> str:
    """Replace a data set's hub name in ``path`` by its local copy.

    Args:
        path: a file or folder, or org/name, optionally with a folder, file or configuration inside
            (openai/gsm8k/main). A split (``:test``) and a slice (``@[a:b]``) are kept.
        download: download missing files; if False, the name of a missing data set is kept.
    Raises:
        UserError: as `fetch_model`.
    """
    name = dataset_name(path)
    if name is None:
        return path
    copy = fetch_dataset(name) if download else _downloaded(name, "dataset")
    return path if copy is None else f"{copy}{path.removeprefix(name)}"


def fetch_model(name: str) -> Path:
    """Return the local copy of a model of the hub; missing files are downloaded.

    Raises:
        UserError: the hub cannot be reached, or does not have the model.
    """
    from huggingface_hub import snapshot_download

    return _fetch(
        name, "model", partial(snapshot_download, name, allow_patterns=list(_MODEL_FILES))
    )


def fetch_dataset(name: str) -> Path:
    """Return the local copy of a data set of the hub: a folder that `slime.prompts.readers` reads.

    Raises:
        UserError: as `fetch_model`.
    """
    from huggingface_hub import snapshot_download

    return _fetch(name, "dataset", partial(snapshot_download, name, repo_type="dataset"))


def _downloaded(name: str, kind: str) -> Path | None:
    """Return the local copy of a model ("model") or data set ("dataset"); None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def is_there(name: str, kind: str) -> bool:
    """Tell whether a model ("model") or data set ("dataset") has a local copy; False: only the hub
    has it. Downloads nothing.

    Raises:
        UserError: as `fetch_model`.
    """
    from huggingface_hub import HfApi

    if _downloaded(name, kind) is not None:
        return True
    if why_not := _why_not_reached():
        raise _not_here(name, kind, why_not)
    with _hub_errors(name):
        HfApi().repo_info(name, repo_type=kind, timeout=deadlines.HUB_FIRST_ANSWER)
    return False


def _fetch(name: str, kind: str, download: Callable[..., str]) -> Path:
    from huggingface_hub.errors import LocalEntryNotFoundError

    why_not = _why_not_reached()
    if why_not is None:
        logger.info("%s %s: missing files come from the hub", kind, name)
    with _hub_errors(name):
        try:
            return Path(download(local_files_only=why_not is not None))
        except LocalEntryNotFoundError as error:
            raise _not_here(name, kind, why_not or str(error).splitlines()[0]) from error


def _not_here(name: str, kind: str, why: str) -> UserError:
    return UserError(
        f"'{name}' is no folder here, and the {kind} of that name was not downloaded before",
        why=why,
        fix="pass a local path, or set HF_ENDPOINT to a hub that can be reached; where there is a "
        f"network, `hf download {name}` makes a folder to copy",
    )


def _why_not_reached() -> str | None:
    """Why the hub does not answer; None: it does. Takes seconds, where the hub's own client
    retries for minutes."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE keeps us from the hub"
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=deadlines.HUB_FIRST_ANSWER).close()
    except urllib.error.HTTPError:
        return None  # an error page is an answer
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if not isinstance(reason, ssl.SSLError):
            return f"{constants.ENDPOINT} gives no answer: {reason}"
    return None


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Convert errors of the hub into a `UserError`."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        yield
    except GatedRepoError as error:
        raise UserError(
            f"{hub} gives '{name}' only to those who accepted its terms",
            fix="accept them on its page, and set HF_TOKEN to a token of that account",
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"there is no folder '{name}' here, and {hub} has nothing of that name",
            why="or it is private, and HF_TOKEN is not set, or of somebody else",
            fix="check the spelling; a local path is taken as it is",
        ) from error
    except HFValidationError as error:
        raise UserError(
            f"'{name}' is no name of the hub", why=str(error).splitlines()[0], fix="org/name"
        ) from error
    except HfHubHTTPError as error:
        raise UserError(
            f"{hub} refused '{name}'", why=str(error).strip().splitlines()[0]
        ) from error


def hub_token(repo: str) -> str:
    """Return the token to upload with: HF_TOKEN, or what `hf auth login` stored.

    Raises:
        UserError: there is none.
    """
    from huggingface_hub import get_token

    token = get_token()
    if token is None:
        raise UserError(
            f"there is no token to write to {repo} with",
            why="neither HF_TOKEN nor a login of `hf auth login`",
            fix="make one that may write, on the hub under Settings, Access Tokens, and set "
            "HF_TOKEN",
        )
    return token


def upload(repo: str, folder: Path, files: dict[str, bytes], *, private: bool, message: str) -> str:
    """Create ``repo`` if it is missing, and upload the folder's files and ``files`` in one commit.

    Returns:
        The URL of the model's page.
    Raises:
        UserError: there is no token, or the hub refuses or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=hub_token(repo), library_name="slime-rl")
    if why_not := _why_not_reached():
        raise UserError(
            f"nothing can be uploaded to {repo}", why=why_not, fix="set HF_ENDPOINT, or try again"
        )
    with _hub_errors(repo):
        url = api.create_repo(repo, private=private, exist_ok=True)
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in files and not path.name.startswith("."):
                operations.append(CommitOperationAdd(name, path))
        api.create_commit(repo, operations, commit_message=message)
    return str(url)
