"""`--chat`: prompts as messages, and the template that makes tokens of them."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl.flags import FlagValues

from vegas_jax.checkpoint import load_chat_template
from vegas_jax.cli.prompts import Prompt, has_surrogates
from vegas_jax.completion import Completion
from vegas_jax.errors import InputError
from vegas_jax.text import Channels, ChatTemplate, Tokenizer, has_channels

_FLAGS = ("system", "chat_template", "chat_template_kwargs", "channels")


@dataclasses.dataclass(frozen=True)
class Chat:
    """What the flags say about chats."""

    template: ChatTemplate
    arguments: Mapping[str, Any]
    system: str | None
    channels: Channels

    def prompts(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts as messages; each is rendered once, so that errors come before loading.

        Raises:
          InputError: token ids, two system messages, or messages that the template refuses.
        """
        chats = []
        for prompt in prompts:
            messages = _messages(prompt, self.system)
            try:
                self.template.render(messages, **self.arguments)
            except InputError as error:
                raise InputError(f"prompt {prompt.id!r}: {error}") from None
            chats.append(dataclasses.replace(prompt, content=messages))
        return chats

    def encode(self, tokenizer: Tokenizer | None, messages: Any) -> list[int]:
        """The tokens of a prompt's messages."""
        if tokenizer is None:
            raise InputError("--chat needs a tokenizer, but this checkpoint has no tokenizer.json")
        return self.template.encode(tokenizer, messages, **self.arguments)

    def hides(self, tokenizer: Tokenizer | None, completion: Completion) -> bool:
        """Whether nothing of a reply is shown, since its final channel is empty."""
        final = self.channels == "final" and tokenizer is not None and has_channels(tokenizer)
        return final and bool(completion.token_ids) and not completion.text

    def settings(self) -> dict[str, Any]:
        """What decides the records of a chat, besides the messages and what decides all records."""
        digest = hashlib.sha256(self.template.source.encode()).hexdigest()[:16]
        return {
            "chat_template_sha256": digest,
            "chat_template_kwargs": dict(self.arguments),
            "channels": self.channels,
        }


def of_flags(values: FlagValues) -> Chat | None:
    """What the flags say; None without --chat.

    Raises:
      InputError: a flag that needs --chat or makes no sense with it, or no usable template.
    """
    if not values.chat:
        given = [name for name in _FLAGS if values[name].present]
        if given:
            raise InputError(f"--{given[0]} needs --chat")
        return None
    for name in ("checkpoint", "system", "chat_template"):
        if getattr(values, name) == "":
            raise InputError(f"--{name} is empty: give it a value or leave it out")
    if values.max_prompt_tokens is not None:
        raise InputError(
            "--max_prompt_tokens would cut off how a chat begins: leave it out, or shorten the"
            " messages"
        )
    if has_surrogates(values.system or ""):
        raise InputError("--system is not valid UTF-8")
    template = load_chat_template(values.checkpoint, values.chat_template)
    if template is None:
        raise InputError(
            f"checkpoint {values.checkpoint!r} has no chat template: give one with"
            " --chat_template=FILE, or leave out --chat"
        )
    return Chat(template, values.chat_template_kwargs or {}, values.system, values.channels)


def _messages(prompt: Prompt, system: str | None) -> list[dict[str, Any]]:
    content = prompt.content
    if isinstance(content, tuple):
        raise InputError(f"prompt {prompt.id!r} is token ids, but --chat needs text or messages")
    user: dict[str, Any] = {"role": "user", "content": content}
    messages = [user] if isinstance(content, str) else content
    if system is not None:
        if messages[0]["role"] == "system":
            raise InputError(f"prompt {prompt.id!r} has a system message already: omit --system")
        messages = [{"role": "system", "content": system}, *messages]
    return messages
