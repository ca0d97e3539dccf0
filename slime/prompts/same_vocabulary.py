"""Check that a teacher knows the student's tokens by the same ids: it scores ids, not text."""

from __future__ import annotations

from pathlib import Path

import xxhash

from slime.errors import UserError
from slime.log import get_logger
from slime.prompts.tokenizer import has_tokenizer, load_tokenizer

logger = get_logger(__name__)

_SHOWN = 3


def check_same_vocabulary(
    student: str, teacher: str, name: str, *, trust_remote_code: bool = False
) -> None:
    """Check that each token of the student has the same id in the teacher's tokenizer. The teacher
    may have more tokens. A directory without a tokenizer, such as a trainer checkpoint, is skipped
    with a warning.

    Args:
        student, teacher: their Hugging Face directories.
        name: the teacher's, for messages.
    Raises:
        UserError: a token is missing or has another id.
    """
    if not has_tokenizer(Path(teacher)):
        logger.warning(
            "teacher %s: %s has no tokenizer, so its token ids cannot be compared with those of %s",
            name,
            teacher,
            student,
        )
        return
    files = [Path(folder) / "tokenizer.json" for folder in (student, teacher)]
    if all(file.is_file() for file in files) and _digest(files[0]) == _digest(files[1]):
        return
    own, its = (
        load_tokenizer(folder, without_torch=True, trust_remote_code=trust_remote_code).get_vocab()
        for folder in (student, teacher)
    )
    other = {token: (id_, its.get(token)) for token, id_ in own.items() if its.get(token) != id_}
    if not other:
        return
    shown = ", ".join(
        f"{token!r} is {own_id} here and {'not there' if its_id is None else its_id} there"
        for token, (own_id, its_id) in sorted(other.items(), key=lambda item: item[1][0])[:_SHOWN]
    )
    raise UserError(
        f"teacher {name} has another vocabulary than --hf-checkpoint",
        why=f"{len(other)} of {len(own)} tokens of {student} have another id, or none, in "
        f"{teacher}: {shown}",
        fix="use a teacher of the same model family: teachers score token ids",
    )


def _digest(file: Path) -> str:
    return xxhash.xxh3_128_hexdigest(file.read_bytes())
