"""Streaming text against the tokenizer's own decode, and stop strings against str.find."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from smpart.runtime.detokenizer import StreamDetokenizer


def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte, a few merges that cross the bytes of a character, and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("t", "h"), ("th", "e"), ("Ġ", "the")]
    words = ["<|end|>", *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def sentence_pieces() -> PreTrainedTokenizerFast:
    """As Llama 2: words that begin with a space, bytes for what has no word."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁a", "the", "é", "cat", "!"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


BYTES, PIECES = byte_level(), sentence_pieces()


def stream(tokenizer: PreTrainedTokenizerFast, tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = StreamDetokenizer(tokenizer, stop)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=40))
def test_pieces_join_to_decode_for_any_tokens(tokens):
    assert "".join(stream(BYTES, tokens)) == BYTES.decode(tokens, skip_special_tokens=True)


@given(st.text(max_size=20))
def test_no_piece_has_half_a_character(text):
    tokens = BYTES.encode(text, add_special_tokens=False)
    pieces = stream(BYTES, tokens)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.sampled_from(["▁the", "▁a", "the", "é", "cat", "!", "▁", "<0x0A>", "😀", "日"]), max_size=20))
def test_sentence_pieces_keep_spaces_and_fallback_bytes(words):
    known = PIECES.get_vocab()
    tokens = [t for word in words for t in ([known[word]] if word in known else byte_tokens(word))]
    pieces = stream(PIECES, tokens)
    assert "".join(pieces) == PIECES.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


def byte_tokens(text: str) -> list[int]:
    return [PIECES.get_vocab()[f"<0x{byte:02X}>"] for byte in text.encode()]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text, stop):
    tokens = BYTES.encode(text, add_special_tokens=False)
    detokenizer = StreamDetokenizer(BYTES, tuple(stop))
    out, used = "", 0
    for token in tokens:
        out += detokenizer.push(token)
        used += 1
        if detokenizer.stopped:
            break
    out += detokenizer.finish()
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert detokenizer.stopped is None
        assert out == text
    else:
        assert used == min(ends)  # one byte a token: found with the first token that completes one
        assert text.startswith(out + detokenizer.stopped)
        assert not any(s in out for s in stop)


def test_what_could_begin_a_stop_string_is_held_back():
    detokenizer = StreamDetokenizer(BYTES, ("END",))
    pieces = [detokenizer.push(token) for token in BYTES.encode("see EN", add_special_tokens=False)]
    assert "".join(pieces) == "see "
    assert detokenizer.push(BYTES.encode("x", add_special_tokens=False)[0]) == "ENx"


def test_a_stop_string_across_tokens_is_cut_and_ends_the_stream():
    detokenizer = StreamDetokenizer(BYTES, ("the",))
    out = "".join(detokenizer.push(token) for token in BYTES.encode("say the word", add_special_tokens=False))
    assert out == "say "
    assert detokenizer.stopped == "the"
    assert detokenizer.finish() == ""


def test_finish_gives_what_was_held_even_if_incomplete():
    tokens = BYTES.encode("é😀", add_special_tokens=False)[:-1]
    assert "".join(stream(BYTES, tokens)) == BYTES.decode(tokens)


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_text_in_pieces():
    from smpart.runtime.models import load_model

    _, tokenizer = load_model("smollm2")
    text = "naïve 日本語 🙂🙃 — \n\n def f(x): return x"
    assert "".join(stream(tokenizer, tokenizer.encode(text))) == text
