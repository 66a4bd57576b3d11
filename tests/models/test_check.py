"""Token ids, lengths and tokenizers that do not fit a model are refused before anything is computed."""

import jax
import numpy as np
import pytest
from flax import nnx

from focus_jax.models import Decoder, ModelConfig, ValueModel, check_length, check_tokenizer, check_tokens, score

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


@pytest.mark.parametrize(
    ("tokens", "segment_ids", "error", "message"),
    [
        (np.zeros((0, 4), int), None, ValueError, r"at least one row of at least one token, got \(0, 4\)"),
        ([[], []], None, ValueError, r"got \(2, 0\)"),
        ([1, 2, 3], None, ValueError, r"`tokens`: expected shape \(B, T\), .* got \(3,\)"),
        ([[1.0, 2.0]], None, TypeError, "`tokens`: expected integer, got float32"),
        ([[True, False]], None, TypeError, "`tokens`: expected integer, got bool"),
        ([[1, 2]], [[1]], ValueError, r"`segment_ids`: expected shape \(1, 2\), got \(1, 1\)"),
        ([[1, 2], [3, 4]], [[1, 1]], ValueError, r"`segment_ids`: expected shape \(2, 2\), got \(1, 2\)"),
        ([[1, 2]], [[1.0, 1.0]], TypeError, "`segment_ids`: expected integer, got float32"),
        ([[1] * 6], None, ValueError, "at most 5 tokens .* got 6"),
    ],
    ids=str,
)
def test_what_is_no_batch_is_refused_while_tracing(tokens, segment_ids, error, message):
    model = nnx.eval_shape(lambda: Decoder(CONFIG, key=jax.random.key(0)))  # has no numbers to compute with
    for ask in (Decoder.__call__, score, lambda model, *rows: ValueModel(model)(*rows)):
        with pytest.raises(error, match=message):
            ask(model, tokens, segment_ids)


def test_an_id_outside_the_vocabulary_gets_no_other_tokens_numbers():
    model = Decoder(CONFIG, key=jax.random.key(0))
    tokens = [[1, 2, 99], [1, -1, 3], [1, 100, 3], [100, 2, 3]]
    got = np.asarray(jax.jit(score)(model, np.array(tokens)).logprobs)
    assert np.isfinite(got[0]).all()
    assert np.isnan(got[1:, 1:]).all()
    np.testing.assert_array_equal(score(model, tokens[:1]).logprobs, got[:1])  # a list will do


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
