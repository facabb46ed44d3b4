r"""Units: what a measured value is measured in, as a factor and powers of base units.

Invariant: two units can be compared if and only if they have the same base units; a word that
is in no table counts things, and has no unit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Optional

_F = Fraction


@dataclass(frozen=True)
class Unit:
    """``factor`` times the product of base units to their powers."""

    factor: Fraction
    bases: tuple[tuple[str, int], ...]


PERCENT = Unit(_F(1, 100), (("percent", 1),))
DOZEN = Unit(_F(12), (("dozen", 1),))
DEGREE = Unit(_F(1), (("degree", 1),))

# base unit: {names: how many of it}
_TABLE: Mapping[str, Mapping[str, Fraction]] = {
    "m": {
        "m meter metre 米": _F(1), "km kilometer kilometre 千米 公里": _F(1000),
        "cm centimeter centimetre 厘米": _F(1, 100), "dm decimeter decimetre 分米": _F(1, 10),
        "mm millimeter millimetre 毫米": _F(1, 1000), "nm nanometer": _F(1, 10**9),
        "in inch inches": _F(254, 10_000), "ft foot feet": _F(3048, 10_000),
        "yd yard": _F(9144, 10_000), "mi mile": _F(1_609_344, 1000),
    },
    "kg": {
        "kg kilogram kilo 千克 公斤": _F(1), "g gram 克": _F(1, 1000), "mg milligram": _F(1, 10**6),
        "ton tonne 吨": _F(1000), "lb lbs pound": _F(45_359_237, 10**8),
        "oz ounce": _F(45_359_237, 16 * 10**8),
    },
    "s": {
        "s sec second 秒": _F(1), "ms millisecond": _F(1, 1000), "min mins minute 分钟": _F(60),
        "h hr hour 小时": _F(3600), "day 天": _F(86_400), "week 周": _F(604_800),
    },
    "month": {"month 个月": _F(1), "yr year 年": _F(12), "decade": _F(120), "century": _F(1200)},
    "l": {
        "l L liter litre 升": _F(1), "ml mL milliliter millilitre 毫升": _F(1, 1000),
        "gallon gal": _F(3_785_411_784, 10**9), "quart": _F(3_785_411_784, 4 * 10**9),
        "pint": _F(3_785_411_784, 8 * 10**9), "cup": _F(3_785_411_784, 16 * 10**9),
    },
    "usd": {"$ usd USD US$ dollar buck 美元": _F(1), "cent ¢": _F(1, 100)},
    "eur": {"€ eur EUR euro 欧元": _F(1)}, "gbp": {"£ gbp GBP pence": _F(1)},
    "jpy": {"JPY jpy yen 日元": _F(1)}, "cny": {"CNY RMB rmb yuan 元 人民币": _F(1)},
    "inr": {"₹ INR Rs rupee": _F(1)}, "krw": {"₩ KRW won": _F(1)}, "yen": {"¥": _F(1)},
    "degree": {r"\degree deg degree 度": _F(1)}, "rad": {"rad radian": _F(1)},
    "celsius": {r"\degree.C celsius Celsius": _F(1)},
    "fahrenheit": {r"\degree.F fahrenheit Fahrenheit": _F(1)},
    "K": {"K kelvin Kelvin": _F(1)}, "percent": {"% percent pct percentage": _F(1, 100)},
    "N": {"N newton": _F(1), "kN": _F(1000)},
    "J": {"J joule": _F(1), "kJ kilojoule": _F(1000), "MJ": _F(10**6), "mJ": _F(1, 1000)},
    "cal": {"cal calorie": _F(1), "kcal": _F(1000)},
    "eV": {"eV": _F(1), "keV": _F(1000), "MeV": _F(10**6)},
    "W": {
        "W watt": _F(1), "kW kilowatt": _F(1000), "MW megawatt": _F(10**6), "mW": _F(1, 1000),
        "GW": _F(10**9),
    },
    "Pa": {
        "Pa pascal": _F(1), "kPa": _F(1000), "hPa": _F(100), "MPa": _F(10**6), "GPa": _F(10**9),
        "bar": _F(10**5),
    },
    "V": {"V volt": _F(1), "kV": _F(1000), "mV": _F(1, 1000)},
    "A": {"A amp ampere": _F(1), "mA": _F(1, 1000)}, "C": {"C coulomb": _F(1)},
    "T": {"T tesla": _F(1)}, "ohm": {"ohm": _F(1), "kohm": _F(1000), "Mohm": _F(10**6)},
    "Hz": {"Hz hertz": _F(1), "kHz": _F(1000), "MHz": _F(10**6), "GHz": _F(10**9)},
    "mol": {"mol mole": _F(1), "mmol": _F(1, 1000)},
    "bit": {"bit": _F(1)}, "dozen": {"dozen": _F(12)},
    "byte": {"byte B": _F(1), "KB kB": _F(1000), "MB": _F(10**6), "GB": _F(10**9)},
}  # fmt: skip
_UNITS: dict[str, Unit] = {
    name: Unit(factor, ((base, 1),))
    for base, names in _TABLE.items()
    for group, factor in names.items()
    for name in group.split()
}
_UNITS["mph"] = Unit(_F(1_609_344, 3_600_000), (("m", 1), ("s", -1)))
_UNITS["kph"] = _UNITS["kmh"] = Unit(_F(1000, 3600), (("m", 1), ("s", -1)))
_UNITS["ha"] = _UNITS["hectare"] = Unit(_F(10_000), (("m", 2),))
_UNITS["acre"] = Unit(_F(40_468_564_224, 10**7), (("m", 2),))
POUND = _UNITS["pound"]
_COUNTS = frozenset({"unit", "units"})
CURRENCIES = frozenset({"usd", "eur", "gbp", "jpy", "cny", "inr", "krw", "yen"})
MONEY = frozenset("$€£¥₹₩¢")
_POWERS = {
    "square": 2,
    "sq": 2,
    "cubic": 3,
    "cu": 3,
    "squared": 2,
    "cubed": 3,
    "平方": 2,
    "立方": 3,
}

_TOKEN = re.compile(
    r"\s*(?:(?P<name>\\degree\s*[CF](?![A-Za-z])|\\degree|[A-Za-z]+\$?|[%$€£¥₹₩¢]"
    r"|[\u4e00-\u9fff]+)\.?"
    r"|(?P<power>\^\s*\{?\s*-?\d\s*\}?|(?<=[a-z])[23](?!\d))|(?P<over>/)|(?P<times>\\cdot|\*|-))"
)


def lookup(name: str) -> Optional[Unit]:
    """The unit of that name, singular or plural, in any case that is not ambiguous."""
    name = re.sub(r"\\degree\s*(?=[CF])", r"\\degree.", name)
    for form in (name, name.lower() if len(name) > 1 else name):
        if form in _UNITS:
            return _UNITS[form]
        if len(form) > 2 and form.endswith("s") and form[:-1] in _UNITS:
            return _UNITS[form[:-1]]
    return None


def parse_unit(text: str) -> Optional[Unit]:
    r"""The unit that ``text`` names as a whole (``km/h``, ``square meters``, ``m^2``), or None."""
    factor, bases = _F(1), dict[str, int]()
    position, sign, ahead = 0, 1, 1
    last: Optional[Unit] = None
    text = text.strip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            return None
        position = found.end()
        power = 1
        article = found["name"] in ("a", "an", "every") and bases
        if found["over"] or found["name"] == "per" or article:
            sign, last = -1, None
            continue
        if found["times"]:
            continue
        if found["power"] or found["name"] in ("squared", "cubed"):
            if last is None:
                return None
            digits = re.search(r"-?\d", found["power"] or "")
            power = (int(digits[0]) if digits else _POWERS[found["name"]]) - 1
        else:
            name = found["name"]
            for prefix in ("平方", "立方"):
                if name.startswith(prefix):
                    ahead, name = _POWERS[prefix], name[len(prefix) :]
            if name in _POWERS:
                ahead = _POWERS[name]
                continue
            if name.lower() in _COUNTS:
                ahead = 1
                continue
            last = lookup(name)
            if last is None:
                return None
            power, ahead = ahead, 1
        factor *= last.factor ** (power * sign)
        for base, exponent in last.bases:
            bases[base] = bases.get(base, 0) + exponent * power * sign
    if bases.get("degree") and (bases.get("celsius") or bases.get("fahrenheit")):
        del bases["degree"]  # degrees Celsius
    return Unit(factor, tuple(sorted((b, e) for b, e in bases.items() if e)))
