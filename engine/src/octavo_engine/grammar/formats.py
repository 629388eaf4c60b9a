"""The values of JSON Schema's `format` that are enforced, and patterns that are stricter than the grammar library.

The library accepts a 29 February in every year, a year 0 and a second 60 in every minute, which validators reject, and
fractions of a second of any length. The formats of numbers are OpenAPI's.
"""

from typing import Any

#: The string formats that the library knows; any other string format is rejected.
STRING_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-(0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-([01][0-9]|2[0-8])|{_LEAP}-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](\.[0-9]{1,9})?[Zz+-].*"

#: Format -> a pattern that is enforced in addition to the library's own rule.
STRICTER = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}

_INT32 = {"minimum": -(2**31), "maximum": 2**31 - 1}
_INT64 = {"minimum": -(2**63) + 1024, "maximum": 2**63 - 1024}  # the library's limits

#: Format -> the keywords that enforce it; empty if every JSON number conforms.
NUMBER_FORMATS: dict[str, dict[str, Any]] = {"int32": _INT32, "int64": _INT64, "float": {}, "double": {}}
