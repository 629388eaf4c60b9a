"""Forty bounded JSON schemas as applications send them: flat, nested, enums, references, lists, unions, formats.

Bounded means that every output is finite: strings and lists have a maximum length, and recursion ends.
"""

from typing import Any

Schema = dict[str, Any]


def obj(**properties: Schema) -> Schema:
    """Return an object schema; properties are required unless marked `optional`, and no others are allowed."""
    names = [name for name, schema in properties.items() if not schema.pop("optional", False)]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def text(longest: int = 24, **more: Any) -> Schema:
    return {"type": "string", "maxLength": longest, **more}


def whole(low: int, high: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high, "multipleOf": 0.5}


def listed(items: Schema, longest: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": longest}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def formatted(name: str) -> Schema:
    return {"type": "string", "format": name}


def tagged(tag: str, **properties: Schema) -> Schema:
    return obj(kind={"const": tag}, **properties)


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


YES_NO: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
PLACE = obj(street=text(), city=text(16), zip=text(5, minLength=5, pattern="^[0-9]+$"))
POINT = obj(x=whole(-100, 100), y=whole(-100, 100))

FLAT = {
    "person": obj(name=text(), age=whole(0, 130), is_student=YES_NO),
    "book": obj(title=text(40), author=text(), year=whole(1450, 2030)),
    "weather": obj(city=text(16), celsius=whole(-60, 60), sky=one_of("clear", "cloudy", "rain", "snow")),
    "product": obj(sku=text(8, pattern="^[A-Z]{2}-[0-9]{3,5}$"), price=number(0, 500), in_stock=YES_NO),
    "sentiment": obj(label=one_of("positive", "neutral", "negative"), confidence=number(0, 1)),
    "colour": obj(red=whole(0, 255), green=whole(0, 255), blue=whole(0, 255)),
    "song": obj(title=text(30), minutes=whole(1, 20), seconds=whole(0, 59), genre=text(12, optional=True)),
    "grade": obj(subject=text(16), mark=one_of("A", "B", "C", "D", "F"), passed=YES_NO),
}
NESTED = {
    "order": obj(id=whole(1, 99999), customer=obj(name=text(), address=PLACE), paid=YES_NO),
    "company": obj(name=text(), headquarters=PLACE, ceo=obj(name=text(), age=whole(20, 99))),
    "flight": obj(number=text(6), origin=obj(code=text(3), gate=text(3)), target=obj(code=text(3), gate=text(3))),
    "recipe": obj(name=text(30), steps=listed(obj(order=whole(1, 9), what=text(40)), 3, 1)),
    "line": obj(start=POINT, end=POINT, width=number(0, 10)),
    "settings": obj(ui=obj(dark=YES_NO, font=obj(family=text(12), size=whole(6, 72)))),
}
ENUMS = {
    "ticket": obj(priority=one_of("low", "high"), status=one_of("open", "closed", None), code=one_of(1, 2, 3)),
    "card": obj(suit=one_of("hearts", "spades", "clubs", "diamonds"), rank=one_of(*range(2, 11), "J", "Q", "K", "A")),
    "mixed": obj(value=one_of(0, 1.5, "x", True, None), other=one_of({"a": 1}, [1, 2])),
    "constant": obj(version={"const": 2}, kind={"const": "ping"}, at=whole(0, 10)),
    "days": listed(one_of("Mon", "Tue", "Wed", "Thu", "Fri"), 5, 1),
}
REFERENCES = {
    "family": obj(mother=ref("person"), father=ref("person"), child=ref("person"))
    | {"$defs": {"person": obj(name=text(), age=whole(0, 99))}},
    "triangle": obj(corners=listed(ref("point"), 3, 3)) | {"$defs": {"point": POINT}},
    "invoice": obj(lines=listed(ref("line"), 3, 1), total=ref("money"))
    | {
        "$defs": {
            "line": obj(item=text(), cost=ref("money")),
            "money": obj(amount=number(0, 900), currency=one_of("EUR", "USD")),
        }
    },
    "old_style": obj(a={"$ref": "#/definitions/die"}, b={"$ref": "#/definitions/die"})
    | {"definitions": {"die": whole(1, 6)}},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": obj(value=whole(0, 9), left=either(ref("leaf"), NOTHING), right=either(ref("leaf"), NOTHING)),
            "leaf": obj(value=whole(0, 9)),
        },
    },
}
LISTS = {
    "tags": obj(tags=listed(text(12), 5)),
    "matrix": listed(listed(whole(0, 9), 3, 3), 3, 3),
    "pair": {"type": "array", "prefixItems": [text(10), whole(0, 99)], "items": False, "minItems": 2},
    "pixels": listed(obj(x=whole(0, 9), y=whole(0, 9), on=YES_NO), 4, 2),
    "shopping": obj(items=listed(obj(name=text(16), count=whole(1, 12)), 4, 1), note=text(30, optional=True)),
    "scores": obj(name=text(16), scores=listed(number(0, 10), 5, 1)),
}
UNIONS = {
    "shape": either(tagged("circle", radius=number(0, 50)), tagged("square", side=number(0, 50))),
    "event": {
        "oneOf": [tagged("click", x=whole(0, 999), y=whole(0, 999)), tagged("key", code=text(8)), tagged("close")]
    },
    "id": obj(id=either(whole(1, 9999), text(8)), note={"type": ["string", "null"], "maxLength": 20}),
    "answer": either(obj(result=text(40)), obj(error=text(40), code=whole(400, 599))),
    "whole": {"allOf": [obj(a=whole(0, 9), b=YES_NO), {"required": ["a"]}]},
}
FORMATS = {
    "meeting": obj(on=formatted("date"), at=formatted("time"), title=text()),
    "log": obj(at=formatted("date-time"), level=one_of("info", "error"), host=formatted("ipv4")),
    "contact": obj(mail=text(32, format="email"), phone=text(16, pattern=r"^\+[0-9]{6,14}$")),
    "record": obj(id=formatted("uuid"), seen=formatted("date"), size=whole(0, 10**6, format="int32")),
    "login": obj(user=text(12, minLength=3, pattern="^[a-z_]+$"), token=text(12, minLength=12, pattern="^[0-9a-f]+$")),
}
SCHEMAS: dict[str, Schema] = FLAT | NESTED | ENUMS | REFERENCES | LISTS | UNIONS | FORMATS
