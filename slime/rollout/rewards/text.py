"""Graders that compare text, as quick functions of the response and the label."""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Any

from slime.errors import UserError, a_type
from slime.prompts.chat_template import REASONING_MARKS
from slime.rollout.rewards.math_answers import is_text, same_answer
from slime.rollout.rewards.math_notation import plain_latex
from slime.rollout.rewards.other_languages import denies, is_denied, stated_choices


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}`` (or ``\fbox``) with balanced braces, None
    without one.

    Example:
        >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    boxes = boxed_spans(text)
    return text[boxes[-1][1] : boxes[-1][2]] if boxes else None


def unboxed(text: str) -> str:
    r"""Return the content of the last ``\boxed{…}``; the whole text without one."""
    boxed = last_boxed(text)
    return text if boxed is None else boxed


_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")


def boxed_spans(text: str) -> list[tuple[int, int, int]]:
    r"""Find each closed ``\boxed{…}``: where it begins, and where its content begins and ends, in
    order. Takes linear time."""
    first = re.search(r"\\(?:boxed|fbox)\s*\{", text)
    if not first:
        return []
    spans = []
    opened = []
    for found in _BRACES.finditer(text, first.start()):
        if found[0] != "}":
            opened.append(found)
        elif opened and (opening := opened.pop())[0] != "{":
            spans.append((opening.start(), opening.end(), found.start()))
    return sorted(spans)


#: Most boxes that are joined to a list.
_MAX_BOXES = 20
_JOINED = re.compile(
    r"(?:\\[)\]]|[$ ])*(?:[,;]|[,;]? ?(?:and|or)\b|\\text\{ ?(?:and|or) ?\})(?:\\[(\[]|[$ ])*"
)


def joined_boxes(text: str) -> str | None:
    r"""Return the last ``\boxed{…}``, with those before it that only a comma, "and" or "or"
    separates."""
    spans = boxed_spans(text)
    if not spans:
        return None
    position, start, end = spans[-1]
    boxes = [text[start:end]]
    for earlier, start, end in spans[-2:-_MAX_BOXES:-1]:
        if not _JOINED.fullmatch(text, end + 1, position):
            break
        position = earlier
        if not any(same_answer(box, text[start:end]) for box in boxes):
            boxes.insert(0, text[start:end])
    return ", ".join(boxes)


_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.S)


def answer_in_label(label: str) -> tuple[str, bool]:
    r"""Return the answer in a label for mathematics, and whether it stands in a ``\boxed{…}``.

    As in a response, boxes that a comma, "and" or "or" joins are a list, and reasoning does not
    count. Labels of GSM8K begin after "####"; others stand between ``<answer>`` tags.

    Example:
        >>> answer_in_label(r"<think>hm</think> \boxed{1} or \boxed{2}")
        ('1, 2', True)
    """
    text = label.rpartition("</think>")[2].rsplit("####", 1)[-1].strip()
    if tagged := _TAGGED.fullmatch(text):
        text = tagged[1].strip()
    boxes = joined_boxes(text)
    return (text if boxes is None else boxes).strip(), boxes is not None


def after_thinking(text: str) -> str | None:
    """Return the text after the reasoning (``</think>`` or ``###Response``); None if it was never
    closed, or begins again."""
    for marker in ("</think>", "###Response"):
        if marker in text:
            rest = text.rsplit(marker, 1)[1]
            return None if "<think>" in rest else rest
    return None


def final_text(text: str) -> str | None:
    """Return the text of a response after its reasoning; None if it never stops thinking.

    Without marks of reasoning (``<think>`` and ``</think>``, ``[THINK]``, ``<seed:think>``) the
    whole response counts.
    """
    for begin, end in REASONING_MARKS:
        text = text.rpartition(end)[2]
        if begin in text:
            return None
    return text


# -- F1 --------------------------------------------------------------------------------------------


