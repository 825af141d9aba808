"""Renders chats by a jinja2 template, with limits on time, memory and output. Run as a script, in a child process.

Reads one JSON request on standard input, writes one JSON line a chat: {"text": …}, or {"error": …} and no more;
{"done": true} at the end. Imports nothing of kdtr, so that the child starts quickly and holds nothing else.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

__all__ = ["main", "render_all"]


def main() -> None:
    """Read the request, set the limits, write the replies."""
    request = json.loads(sys.stdin.buffer.read())
    sys.path[:] = request["path"]  # find the jinja2 that the parent found
    _limit(request["cpu_seconds"], request["memory"])
    for reply in render_all(request):
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _limit(cpu_seconds: int, memory: int) -> None:
    import resource

    limits = (
        (resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1)),
        (resource.RLIMIT_CORE, (0, 0)),
        (resource.RLIMIT_AS, (memory, memory)),
    )
    for kind, values in limits:
        with suppress(OSError, ValueError):  # a lower limit stands already, or the system has none of this kind
            resource.setrlimit(kind, values)


def render_all(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The replies to a request."""
    import jinja2

    total = 0
    try:
        template = _environment().from_string(request["template"])
        for chat in request["chats"]:
            messages = [_guarded(message) for message in chat]
            pieces, size = [], 0
            for piece in template.generate(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **request["tokens"]
            ):
                pieces.append(piece)
                size += len(piece)
                if size > request["max_text"]:
                    raise _Refusal(f"writes more than {request['max_text']} characters for one chat")
            total += size
            if total > request["max_texts"]:
                raise _Refusal(f"writes more than {request['max_texts']} characters in all; render fewer chats")
            yield {"text": "".join(pieces)}
    except _Refusal as error:
        yield {"error": str(error)}
    except MemoryError:
        yield {"error": f"needs more than {request['memory'] >> 20} MiB of memory"}
    except RecursionError:
        yield {"error": "is nested too deeply, or calls itself without end"}
    except jinja2.TemplateSyntaxError as error:
        yield {"error": f"is no jinja2 template: line {error.lineno}: {_shortened(error.message)}"}
    except jinja2.sandbox.SecurityError as error:
        yield {"error": f"does what the sandbox forbids: {_shortened(error)}"}
    except Exception as error:  # a template can raise anything that Python's operators raise
        yield {"error": f"fails: {type(error).__name__}: {_shortened(error)}"}
    else:
        yield {"done": True}


class _Refusal(Exception):
    """What kdtr refuses, and what a template itself raises by raise_exception."""


class _Parts(list):
    """Content that is a list of parts. A template for plain texts would write it as Python does, into the prompt."""

    def __repr__(self) -> str:
        raise _Refusal("takes content as one text, not as a list of parts")


class _Part(dict):
    __repr__ = _Parts.__repr__


def _guarded(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": _Parts(map(_Part, content))} if isinstance(content, list) else message


def _shortened(what: object) -> str:
    text = str(what)
    return text if len(text) <= 300 else text[:297] + "..."


def _environment() -> Any:
    """The environment that transformers renders chat templates in, without what differs from one day to the next."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} … {% endgeneration %}, which marks what a model is trained on, and changes no text."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

        def _inside(self, caller: Callable[[], str]) -> str:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore, as in transformers: they may be Python's own."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            values = dict(*args, **kwargs)
            for name in values:
                _check_name(name)
            super().__init__(values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.sandbox.SecurityError(f"the attribute {name!r} of a namespace")

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["random"] = _never("the filter random")
    environment.globals["lipsum"] = _never("lipsum()")
    environment.globals["strftime_now"] = _never("today's date (strftime_now)")
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = Namespace
    return environment


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own would escape <, > and & for HTML
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object = "") -> None:
    raise _Refusal(f"refuses these messages: {_shortened(message)}")


def _never(what: str) -> Callable[..., None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise _Refusal(
            f"asks for {what}: such a prompt can't be made again; write a fixed value into chat_template.jinja"
        )

    return refuse


if __name__ == "__main__":
    main()
