"""Numbers and names as text: shares, sizes, and names that cannot steer a terminal."""

from __future__ import annotations

import re
import unicodedata

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def clean(text: str) -> str:
    """Spell out control and direction characters, so that a name cannot steer a terminal."""
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def share(part: int, whole: int) -> str:
    """Format a fraction as percent. Only nothing is 0% and only everything is 100%.

    >>> share(1, 8), share(3, 100_000), share(0, 5), share(1, 10**9), share(10**9 - 1, 10**9)
    ('12.5%', '0.003%', '0%', '<0.001%', '>99.9%')
    """
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 0.001:
        return "<0.001%"
    if 99.9 < percent < 100:
        return ">99.9%"
    return f"{percent:.3g}%"


def size(count: float) -> str:
    """Format a number of bytes in binary units.

    >>> size(512), size(2048), size(3.5 * 2**20)
    ('512 B', '2.0 KiB', '3.5 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise ValueError(count)


def parse_size(amount: int | str) -> int:
    """Return a number of bytes, which may be given as text with a unit. Raise ValueError if it is not positive.

    >>> parse_size(300), parse_size("2 GiB"), parse_size("1.5 kB")
    (300, 2147483648, 1500)
    """
    if isinstance(amount, int) and amount > 0:
        return amount
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*", str(amount).upper())
    if match is None:
        raise ValueError(f'A bound is a number of bytes or a text such as "500 MB" or "2 GiB"; received {amount!r}.')
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix])
