r"""Units of measure and money after a number: ``12 cm``, ``5 \frac{m}{s}``, ``20 cubic inches``."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Unit:
    """The unit of a number.

    Attributes:
        dimension: exponents of base units, as ``(("m", 1), ("s", -1))``; () for "units" and the
            like.
        factor: the size of the unit in base units.
        words: a unit that is not in the table ("apples"), else "".
    """

    dimension: tuple[tuple[str, int], ...]
    factor: Fraction = Fraction(1)
    words: str = ""

    def times(self, other: Unit) -> Unit:
        """Return the product of two units in the table."""
        exponents = Counter(dict(self.dimension))
        for name, exponent in other.dimension:
            exponents[name] += exponent
        kept = tuple(sorted((name, n) for name, n in exponents.items() if n))
        return Unit(kept, self.factor * other.factor)


#: name(s) of a unit: "factor base^exponent …". Case counts for symbols of one and two letters.
_TABLE = """
m meter metre 米 公尺: 1 m
km kilometer kilometre 千米 公里: 1000 m
dm decimeter decimetre: 1/10 m
cm centimeter centimetre 厘米 公分: 1/100 m
mm millimeter millimetre 毫米: 1/1000 m
µm um micron micrometer micrometre: 1/1000000 m
nm nanometer nanometre: 1/1000000000 m
in inch inche: 127/5000 m
ft foot feet: 381/1250 m
yd yard: 1143/1250 m
mi mile: 201168/125 m
g gram gramme gm 克: 1/1000 kg
kg kilogram kilo 千克 公斤: 1 kg
mg milligram: 1/1000000 kg
tonne 吨: 1000 kg
ton: 1 ton
lb lbs pound: 45359237/100000000 kg
oz ounce: 45359237/1600000000 kg
s sec secs second 秒 초: 1 s
ms millisecond: 1/1000 s
min mins minute 分钟 分鐘 분: 60 s
h hr hrs hour 小时 小時 時間 시간: 3600 s
day 天 일: 86400 s
wk week: 604800 s
month: 1 month
yr yrs year: 1 year
L l liter litre 升: 1/1000 m^3
mL ml milliliter millilitre cc 毫升: 1/1000000 m^3
cL cl centiliter centilitre: 1/100000 m^3
gal gallon: 1 gallon
qt quart: 1/4 gallon
pt pint: 1/8 gallon
cup: 1/16 gallon
ha hectare: 10000 m^2
acre: 1 acre
N newton: 1 kg m s^-2
kN: 1000 kg m s^-2
J joule: 1 kg m^2 s^-2
kJ kilojoule: 1000 kg m^2 s^-2
MJ: 1000000 kg m^2 s^-2
eV: 1 eV
keV: 1000 eV
MeV: 1000000 eV
GeV: 1000000000 eV
cal calorie: 1 cal
kcal: 1000 cal
W watt: 1 kg m^2 s^-3
kW kilowatt: 1000 kg m^2 s^-3
MW megawatt: 1000000 kg m^2 s^-3
kWh: 3600000 kg m^2 s^-2
Pa pascal: 1 kg m^-1 s^-2
kPa kilopascal: 1000 kg m^-1 s^-2
MPa: 1000000 kg m^-1 s^-2
atm: 101325 kg m^-1 s^-2
bar: 100000 kg m^-1 s^-2
Hz hertz: 1 s^-1
kHz: 1000 s^-1
MHz: 1000000 s^-1
GHz: 1000000000 s^-1
rpm: 1 rpm
A amp ampere: 1 A
mA milliampere: 1/1000 A
V volt: 1 kg m^2 s^-3 A^-1
kV: 1000 kg m^2 s^-3 A^-1
mV: 1/1000 kg m^2 s^-3 A^-1
Ω ohm Ohm: 1 kg m^2 s^-3 A^-2
kΩ: 1000 kg m^2 s^-3 A^-2
C coulomb: 1 A s
F farad: 1 kg^-1 m^-2 s^4 A^2
T tesla: 1 kg s^-2 A^-1
K kelvin: 1 K
mol mole: 1 mol
mmol: 1/1000 mol
M: 1000 mol m^-3
mph: 1397/3125 m s^-1
kph kmh kmph: 5/18 m s^-1
dollar usd USD $ buck: 1 $
cent ¢: 1/100 $
euro EUR €: 1 €
£ GBP: 1 £
yen JPY ¥ 円: 1 ¥
rupee ₹ INR: 1 ₹
yuan RMB CNY 元 块: 1 yuan
degree deg ° 度 도: 1 degree
radian rad: 1 rad
°C celsiu celsius: 1 °C
°F fahrenheit: 1 °F
bit: 1 bit
byte: 8 bit
KB: 8000 bit
MB: 8000000 bit
GB: 8000000000 bit
平方米: 1 m^2
平方厘米: 1/10000 m^2
立方米: 1 m^3
立方厘米: 1/1000000 m^3
unit 个 個 人 名 位 次 件 只 本 张 枚 つ 倍 岁 歳 개 명 번 살 원: 1
"""


def _read_table() -> dict[str, Unit]:
    units = {}
    for line in _TABLE.strip().splitlines():
        names, _, meaning = line.partition(": ")
        factor, *bases = meaning.split()
        exponents: Counter[str] = Counter()
        for base in bases:
            name, _, exponent = base.partition("^")
            exponents[name] += int(exponent or 1)
        for name in names.split():
            units[name] = Unit(tuple(sorted(exponents.items())), Fraction(factor))
    return units


_UNITS = _read_table()
#: Letters of scripts that put no blank between words and numbers: Chinese, Japanese, Korean.
UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_TOKEN = re.compile(
    r"\s*(?:(?P<power>\^\s*\{?\(?\s*(?P<exponent>[-+]?\d)\s*\)?\}?)|(?P<over>/|\bper\b)|"
    r"(?P<open>[({])|(?P<close>[)}])|"
    r"(?P<degree>(?:\^\{?)?\\circ\}?\s*(?P<scale>[CF]\b)?)|(?P<times>\\cdot|\\times|\*|-)|"
    rf"(?P<name>\\\$|\\Omega|\\mu\s*m\b|[$€£¥₹¢%]|[A-Za-zµμΩ]+\.?(?:\d(?!\d))?|[{UNSPACED}]+))"
)
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_PREFIXES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SUFFIXES = {"squared": 2, "cubed": 3}
#: Words that do not occur in a unit made of words.
_NO_UNIT = frozenset([
    "or", "and", "if", "to", "is", "are", "not", "but", "plus", "minus", "times", "mod", "over",
    "where", "when", "for", "with", "than", "then", "because"
])  # fmt: skip


@functools.lru_cache(maxsize=2048)
def read_unit(text: str, allow_words: bool = True) -> Unit | None:
    r"""Parse a unit; None if ``text`` is not one.

    Args:
        allow_words: up to four words that are not in the table are a unit too.

    Example:
        >>> read_unit(r"\frac{km}{h}") == read_unit("kilometers per hour") == read_unit("km h^{-1}")
        True
    """
    text = _FRACTION.sub(r"\1/(\2)", text.strip()).strip(" .")
    text = text[1:-1] if text.startswith("{") and text.endswith("}") else text
    text = re.sub(r"(?i)^(?:degrees?|deg\.?) *(?=[CF]\b|celsius|fahrenheit)", "°", text)
    text = re.sub(r"(?i)^°(?:celsius|fahrenheit)", lambda found: found[0][:2].upper(), text)
    text = re.sub(r" (?:old|of age)$", "", text.replace("°", r"\circ "))
    if not text:
        return None
    unit = _known(text)
    if unit is not None or not allow_words:
        return unit
    words = re.fullmatch(r"[A-Za-z][A-Za-z'.-]+(?: [A-Za-z][A-Za-z'.-]*){0,3}", text)
    if not words or _NO_UNIT & set(text.lower().split()):
        return None
    return Unit((), words=" ".join(_singular(word) for word in text.lower().split()))


def _known(text: str) -> Unit | None:
    exponents: Counter[str] = Counter()
    factor = Fraction(1)
    sign = 1
    group = 1
    prefix = 1
    last: tuple[Unit, int] | None = None
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if not found or found.end() == position:
            return None
        position = found.end()
        kind = found.lastgroup if found.lastgroup not in ("exponent", "scale") else None
        if found["power"]:
            if last is None:
                return None
            extra = int(found["exponent"])
            factor *= _apply(exponents, last[0], last[1] * (extra - 1))
            last = None
        elif kind == "over":
            sign = -1
        elif kind == "open":
            group = sign
            sign = 1
        elif kind == "close":
            group = 1
            sign = 1
        elif kind == "times":
            continue
        else:
            name = _name_of(found)
            if name.lower() in _PREFIXES:
                prefix = _PREFIXES[name.lower()]
                continue
            if name.lower() in _SUFFIXES:
                if last is None:
                    return None
                factor *= _apply(exponents, last[0], last[1] * (_SUFFIXES[name.lower()] - 1))
                continue
            if name.lower() == "a" and sign < 0:
                continue
            power = 1
            if name[-1].isdigit():  # m2
                power = int(name[-1])
                name = name[:-1]
            unit = _UNITS.get(name) or _UNITS.get(
                _singular(name if len(name) < 3 else name.lower())
            )
            if unit is None:
                return None
            total = sign * group * prefix * power
            factor *= _apply(exponents, unit, total)
            last = (unit, sign * group * prefix)
            sign = prefix = 1
    return Unit(tuple(sorted((name, n) for name, n in exponents.items() if n)), factor)


def _name_of(found: re.Match[str]) -> str:
    if found["degree"]:
        return f"°{found['scale']}" if found["scale"] else "°"
    name = found["name"].rstrip(".")
    return {r"\$": "$", r"\Omega": "Ω", "μm": "µm"}.get(
        name, "µm" if name.startswith(r"\mu") else name
    )


def _apply(exponents: Counter[str], unit: Unit, times: int) -> Fraction:
    for name, exponent in unit.dimension:
        exponents[name] += exponent * times
    return unit.factor**times


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
