"""Tell columns of categories from other columns of texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Texts are names or ids rather than categories where there are more of them, and fewer rows for each.
_HANDFUL, _ROWS_EACH = 10, 5

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_TIME = r"(?:[T ]\d{1,2}:\d{2}.*)?"
_DATE = re.compile(
    rf"(?:\d{{4}}([-/.])\d{{1,2}}\1\d{{1,2}}|\d{{1,2}}([-/.])\d{{1,2}}\2(?:\d{{4}}|\d{{2}})"
    rf"|{_MONTH}[-/. ]\d{{1,2}}[-/., ]+\d{{2,4}}|\d{{1,2}}[-/. ]+{_MONTH}[-/. ]\d{{2,4}}){_TIME}",
    re.IGNORECASE,
)
_COMMA = re.compile(r"[-+]?(?:\d+(?:,\d*)?|,\d+)(?:[eE][-+]?\d+)?")


def decimal_commas(texts: Sequence[str]) -> bool:
    """Tell whether texts are numbers with a decimal comma; whole ones may lack it."""
    several = set(texts)
    return any("," in text for text in several) and all(_COMMA.fullmatch(text.strip()) for text in several)


def no_categories(texts: Sequence[str]) -> str | None:
    """Say what a column holds that should not become a feature for every value; of categories None.

    Args:
      texts: of all rows, none of them empty.
    """
    several = dict.fromkeys(texts)
    first = next(iter(several), "")
    if decimal_commas(texts):
        return f"holds numbers with decimal commas such as {first!r}"
    if several and all(_DATE.fullmatch(text.strip()) for text in several):
        return f"holds dates such as {first!r}"
    if len(several) > max(_HANDFUL, len(texts) / _ROWS_EACH):
        return f"holds {len(several)} different texts in {len(texts)} rows, as names or ids do, such as {first!r}"
    return None
