r"""Read one expression in the notation of `slime.rollout.rewards.math_notation` and compare values.

Rational numbers are exact. Irrational numbers are computed to 60 digits and compared to 40,
relative to their size; formulas with variables are compared at fixed points. Work is bounded: no
expression, whatever its exponents, takes more than milliseconds.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import mpmath

#: ("n", Fraction) | ("x", name) | ("+", a, b) | ("*", a, b) | ("/", a, b) | ("^", a, b) | ("-", a)
#: | ("!", a) | ("f", name, *arguments) | ("±",)
Node = tuple[Any, ...]
Number = Any  # Fraction, or mpf or mpc of _MP

_MP = mpmath.mp.clone()
_MP.dps = 60
_MP_MORE = mpmath.mp.clone()
_MP_MORE.dps = 150
_MP_INTEGRAL = mpmath.mp.clone()
_MP_INTEGRAL.dps = 25
#: Relative difference of equal integrals.
_INTEGRAL_TOLERANCE = _MP.mpf(10) ** -14
#: Rational numbers with more bits become floats.
_MAX_BITS = 60_000
#: Larger exponents (bits of the exponent itself) are beyond comparison.
_MAX_EXPONENT_BITS = 4096
_MAX_EXACT_FACTORIAL = 3000
_MAX_TEXT = 1500
_MAX_DEPTH = 60
#: Factors, signs and exponents of one expression; the tree is as deep at most.
_MAX_FACTORS = 200
_POINTS = 6
#: Further points, far from 0, of expressions with functions that differ from piece to piece.
_FAR_POINTS = 2
_PIECEWISE = ("max", "min", "floor", "ceil", "abs", "mod")


class NotMath(ValueError):
    """The text is not an expression that this module reads."""


class TooBig(NotMath):
    """The value is too large to be computed."""


class Undefined(ArithmeticError):
    """The expression has no value, like 1/0."""


# -- reading ---------------------------------------------------------------------------------------

_FUNCTIONS = frozenset([
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "sinh",
    "cosh", "tanh", "cis", "log", "ln", "lg", "exp", "sqrt", "abs", "max", "min", "gcd", "lcm"
])  # fmt: skip
_ALIASES = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "cosec": "csc", "tg": "tan", "ctg": "cot",
}  # fmt: skip
_GREEK = frozenset([
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
    "Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega", "ell", "hbar"
])  # fmt: skip
_WORDS = {"pi": ("x", "pi"), "infinity": ("x", "oo"), "inf": ("x", "oo")}
#: Adjacent letters that are a product; other runs of letters are words.
_PRODUCTS = re.compile(
    r"[xyzw]{2,4}|[abc]{2,3}|[pqrst]{2,3}|[mnk]{2,3}|[uvw]{2,3}|[ijk]{2}|i[a-z]|[a-z]i|[a-z]{2}"
)
_NUMBER = re.compile(r"\d{1,3}(?:[, ]\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+")
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\(?:overline|bar|overbar|widebar)\s*(?:\{(\d+)\}|(\d))|\((\d+)\)|"
    r"\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?)(?:\s*\\ldots|\.\.\.)?"
)
_ELLIPSIS = re.compile(r"(\d*)\.(\d*?)(?:(\d+?)\3{2,}|(\d{2,}?)\4+)(?:\\ldots|\.{3})")
_MIXED = re.compile(
    r"(\d+) +(\d+) ?/ ?(\d+)(?![\d.!^])|(\d+) ?\\frac ?(?:\{ ?(\d+) ?\}|(\d)) ?(?:\{ ?(\d+) "
    r"?\}|(\d))(?![!^])"
)
_SCIENTIFIC = re.compile(r"[eE][-+]?\d+(?![\d.]*[A-Za-z])")
_LATEX_NAME = re.compile(r"\\([A-Za-z]+)")
_LETTERS = re.compile(r"[A-Za-z]+")
_ACCENTED = re.compile(r"\s*\{\s*([A-Za-z]+)\s*\}|\s*([A-Za-z])")
_SUBSCRIPT = re.compile(r"_(?:\{([^{}]*)\}|(\w))")
_PRIMES = re.compile(r"'+|\^\{?\\prime\}?")
_TIMES = re.compile(r"\s*(\\times|\\cdot|\*\*?|\\div|/|\\mod(?![A-Za-z]))\s*")
#: Combinations and permutations: {}_{10}C_3 and ^{10}C_3, C_{10}^3, C(10,3).
_COUNT_BEFORE = re.compile(
    r"(?:\{ ?\} ?)?[_^] ?(?:\{ ?(\w+) ?\}|(\w)) ?([CP])_ ?(?:\{ ?(\w+) ?\}|(\w))"
)
_COUNT_BEHIND = re.compile(r"_ ?(?:\{ ?(\d+) ?\}|(\d)) ?\^ ?(?:\{ ?(\d+) ?\}|(\d))")
_COUNT_CALLED = re.compile(r"\( ?([\dnkmr][\dnkmr +-]{0,20}), ?([\dnkmr][\dnkmr +-]{0,20})\)")
_SUM_FROM = re.compile(r" ?_ ?\{ ?([A-Za-z]) ?= ?([^{}=]{1,40})\} ?\^ ?(?:\{([^{}]{1,40})\}|(\w))")
_LIMIT = r"(?:\{((?:[^{}]|\{[^{}]{0,40}\}){1,80})\}|(\w|\\pi))"
_INTEGRAL_FROM = re.compile(rf" ?_ ?{_LIMIT} ?\^ ?{_LIMIT}")
_DIFFERENTIAL = re.compile(r"(?<![A-Za-z\\])d ?([a-z])(?![A-Za-z])")
_MAX_SUMS = 2
_MAX_TERMS = 600
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", "|": "|"}


@functools.lru_cache(maxsize=4096)
def read_expression(text: str) -> Node:
    r"""Return the expression as a tree.

    Raises:
        NotMath: ``text`` is not an expression, or of a kind that this module does not read
            (relations, words).

    Example:
        >>> read_expression(r"\frac12 x")
        ('*', ('/', ('n', Fraction(1, 1)), ('n', Fraction(2, 1))), ('x', 'x'))
    """
    if len(text) > _MAX_TEXT:
        raise NotMath("too long")
    reader = _ExpressionReader(text)
    node = reader.sum()
    reader.blanks()
    if reader.at < len(text):
        raise NotMath(f"unread: {text[reader.at :]!r:.40}")
    return node


class _ExpressionReader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.bars = 0
        self.factors = 0
        self.sums = 0

    def count_factor(self) -> None:
        self.factors += 1
        if self.factors > _MAX_FACTORS:
            raise NotMath("too long")

    def blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def take(self, *options: str) -> str | None:
        self.blanks()
        for option in options:
            if self.text.startswith(option, self.at):
                end = self.at + len(option)
                is_command = option[0] == "\\" and option[-1].isalpha()
                if is_command and self.text[end : end + 1].isalpha():
                    continue
                self.at = end
                return option
        return None

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotMath("nested too deeply")
        node = self.signed()
        while sign := self.take("+", "-", r"\pm", r"\mp"):
            node = ("+", node, _signed(sign, self.product()))
        self.depth -= 1
        return node

    def signed(self) -> Node:
        self.count_factor()
        sign = self.take("+", "-", r"\pm", r"\mp")
        return _signed(sign, self.signed()) if sign else self.product()

    def product(self) -> Node:
        node = last = self.factor()
        while True:
            if operator := self.match(_TIMES):
                sign = self.take("-", "+")
                if operator[1] == "**":
                    node = ("^", node, _signed(sign, self.factor()))
                    continue
                right = _signed(sign, self.factor())
                if operator[1] == r"\mod":
                    node = ("f", "mod", node, right)
                else:
                    node = ("/" if operator[1] in ("/", r"\div") else "*", node, right)
            elif self.starts_factor():
                is_number = self.text[self.at].isdigit() or self.text[self.at] == "."
                is_power = last[0] == "^" and bool(symbols_of(last[2]))  # (-1)^n 2^n
                if is_number and not is_power and self.text[self.at - 1] not in ("i", "!"):
                    raise NotMath("a number right after a factor")
                last = self.factor()
                node = ("*", node, last)
            else:
                return node

    def starts_factor(self) -> bool:
        self.blanks()
        if self.at >= len(self.text):
            return False
        character = self.text[self.at]
        if character == "|":
            return self.bars == 0
        if character == "\\":
            name = _LATEX_NAME.match(self.text, self.at)
            return name is not None and name[1] not in _NO_FACTOR
        return character.isalnum() or character in "([{."

    def factor(self) -> Node:
        self.count_factor()
        return self.postfix(self.primary())

    def postfix(self, node: Node) -> Node:
        while True:
            start = self.at
            if self.take("^"):
                if self.match(re.compile(r"\{?\s*\\circ\s*\}?")):
                    node = ("*", node, ("f", "degree"))
                else:
                    node = ("^", node, self.exponent())
            elif self.text.startswith("!", self.at) and not self.text.startswith("!=", self.at):
                self.at += 1
                node = ("!", node)
            elif self.take(r"\circ"):
                node = ("*", node, ("f", "degree"))
            else:
                self.at = start
                return node

    def exponent(self) -> Node:
        self.count_factor()
        self.blanks()
        if sign := self.take("-", "+"):
            return _signed(sign, self.exponent())
        if digits := self.match(re.compile(r"\d+(?:\.\d+)?(?![\d.]*/\d)|\d+")):
            node: Node = ("n", Fraction(digits[0]))
        else:
            node = self.primary()
        return ("^", node, self.exponent()) if self.take("^") else node

    def primary(self) -> Node:
        self.blanks()
        text = self.text
        if self.at >= len(text):
            raise NotMath("an operand is missing")
        character = text[self.at]
        if character.isdigit() or character == ".":
            return self.number()
        if character in "([{":
            return self.group(character)
        if character == "|":
            self.at += 1
            self.bars += 1
            node = self.sum()
            self.bars -= 1
            if not self.take("|"):
                raise NotMath("an open |")
            return ("f", "abs", node)
        if character == "\\":
            return self.command()
        if character.isascii() and character.isalpha():
            return self.word()
        if found := self.match(_COUNT_BEFORE):
            return _selections(found[3], _atom(found[1] or found[2]), _atom(found[4] or found[5]))
        raise NotMath(f"{character!r}")

    def group(self, opening: str) -> Node:
        if opening == "{" and (found := self.match(_COUNT_BEFORE)):
            return _selections(found[3], _atom(found[1] or found[2]), _atom(found[4] or found[5]))
        self.take(opening)
        outer = self.bars
        self.bars = 0
        node = self.sum()
        if not self.take(_CLOSING[opening]):
            raise NotMath(f"an open {opening}")
        self.bars = outer
        return node

    def number(self) -> Node:
        if found := self.match(_REPEATING):
            return ("n", _repeating(found))
        if found := self.match(_ELLIPSIS):
            return ("n", _periodic(found[1], found[2], found[3] or found[4]))
        if found := self.match(_MIXED):
            whole = found[1] or found[4]
            top = found[2] or found[5] or found[6]
            bottom = found[3] or found[7] or found[8]
            if 0 < int(top) < int(bottom):
                return ("n", int(whole) + Fraction(int(top), int(bottom)))
            self.at = found.start()
            if found[1]:
                raise NotMath("two numbers side by side")
        found = self.match(_NUMBER)
        if not found:
            raise NotMath("a lone point")
        digits = re.sub("[, ]", "", found[0])
        if len(digits) > _MAX_TEXT:
            raise NotMath("too long")
        node: Node = ("n", Fraction(digits.rstrip(".") if digits.endswith(".") else digits))
        if power := self.match(_SCIENTIFIC):
            return _times_power_of_ten(node, int(power[0][1:]))
        if power := self.match(
            re.compile(r" ?[xX] ?10\^ ?(?:\{ ?([-+]?\d+) ?\}|\(([-+]?\d+)\)|([-+]?\d+))")
        ):
            return _times_power_of_ten(node, int(power[1] or power[2] or power[3]))
        rest = self.text[self.at :]
        if rest.startswith("_") and not rest.startswith("_{ }"):
            raise NotMath("a number with a subscript")
        return node

    def argument(self) -> Node:
        r"""Read an argument of \frac and the like: a group or one digit or letter."""
        self.blanks()
        if self.text[self.at : self.at + 1].isdigit():
            self.at += 1
            return ("n", Fraction(self.text[self.at - 1]))
        if self.text[self.at : self.at + 1].isalpha():
            self.at += 1
            return _symbol(self.text[self.at - 1])
        return self.primary()

    def command(self) -> Node:
        found = self.match(_LATEX_NAME)
        if not found:
            raise NotMath("a backslash")
        name = found[1]
        if name == "frac":
            return ("/", self.argument(), self.argument())
        if name == "sqrt":
            return self.root()
        if name in ("sum", "prod"):
            return self.series(name)
        if name == "int":
            return self.integral()
        if name == "binom":
            return ("f", "binom", self.argument(), self.argument())
        if name in ("lfloor", "lceil"):
            node = self.sum()
            if not self.take(_CLOSING["\\" + name]):
                raise NotMath("an open floor")
            return ("f", "floor" if name == "lfloor" else "ceil", node)
        if name == "pi":
            return ("x", "pi")
        if name == "infty":
            return ("x", "oo")
        if name in _FUNCTIONS:
            return self.function(name)
        if name in _GREEK:
            return self.subscripted(name)
        is_accent = name in ("vec", "hat", "bar", "overline", "tilde", "overrightarrow")
        if is_accent and (inner := self.match(_ACCENTED)):
            return ("x", f"{name}:{inner[1] or inner[2]}")
        raise NotMath(f"\\{name}")

    def series(self, kind: str) -> Node:
        r"""Return a sum or product between limits. Its variable is renamed, so that its name does
        not matter."""
        found = self.match(_SUM_FROM)
        if not found:
            raise NotMath(f"\\{kind} without limits")
        bound = self.bound_variable()
        low = read_expression(found[2].strip())
        high = read_expression((found[3] or found[4]).strip())
        body = replaced(self.product(), ("x", found[1]), ("x", bound))
        return ("f", kind, ("x", bound), low, high, body)

    def integral(self) -> Node:
        limits = self.match(_INTEGRAL_FROM)
        end = _DIFFERENTIAL.search(self.text, self.at) if limits else None
        if not limits or not end or "int" in self.text[self.at : end.start()]:
            raise NotMath("\\int without limits or differential")
        bound = self.bound_variable()
        body = read_expression(self.text[self.at : end.start()].strip() or "1")
        self.at = end.end()
        low, high = (read_expression((limits[n] or limits[n + 1]).strip()) for n in (1, 3))
        return ("f", "int", ("x", bound), low, high, replaced(body, ("x", end[1]), ("x", bound)))

    def bound_variable(self) -> str:
        """Return the name of the variable of the next sum or integral."""
        self.sums += 1
        if self.sums > _MAX_SUMS:
            raise NotMath("too many sums")
        return f"#{self.sums}"

    def root(self) -> Node:
        degree: Node = ("n", Fraction(2))
        if self.take("["):
            degree = self.sum()
            if not self.take("]"):
                raise NotMath("an open [")
        self.blanks()
        if digits := self.match(re.compile(r"\d+(?:\.\d+)?")):
            return ("f", "root", ("n", Fraction(digits[0])), degree)
        return ("f", "root", self.argument(), degree)

    def word(self) -> Node:
        found = self.match(_LETTERS)
        assert found
        word = found[0]
        if len(word) == 1:
            return self.letter(word)
        lower = _ALIASES.get(word.lower(), word.lower())
        if lower in ("root", "sqrt"):
            return self.root()
        if lower in _FUNCTIONS:
            return self.function(lower)
        if lower in _WORDS:
            return _WORDS[lower]
        if word in _GREEK:
            return self.subscripted(word)
        for name in sorted(_FUNCTIONS | {"pi"}, key=len, reverse=True):  # "xsqrt(3)", "2npi"
            if word.startswith(name, 1):
                self.at = found.start() + 1
                return _symbol(word[0])
        if not _PRODUCTS.fullmatch(word):
            raise NotMath(f"a word, {word!r:.20}")
        self.at = found.start() + 1
        return self.letter(word[0])

    def letter(self, letter: str) -> Node:
        if letter in "CP":
            if found := self.match(_COUNT_CALLED):
                return _selections(letter, *(read_expression(found[n].strip()) for n in (1, 2)))
            if letter == "C" and (found := self.match(_COUNT_BEHIND)):
                ends = (_atom(found[1] or found[2]), _atom(found[3] or found[4]))
                return _selections(letter, *sorted(ends, reverse=True))
        if letter in "fgh" and self.text.startswith("(", self.at):
            return ("f", f"unknown:{letter}", self.group("("))
        return self.subscripted(letter)

    def subscripted(self, name: str) -> Node:
        if found := self.match(_SUBSCRIPT):
            name += "_" + (found[1] or found[2] or "").replace(" ", "")
        if found := self.match(_PRIMES):
            name += "'" * max(1, found[0].count("'"))
        return _symbol(name)

    def function(self, name: str) -> Node:
        power: Node | None = None
        base: Node | None = None
        if name == "log" and self.take("_"):
            base = self.argument()
        if self.take("^"):
            power = self.exponent()
            if base is None and name == "log" and self.take("_"):
                base = self.argument()
        if name in ("max", "min", "gcd", "lcm"):
            return ("f", name, *self.arguments())
        self.blanks()
        bracket = self.text[self.at : self.at + 1]
        if name == "sqrt" or bracket in ("(", "{", "["):
            argument = self.group(bracket) if bracket else self.primary()
            argument = self.postfix(argument) if bracket == "{" else argument
        else:
            argument = self.open_argument()
        node: Node = ("f", name, argument) if base is None else ("f", "log", argument, base)
        if power == ("-", ("n", Fraction(1))) and name in ("sin", "cos", "tan", "cot"):
            return ("f", f"arc{name}", argument)
        return node if power is None else ("^", node, power)

    def open_argument(self) -> Node:
        r"""Read the argument of \sin without brackets: factors side by side, up to the next
        function."""
        node = self.factor()
        while self.starts_factor() and not self.starts_function():
            if self.text[self.at] == "(":
                break
            node = ("*", node, self.factor())
        if divisor := self.match(re.compile(r"/(\d+)")):
            node = ("/", node, ("n", Fraction(divisor[1])))
        return node

    def starts_function(self) -> bool:
        name = _LATEX_NAME.match(self.text, self.at)
        word = name[1] if name else (_LETTERS.match(self.text, self.at) or [""])[0]
        return word in _FUNCTIONS

    def arguments(self) -> list[Node]:
        opening = self.take("(", "{", "[")
        if not opening:
            raise NotMath("arguments are missing")
        nodes = [self.sum()]
        while self.take(","):
            nodes.append(self.sum())
        if not self.take(_CLOSING[opening]):
            raise NotMath("an open bracket")
        return nodes


_NO_FACTOR = frozenset([
    "times", "cdot", "div", "mod", "pm", "mp", "le", "ge", "ne", "in", "approx", "equiv", "to",
    "cup", "cap", "setminus", "ldots", "circ", "rfloor", "rceil", "rangle", "langle", "end",
    "begin", "R", "Z", "N", "Q", "C", "quad"
])  # fmt: skip


def _signed(sign: str | None, node: Node) -> Node:
    if sign == "-":
        return ("-", node)
    if sign == r"\pm":
        return ("*", ("±",), node)
    return ("-", ("*", ("±",), node)) if sign == r"\mp" else node


def _symbol(name: str) -> Node:
    return ("x", name)


def _atom(text: str) -> Node:
    return ("n", Fraction(text)) if text.isdigit() else _symbol(text)


def _selections(kind: str, n: Node, k: Node) -> Node:
    """Return the combinations (C) or permutations (P) of k out of n."""
    numbers = [node[1] for node in (n, k) if node[0] == "n"]
    if len(numbers) == 2 and not numbers[0] >= numbers[1]:
        raise NotMath("more are taken than there are")  # the point C(1, 2)
    return ("f", "binom", n, k) if kind == "C" else ("/", ("!", n), ("!", ("+", n, ("-", k))))


def _times_power_of_ten(node: Node, power: int) -> Node:
    return ("*", node, ("^", ("n", Fraction(10)), ("n", Fraction(power))))


def _periodic(whole: str, fixed: str, period: str) -> Fraction:
    value = Fraction(int(whole or 0))
    value += Fraction(int(fixed or 0), 10 ** len(fixed))
    return value + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))


def _repeating(found: re.Match[str]) -> Fraction:
    period = found[3] or found[4] or found[5] or found[6] + (found[7] or "") + (found[8] or "")
    return _periodic(found[1], found[2], period)


# -- computing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scope:
    """How an expression is computed.

    Attributes:
        point: which of the fixed points the variables are at.
        sign: of ±.
        log_base: base of "log" without a base; 0: e.
        mp: context of mpmath with the number of digits.
        bound: values of the variables of sums and integrals.
        whole: variables are whole numbers.
    """

    point: int
    sign: int = 1
    log_base: int = 0
    mp: Any = _MP
    bound: tuple[tuple[str, Number], ...] = ()
    whole: bool = False


def _evaluate(node: Node, scope: _Scope) -> Number:
    kind = node[0]
    if kind == "f" and node[1] in ("sum", "prod"):
        return _series(node, scope)
    if kind == "f" and node[1] == "int":
        return _integral(node, scope)
    if kind == "n":
        return node[1]
    if kind == "x":
        return _named(node[1], scope)
    if kind == "±":
        return Fraction(scope.sign)
    values = [_evaluate(item, scope) for item in node[1:] if isinstance(item, tuple)]
    if kind == "f":
        return _apply(node[1], values, scope)
    if kind == "-":
        return -values[0]
    if kind == "!":
        return _factorial(values[0], scope)
    a, b = values
    if kind == "^":
        return _power(a, b, scope)
    exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    if not exact:
        a = _float(a, scope)
        b = _float(b, scope)
    if kind == "+":
        return _bounded(a + b, scope)
    if kind == "*":
        return _bounded(a * b, scope)
    if b == 0:
        raise Undefined("a division by zero")
    return _bounded(a / b, scope)


def _series(node: Node, scope: _Scope) -> Number:
    low = _evaluate(node[3], scope)
    high = _evaluate(node[4], scope)
    if not all(isinstance(limit, Fraction) and limit.denominator == 1 for limit in (low, high)):
        raise Undefined("limits that are no whole numbers")
    if high - low > _MAX_TERMS or scope.bound:
        raise TooBig("too many terms")
    total: Number = Fraction(0 if node[1] == "sum" else 1)
    for n in range(int(low), int(high) + 1):
        term = _evaluate(node[5], replace(scope, bound=((node[2][1], Fraction(n)),)))
        if not (isinstance(total, Fraction) and isinstance(term, Fraction)):
            total = _float(total, scope)
            term = _float(term, scope)
        total = _bounded(total + term if node[1] == "sum" else total * term, scope)
    return total


def _integral(node: Node, scope: _Scope) -> Number:
    if scope.bound or symbols_of(node):
        raise Undefined("an integral with variables")
    mp = _MP_INTEGRAL
    rough = replace(scope, mp=mp)
    low, high = (mp.mpf(_float(_evaluate(limit, rough), rough)) for limit in node[3:5])

    def integrand(x: Number) -> Number:
        return _float(_evaluate(node[5], replace(rough, bound=((node[2][1], x),))), rough)

    value, error = mp.quad(integrand, [low, high], error=True, maxdegree=7)
    if error > 1e-16 * max(1, abs(value)):
        raise Undefined("an integral that does not converge")
    return scope.mp.mpc(value) if mp.im(value) else scope.mp.mpf(mp.re(value))


def _value(node: Node, scope: _Scope) -> Number:
    """`_evaluate`; errors of mpmath become `Undefined`."""
    try:
        return _evaluate(node, scope)
    except (NotMath, Undefined):
        raise
    except (ArithmeticError, ValueError, TypeError, mpmath.libmp.NoConvergence) as error:
        raise Undefined(str(error)) from error


def _bounded(value: Number, scope: _Scope) -> Number:
    if isinstance(value, Fraction):
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        return value if bits <= _MAX_BITS else _float(value, scope)
    if scope.mp.isnan(value):
        raise Undefined("no number, as of oo - oo")
    return value


def _float(value: Number, scope: _Scope) -> Number:
    if isinstance(value, Fraction):
        return scope.mp.mpf(value.numerator) / value.denominator
    return value


def _named(name: str, scope: _Scope) -> Number:
    mp = scope.mp
    if name == "pi":
        return +mp.pi
    if name == "e":
        return +mp.e
    if name == "i":
        return mp.mpc(0, 1)
    if name == "oo":
        return mp.inf
    if name.startswith("#"):
        return next(value for bound, value in scope.bound if bound == name)
    return _whole_point(name, scope.point) if scope.whole else _point(name, scope.point)


@functools.lru_cache(maxsize=4096)
def _whole_point(name: str, point: int) -> Fraction:
    """Return a whole number for a variable: even at one point, odd at the next."""
    return Fraction(2 * (zlib.crc32(f"{name} {point}".encode()) % 8) + 2 + point % 2)


@functools.lru_cache(maxsize=4096)
def _point(name: str, point: int) -> Fraction:
    """Return a value for a variable: all positive at 0 and 1, all negative at 2, mixed at 3, small
    at 4 and 5, big behind `_POINTS`."""
    draw = zlib.crc32(f"{name} {point}".encode())
    value = Fraction(700 + draw % 4001, 1009)
    if point >= _POINTS:
        return value * (-1) ** point * 10**6
    if point >= 4:
        return value / 8
    return -value if point == 2 or (point == 3 and draw >> 16 & 1) else value


def _guard(value: Number, scope: _Scope, bits: int = _MAX_EXPONENT_BITS) -> Number:
    value = _float(value, scope)
    if value and not scope.mp.isinf(value) and scope.mp.mag(value) > bits:
        raise TooBig("a value beyond comparison")
    return value


def _factorial(value: Number, scope: _Scope) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise Undefined("the factorial of a negative number")
        if value <= _MAX_EXACT_FACTORIAL:
            return Fraction(math.factorial(int(value)))
    return scope.mp.gamma(_guard(value, scope, 1000) + 1)


def _power(base: Number, exponent: Number, scope: _Scope) -> Number:
    mp = scope.mp
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        if exponent.denominator == 1:
            return _whole_power(base, exponent.numerator, scope)
        root = _exact_root(base, exponent.denominator)
        if root is not None:
            return _whole_power(root, exponent.numerator, scope)
        if base < 0 and exponent.denominator % 2:
            sign = -1 if exponent.numerator % 2 else 1
            return sign * _power(-base, exponent, scope)
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        if base == 0 and exponent < 0:
            raise Undefined("a division by zero")
        _guard(exponent, scope)
        return mp.power(_float(base, scope), int(exponent))
    a = _float(base, scope)
    b = _guard(exponent, scope)
    if a == 0:
        if mp.re(b) <= 0:
            raise Undefined("zero to no positive power")
        return Fraction(0)
    if not mp.isinf(a):
        _guard(b * mp.log(a), scope)
    return mp.power(a, b)


def _whole_power(base: Fraction, exponent: int, scope: _Scope) -> Number:
    if base == 0 and exponent < 0:
        raise Undefined("a division by zero")
    if base in (0, 1, -1):
        return base**exponent if abs(exponent) < 2**20 else base ** (exponent % 2 + 2)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
    if bits <= _MAX_BITS:
        return base**exponent
    if exponent.bit_length() > _MAX_EXPONENT_BITS:
        raise TooBig("an exponent beyond comparison")
    return scope.mp.power(_float(base, scope), exponent)


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    if value < 0:
        root = _exact_root(-value, degree) if degree % 2 else None
        return None if root is None else -root
    top = _whole_root(value.numerator, degree)
    bottom = _whole_root(value.denominator, degree)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _whole_root(value: int, degree: int) -> int | None:
    if value in (0, 1):
        return value
    if degree > 64 or value.bit_length() > 4096:
        return None
    if degree == 2:
        root = math.isqrt(value)
    else:
        with _MP.workprec(value.bit_length() + 32):
            root = int(_MP.nint(_MP.root(value, degree)))
    return root if root**degree == value else None


def _apply(name: str, values: list[Number], scope: _Scope) -> Number:
    mp = scope.mp
    if name == "degree":
        return mp.pi / 180
    if name in ("root", "sqrt"):
        degree = values[1] if len(values) > 1 else Fraction(2)
        if degree == 0:
            raise Undefined("a root of degree zero")
        return _power(values[0], 1 / degree, scope)
    if name.startswith("unknown:"):
        seed = zlib.crc32(name.encode()) % 97
        return mp.cos(_guard(values[0], scope, 512) * mp.sqrt(2) + seed) + mp.mpf(seed) / 7
    if name in ("max", "min"):
        chosen = max if name == "max" else min
        return chosen(values, key=lambda value: mp.re(_float(value, scope)))
    if name in ("gcd", "lcm"):
        if not all(isinstance(value, Fraction) and value.denominator == 1 for value in values):
            raise Undefined("no whole numbers")
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*map(int, values)))
    if name == "abs":
        return abs(values[0])
    if name in ("floor", "ceil"):
        return _rounded(name, values[0], scope)
    if name == "mod":
        if values[1] == 0:
            raise Undefined("modulo zero")
        if not all(isinstance(value, Fraction) for value in values):
            raise Undefined("a remainder of no rational number")
        return values[0] % values[1]
    if name == "binom":
        return _binomial(values[0], values[1], scope)
    if name in ("log", "ln", "lg"):
        return _logarithm(name, values, scope)
    is_periodic = name in ("sin", "cos", "tan", "cot", "sec", "csc")
    value = _guard(values[0], scope, 512 if is_periodic else _MAX_EXPONENT_BITS)
    try:
        return _bounded(getattr(mp, _ANALYTIC[name])(value), scope)
    except (ZeroDivisionError, ValueError) as error:
        raise Undefined(name) from error


def _rounded(name: str, value: Number, scope: _Scope) -> Number:
    if isinstance(value, Fraction):
        return Fraction(math.floor(value) if name == "floor" else math.ceil(value))
    if scope.mp.im(value):
        raise Undefined("no real number")
    near = scope.mp.nint(_guard(value, scope))
    if abs(near - value) < scope.mp.mpf(10) ** -40:
        return near
    return (scope.mp.floor if name == "floor" else scope.mp.ceil)(value)


def _binomial(n: Number, k: Number, scope: _Scope) -> Number:
    are_whole = all(isinstance(one, Fraction) and one.denominator == 1 for one in (n, k))
    if are_whole and 0 <= n <= _MAX_EXACT_FACTORIAL and k >= 0:
        return Fraction(math.comb(int(n), int(k)))
    return scope.mp.binomial(_guard(n, scope, 1000), _guard(k, scope, 1000))


def _logarithm(name: str, values: list[Number], scope: _Scope) -> Number:
    mp = scope.mp
    if values[0] == 0:
        raise Undefined("the logarithm of zero")
    logarithm = mp.log(_float(values[0], scope))
    is_decimal = name == "lg" or (name == "log" and scope.log_base)
    if len(values) == 1 and not is_decimal:
        return logarithm
    base = values[1] if len(values) > 1 else Fraction(10)
    if base in (0, 1):
        raise Undefined("the base of a logarithm")
    return logarithm / mp.log(_float(base, scope))


#: Function → its name in mpmath.
_ANALYTIC = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "cis": "expj",
    **{name: name for name in (
        "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp"
    )},
}  # fmt: skip


# -- comparing -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8192)
def symbols_of(node: Node) -> frozenset[str]:
    """Return the names of the variables, which ``pi``, ``e``, ``i`` and ``oo`` are not."""
    if node[0] == "x":
        is_constant = node[1] in ("pi", "e", "i", "oo") or node[1][0] == "#"
        return frozenset() if is_constant else frozenset({node[1]})
    found: frozenset[str] = frozenset()
    for item in node[1:]:
        if isinstance(item, tuple):
            found |= symbols_of(item)
    return found


def contains(node: Node, kind: str, name: str | None = None) -> bool:
    """Tell whether a node of this kind (and name) is in the tree."""
    if node[0] == kind and (name is None or node[1] == name):
        return True
    return any(isinstance(item, tuple) and contains(item, kind, name) for item in node[1:])


def replaced(node: Node, old: Node, new: Node) -> Node:
    """Return the tree with every ``old`` replaced by ``new``."""
    if node == old:
        return new
    return tuple(replaced(item, old, new) if isinstance(item, tuple) else item for item in node)


@functools.lru_cache(maxsize=4096)
def number_of(node: Node, log_base: Literal[0, 10] = 0) -> Number:
    """Return the value of an expression without variables: a `Fraction`, or an mpf or mpc of 60
    digits.

    Raises:
        NotMath: the expression has variables, or its value is too big.
        Undefined: the expression has no value.
    """
    if symbols_of(node):
        raise NotMath("it has variables")
    return _value(node, _Scope(0, log_base=log_base))


def equal(a: Node, b: Node) -> bool | None:
    """Tell whether two expressions have the same value wherever both have one.

    Returns:
        None if no point was found at which both are defined.
    """
    if a == b:
        return True
    logarithms = (0, 10) if contains(a, "f", "log") or contains(b, "f", "log") else (0,)
    answers = [_equal(a, b, base) for base in logarithms]
    return True if True in answers else answers[0]


def _equal(a: Node, b: Node, log_base: int) -> bool | None:
    if not (symbols_of(a) or symbols_of(b)):
        try:
            return _same_number(a, b, _Scope(0, log_base=log_base))
        except (Undefined, TooBig):
            return None if _has_series(a) or _has_series(b) else False
    is_whole = _is_of_whole_numbers(a) or _is_of_whole_numbers(b)
    has_i = contains(a, "x", "i") or contains(b, "x", "i")
    is_piecewise = any(contains(node, "f", name) for node in (a, b) for name in _PIECEWISE)
    supported = False
    for point in range(_POINTS + is_piecewise * _FAR_POINTS):
        scope = _Scope(point, log_base=log_base, whole=is_whole)
        try:
            x = _value(a, scope)
            y = _value(b, scope)
        except (Undefined, TooBig):
            continue
        if _close(x, y, scope):
            supported = True
            continue
        is_compared = (_is_real(x) and _is_real(y)) or (has_i and point < 2)
        if is_compared and not _is_roundoff(a, b, x, y, scope):
            return False
    return True if supported else None


def _has_series(node: Node) -> bool:
    return any(contains(node, "f", name) for name in ("sum", "prod", "int"))


def _is_of_whole_numbers(node: Node) -> bool:
    """Tell whether variables must be integers: limits of a sum, or exponents of a negative
    number."""
    if node[0] == "f" and node[1] in ("sum", "prod") and symbols_of(node):
        return True
    if node[0] == "^" and symbols_of(node[2]):
        base = node[1]
        if base[0] == "-" or (base[0] == "n" and base[1] < 0):
            return True
    return any(isinstance(item, tuple) and _is_of_whole_numbers(item) for item in node)


def _same_number(a: Node, b: Node, scope: _Scope) -> bool:
    x = _value(a, scope)
    y = _value(b, scope)
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    if contains(a, "f", "int") or contains(b, "f", "int"):
        x = _float(x, scope)
        y = _float(y, scope)
        return bool(abs(x - y) <= _INTEGRAL_TOLERANCE * max(abs(x), abs(y)))
    if not _close(x, y, scope):
        return _is_roundoff(a, b, x, y, scope)
    size = abs(_float(x, scope))
    is_huge = not _MP.isinf(size) and size > _MP.mpf(10) ** 45
    # 10^(10^9) + 1 is not 10^(10^9)
    return not is_huge or not (contains(a, "+") or contains(b, "+"))


def _close(x: Number, y: Number, scope: _Scope) -> bool:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    x = _float(x, scope)
    y = _float(y, scope)
    if x == y:
        return True
    if _MP.isinf(x) or _MP.isinf(y):
        return False
    return bool(abs(x - y) <= max(abs(x), abs(y)) * _MP.mpf(10) ** -40)


def _is_roundoff(a: Node, b: Node, x: Number, y: Number, scope: _Scope) -> bool:
    """Tell whether the difference vanishes with more digits: sin(pi) is 0."""
    size = max(abs(_float(x, scope)), abs(_float(y, scope)))
    if _MP.isinf(size) or size > 1e-45:
        return False
    more = _Scope(scope.point, log_base=scope.log_base, mp=_MP_MORE)
    x = _float(_value(a, more), more)
    y = _float(_value(b, more), more)
    return bool(abs(x - y) < size * _MP_MORE.mpf(10) ** -60)


def _is_real(value: Number) -> bool:
    if isinstance(value, Fraction):
        return True
    return bool(abs(_MP.im(value)) <= abs(value) * _MP.mpf(10) ** -40)


def as_float(value: Number) -> Any:
    """Return a result of `number_of` as an mpf or mpc."""
    return _float(value, _Scope(0))


def proportional(a: Node, b: Node) -> bool | None:
    """Tell whether a = c · b with a constant c ≠ 0: the equations a = 0 and b = 0 are then the
    same."""
    ratio = None
    points = 0
    for point in range(4):
        scope = _Scope(point)
        try:
            x = _value(a, scope)
            y = _value(b, scope)
        except (Undefined, TooBig):
            continue
        if x == 0 or y == 0:
            if (x == 0) != (y == 0):
                return False
            continue
        is_exact = isinstance(x, Fraction) and isinstance(y, Fraction)
        here = x / y if is_exact else _float(x, scope) / _float(y, scope)
        if ratio is not None and not _close(ratio, here, scope):
            return False
        ratio = here
        points += 1
    return True if points >= 2 else None


def ratio_at(a: Node, b: Node) -> Any:
    """a / b at one point, as an mpf or mpc; None if it has no value."""
    scope = _Scope(0)
    try:
        x = _float(_value(a, scope), scope)
        y = _float(_value(b, scope), scope)
    except (Undefined, TooBig):
        return None
    return (x / y).real if y else None
