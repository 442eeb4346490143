"""The units of answers and their exact conversion factors."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

_TABLE: dict[str, tuple[tuple[str, Fraction], ...]] = {
    "length": (
        ("m metre metres meter meters", Fraction(1)),
        ("km kilometre kilometres kilometer kilometers", Fraction(1000)),
        ("dm decimetre decimetres decimeter decimeters", Fraction(1, 10)),
        ("cm centimetre centimetres centimeter centimeters", Fraction(1, 100)),
        ("mm millimetre millimetres millimeter millimeters", Fraction(1, 1000)),
        ("in inch inches", Fraction(254, 10000)),
        ("ft foot feet", Fraction(3048, 10000)),
        ("yd yard yards", Fraction(9144, 10000)),
        ("mi mile miles", Fraction(1609344, 1000)),
    ),
    "mass": (
        ("g gram grams", Fraction(1)),
        ("kg kilogram kilograms", Fraction(1000)),
        ("mg milligram milligrams", Fraction(1, 1000)),
        ("t ton tons tonne tonnes", Fraction(1_000_000)),
        ("lb lbs pound pounds", Fraction(45359237, 100000)),
        ("oz ounce ounces", Fraction(45359237, 1600000)),
    ),
    "time": (
        ("s sec secs second seconds", Fraction(1)),
        ("ms millisecond milliseconds", Fraction(1, 1000)),
        ("min mins minute minutes", Fraction(60)),
        ("h hr hrs hour hours", Fraction(3600)),
        ("d day days", Fraction(86400)),
        ("week weeks", Fraction(604800)),
    ),
    "volume": (
        ("l litre litres liter liters", Fraction(1)),
        ("ml millilitre millilitres milliliter milliliters", Fraction(1, 1000)),
        ("cl centilitre centilitres centiliter centiliters", Fraction(1, 100)),
        ("m^3 m3", Fraction(1000)),
        ("cm^3 cm3", Fraction(1, 1000)),
    ),
    "area": (
        ("m^2 m2", Fraction(1)),
        ("km^2 km2", Fraction(1_000_000)),
        ("cm^2 cm2", Fraction(1, 10_000)),
        ("mm^2 mm2", Fraction(1, 1_000_000)),
    ),
    "money": (("$ dollar dollars usd", Fraction(1)), ("¢ cent cents", Fraction(1, 100))),
    "angle": (("° degree degrees deg", Fraction(1)),),
    "speed": (("m/s", Fraction(1)), ("km/h kmh kph", Fraction(1000, 3600)), ("mph", Fraction(1609344, 3600000))),
}


class Unit(NamedTuple):
    """The measured dimension and the factor to its base unit."""

    dimension: str
    factor: Fraction


_UNITS = {
    name: Unit(dimension, factor)
    for dimension, rows in _TABLE.items()
    for names, factor in rows
    for name in names.split()
}


def read(text: str) -> Unit | None:
    """Return the unit that a text consists of; None for one that is not in the table."""
    plain = text.strip().rstrip(".")
    return _UNITS.get(plain) or _UNITS.get(plain.casefold())
