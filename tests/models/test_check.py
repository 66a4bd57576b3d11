"""Token ids, lengths and tokenizers that do not fit a model are refused before anything is computed."""

import numpy as np
import pytest

from focus_jax.models import ModelConfig, check_length, check_tokenizer, check_tokens

CONFIG = ModelConfig("qwen3", 100, 64, 128, 4, 2, 32, ("full_attention",) * 2, max_positions=5)


@pytest.mark.parametrize(
    ("tokens", "segment_ids"),
    [
        ([[0, 99, 1]], None),
        ([0, 99, 1], None),
        (np.zeros((2, 5), np.uint32), None),
        ([[1, 2, 3, 100, -100]], [[1, 1, 1, 0, 0]]),  # whatever stands in padding
        (np.ones((2, 9), int), [[1, 1, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 7]]),
        (np.ones((2, 6), int), [[0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),  # no run crosses rows
        (np.zeros((0, 4), int), None),
        ([[]], None),
    ],
)
def test_what_a_model_takes_passes(tokens, segment_ids):
    check_tokens(CONFIG, tokens, segment_ids)


@pytest.mark.parametrize(
    ("tokens", "segment_ids", "message"),
    [
        ([[1, 2], [3, 100]], None, r"in \[0, 100\), got 100 at \(1, 1\)"),
        ([[1, -1]], None, r"got -1 at \(0, 1\)"),
        ([[1, 100, 100]], [[0, 0, 3]], r"got 100 at \(0, 2\)"),
        (np.array([[2**32 - 1]], np.uint32), None, "got 4294967295"),
        (np.ones((1, 6), int), None, "at most 5 tokens .* got 6"),
        (np.ones((2, 8), int), [[1, 1, 1, 1, 2, 2, 2, 2], [0, 4, 4, 4, 4, 4, 4, 0]], "at most 5 tokens .* got 6"),
        ([[1, 2]], [[1]], "expected the shape of `tokens`"),
        ([[1, 2]], [[1, -1]], "positive numbers, got -1"),
        ([[1.0, 2.0]], None, "expected integers"),
        ([[True]], None, "expected integers"),
        ([[1, 2], [3]], None, "rows of one length"),
        (3, None, "expected integers"),
    ],
)
def test_what_a_model_cannot_take_is_refused_by_place(tokens, segment_ids, message):
    with pytest.raises(ValueError, match=message):
        check_tokens(CONFIG, tokens, segment_ids)


def test_a_generation_that_would_outgrow_the_positions_is_refused():
    check_length(CONFIG, 5)
    with pytest.raises(ValueError, match="at most 5 tokens"):
        check_length(CONFIG, 6)


def test_a_tokenizer_may_know_fewer_tokens_than_the_embedding_but_not_more():
    class Grown:
        """As transformers': `vocab_size` leaves out the tokens that were added."""

        vocab_size = 99

        def __len__(self):
            return 101

    class Ours:
        vocab_size = 101

    check_tokenizer(CONFIG, 99)
    check_tokenizer(CONFIG, 100)
    for tokenizer in (101, Grown(), Ours()):
        with pytest.raises(ValueError, match=r"at most 100 tokens.*got 101"):
            check_tokenizer(CONFIG, tokenizer)
