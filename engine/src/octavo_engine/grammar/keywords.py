"""The keywords and formats of JSON Schema: enforced keywords, annotations, and keywords whose values hold schemas.

A keyword in none of these sets is rejected: the grammar library cannot enforce it, or JSON Schema does not define it.
An undefined keyword is more often a typing error than meant to have no effect. Names that begin with "x-" are
annotations.

Formats: the library accepts a 29 February in every year, a year 0 and a second 60 in every minute, which validators
reject, and fractions of a second of any length. The formats of numbers are OpenAPI's.
"""

from typing import Any

#: Enforced keywords whose values hold no schema.
PLAIN = frozenset(
    {
        *("type", "enum", "const", "format", "pattern", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minItems", "maxItems", "minProperties", "maxProperties", "required"),
        *("$ref", "$anchor", "$id", "$schema"),
    }
)
ONE_SCHEMA = frozenset({"items", "additionalItems", "additionalProperties"})
LISTS_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "propertyOrdering", "enumNames", "enumDescriptions", "markdownDescription"),
    }
)

#: Unsupported keyword -> the remedy that its error message gives.
REMEDIES = {
    "nullable": 'write "type": ["...", "null"]',
    "id": "write $id",
    "dependencies": "leave it out",
    "not": "describe the allowed values instead",
    "if": "use anyOf",
    "then": "use anyOf",
    "else": "use anyOf",
    "uniqueItems": "leave it out, or use an enum for each position",
    "contentEncoding": "use pattern",
}

ALL = PLAIN | ONE_SCHEMA | LISTS_OF_SCHEMAS | NAMED_SCHEMAS | ANNOTATIONS

_2019 = "https://json-schema.org/draft/2019-09/schema"
_2020 = "https://json-schema.org/draft/2020-12/schema"
_OLD = tuple(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7))

#: Dialect -> whether a list of schemas by position is written `items` (with `additionalItems`), not `prefixItems`.
DIALECTS = {_2020: False, _2019: True, **dict.fromkeys(_OLD, True)}
DEFAULT_DIALECT = _2020
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
