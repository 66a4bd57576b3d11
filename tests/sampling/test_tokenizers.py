"""Tokenizers: text that names a control token stays text, and every end of a turn is known."""

import json
from pathlib import Path

import jinja2
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from focus_jax.agents.tokenizer import Tokenizer
from focus_jax.sampling import ByteTokenizer, HFTokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a small byte-level tokenizer: three special tokens, and <think>, which is added but not special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["hello hello world"], trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<think>"), tokenizers.AddedToken("   ")])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|im_end|>", "bos_token": None})
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def ids_of(folder: Path, *names: str) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.token_to_id(name) for name in names]


def test_the_names_of_control_tokens_stay_text_unless_asked(folder):
    for tokenizer in (HFTokenizer(folder), ByteTokenizer()):
        end = tokenizer.encode("<|im_end|>", special=True)
        assert len(end) == 1
        observed = tokenizer.encode("so <|im_end|> and <|endoftext|>")
        assert tokenizer.eos_ids.isdisjoint(observed)
        assert tokenizer.decode(observed) == "so <|im_end|> and <|endoftext|>"
        assert tokenizer.encode("a<|im_end|>b", special=True) == [*tokenizer.encode("a"), *end, *tokenizer.encode("b")]


def test_added_markup_stays_text_but_added_words_do_not(folder):
    tokenizer = HFTokenizer(folder)
    think, spaces = ids_of(folder, "<think>", "   ")
    assert tokenizer.encode("<think>", special=True) == [think]
    assert think not in tokenizer.encode("<think>")
    assert tokenizer.decode(tokenizer.encode("<think>")) == "<think>"
    assert spaces in tokenizer.encode("a   b")


def test_a_vocabulary_that_lists_control_names_as_words(folder):
    """Whole-word vocabularies find the name itself: it is broken up."""
    words = tokenizers.Tokenizer(models.WordLevel({"hi": 0, "</s>": 1, "<": 2, "/s>": 3, "?": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([tokenizers.AddedToken("</s>", special=True)])
    words.save(str(folder / "tokenizer.json"))
    tokenizer = HFTokenizer(folder)
    assert tokenizer.encode("hi </s>") == [0, 2, 3]
    assert tokenizer.encode("hi </s>", special=True) == [0, 1]


def test_nothing_is_cut_padded_or_added(folder):
    text = "hello world " * 20
    for tokenizer in (HFTokenizer(folder), ByteTokenizer()):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode("") == []


def test_text_that_is_not_ascii_survives_and_broken_text_shows(folder):
    for tokenizer in (HFTokenizer(folder), ByteTokenizer()):
        ids = tokenizer.encode("5 ≤ é 😀\r\n")
        assert tokenizer.decode(ids) == "5 ≤ é 😀\r\n"
        assert tokenizer.decode(tokenizer.encode("😀")[:-1]).startswith("\ufffd")


def test_b07_every_id_that_ends_a_turn_is_known(folder):
    end, text_end = ids_of(folder, "<|im_end|>", "<|endoftext|>")
    assert HFTokenizer(folder).eos_ids == {end}
    write(folder, "generation_config.json", {"eos_token_id": [128001, text_end, 128009]})
    write(folder, "config.json", {"eos_token_id": 128008, "vocab_size": 128256})
    assert HFTokenizer(folder).eos_ids == {end, text_end, 128001, 128008, 128009}
    write(folder, "config.json", {"text_config": {"eos_token_id": 128008}})
    assert HFTokenizer(folder).eos_ids == {end, text_end, 128001, 128008, 128009}
    assert ByteTokenizer().eos_ids == {257, 258}


@pytest.mark.parametrize("named", ["<|endoftext|>", {"content": "<|endoftext|>", "lstrip": False}])
def test_b06_whether_the_model_expects_bos(folder, named):
    tokenizer = HFTokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.bos_id, tokenizer.adds_bos) == (None, None, False)
    write(folder, "tokenizer_config.json", {"bos_token": named, "add_bos_token": True})
    tokenizer = HFTokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.bos_id, tokenizer.adds_bos) == ("<|endoftext|>", 0, True)
    assert tokenizer.encode("hello", special=True)[0] != 0
    write(folder, "tokenizer_config.json", {"bos_token": named})
    assert not HFTokenizer(folder).adds_bos
    spec = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    spec.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    spec.save(str(folder / "tokenizer.json"))
    tokenizer = HFTokenizer(folder)
    assert tokenizer.adds_bos
    assert tokenizer.encode("hello", special=True)[0] != 0


def test_where_the_chat_template_comes_from(folder):
    assert HFTokenizer(folder).chat_template is None
    write(folder, "tokenizer_config.json", {"chat_template": "one"})
    assert HFTokenizer(folder).chat_template == "one"
    several = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    write(folder, "tokenizer_config.json", {"chat_template": several})
    assert HFTokenizer(folder).chat_template == "three"
    (folder / "chat_template.jinja").write_text("four")
    assert HFTokenizer(folder).chat_template == "four"


def test_the_vocabulary_counts_padding_and_ids_outside_are_refused(folder):
    size = HFTokenizer(folder).vocab_size
    assert size == max(ids_of(folder, "<think>", "   ")) + 1
    write(folder, "config.json", {"vocab_size": 512})
    assert HFTokenizer(folder).vocab_size == 512
    for tokenizer in (HFTokenizer(folder), ByteTokenizer()):
        for bad in (-1, tokenizer.vocab_size):
            with pytest.raises(ValueError, match=f"got {bad}"):
                tokenizer.decode([0, bad])


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("tokenizer.json", None, FileNotFoundError, "expected a model folder with a tokenizer.json"),
        ("tokenizer.json", "{oops", ValueError, r"tokenizer\.json: expected JSON"),
        ("tokenizer.json", '{"model": 5}', ValueError, "cannot read it"),
        ("config.json", "[1]", ValueError, r"config\.json: expected a JSON object"),
    ],
)
def test_a_folder_that_is_none(folder, name, content, error, message):
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(error, match=message):
        HFTokenizer(folder)


def test_the_template_of_the_byte_tokenizer_renders():
    template = jinja2.Template(ByteTokenizer().chat_template or "")
    text = template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ByteTokenizer().encode(text, special=True)[:5] == [256, *b"user"]


def test_they_are_tokenizers(folder):
    both: list[Tokenizer] = [ByteTokenizer(), HFTokenizer(folder)]
    assert "eos_ids" in repr(both[1])
