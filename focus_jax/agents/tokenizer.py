"""Text to token ids and back: the `Tokenizer` protocol.

It stands here because the chat renderer is what calls it; the implementations live in `focus_jax.sampling.tokenizers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """A model's vocabulary and its conventions. Synchronous; safe to call from several threads.

    One that may wait, for a server's answer say, also has `blocking = True`: agents then call it beside the event loop.

    Attributes:
        bos_token: text of the token that opens a sequence, or None.
        eos_token: text of the token that ends one, as a chat template may name it, or None.
        bos_id: id of `bos_token`, or None.
        eos_ids: every id that ends a turn (a model may have several).
        adds_bos: the model expects `bos_id` at the start. `encode` never adds it, so whoever builds a context does,
            once, unless the template's text begins with it already.
        chat_template: the model's own Jinja template, or None.
        vocab_size: ids are in [0, vocab_size).
    """

    @property
    def bos_token(self) -> str | None: ...

    @property
    def eos_token(self) -> str | None: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def adds_bos(self) -> bool: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`, without BOS or EOS.

        Args:
            text: any text.
            special: True turns the names of special tokens inside the text into those tokens (a rendered template);
                False keeps them as plain text (an observation that says "<|im_end|>" must not end a turn).
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens written by their names; incomplete UTF-8 becomes U+FFFD.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        ...
