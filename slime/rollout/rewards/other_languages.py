"""How answers are stated in languages other than English.

Each table has one row per kind of word; words of scripts without blanks between words are in
`_GLUED`, and match anywhere.
"""

from __future__ import annotations

import re
import unicodedata

#: German, French, Spanish, Portuguese, Italian, Dutch, Swedish, Danish, Norwegian, Polish, Czech,
#: Romanian, Russian, Ukrainian, Greek, Turkish, Indonesian, Vietnamese, Arabic, Hindi.
_WORDS = {
    "answer": "antwort|auswahl|réponse|choix|respuesta|opción|alternativa|resposta|"
    "opção|risposta|opzione|antwoord|keuze|svar|svaret|alternativet|odpowiedź|odpowiedzią|odpověď|"
    "răspunsul|răspuns|ответ|ответом|вариант|відповідь|варіант|απάντηση|επιλογή|cevap|cevabı|yanıt|"
    "seçenek|jawaban|jawabannya|pilihan|đáp án|câu trả lời|الإجابة|الجواب|उत्तर|जवाब|विकल्प",
    "solution": "lösung|solución|solução|soluzione|решение|rozwiązanie",
    "is": "ist|lautet|wäre|est|serait|es|sería|é|seria|è|sarebbe|is|är|er|to|to jest|jest|je|este|"
    "является|это|є|це|είναι|adalah|ialah|yaitu|là|هي|هو",
    "choose": "wähle|choisis|choisir|elijo|escojo|escolho|scelgo|kies|väljer|vælger|velger|"
    "wybieram|vybírám|aleg|выбираю|выбираем|обираю|επιλέγω|memilih|pilih|chọn|أختار",
    "not": "nicht|keine|kein|pas|no|não|non|niet|geen|inte|ikke|nie|není|nu|не|ні|δεν|değil|"
    "bukan|không|không phải|ليس|ليست|नहीं",
    "right": "richtig|richtige|korrekt|correct|correcte|correcta|correcto|bonne|bon|correta|"
    "correto|certa|corretta|corretto|giusta|esatta|juist|juiste|goed|rätt|riktig|rigtig|poprawna|"
    "prawidłowa|správně|správná|corectă|corect|правильный|правильно|правильным|верный|верно|"
    "правильна|σωστή|σωστό|doğru|doğrudur|benar|đúng|صحيحة|الصحيحة|सही",
    "wrong": "falsch|falsche|falschen|faux|fausse|incorrect|incorrecte|incorrecta|incorrecto|falsa|"
    "falso|errada|errado|sbagliata|sbagliato|onjuist|fout|fel|feil|forkert|błędna|niepoprawna|"
    "špatně|greșită|"
    "неверно|неверный|неправильный|неправильно|неправильна|λάθος|yanlış|yanlıştır|salah|sai|خطأ|"
    "गलत",
    "but": "sondern|sino|bensì|maar|utan|lecz|nýbrž|ci|а|αλλά|melainkan|mà là|بل|बल्कि",
    "the": "die|der|das|la|le|el|o|a|il|de|het|den|det|η|το",
    "bound": "mindestens|höchstens|mehr als|weniger als|au moins|au plus|plus de|moins de|al menos|"
    "como máximo|más de|menos de|pelo menos|no máximo|mais de|almeno|al massimo|più di|meno di|"
    "minstens|hoogstens|meer dan|minder dan|co najmniej|co najwyżej|не менее|не более|больше|"
    "меньше|как минимум|en az|en fazla|ít nhất|nhiều nhất|على الأقل|कम से कम",
    "and": "und|oder|et|ou|y|o|e|u|ed|en|of|och|eller|og|i|lub|a|nebo|și|sau|и|или|і|або|και|ή|ve|"
    "veya|dan|atau|và|hoặc|و|أو|और|या",
}
#: Chinese, Japanese, Korean, Thai.
_GLUED = {
    "answer": "答案|选项|選項|答え|正解|正答|選択肢|정답|답|คำตอบ|ตัวเลือก",
    "solution": "解答|回答|해답",
    "is": "应该是|應該是|应为|應為|是|为|為|选|選|は|が|은|는|이|คือ",
    "choose": "选择|選擇|选|選",
    "not": "不是|不|非|并非|ではな|ではあ|じゃな|でな|가 아니|이 아니|아니|가 아닙|이 아닙|아닙|ไม่",
    "right": "的?正确|的?正確|が正解|が正し|は正し|は正解|가 정답|이 정답|가 맞|이 맞|ถูก",
    "wrong": "错|錯|不正确|不正確|は間違|が間違|は誤|が誤|는 틀|은 틀|가 틀|은 오답|ผิด",
    "but": "而是|なく",
    "the": "(?!)",
    "bound": "至少|至多|不少于|不超过|超过|多于|少于|小于|大于|少なくとも|적어도|최소|최대",
    "and": "和|或者?|与|與|と|か|または|や|와|과|및|또는|이나|나|และ|หรือ",
}


