"""Chat messages to token ids with the model's own template, appending only."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from focus_jax.agents.describe import describe
from focus_jax.agents.environment import Message
from focus_jax.agents.tokenizer import Tokenizer

# A rendered conversation with its contents cut out: runs of template tokens, and the index of a message in between.
_Layout = tuple["tuple[int, ...] | int", ...]


class ChatRenderer:
    """Turns messages into token ids to append; what stands in a context already is never rendered again.

    The template is applied to placeholders only, once for every sequence of roles. The text around a placeholder is
    encoded with its control tokens, the contents as plain text. So a template that drops earlier reasoning or rewrites
    tool calls has nothing to rewrite, and a content that spells a control token stays text. Every method raises
    ValueError, naming the roles and the template's reason, where the template refuses or drops a message.

    Args:
        tokenizer: the model's vocabulary.
        chat_template: Jinja text to use in place of the model's own.
        variables: further template variables, such as `{"enable_thinking": False}` or `{"tools": [...]}`.

    Raises:
        ValueError: there is no chat template, or it cannot be read.

    Example:
        >>> from focus_jax.sampling import ByteTokenizer
        >>> tokenizer = ByteTokenizer()
        >>> ids = ChatRenderer(tokenizer, chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}").opening(
        ...     [Message("user", "2 + 2")])
        >>> tokenizer.decode(ids.tolist())
        '[2 + 2]'
    """

    def __init__(
        self, tokenizer: Tokenizer, *, chat_template: str | None = None, variables: Mapping[str, Any] | None = None
    ) -> None:
        template = chat_template or tokenizer.chat_template
        if not template:
            raise ValueError(
                "the model has no chat template: use an instruction-tuned model, or pass `chat_template=` (Jinja text)"
            )
        self.tokenizer = tokenizer
        self._template = template
        self._apply = _compile(template)
        self._variables = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or "", **(variables or {})}
        self._layout = lru_cache(maxsize=256)(self._make_layout)
        self._encode_content = lru_cache(maxsize=256)(lambda content: tuple(tokenizer.encode(content)))

    @cached_property
    def digest(self) -> str:
        """Hash of the template and its variables, 16 hexadecimal digits, which tells one from another.

        Raises:
            TypeError: a variable has nothing but its address to be known by.
        """
        settings = json.dumps(describe([self._template, self._variables]), sort_keys=True)
        return hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()

    def opening(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> np.ndarray:
        """Ids that open a context, with exactly one BOS where the template or the tokenizer wants one.

        Args:
            messages: the whole opening.
            generation_prompt: False leaves out what invites the policy to reply.

        Returns:
            int32 [T].

        Example:
            >>> from focus_jax.sampling import ByteTokenizer
            >>> tokenizer = ByteTokenizer()
            >>> tokenizer.decode(ChatRenderer(tokenizer).opening([Message("user", "2 + 2")]).tolist())
            '<|im_start|>user\\n2 + 2<|im_end|>\\n<|im_start|>assistant\\n'
        """
        ids = self._fill("opening" if generation_prompt else "seed", messages)
        bos = self.tokenizer.bos_id
        if self.tokenizer.adds_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return np.array(ids, np.int32)

    def turn(self, messages: Sequence[Message], last_id: int) -> np.ndarray:
        """Ids to append after the policy's reply: the end of its message, `messages`, the invitation to reply.

        Args:
            messages: what came back; with none there is nothing to append, the policy goes on within its own message.
            last_id: the last id of the context. If it ends a turn, whichever of the model's ids for that it is, the
                template's own end-of-turn token is left out.

        Returns:
            int32 [T].

        Example:
            >>> from focus_jax.sampling import ByteTokenizer
            >>> tokenizer = ByteTokenizer()
            >>> ids = ChatRenderer(tokenizer).turn([Message("user", "Sure?")], last_id=ord("4"))
            >>> tokenizer.decode(ids.tolist())
            '<|im_end|>\\n<|im_start|>user\\nSure?<|im_end|>\\n<|im_start|>assistant\\n'
        """
        if not messages:
            return np.zeros(0, np.int32)
        ids = self._fill("turn", messages)
        if last_id in self.tokenizer.eos_ids:
            head = self._layout("turn", tuple(m.role for m in messages))[0]
            end = next((i for i, t in enumerate(head) if t in self.tokenizer.eos_ids), -1) if isinstance(head, tuple) else -1
            ids = ids[end + 1 :]
        return np.array(ids, np.int32)

    def extend(self, messages: Sequence[Message]) -> np.ndarray:
        """Ids to append after complete messages without an invitation to reply: `messages`, then the invitation.

        Args:
            messages: what follows an opening made with `generation_prompt=False`.

        Returns:
            int32 [T].

        Example:
            >>> from focus_jax.sampling import ByteTokenizer
            >>> tokenizer = ByteTokenizer()
            >>> tokenizer.decode(ChatRenderer(tokenizer).extend([Message("user", "Go on.")]).tolist())
            '<|im_start|>user\\nGo on.<|im_end|>\\n<|im_start|>assistant\\n'
        """
        return np.array(self._fill("extend", messages), np.int32)

    def _fill(self, kind: str, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for piece in self._layout(kind, tuple(m.role for m in messages)):
            ids.extend(piece if isinstance(piece, tuple) else self._encode_content(messages[piece].content))
        return ids

    def _make_layout(self, kind: str, roles: tuple[str, ...]) -> _Layout:
        # Where messages follow others, a user message (and a reply) stand for what came before.
        before: tuple[str, ...] = {"turn": ("user", "assistant"), "extend": ("user",)}.get(kind, ())
        roles = before + roles
        text = self._render(roles, generation_prompt=kind != "seed")
        if kind == "turn":
            text = text.rpartition(_placeholder(1))[2] if _placeholder(1) in text else ""
        elif kind == "extend":
            start = self._render(before, generation_prompt=False)
            if not text.startswith(start):
                raise ValueError(f"the model's chat template changes a message when another follows it: {', '.join(roles)}")
            text = text[len(start) :]
        layout: list[tuple[int, ...] | int] = []
        for i, part in enumerate(_PLACEHOLDER.split(text)):
            if i % 2:
                layout.append(int(part) - len(before))
            elif part:
                layout.append(tuple(self.tokenizer.encode(part, special=True)))
        for i, role in enumerate(roles[len(before) :]):
            if i not in layout:
                raise ValueError(
                    f"the model's chat template drops the {role} message, or the reply before it: {', '.join(roles)}"
                )
        return tuple(layout)

    def _render(self, roles: tuple[str, ...], *, generation_prompt: bool = True) -> str:
        messages = [{"role": role, "content": _placeholder(i)} for i, role in enumerate(roles)]
        try:
            return self._apply(messages=messages, add_generation_prompt=generation_prompt, **self._variables)
        except Exception as error:
            raise ValueError(
                f"the model's chat template refuses the roles {', '.join(roles)}: {error}; "
                "let the environment and the context manager use roles, in an order, that the model knows"
            ) from error


_PLACEHOLDER = re.compile(r"\[\[message-(\d+)\]\]")


def _placeholder(index: int) -> str:
    return f"[[message-{index}]]"


def _compile(template: str) -> Callable[..., str]:
    """The template as a function, in the sandbox and with the helpers that chat templates are written for."""
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("chat templates need jinja2: pip install 'focus_jax[hf]'") from error

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    jinja.filters["tojson"] = to_json  # Jinja's own escapes HTML
    jinja.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    # Some templates mark the reply with a tag of their own, which says nothing about the text.
    plain = re.sub(
        r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})", lambda m: f"{m[1]}{'endif' if m[2] else 'if true'}{m[3]}", template
    )
    try:
        return jinja.from_string(plain).render
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template cannot be read, line {error.lineno}: {error.message}") from error