def normalise_answer(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and surplus blanks (SQuAD,
    arXiv:1606.05250).

    Points, apostrophes and the commas of numbers vanish as in SQuAD (U.S. is US, 1,000 is 1000);
    other punctuation separates words, so that "well-known" is "well known". A letter with an accent
    is one character, however it was written.
    """
    text = unicodedata.normalize("NFC", re.sub("[\ufeff\u200b]", "", text))
    text = re.sub(r"(?<=\d),(?=\d)|[.'’‘`]", "", text.lower())
    text = "".join(
        " " if c in string.punctuation or unicodedata.category(c)[0] == "P" else c for c in text
    )
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def grade_f1(response: str, label: Any) -> float:
    """Return the token F1 of the label and the text after ``</think>``, both normalised.

    Example (2 of 3 words are right, 2 of 2 are found):
        >>> grade_f1("The big red dog", "red dog")
        0.8
    """
    text = final_text(response)
    return 0.0 if text is None else f1_of_words(text, label)[0]


def f1_of_words(response: str, label: Any) -> tuple[float, float, float]:
    """Return F1, precision and recall of the words of ``response``.

    A label that normalisation empties ("A", "<") is compared as it is, except for case.
    """
    wanted = normalise_answer(str(label)).split()
    if not wanted:
        same = float(response.strip().lower() == str(label).strip().lower())
        return same, same, same
    predicted = normalise_answer(response).split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if not common:
        return 0.0, 0.0, 0.0
    return (
        2 * common / (len(predicted) + len(wanted)),
        common / len(predicted),
        common / len(wanted),
    )


# -- DAPO ------------------------------------------------------------------------------------------

#: The line with DAPO's answer.
ANSWER_LINE = r"(?i)Answer\s*:\s*([^\n]+)"
#: Characters at the end of a response in which DAPO looks for it.
_DAPO_TAIL = 300
#: Units and nouns that are removed before answers are compared.
_DAPO_UNITS = re.compile(
    r"(?<![A-Za-z\\])(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|"
    r"minutes|digits|cents|degrees|"
    r"cm|gm|pounds|meters|meals|edges|students|childrentickets|children|tickets|multiples)"
    r"(?![A-Za-z])(?:\s*\^\s*\{?[23]\}?)?"
)
_DAPO_DROPPED = re.compile(
    r"\\(?:ldots|dots|left|right|displaystyle)(?![A-Za-z])|\\[,;:! "
    r"]|\^\s*\{?\s*\\circ\s*\}?|\\%|%|\\\$|"
    r"\\mathrm\{\s*th\s*\}|"
    r'\{,\}(?=\d{3})|"|\\(?:quad|qquad)(?![A-Za-z])'
)
#: Special tokens at the end of a response.
_END_TOKENS = re.compile(
    r"(?:\s*(?:<\|[^<>|]{1,40}\|>|<[｜|][^<>]{1,40}[｜|]>|</s>|<eos>|<end_of_turn>))+\s*$"
)
_DAPO_LOOKALIKES = str.maketrans({
    "−": "-", "–": "-", "°": "", "×": r"\times", "·": r"\cdot", "π": r"\pi", "√": r"\sqrt",
    "∞": r"\infty",
})  # fmt: skip


def normalise_final_answer(answer: str) -> str:
    r"""Normalise an answer as in Minerva (arXiv:2206.14858, appendix D): the part after the last
    "=", without units, degrees, articles, text, dollars, blanks and thousands separators;
    ``\frac12`` and ``\sqrt3`` get braces.

    Example:
        >>> normalise_final_answer(r"x = \$1,000 \text{ dollars}")
        '1000'
        >>> normalise_final_answer(r"20\text{ cm}^3"), normalise_final_answer(r"\sqrt 3")
        ('20', '\\sqrt{3}')
    """
    text = _END_TOKENS.sub("", answer).split("=")[-1].translate(_DAPO_LOOKALIKES)
    text = unboxed(text.replace("mbox", "text"))
    text = re.sub(r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3})", "", text)
    text = re.sub(r"\\(?:dfrac|tfrac|cfrac)(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\b(?:an?|the)\s+(?=\S)", "", text, flags=re.I)
    text = _DAPO_DROPPED.sub("", text)
    math = re.search(r"\$(.+?)\$", text)
    text = (math[1] if math else text).replace("$", "")
    text = re.sub(r",?\s*\\text\{\s*(?:and|or)\s*\}|\s+and\s+", ",", text)
    text = re.sub(r"\\(?:text|mathrm)\{\s*(?:m|s|kg|g|h)\s*\}(?:\^\{?\d\}?)?", "", text)
    text = re.sub(
        r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}(\^\{?[23]\}?)?", _without_units, text
    )
    text = re.sub(r"\\(?:overline|boxed)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s+", " ", _DAPO_UNITS.sub("", text)).strip(" .*`,")
    text = re.sub(r"\\?frac\s*([^{\s\\])\s*([^{\s\\])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\?sqrt\s*([^{\s\\\[(])", r"\\sqrt{\1}", text)
    text = text.replace(" ", "").rstrip(".")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text)


#: Markdown and quotes before an answer, but not the index of _{10}C_3.
_OPENING_MARKS = re.compile(r"^(?:[}*\s\"']|_(?![{\d]))+")
#: A line's only formula, with a remark behind it that neither denies it nor adds to it.
_REMARKED = re.compile(
    r"(?i)([^$]*(?<!\\)\$[^$]+(?<!\\)\$)\**\s*(?:[.,;(]|(?:because|since|as|by|where|which|for)\b)"
    r"(?!.*(?:\b(?:or|and|not|but|no|wrong|however|except|false)\b|"
    r"\b(?:reject|fail|invalid)|n['’]t\b))[^$\d]*"
)
#: Marks at the end of a turn or a proof, which are not part of an answer.
_END_MARKS = re.compile(r"<\|[^|>]*\|>|</?s>|<eos>|\\blacksquare|\\square|\\qed")


def _without_units(found: re.Match[str]) -> str:
    """Return the content of ``\\text{…}`` with its power; "" if it is a unit: \\text{ cm}^3."""
    left = _DAPO_UNITS.sub("", found[1])
    return (left + (found[2] or "")) if left.strip() or not found[1].strip() else left


def grade_dapo(response: str, label: Any) -> dict[str, Any]:
    """Score ±1 by the last "Answer: …" line within the last 300 characters (DAPO,
    arXiv:2503.14476).

    An answer is right if it is the label after `normalise_final_answer`, or equal to it by the
    rules of `slime.rollout.rewards.math_answers`. It is wrong if these rules distinguish the two:
    ``1,2`` is not 12, although the published normalisation says so.

    Returns:
        ``{"score": 1.0 | -1.0, "acc": bool, "pred": str}``; train on it with ``--reward-key
        score``.

    Example:
        >>> grade_dapo("We get\\nAnswer: $42$", "42")
        {'score': 1.0, 'acc': True, 'pred': '42'}
    """
    right, predicted = final_answer(response[-_DAPO_TAIL:], label)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": predicted}


def final_answer(response: str, label: Any, pattern: str = ANSWER_LINE) -> tuple[bool, str]:
    """Tell whether the last match of ``pattern`` is the label, and the match in Minerva's form."""
    found = re.findall(pattern, response)
    if not found or label is None:
        return False, "[INVALID]"
    given = _END_MARKS.sub("", found[-1]).strip()
    ends = "*_ \"'" if given.startswith("'") else '*_ "'  # 30' is an angle
    given = _OPENING_MARKS.sub("", given).rstrip(ends)
    given = given if given.endswith("...") else given.rstrip(ends + ".")
    boxes = joined_boxes(given)
    given = given if boxes is None else boxes
    remarked = _REMARKED.fullmatch(given)
    given = given if remarked is None else remarked[1]
    answer = answer_in_label(str(label))[0]
    predicted = normalise_final_answer(given)
    wanted = normalise_final_answer(answer)
    if not predicted or not wanted:
        return False, predicted or "[INVALID]"
    verdict = same_answer(answer, given)
    if verdict is None or (not verdict and is_text(answer)):
        return predicted == wanted, predicted
    return verdict, predicted


# -- multiple choice -------------------------------------------------------------------------------

#: The letters of choices if a row does not name them.
_LETTERS = "ABCDEFGHIJ"
#: LaTeX that changes the font of a choice and nothing else.
_FONTS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textup|mathrm|mathbf|mathit|mathsf|mathtt|"
    r"mathcal|mathbb|bm|"
    r"boldsymbol|bold|mbox|hbox|operatorname|emph|underline|fbox|large|Large|rm|bf|it|"
    r"displaystyle|left|right)"
    r"(?![A-Za-z])\s*"
)
_SPACES = re.compile(r"\\[,;:! ]|~|\\quad|\\qquad|\s+")
#: Decoration around a letter: Markdown, quotes, dollars, braces.
_MARKS = "*_`\"'“”‘’«»$"
_STATEMENTS = re.compile(
    r"""(?ix)
    答案\s*(?:是|为)?\s*:?
    | \b(?:answer|ans\.?|choice|option|selection|response|letter|solution|result)s?\b
        (?:\s+(?:to|for|of|here|would|should|must|will|can|could|choose|chose|select|from|among|
            above|given|the|this|that|problem|question|q\d*|choices|options|provided|most|likely|
            probably|is|are|be|was|therefore|thus|hence|clearly|then|also|definitely|certainly|
            simply|indeed|correct|right|best|final|letter|option|choice|answer|number|:)\b)*
        [\s*_`"'“‘]*(?:\bis\b|\bare\b|\bbe\b|:|=|-+>|→|⇒|[\s(*]\Z)?
    | \b(?:i|we|i'd|i'll|i'm|i\ am|we're|i\ would|i\ will|let's|you\ should)\s+
        (?:therefore\ |thus\ |would\ |will\ |shall\ |can\ )?
        (?:choose|chose|pick|select|go(?:ing)?\ (?:with|for)|answer(?:\ with)?|say|conclude|
            vote\ for|opt\ for|went\ with)
        (?:\ that)?
    | \b(?:choose|pick|select|chose|selecting|choosing|go\ with|must\ be|has\ to\ be|should\ be|
        it\ is|it's|which\ is|correct\ (?:one|statement|letter)\ is|one\ is|corresponds\ to|matches|
        that\ is|leav(?:es|ing)(?:\ us\ with)?)\b
    | \b(?:therefore|thus|hence|so)\b[,:]?
    | \#{4}
    """
)
_GAP = re.compile(
    r"(?i)[\s:=\-–—<>→⇒*_`\"'“‘$]*(?:(?:the|option|choice|answer|letter|is|be|correct|right|best|"
    r"final|definitely|"
    r"clearly|therefore|thus|indeed|probably|likely|most)\b[\s:*_`\"'“‘$=]*)*"
)
_NEGATION = re.compile(
    r"(?i)\b(?:not|n't|isn't|cannot|can't|never|neither|nor|wrong|incorrect|false|rule\w* out|"
    r"eliminat\w+|exclud\w+|reject\w*|rather than|instead of)\b"
)
_DENIED = re.compile(r"(?i)(?:n['’]t|\bnot|\bnever|\bnor)\b[\w ]{0,16}$")
_CONTRASTED = re.compile(
    r"(?i)^[\s)*_`\]}.]*(?:is|are|was|seems|looks|would be)\s+(?:clearly |definitely |also |the )?"
    r"(?:not|wrong|incorrect|false|ruled|eliminated|excluded|impossible)\b"
)


