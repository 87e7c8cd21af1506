"""The tokenizer of the demo's policy: whole words of the task family, single characters for everything else.

`build_tokenizer()` makes it from the lists below, with nothing learned, so it is the same on every machine. A word
that the tasks or their right and wrong commands use is one token; any other text falls back to its characters; a
character that is not listed becomes `<unk>`, so no prompt can fail to encode.

What the policy can sample is bounded by this alphabet. It has no character that leads out of a workspace or that a
shell expands, pipes, chains or runs in the background: none of `/ . ~ $ | & * ; ( ) \\ # = %`, no single backquote.
(The closing tags of the chat format hold a slash in their names; the policy never learns to put those into a
command.)
"""

from __future__ import annotations

import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from gyre.demo.chores import CONTENT_WORDS, HELDOUT_NAMES, TRAIN_NAMES

UNKNOWN = "<unk>"
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS: tuple[str, ...] = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
VOCABULARY_TOKENS = 256

_CHARACTERS = "\n\t " + string.ascii_letters + string.digits + "-_<>:,!?'\"[]{}+"
_FENCES = ("```\n", "\n```")
_LINE_STARTS = (
    *("system", "user", "assistant", "one", "write", "do", "no", "ok", "failed"),
    *("tac", "sort", "tail", "head", "tr", "cat", "wc", "echo", "ls", "uniq"),
    *CONTENT_WORDS,
)
_AFTER_A_SPACE = (
    *("command", "per", "answer", "the", "line", "lines", "count", "of", "to", "in", "reverse", "last", "first"),
    *("capitals", "chores", "write", "do"),
    *("<", ">", "-r", "-l", "-w", "-n", "1", "2", "a-z", "A-Z", "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    *CONTENT_WORDS,
    *TRAIN_NAMES,
    *HELDOUT_NAMES,
)
# A fence with its newline, a newline, a word or a mark with the space before it, any other white space.
_PIECES = r"```\n|\n```|\n| ?[A-Za-z0-9_-]+| ?[^\sA-Za-z0-9_-]|\s"


def build_tokenizer() -> Tokenizer:
    """The tokenizer, with exactly `VOCABULARY_TOKENS` tokens; the last ones are reserved and stand for nothing."""
    words = [UNKNOWN, *_CHARACTERS, *_FENCES, *_LINE_STARTS, *(f" {word}" for word in _AFTER_A_SPACE)]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    # No merges: a piece that is in the vocabulary is one token, any other is spelt.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    reserved = VOCABULARY_TOKENS - len(vocabulary) - len(SPECIAL_TOKENS)
    names = [*SPECIAL_TOKENS, *(f"<|reserved_{index}|>" for index in range(reserved))]
    for name in names:  # as in Qwen3's own tokenizer: what begins and ends a turn is special, what stands in one is not
        tokenizer.add_tokens([AddedToken(name, special=name.startswith("<|"), normalized=False)])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer is known to have."""
    found = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer has no token {token!r}"
    return found
