"""Tools and the turn that may call them, as plain values.

`turn_grammar` writes what such a turn may be; `turn_reading` says what one was.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

MOST_WHOLE = 8192  # bytes of schemas that are tried as one automaton


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        schema: JSON text of the schema of its arguments, an object.
        strict: A keyword that cannot be held is refused; else it is left out with a note.
    """

    name: str
    schema: str
    strict: bool = False


@dataclasses.dataclass(frozen=True)
class Tools:
    """A turn that may call tools, or must.

    Attributes:
        choice: "auto", "required", "none", or the number of the one to call.
        several: Several calls may follow one another.
        form: A name of `FORMS`.
        thinks: Thoughts may come first, between the form's marks.
        inside: The prompt ends within them.
        answer: Schema and white space of a `JsonSchema` that stands in the place of prose.
        budget: Tokens by which thoughts have ended; None: no number is held to.
        at: The text goes on in this state of the automaton, after its budget of thoughts.
        stage: "whole"; "names": up to a call's arguments, where the text ends; or the number of the
            tool whose arguments come first, after which it goes on as "names".
    """

    tools: tuple[Tool, ...]
    choice: str | int = "auto"
    several: bool = True
    form: str = "hermes"
    thinks: bool = False
    inside: bool = False
    stage: str | int = "whole"
    answer: tuple[str, str] | None = None
    budget: int | None = None
    at: int | None = None

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "Tools":
        """From plain values, see `fields`."""
        tools = tuple(Tool(*one) for one in fields["tools"])
        answer = fields.get("answer") and tuple(fields["answer"])
        return Tools(**{**fields, "tools": tools, "answer": answer})

    @property
    def fields(self) -> dict[str, Any]:
        """Plain values."""
        found = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {**found, "tools": [dataclasses.astuple(one) for one in self.tools]}

    @property
    def is_large(self) -> bool:
        """Whether its calls are better held in stages from the beginning."""
        return sum(len(one.schema) for one in self.tools) > MOST_WHOLE

    @property
    def loosest(self) -> "Tools | None":
        """A stage whose arguments are any object; None where they have to be held."""
        if not isinstance(self.stage, int) or self.tools[self.stage].strict:
            return None
        tools = [*self.tools]
        tools[self.stage] = dataclasses.replace(tools[self.stage], schema='{"type": "object"}')
        return dataclasses.replace(self, tools=tuple(tools))
