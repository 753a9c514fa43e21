"""What the tools of one chat request mean: what the chat template is told, what the answer is held to, how its calls are read."""

from typing import Any

from atoll.engine.prompts import check_text
from atoll.errors import RequestError
from atoll.server.grammars import Grammars
from atoll.server.protocol import ChatBody, ChatMessage, NamedTool, SchemaFormat, TextFormat, Tool
from atoll.server.schemas import check_schema_size
from atoll.server.tool_calls import ToolCallParser
from atoll.server.tool_formats import OPEN, ToolFormat, read_json

# All tools together. A grammar of 128 tools, each of arrays in arrays as deep as a schema may be, 300,000 characters in all, took 4 s to make (one core).
MAX_TOOLS_CHARS = 262_144
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolChoice:
    """Of a body with tools that the answer may call. Raises RequestError for parameters that are no object's schema."""

    def __init__(self, body: ChatBody, tool_format: ToolFormat) -> None:
        self._body = body
        self._format = tool_format
        self._tools = body.offered_tools
        num_chars = sum(_check_tool(tool, f"tools.{at}") for at, tool in enumerate(self._tools))
        if num_chars > MAX_TOOLS_CHARS:
            raise RequestError(f"the tools have {num_chars} characters together, {MAX_TOOLS_CHARS} is the limit; offer fewer, or describe them shortly")
        self._only_one = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
        self._schemas = {tool.function.name: {"type": "object", **(tool.function.parameters or NO_PARAMETERS)} for tool in self._tools}

    def parser(self) -> ToolCallParser:
        """For one answer."""
        is_held, max_calls = self._body.held_by is not None, 1 if self._only_one else None
        return ToolCallParser(self._format, self._schemas, is_held=is_held, has_text=not self._body.must_call, max_calls=max_calls)

    def form(self, grammars: Grammars) -> dict[str, Any] | None:
        """The answer as the format of a structural tag; None: any text will do. Raises RequestError for a schema that no answer can be held to."""
        body = self._body
        if body.held_by is None:
            return None
        name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        tags = [self._tag(grammars, at) for at, tool in enumerate(self._tools) if name in (None, tool.function.name)]
        calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, "stop_after_first": self._only_one}
        if body.must_call:
            return calls
        wanted = body.response_format
        if wanted is None or isinstance(wanted, TextFormat):
            return {"type": "triggered_tags", "triggers": [OPEN], "tags": tags, "stop_after_first": self._only_one}
        schema = wanted.json_schema.schema_ if isinstance(wanted, SchemaFormat) else None
        return {"type": "or", "elements": [grammars.json_part(schema, "the JSON schema"), calls]}

    def _tag(self, grammars: Grammars, at: int) -> dict[str, Any]:
        """One call. Where the model need not call, the parameters of a tool that is not strict may be any."""
        function = self._tools[at].function
        schema = self._schemas[function.name] if self._body.must_call or function.strict else {"type": "object"}
        content = self._format.grammar(grammars, schema, f"tools.{at}.function.parameters")
        return {"type": "tag", "begin": self._format.begin(function.name), "content": content, "end": self._format.end}


def template_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools as chat templates take them."""
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.offered_tools] or None


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates take them, the arguments of calls read. Raises RequestError for one without content or calls."""
    return [_template_message(message, f"messages.{at}") for at, message in enumerate(messages)]


def _template_message(message: ChatMessage, place: str) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{place}.content is missing; give text, or tool_calls")
    check_text(f"{place}.role", message.role)
    check_text(f"{place}.content", message.text)
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError(f"{place}.tool_calls are given in a message of role {message.role[:40]!r}; only the assistant calls, leave them out")
        for call in message.tool_calls:
            check_text(f"{place}.tool_calls", f"{call.id} {call.function.name}")
        plain["tool_calls"] = [
            call.model_dump(exclude={"function", "index"}, exclude_none=True)
            | {"function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, f"{place}.tool_calls.{at}.function.arguments")}}
            for at, call in enumerate(message.tool_calls)
        ]
    return plain


def _arguments(text: str, place: str) -> dict[str, Any]:
    """Of an earlier call; some clients write nothing for none."""
    try:
        arguments = read_json(text) if text.strip() else {}
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f'{place} {text[:80]!r} is not a JSON object; send them as text like {{"x": 1}}')
    check_schema_size(arguments, place)
    return arguments


def _check_tool(tool: Tool, place: str) -> int:
    """Its characters."""
    num_chars = len(check_schema_size(tool.model_dump(exclude_none=True), place))
    parameters = tool.function.parameters
    if parameters and parameters.get("type", "object") != "object":
        raise RequestError(f"{place}.function.parameters.type {str(parameters['type'])[:80]!r} is not 'object'; parameters are the properties of an object")
    return num_chars
