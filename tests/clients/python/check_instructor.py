"""`create` in the modes JSON and JSON_SCHEMA, lists, partial streams"""

from typing import Literal

import instructor
import openai
import pydantic
import pytest


class Person(pydantic.BaseModel):
    kind: Literal["poet", "painter"]
    age: int = pydantic.Field(ge=0, le=120)
    alive: bool


@pytest.fixture(scope="module", params=[instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def client(request, base_url):
    return instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none", max_retries=0), mode=request.param)


GIVEN = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 300, "temperature": 0.3, "seed": 4}


def test_a_model(client, model, request):
    if client.mode is instructor.Mode.JSON:
        # It asks for any JSON object and tells the schema in words, which the small model does not follow.
        with pytest.raises(instructor.core.InstructorRetryException):
            client.create(model=model, response_model=Person, max_retries=1, **GIVEN)
        return
    person = client.create(model=model, response_model=Person, max_retries=1, **GIVEN)
    assert isinstance(person, Person)


def test_partial_objects(base_url, model):
    client = instructor.from_openai(
        openai.OpenAI(base_url=base_url, api_key="none", max_retries=0), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = list(client.create_partial(model=model, response_model=Person, max_retries=1, **GIVEN))
    assert parts[-1].age is not None