def _of(*kinds: str) -> str:
    words = "|".join(_WORDS[kind] for kind in kinds)
    glued = "|".join(_GLUED[kind] for kind in kinds)
    pattern = rf"(?:(?<!\w)(?:{words})(?!\w)|(?:{glued}))"
    return unicodedata.normalize("NFKC", pattern)


_STOP = r"[^.。!?！？\n:：]"
#: "Die richtige Antwort ist", "答えは": what stands before an answer.
ANSWER_IS = rf"(?:{_of('answer')}{_STOP}{{0,40}}?(?:{_of('is')}|[:：=—–]))"
_CHOICE_IS = ANSWER_IS.replace(_of("answer"), _of("answer", "solution"), 1)
IS = _of("is")
NOT = _of("not")
BOUND = _of("bound")
BOUND_BEHIND = "以上|以下|以内|未満|未满|이상|이하|미만"
_DENIED = re.compile(rf"(?i){_of('not', 'wrong')}")
#: What may stand before a letter.
_GAP = (
    r"(?:\\[a-z]+\{|[\s:*_`\"'“”‘„«»$(\[]|"
    rf"(?i:{_of('answer')})|{_of('the')}|(?<!\w)l['’]){{0,12}}"
)


def denies(text: str) -> bool:
    """Tell whether a text has a word for "not" or "wrong"."""
    return _DENIED.search(text) is not None


def is_denied(rest: str) -> bool:
    """Tell whether a text behind a choice says that it is wrong: "ist falsch", "ではない"."""
    return _WRONG.match(rest) is not None


_WRONG = re.compile(
    rf"(?i)[\s)\]*_`'’}}]*{_of('is')}?\s*(?:{_of('not')}|{_of('wrong')})|"
    rf"[\s)\]*_`}}]*{_of('wrong')}"
)


def stated_choices(text: str, letters: str) -> list[tuple[int, str | None]]:
    """Return the position and the letter of each statement of a choice; None for a statement of
    several letters. Those that only name a choice ("Option B") have positions below 0.

    Args:
        letters: those that may be chosen, escaped for a regular expression's set.

    Example:
        >>> stated_choices("Die Antwort ist nicht A. Richtig ist (B), also: 答えはCです", "A-D")
        [(38, 'B'), (51, 'C')]
    """
    one = rf"(?P<letter>[{letters}])(?![A-Za-z0-9\u00c0-\u024f-]|['’][a-ce-su-zA-Z])"
    before = re.compile(
        rf"(?:(?P<said>(?i:{_CHOICE_IS}|{_of('choose', 'but')}|{_of('right')} {_of('is')}))|"
        rf"(?i:{_of('answer')})){_GAP}{one}"
    )
    behind = re.compile(
        rf"(?<![\w'’-]){one}[)\]*_`\"]{{0,4}}\s?"
        rf"(?i:(?:{_of('is')}|[—–])\s*(?:{_of('the')} |l['’])?{_of('right')}|{_GLUED['right']})"
    )
    found: list[tuple[int, str | None]] = []
    for match in (*before.finditer(text), *behind.finditer(text)):
        rest = text[match.end("letter") : match.end("letter") + 40]
        if denies(text[match.start() : match.start("letter")]) or is_denied(rest):
            continue
        several = re.match(
            rf"[*_`\"'”)\]$]*\s*(?:,|/|&|{_of('and')})\s*[(\[*_`\"]*[{letters}]\b", rest
        )
        is_said = "said" not in match.groupdict() or match["said"]
        position = match.start("letter") - (0 if is_said else len(text))
        found.append((position, None if several else match["letter"]))
    return sorted(found, key=lambda one: one[0])
