r"""The number that an answer gives, found and compared as lm-eval's task gsm8k does it, so that scores mean the same.

strict-match: the first `#### (\-?[0-9\.\,]+)`. flexible-extract: the last run of digits, signs and points, wherever it stands. Before two numbers are compared
as text, commas, dollar signs, all up to `#### ` and one final point are dropped: 1,234 is 1234, but 7.0 is not 7.
"""

import re

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
# One after the other: what the first leaves may show the last its point.
_DROPPED = tuple(re.compile(pattern) for pattern in (r",", r"\$", r"(?s).*#### ", r"\.$"))


def strict_number(text: str) -> str | None:
    """What stands after the first `#### `, as written; None: nothing does."""
    found = _STRICT.search(text)
    return found.group(1) if found else None


def flexible_number(text: str) -> str | None:
    """The last number of the text, as written; None: there is none."""
    found = _FLEXIBLE.findall(text)
    return next(part for part in found[-1] if part) if found else None


def normal_form(number: str) -> str:
    """What is compared."""
    for dropped in _DROPPED:
        number = dropped.sub("", number)
    return number


def is_number(found: str | None, number: str) -> bool:
    """Whether a number found in an answer is the one asked for, given in its normal form."""
    return found is not None and normal_form(found) == number
