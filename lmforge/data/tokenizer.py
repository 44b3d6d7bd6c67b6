"""Text ↔ token ids: train a byte-level BPE, or open any tokenizer.json, and treat every one of them alike.

Alike means: a text becomes its own tokens and no others. Tokenizers come with post-processors that add a token before
or after, with truncation and padding set by whoever saved them, and with special tokens that text may happen to spell;
all of that is switched off, and what stands between documents is put there by `prepare` alone.
"""

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
import xxhash
from tokenizers import decoders, models, pre_tokenizers, trainers

from lmforge.atomic_files import atomic_write
from lmforge.errors import UserError

EOS_TOKEN = "<|endoftext|>"
# Reserved from the start, so that a pretrained model can be taught to chat without growing its vocabulary.
CHAT_SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
MIN_VOCAB_SIZE = 256 + 1 + len(CHAT_SPECIAL_TOKENS)

# What a token may not straddle. A mark takes the end of its line and the next line's indentation along, which in code
# is a statement's end in one token: 6 % fewer tokens than GPT-4's pattern on standard library files that it was not
# trained on, at 4,096 ids, and as many on Shakespeare. The last two let a run of blanks go by in one stride: of a long
# one, a blank at a time is quadratic.
PRE_TOKENIZE_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r" ?[^\s\p{L}\p{N}]+(?:\r?\n[ \t]*)*",
        r"\s*\n[ \t]*",
        r" ?\p{N}{1,3}",
        r"[ \t]+(?=[ \t]\S)",
        r"\s+",
    )
)

# Where a long text may be cut, how much of it around a cut is compared, and how many places are tried.
PIECE_CHARACTERS = 1 << 20
LINE_END = re.compile(r"\S\r?\n(?=\S)")
CUT_CONTEXT_CHARACTERS = 200
MAX_CUT_ATTEMPTS = 20

# Files that say of a tokenizer.json what it does not say itself; kept with it wherever it goes.
COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Learn a byte-level BPE (Sennrich et al. 2016, over bytes as in Radford et al. 2019) of at most `vocab_size` ids.

    The ids count the specials and the 256 bytes. A text too small to fill the vocabulary gives a smaller one.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"vocab_size {vocab_size}: the bytes and the special tokens alone are {MIN_VOCAB_SIZE}")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PRE_TOKENIZE_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN, *CHAT_SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN, "clean_up_tokenization_spaces": False}
    return Tokenizer(bpe.to_str(pretty=True), {"tokenizer_config.json": json.dumps(config, indent=2)})


