"""Request outputs of a given shape with the official OpenAI client: python examples/structured_output.py [BASE_URL]."""

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=130)
    likes: list[Literal["books", "chess", "hiking"]] = Field(max_length=2)


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    with OpenAI(base_url=base_url, api_key="none") as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.parse(
            model=model,
            messages=[{"role": "user", "content": "Invent a person, as JSON."}],
            response_format=Person,
            temperature=0,
        )
        print(answer.choices[0].message.parsed)

        # Extensions of OpenAI's API: a list of choices, and a regular expression.
        for shape in ({"choice": ["positive", "negative"]}, {"regex": r"\d{4}-\d{2}-\d{2}"}):
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "I like this book."}],
                extra_body={"structured_outputs": shape},
            )
            print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