def grade_gpqa(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    r"""Return 1 if the letter chosen in the response is the right one.

    The last statement of a choice after ``</think>`` counts: a ``\boxed{…}``, "the answer is C", "I
    choose (C)", or a single letter. The English words "a" and "I" are not letters, and two letters
    ("A and B") are not a choice.

    ``label`` is a letter, or the text or position of one of ``metadata["choices"]`` (see
    `valid_choices`); ``metadata["valid_letters"]`` limits the letters; they are those of the
    choices, else A to J.

    Example:
        >>> grade_gpqa("Not A. The answer is (C).", "C")
        1.0
    """
    letters, texts = valid_choices(metadata)
    wanted = label_letter(label, letters, texts)
    text = final_text(response)
    if wanted is None or text is None:
        return 0.0
    text = unicodedata.normalize("NFKC", text)
    return float(chosen_letter(text, letters, texts) == wanted)


def valid_choices(metadata: dict[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
    """Return the letters that may be chosen, and the texts of the choices by letter ({} if the row
    has none).

    ``metadata["choices"]`` is a list of texts, a dict of them by letter, a list of objects with
    "label" and "text", or an object with a list of each; or the JSON text of one of these. Choices
    that are null do not count: columnar files fill records up to the union of all keys.

    Raises:
        UserError: the choices, or the letters, have another form; says which.

    Example:
        >>> valid_choices({"choices": {"label": ["A", "B"], "text": ["red", "blue"]}})
        (['A', 'B'], {'A': 'red', 'B': 'blue'})
    """
    metadata = metadata or {}
    texts = _choice_texts(metadata.get("choices"))
    texts = {str(letter).strip().upper(): text for letter, text in texts.items()}
    letters = metadata.get("valid_letters") or texts or _LETTERS
    if not isinstance(letters, str | list | tuple | dict):
        raise _no_choices(f"'valid_letters' is {a_type(letters)}")
    found = [str(letter).upper() for letter in letters]
    if any(len(letter) != 1 for letter in found):
        raise _no_choices(f"its letters are {', '.join(found)}, and each must be one character")
    return found, texts


def _choice_texts(choices: Any) -> dict[str, Any]:
    if isinstance(choices, str) and choices.strip():
        try:
            choices = json.loads(choices)
        except ValueError:
            raise _no_choices("'choices' is text that is not JSON") from None
    if not choices:
        return {}
    if isinstance(choices, dict):
        labels, texts = (choices.get(key) for key in ("label", "text"))
        if isinstance(labels, list) and isinstance(texts, list):
            return dict(zip(labels, texts))
        return {letter: text for letter, text in choices.items() if text is not None}
    if not isinstance(choices, list | tuple):
        raise _no_choices(f"'choices' is {a_type(choices)}")
    if all(isinstance(one, dict) for one in choices):
        if not all("label" in one and "text" in one for one in choices):
            raise _no_choices(f"the keys of the first are {', '.join(map(str, choices[0]))}")
        return {one["label"]: one["text"] for one in choices}
    known = zip(string.ascii_uppercase, choices)
    return {letter: text for letter, text in known if text is not None}


def _no_choices(why: str) -> UserError:
    return UserError(
        "the metadata has choices that --rm-type gpqa cannot read",
        why=why,
        fix="write a list of their texts, a dict by letter, or objects with label and text",
    )


def label_letter(label: Any, letters: list[str], texts: dict[str, Any]) -> str | None:
    """Return the letter that a label means: itself, a position in ``letters``, or the choice with
    this text."""
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    return _letter_of(unboxed(str(label).strip()), letters, texts)


def _unfonted(text: str) -> str:
    text = _SPACES.sub(" ", text.replace(r"\(", "$").replace(r"\)", "$"))
    return _FONTS.sub("", text).replace("{", " ").replace("}", " ").strip()


def _letter_of(text: str, letters: list[str], texts: dict[str, Any]) -> str | None:
    """Return the choice that ``text`` as a whole names: by letter, by letter and text, or by
    text."""
    own = _choice_with_text(text, texts)
    if own is not None and len(text.strip()) > 1:
        return own
    plain = " ".join(_unfonted(text).strip(_MARKS + " .").split())
    plain = re.sub(
        r"(?i)^(?:(?:the|final|correct|answer|option|choice|is)\b[\s:=]*)+(?=\W*\w)", "", plain
    ).strip(_MARKS + " ")
    group = "".join(map(re.escape, letters))
    if found := re.fullmatch(rf"(?i)[(\[]?\s*([{group}])\s*[)\].:,]*", plain):
        return found[1].upper()
    if found := re.match(
        rf"[(\[]\s*([{group}{group.lower()}])\s*[)\]][\s.:,*_$-]*(.+)|"
        rf"([{group}])\s*[).:]\s*[*_$]*\s*(\S.*)|"
        rf"([{group}])\s+[-–—=]+\s+(\S.*)",
        plain,
    ):
        letter = (found[1] or found[3] or found[5]).upper()
        rest = found[2] or found[4] or found[6] or ""
        if re.match(rf"(?:and|or|&|,|/)?\s*[(\[]?[{group}]\b[)\]]?(?:\W|$)", rest) and not texts:
            return None
        return letter
    return own


def _choice_with_text(text: str, texts: dict[str, Any]) -> str | None:
    plain = _plain_choice(text) if texts else ""
    found = (
        letter
        for letter, choice in texts.items()
        if plain in (_plain_choice(str(choice)), _plain_choice(_unlettered(str(choice), letter)))
    )
    return next(found, None) if plain else None


def _unlettered(choice: str, letter: str) -> str:
    """Return a choice without its own letter before it: "(A) red", "A. red"."""
    return re.sub(rf"^\s*(?:\({letter}\)|{letter}\s*[).:])\s*(?=\S)", "", choice)


def _plain_choice(text: str) -> str:
    formula = re.sub(r"[\s{}]+", " ", plain_latex(text).lower()).strip()
    if re.search(r"[\d\\^/=<>]", formula):
        return re.sub(r"[\s()*]+", "", formula)
    return normalise_answer(formula)


def chosen_letter(text: str, letters: list[str], texts: dict[str, Any]) -> str | None:
    """Return the letter that a response chooses; None if it chooses none, or several."""
    stated = [found for found in _stated_letters(text, letters, texts) if found]
    if stated:
        return max(stated, key=lambda found: found[0])[1]
    return _only_letter(text, letters, texts)


def _stated_letters(
    text: str, letters: list[str], texts: dict[str, Any]
) -> Iterator[tuple[int, str | None]]:
    """Yield the position and letter of each statement of a choice; None for a statement of several
    letters. Those that only name a choice ("Option B is too small") have positions below 0, so that
    any other one counts before them."""
    for position, start, end in boxed_spans(text):
        inner = text[start:end]
        letter = _letter_of(inner, letters, texts)
        one = f"[{''.join(letters)}]"
        several = re.search(rf"\b{one}\W+(?:and|or)?\W*{one}\b", _unfonted(inner))
        if letter is not None or several:
            yield position, letter
    for tagged in _TAGGED.finditer(text):
        if (letter := _letter_of(tagged[1], letters, texts)) is not None:
            yield tagged.start(), letter
    group = "".join(map(re.escape, letters))
    for found in _STATEMENTS.finditer(text):
        if (stated := _letter_after(text, found.end(), group)) is not None:
            is_weak = found[0].lower().strip(" ,:") in _WEAK and not stated[2]
            is_negated = _NEGATION.search(text[found.start() : stated[0]])
            is_denied = _DENIED.search(text[: found.start()][-30:])
            is_named = _NAMED.fullmatch(found[0]) or _DISCUSSED.match(text, stated[0])
            if not (is_weak or is_negated or is_denied):
                yield stated[0] - (len(text) if is_named else 0), stated[1]
        elif texts and (by_text := _text_after(text, found.end(), texts)):
            yield found.end(), by_text
    after = re.compile(
        rf"(?:(?<![\w'’-])(?:[Oo]ption|[Cc]hoice|[Aa]nswer|"
        rf"[Ss]tatement)\s+)?(?<![\w'’(*`\"-])[(*_`\"]{{0,4}}([{group}])[)*_`\"]{{0,4}}\s+"
        r"(?:is|must be|has to be|would be|should be)\s+(?:therefore |thus |hence |clearly "
        r"|indeed )?(?:the )?"
        r"(?:only )?(?:correct|right|best|answer|true|final)\b"
    )
    for found in after.finditer(text):
        before = text[max(0, found.start() - 14) : found.start()]
        is_second = re.search(rf"\b[{group}]\)?\s*(?:and|or|,)\s*$", before)
        yield found.start(1), None if is_second else found[1].upper()
    yield from stated_choices(text, group)


#: Statements that only name a choice, and a choice that is discussed.
_NAMED = re.compile(r"(?i)\W*(?:option|choice|statement|letter)s?\W*")
_DISCUSSED = re.compile(r"\W*[A-Za-z]\W*\s(?:was|were|has|does|would|could|seems|looks)\b")
_WEAK = frozenset({
    "therefore", "thus", "hence", "so", "it is", "it's", "that is", "which is", "one is", "matches"
})  # fmt: skip


def _letter_after(text: str, start: int, group: str) -> tuple[int, str | None, bool] | None:
    """Return (position, letter or None for several, whether it is clearly a choice) of the letter
    after ``start``."""
    gap = _GAP.match(text, start)
    assert gap
    at = gap.end()
    window = text[at : at + 80]
    clean = re.sub(
        r"^(?:\\[(\[]|\\(?:text|textbf|mathrm|mathbf|textit|boldsymbol)\s*\{|[{$])+\s*", "", window
    )
    found = re.match(rf"([(\[]?)\s*([{group}{group.lower()}])(?![\w'’-])(?:\s*([)\]]))?", clean)
    if not found:
        return None
    letter = found[2]
    rest = clean[found.end() :]
    before = text[start:at]
    is_marked = bool(
        (found[1] and found[3]) or re.search(r"[*_`\"“$]$", before) or clean != window or found[3]
    )
    follows = re.match(r"[*_`\"'”’}$]*\s*(?:[.,;:!?\n)—–]|$|\\\)|\\\])", rest)
    if not is_marked and not follows:
        if letter.islower():
            return None
        word = re.match(r"[*_`\"'”’]*\s+([a-z]+)", rest)
        if letter in "AI" and (not word or word[1] not in _AFTER_A):
            return None
    if letter in "ai" and not is_marked and ":" not in before and not re.match(r"\W*$", rest):
        return None
    several = re.match(
        rf"[*_`\"'”’}})\]$]*\s*(?:,\s*)?(?:and|or|&|/|,|as well "
        rf"as)\s*(?:also\s+)?[(\[*_`\"]*([{group}])(?![\w'’-])",
        rest,
    )
    if _CONTRASTED.match(rest) or is_denied(rest[:40]):
        return None
    if several and several[1].upper() != letter.upper():
        behind = rest[several.end() :]
        # "C, D is wrong", but not "C and D are wrong"
        is_apart = re.fullmatch(r"\W*,\s*\W*", several[0][:-1])
        is_one = re.match(r"\W*\s(?:is|was)\b", behind)
        if not (is_apart and is_one and _CONTRASTED.match(behind)):
            return at, None, True
    return at, letter.upper(), is_marked or bool(follows)


_AFTER_A = frozenset([
    "because", "since", "as", "is", "and", "or", "for", "with", "which", "where", "while", "so",
    "due", "given", "but,", "by"
])  # fmt: skip


#: What a choice is not: "not red but", ", not red".
_CONTRAST = re.compile(
    r"(?i)^\W*not .{1,80}?,? but (?:rather )?|,? (?:and not|not|rather than|instead of) .*$"
)


def _text_after(text: str, start: int, texts: dict[str, Any]) -> str | None:
    gap = re.compile(r"[\s:=*_`\"“$-]*(?:(?:the|is|be)\s+)?").match(text, start)
    assert gap
    for rest in (text[start:], text[gap.end() :]):
        line = re.split(r"\n|[.!?](?:\s|$)|\bbecause\b|\bsince\b", rest.strip(), maxsplit=1)[0]
        for words in (line, _CONTRAST.sub("", line)):
            if letter := _choice_with_text(words.strip(_MARKS + " :"), texts):
                return letter
    return None


def _only_letter(text: str, letters: list[str], texts: dict[str, Any]) -> str | None:
    """Return the letter of a response without a statement: a single one, or the last in brackets or
    bold."""
    whole = _letter_of(text, letters, texts)
    if whole is not None:
        return whole
    group = "".join(map(re.escape, letters))
    lines = [line for line in text.splitlines() if line.strip()]
    for line in (lines[-1:] or [""]) + lines[:1]:
        if (letter := _letter_of(line, letters, texts)) is not None:
            return letter
    marked = []
    for found in re.finditer(
        rf"[(\[]([{group}{group.lower()}])[)\]]|\*\*\(?([{group}])[).:]?\*\*", text
    ):
        sentence = re.split(r"[.!?\n]\s", text[: found.start()])[-1]
        rest = text[found.end() :][:40]
        if not _NEGATION.search(sentence) and not (_CONTRASTED.match(rest) or is_denied(rest)):
            marked.append((found[1] or found[2]).upper())
    if marked:
        return marked[-1]
    if re.search(rf"\b[{group}]\W+(?:and|or|&|,)?\W*[{group}]\b", text):
        return None
    last = re.search(rf"[,:=>→⇒]\s*([{group}])[.!]?\s*$", text[-20:])
    if last and not re.search(r"(?i)n['’]t\b|\b(?:not|never|neither|nor|except|but)\b", text[-80:]):
        return str(last[1])
    bare = re.findall(
        rf"(?:^|\b(?:is|be|say|think|guess|option|choice|with|pick|"
        rf"choose)\s+)([{group}])(?![\w'’+#-])",
        text.strip(),
    )
    is_denial = _NEGATION.search(text) or denies(text)
    if len(set(bare) - {"A", "I"}) == 1 and len(text.split()) <= 8 and not is_denial:
        return next(letter for letter in bare if letter not in "AI")
    if texts and lines:
        there = [letter for letter, choice in texts.items() if _mentions(lines[-1], str(choice))]
        if len(there) == 1 and not _NEGATION.search(lines[-1]):
            return there[0]
    return None


def _mentions(line: str, choice: str) -> bool:
    words = normalise_answer(choice)
    return bool(words) and f" {words} " in f" {normalise_answer(line)} "
