"""Tokenizers: bytes (tests and scripts), a Hugging Face folder, and the one inside a llama.cpp server."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# An added token that looks like markup could open a turn, a tool call or a thought when an observation spells it out.
_MARKUP = re.compile(r"<.*>|\[.*\]", re.DOTALL)


def check_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """`ids` as plain integers, all inside the vocabulary."""
    plain = [int(i) for i in ids]
    for i in plain:
        if not 0 <= i < vocab_size:
            raise ValueError(f"`ids`: expected token ids in [0, {vocab_size}), got {i}")
    return plain


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes are the tokens, followed by four special ones; for tests and scripted replies.

    Args:
        adds_bos: the model expects BOS at the start of a context.
        chat_template: Jinja template, ChatML unless given; None is a model without one.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("é<|im_end|>", special=True)
        [195, 169, 257]
        >>> tokenizer.decode([72, 105, 257])
        'Hi<|im_end|>'
    """

    adds_bos: bool = False
    chat_template: str | None = CHATML
    bos_token: str | None = "<|startoftext|>"
    eos_token: str | None = "<|im_end|>"

    special_tokens = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|startoftext|>")  # ids 256, 257, ...
    vocab_size = 260
    bos_id = 259
    eos_ids = frozenset({257, 258})

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Bytes of `text`; with `special`, the names of special tokens become those tokens."""
        if not special:
            return list(text.encode())
        pieces = re.split("(" + "|".join(map(re.escape, self.special_tokens)) + ")", text)
        names = {name: 256 + i for i, name in enumerate(self.special_tokens)}
        return [i for piece in pieces for i in ([names[piece]] if piece in names else piece.encode())]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is not in [0, 260).
        """
        plain = check_ids(ids, self.vocab_size)
        raw = b"".join(bytes([i]) if i < 256 else self.special_tokens[i - 256].encode() for i in plain)
        return raw.decode(errors="replace")


class HFTokenizer:
    """The tokenizer of a Hugging Face model folder, read with the `tokenizers` library alone.

    Reads `tokenizer.json` (required), `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json` and
    `config.json`. A turn ends at every id that one of them calls EOS. `encode(..., special=False)` spells out the names
    of special tokens, and of other added tokens written like markup (`<think>`, `[TOOL]`), as plain text.

    Args:
        folder: the model folder.

    Raises:
        FileNotFoundError: `tokenizer.json` is not there.
        ValueError: a file is not what it should be.

    Example:
        tokenizer = HFTokenizer("models/Qwen3.5-0.8B")
        ids = tokenizer.encode("<|im_start|>user\\n", special=True)
    """

    def __init__(self, folder: str | Path):
        try:
            import tokenizers
        except ImportError:
            raise ImportError("HFTokenizer needs the `tokenizers` library: pip install 'focus_jax[hf]'") from None
        folder = Path(folder)
        spec = _read_json(folder / "tokenizer.json")
        if not spec:
            raise FileNotFoundError(f"{folder}: expected a model folder with a tokenizer.json, found none")
        settings = _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")

        def load(content: dict[str, Any]) -> Any:
            # Truncation and padding are settings of whoever saved the file; a context is never cut or filled silently.
            try:
                return tokenizers.Tokenizer.from_str(json.dumps({**content, "truncation": None, "padding": None}))
            except Exception as error:
                raise ValueError(f"{folder}/tokenizer.json: the tokenizers library cannot read it: {error}") from None

        self._special = load(spec)
        added = [{**token, "special": _is_control(token)} for token in spec.get("added_tokens", [])]
        self._control = frozenset(token["id"] for token in added if token["special"])
        self._plain = load({**spec, "added_tokens": added})
        self._plain.encode_special_tokens = True  # as text, that is
        self.bos_token: str | None = _token_text(settings.get("bos_token"))
        self.eos_token: str | None = _token_text(settings.get("eos_token"))
        self.bos_id: int | None = self._id(self.bos_token)
        text_config = config.get("text_config", {})
        named = [
            self._id(self.eos_token),
            config.get("eos_token_id"),
            text_config.get("eos_token_id"),
            generation.get("eos_token_id"),
        ]
        self.eos_ids = frozenset(i for value in named for i in _as_ids(value))
        self.adds_bos: bool = self._adds_bos(settings)
        self.chat_template: str | None = _chat_template(folder, settings)
        sizes = [config.get("vocab_size"), text_config.get("vocab_size"), max(self._special.get_vocab().values()) + 1]
        self.vocab_size: int = max(size for size in sizes if isinstance(size, int))

    def __repr__(self) -> str:
        return f"HFTokenizer(vocab_size={self.vocab_size}, eos_ids={sorted(self.eos_ids)})"

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`, without BOS or EOS; see `Tokenizer.encode`."""
        tokenizer = self._special if special else self._plain
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if special or self._control.isdisjoint(ids):
            return ids
        return [j for i in ids for j in (self._spell(i) if i in self._control else [i])]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens by their names; see `Tokenizer.decode`."""
        text: str = self._special.decode(check_ids(ids, self.vocab_size), skip_special_tokens=False)
        return text

    def _spell(self, control: int) -> list[int]:
        """The name of a control token in ordinary tokens, for vocabularies that hold such names as pieces of text."""
        name = self._special.id_to_token(control)
        return [i for part in (name[:1], name[1:]) for i in self._plain.encode(part, add_special_tokens=False).ids]

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._special.token_to_id(token)

    def _adds_bos(self, settings: dict[str, Any]) -> bool:
        if self.bos_id is None:
            return False
        if isinstance(settings.get("add_bos_token"), bool):
            return bool(settings["add_bos_token"])
        return bool(self._special.encode("a").ids[0] == self.bos_id)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _is_control(token: dict[str, Any]) -> bool:
    return bool(token.get("special")) or bool(_MARKUP.fullmatch(token.get("content", "")))


def _token_text(value: Any) -> str | None:
    """A token's text, which configs write as a string or as an object."""
    return value.get("content") if isinstance(value, dict) else value


def _as_ids(value: Any) -> list[int]:
    """Ids out of a field that may hold none, one or a list."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The model's template: its own file first, then the config, where several are told apart by name."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template
