"""Chat templates: from messages to the text, and the tokens, that a chat model was trained on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vegas_jax.errors import CheckpointError, InputError
from vegas_jax.text.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
      source: the template, in Jinja.
      special_tokens: names that the template may use, such as `bos_token`, and what they stand for.

    Raises:
      InputError: the template is malformed, or jinja2 is not installed.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        try:
            import jinja2

            from vegas_jax.text import template_engine
        except ImportError:
            raise InputError(
                "chat templates need the package jinja2: pip install vegas_jax[chat]"
            ) from None
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._refused: type[Exception] = template_engine.RefusedError
        try:
            self._template = template_engine.compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"the chat template is malformed at line {error.lineno}: {_one_line(error)}"
            ) from None
        except RecursionError:
            raise InputError("the chat template is nested too deeply") from None

    @classmethod
    def load(cls, folder: str | Path, file: str | Path | None = None) -> "ChatTemplate | None":
        """Reads the template of a Hugging Face folder; None where it has none.

        That is chat_template.jinja, else `chat_template` of tokenizer_config.json: a string, or a
        list of {name, template} of which "default" counts. The special tokens are always those of
        tokenizer_config.json.

        Args:
          folder: the checkpoint's.
          file: a template to take instead of the folder's.

        Raises:
          InputError: a file that cannot be read, a malformed template, or jinja2 is missing;
            a CheckpointError where the folder or its tokenizer_config.json is at fault.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(
                f"{str(folder)!r} is no folder; vegas_jax.checkpoint.load_chat_template reads the "
                "chat templates of GGUF files too"
            )
        config = _read_config(folder / CONFIG_FILE)
        if file is None and (folder / TEMPLATE_FILE).exists():
            file = folder / TEMPLATE_FILE
        source = (
            read_template(Path(file)) if file is not None else _default_template(config, folder)
        )
        return None if source is None else cls(source, _special_tokens(config))

    def render(
        self,
        messages: Messages,
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: {"role": ..., "content": ...}, in order.
          add_generation_prompt: end with what begins the assistant's next message.
          tools: JSON schemas of functions that the model may call.
          **kwargs: what else this template knows, such as `enable_thinking=False`.

        Raises:
          InputError: messages of another form, or the template refuses them or fails.
        """
        check_messages(messages)
        if "messages" in kwargs:
            raise InputError("'messages' is no argument for the template: it is the conversation")
        context = {"documents": None, **self.special_tokens, **kwargs}
        context |= {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except self._refused as error:
            raise InputError(
                f"the chat template refuses the messages: {_one_line(error)}"
            ) from None
        except Exception as error:  # a template is a program, and may fail in any way
            raise InputError(
                f"the chat template fails on the messages: {_one_line(error)}"
            ) from error

    def encode(self, tokenizer: Tokenizer, messages: Messages, /, **kwargs: Any) -> list[int]:
        """The tokens of a conversation, as `Generator` takes them.

        A BOS, or whatever the tokenizer puts before every text, comes exactly once: from the
        template, or from the tokenizer where the template wrote none. Where neither writes one, as
        for Qwen3 and gpt-oss, there is none. Nothing is put after the text.

        Args:
          tokenizer: the checkpoint's.
          messages, **kwargs: as for `render`.

        Raises:
          InputError: as for `render`.
        """
        text = self.render(messages, **kwargs)
        ids = tokenizer.encode(text, add_special_tokens=False)
        bos = self.special_tokens.get("bos_token")
        prefix = tokenizer.prefix
        written = ids[: len(prefix)] == prefix or (bos and text.lstrip().startswith(bos))
        return ids if written else prefix + ids


def check_messages(messages: Any) -> None:
    """InputError unless these are messages: objects with a role, and content or tool calls."""
    listed = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not listed or not messages:
        raise InputError(
            'messages must be a non-empty list of objects such as {"role": "user", "content": "Hi"}'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{i}] is a {type(message).__name__}, but must be an object")
        if not isinstance(message.get("role"), str):
            raise InputError(
                f"messages[{i}] has the role {message.get('role')!r}, but it must be a string"
            )
        content = message.get("content")
        if content is None and "tool_calls" not in message:
            raise InputError(f"messages[{i}] has no content")
        if not isinstance(content, str | list | None):
            raise InputError(
                f"messages[{i}] has content of type {type(content).__name__}, but it must be a "
                "string or a list of parts"
            )


def _default_template(config: Mapping[str, Any], folder: Path) -> str | None:
    """The template that tokenizer_config.json holds."""
    value, path = config.get("chat_template"), folder / CONFIG_FILE
    if isinstance(value, list):
        try:
            named = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError):
            named = {"default": value}  # refused below
        if "default" not in named:
            names = ", ".join(map(repr, named)) or "none at all"
            raise CheckpointError(
                f"{path}: chat_template has no template named 'default', but {names}"
            )
        value = named["default"]
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(
        f"{path}: chat_template is a {type(value).__name__}, but must be a string or a list of "
        "objects with a name and a template"
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like; each is a string, or an object whose content is one."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(config).__name__}, but must hold an object"
        )
    return config


def read_template(path: Path) -> str:
    """A file's text; InputError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"the chat template {str(path)!r} is not UTF-8: bad byte at offset {error.start}"
        ) from None
    except OSError as error:
        raise InputError(
            f"cannot read the chat template {str(path)!r}: {error.strerror or error}"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).removesuffix(".") or type(error).__name__
