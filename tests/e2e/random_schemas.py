"""Random JSON schemas of the keywords that structured outputs honour."""

WORDS = ["path", "name", "size", "mode", "kind", "line", "self", "id", "ünï", 'quo"te', "a b"]


def random_schema(draw, depth=0):
    """A schema; ``draw`` is a ``random.Random``. Nested at most three deep, so that texts stay short."""
    simple = [_string, _integer, _number, _constant]
    make = draw.choice(simple if depth >= 2 else [*simple, _array, _object, _object, _any_of])
    return make(draw, depth)


def _string(draw, depth):
    schema = {"type": "string"}
    kind = draw.randrange(4)
    if kind == 0:
        schema["pattern"] = draw.choice(["^[a-z]{1,6}$", "^(ab|c)+$", "^[0-9]{3}-[0-9]{2}$"])
    elif kind == 1:
        schema["minLength"] = draw.randrange(3)
        schema["maxLength"] = schema["minLength"] + draw.randrange(8)
    elif kind == 2:
        schema["format"] = draw.choice(["date", "time", "ipv4", "uuid"])
    else:
        schema["maxLength"] = draw.randrange(1, 20)
    return schema


def _integer(draw, depth):
    low = draw.randrange(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(1000)}


def _number(draw, depth):
    low = draw.randrange(-100, 100)
    return draw.choice([{"type": "number", "minimum": low}, {"type": "number", "exclusiveMaximum": low}])


def _constant(draw, depth):
    values = [None, True, 17, -2, "x", "→ y", 'a "b"', [1, "a"], {"k": False}]
    return draw.choice(
        [{"const": draw.choice(values)}, {"enum": draw.sample(values, 3)}, {"type": "boolean"}, {"type": "null"}]
    )


def _array(draw, depth):
    low = draw.randrange(2)
    schema = {"type": "array", "items": random_schema(draw, depth + 1), "minItems": low, "maxItems": low + 3}
    if draw.random() < 0.3:
        schema["prefixItems"] = [random_schema(draw, depth + 1)]
    return schema


def _object(draw, depth):
    names = draw.sample(WORDS, draw.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth + 1) for name in names},
        "required": names[: draw.randrange(len(names) + 1)],
        "additionalProperties": False,
    }


def _any_of(draw, depth):
    return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