class Tokenizer:
    """An opened tokenizer. Ids are ints below `vocab_size`; `separator_id` ends a document; `bos_id` may be None."""

    def __init__(self, text: str, companions: dict[str, str], location: str = "tokenizer.json"):
        """`text` is the tokenizer.json, `companions` the files beside it by name. UserError if they make no sense."""
        self._text = text
        self._companions = companions
        self._location = location
        try:
            self._json: dict[str, Any] = json.loads(text)
            self._backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{location}: not a tokenizer.json this can open: {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self._vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(self._vocab.values())
        self.eos_token_id = self._find_eos_token_id()
        self.bos_token_id = self._named_token_id("bos_token")
        # Some files do not mark these as special, and text that spells them would then become them.
        ends = [self._backend.id_to_token(id) for id in (self.eos_token_id, self.bos_token_id) if id is not None]
        self._backend.add_special_tokens(ends)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a tokenizer.json, or a folder holding one, with the files beside it that name its special tokens."""
        file = Path(path) if isinstance(path, str) else path
        if file.is_dir():
            file = file / "tokenizer.json"
        try:
            text = file.read_text("utf-8")
            companions = {
                name: beside.read_text("utf-8") for name in COMPANION_FILES if (beside := file.parent / name).is_file()
            }
        except FileNotFoundError:
            raise UserError(f"{file}: no such tokenizer: name a tokenizer.json or a folder that holds one") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from None
        return cls(text, companions, str(file))

    @property
    def files(self) -> dict[str, str]:
        """What it is saved as, by file name; tokenizer.json last."""
        return {**self._companions, "tokenizer.json": self._text}

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and its companions, as they were, into a folder; tokenizer.json last."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            with atomic_write(folder / name) as file:
                file.write(text.encode())

    @cached_property
    def hash(self) -> str:
        """xxh3 of the tokenizer.json, whatever its spacing and key order, and of which token separates."""
        canonical = json.dumps([self._json, self.eos_token_id], sort_keys=True, separators=(",", ":"))
        return xxhash.xxh3_128_hexdigest(canonical.encode())

    def encode(self, text: str) -> list[int]:
        """The ids of a text and nothing else: what spells a special token is text too."""
        return self._backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def prefix_ids(self) -> list[int]:
        """What its own post-processor puts before a text, most often the token that begins one; empty for many."""
        text = "a"
        plain, dressed = self.encode(text), self._backend.encode(text, add_special_tokens=True).ids
        starts = [at for at in range(len(dressed)) if dressed[at : at + len(plain)] == plain]
        return dressed[: starts[0]] if starts else []

    def encode_batch(self, texts: Sequence[str], *, is_continuation: bool = False) -> list[list[int]]:
        """`encode` of each. `inside`: as it reads after other tokens, where some tokenizers put no blank before a word."""
        if not is_continuation or '"first"' not in json.dumps(self._json.get("pre_tokenizer")):
            return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        tokens, before = self._continuation_tokenizer
        after = [before + text for text in texts]
        return [encoding.ids[1:] for encoding in tokens.encode_batch_fast(after, add_special_tokens=False)]

    def split_long_text(self, text: str, piece_characters: int = PIECE_CHARACTERS) -> Iterator[str]:
        """A long text in pieces of about `length` characters whose ids, joined, are those of the whole.

        The library needs a hundred bytes of memory for each byte that it encodes at once. Pieces end with a line, where
        the text on both sides shows that no token goes across; a tokenizer that lets none end there gets the text whole.
        """
        start = 0
        while len(text) - start > 2 * piece_characters and (
            end := self._find_safe_cut(text, start + piece_characters, piece_characters)
        ):
            yield text[start:end]
            start = end
        yield text[start:]

    def _find_safe_cut(self, text: str, start: int, length: int) -> int | None:
        for line_end in islice(LINE_END.finditer(text, start, start + length), MAX_CUT_ATTEMPTS):
            at = line_end.end()
            before, after = text[max(0, at - CUT_CONTEXT_CHARACTERS) : at], text[at : at + CUT_CONTEXT_CHARACTERS]
            if self.encode(before) + self.encode(after) == self.encode(before + after):
                return at
        return None

    def decode(self, ids: Sequence[int], *, include_special_tokens: bool = False) -> str:
        """The text of ids, with the special tokens spelled out or left out."""
        return self._backend.decode(list(ids), skip_special_tokens=not include_special_tokens)

    def stream_decoder(self) -> "StreamDecoder":
        """Text as ids come, one at a time."""
        return StreamDecoder(self._bytes_of_id, self.all_special_ids, self._drops_leading_space)

    def token_byte_lengths(self) -> np.ndarray:
        """How many UTF-8 bytes of text each id stands for, int32 [vocab_size]; 0 for special tokens."""
        sizes = np.array([len(piece) for piece in self._bytes_of_id], np.int32)
        sizes[list(self.all_special_ids)] = 0
        return sizes

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its spelling, special or not."""
        return self._vocab.get(token)

    def id_to_token(self, token_id: int) -> str:
        """The spelling of a token."""
        return str(self._backend.id_to_token(token_id))

    def _find_eos_token_id(self) -> int:
        named = self._named_token_id("eos_token")
        if named is not None:
            return named
        specials = [token["content"] for token in self._json.get("added_tokens", []) if token["special"]]
        # A lone tokenizer.json does not say which token ends a text; these have never meant anything else.
        known = [token for token in (EOS_TOKEN, "</s>", "<|end_of_text|>", "<eos>") if token in specials]
        if len(known) == 1:
            return self._vocab[known[0]]
        raise UserError(
            f"{self._location}: cannot tell which token ends a document: "
            'put a tokenizer_config.json beside it that says "eos_token"'
        )

    def _named_token_id(self, role: str) -> int | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            try:
                token = json.loads(self._companions.get(name, "{}")).get(role)
            except (ValueError, AttributeError):
                raise UserError(f"{Path(self._location).parent / name}: not a JSON object") from None
            if isinstance(token, dict):
                token = token.get("content")
            if token is not None:
                if token not in self._vocab:
                    raise UserError(f"{self._location}: has no token {token!r}, which {name} says is its {role}")
                return self._vocab[token]
        return None

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for within a text; of a special token, its spelling."""
        return self._bytes_of_id[token_id]

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """What is no text: the tokens that its file calls special, and those that begin and end a text."""
        named = {id for id in (self.eos_token_id, self.bos_token_id) if id is not None}
        return frozenset(named | {t["id"] for t in self._json.get("added_tokens", []) if t["special"]})

    @cached_property
    def _continuation_tokenizer(self) -> tuple[tokenizers.Tokenizer, str]:
        """The same with one token more, for a text to stand after, and its spelling, which no text can guess."""
        tokens, before = tokenizers.Tokenizer.from_str(self._backend.to_str()), secrets.token_hex(16)
        tokens.encode_special_tokens = True
        tokens.add_tokens([tokenizers.AddedToken(before, normalized=False)])
        return tokens, before

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        decoder = self._json.get("decoder") or {}
        return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]

    @cached_property
    def _drops_leading_space(self) -> bool:
        # Without a decoder the library puts a blank between tokens, as it does before words for WordPiece.
        return any(
            step.get("type") in ("WordPiece", None)
            or (step.get("type") == "Strip" and step["content"] == " " and step["start"])
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in self._decoders
        )

    @cached_property
    def _bytes_of_id(self) -> list[bytes]:
        """The bytes each id stands for within a text."""
        kinds = {step.get("type"): step for step in self._decoders}
        added = {token["id"] for token in self._json.get("added_tokens", [])}
        pieces = [b""] * self.vocab_size
        for token, id in self._vocab.items():
            if id in added:
                pieces[id] = token.encode()
            elif "ByteLevel" in kinds:
                pieces[id] = bytes(_BYTE_OF_CHARACTER[character] for character in token)
            elif "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x"):
                pieces[id] = bytes([int(token[3:5], 16)])
            elif "WordPiece" in kinds:
                prefix = kinds["WordPiece"]["prefix"]
                pieces[id] = (token.removeprefix(prefix) if token.startswith(prefix) else " " + token).encode()
            elif None in kinds:
                pieces[id] = (" " + token).encode()
            else:
                blank = kinds["Metaspace"]["replacement"] if "Metaspace" in kinds else "▁"
                pieces[id] = token.replace(blank, " ").encode()
        return pieces


class StreamDecoder:
    """Turns ids into text as they come, keeping back the bytes of a character that is not whole yet."""

    def __init__(self, bytes_of_id: list[bytes], special_ids: frozenset[int], drops_leading_space: bool):
        self._bytes_of_id = bytes_of_id
        self._special_ids = special_ids
        self._at_start = drops_leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that is certain once `id` has come; special tokens have none."""
        if token_id in self._special_ids:
            return ""
        piece = self._bytes_of_id[token_id]
        if self._at_start:
            piece = piece.removeprefix(b" ")
        self._at_start = False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What was kept back, with U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)


def _byte_of_character() -> dict[str, int]:
    """The 256 characters in which byte-level tokenizers write bytes (Radford et al. 2019), each with its byte.

    Bytes that print as themselves stay; the others, in order, take the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
