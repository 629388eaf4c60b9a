"""Which values of `format` are enforced, and what the grammar library's own rules for them leave open.

Its dates have a 29th of February in every year and a year 0, its times a second 60 in every minute, which validators
don't take, and fractions of a second without end. The formats of numbers are OpenAPI's.
"""

from typing import Any

#: What the library knows; any other is refused.
STRING_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-(0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-([01][0-9]|2[0-8])|{_LEAP}-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](\.[0-9]{1,9})?[Zz+-].*"

#: Format -> a pattern that holds besides the library's own.
STRICTER = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}

_INT32 = {"minimum": -(2**31), "maximum": 2**31 - 1}
_INT64 = {"minimum": -(2**63) + 1024, "maximum": 2**63 - 1024}  # as far as the library counts

#: Format -> keywords that it stands for; nothing for those that every JSON number meets.
NUMBER_FORMATS: dict[str, dict[str, Any]] = {"int32": _INT32, "int64": _INT64, "float": {}, "double": {}}
