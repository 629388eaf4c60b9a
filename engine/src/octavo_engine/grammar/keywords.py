"""The keywords of JSON Schema: enforced keywords, annotations, and keywords whose values hold schemas.

A keyword in none of these sets is rejected: the grammar library cannot enforce it, or JSON Schema does not define it.
An undefined keyword is more often a typing error than meant to have no effect. Names that begin with "x-" are
annotations.
"""

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
