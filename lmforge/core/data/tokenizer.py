"""Text ↔ token ids: train a byte-level BPE, take bytes or characters, or open any tokenizer.json,
and treat all of them alike.

A text is encoded without additional tokens. Tokenizers come with post-processors that add a token
before or after, with truncation and padding as they were saved, and with special tokens that a text
may spell. All of this is switched off; only `prepare` adds a token between documents.
"""

import codecs
import json
import re
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import tokenizers
import xxhash
from tokenizers import decoders, models, pre_tokenizers, trainers

from lmforge.core.data import tokenizer_json
from lmforge.core.data.tokenizer_json import CONFIG_FILES
from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.files.untrusted import parse_json, read_bounded

EOS_TOKEN = "<|endoftext|>"
# Reserved in every trained vocabulary, so that a pretrained model can learn to chat without growing
# it.
CHAT_SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
UNKNOWN_TOKEN = "<|unknown|>"  # of a vocabulary of characters
MIN_VOCAB_SIZE = 256 + 1 + len(CHAT_SPECIAL_TOKENS)

# No token goes across two matches. Punctuation takes the end of its line and the next line's
# indentation along, so the end of a statement is one token in code: 6 % fewer tokens than GPT-4's
# pattern on standard library files that it was not trained on, at 4,096 ids, and as many on
# Shakespeare. The last two match a run of blanks at once: one blank at a time is quadratic.
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

# Where a long text may be cut, how many characters around a cut are compared, and how many
# positions are tried.
PIECE_CHARACTERS = 1 << 20
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
LINE_END = re.compile(r"\S\s*\n(?=\S)")
CUT_CONTEXT_CHARACTERS = 200
MAX_CUT_ATTEMPTS = 20

SENTENCEPIECE_FILE = "tokenizer.model"
# Files beside a tokenizer.json with what it does not hold itself; copied with it.
COMPANION_FILES = (*CONFIG_FILES, "chat_template.jinja")
ADDITIONAL_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja beside them
MAX_TOKENIZER_BYTES = 2**28
MAX_VOCAB_SIZE = 2**24


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Learn a byte-level BPE (Sennrich et al.

    2016, over bytes as in Radford et al. 2019) of at most `vocab_size` ids.

    The ids include the special tokens and the 256 bytes. Texts too small to fill the vocabulary
    give a smaller one.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size {vocab_size}: the bytes and the special tokens alone are {MIN_VOCAB_SIZE}"
        )
    bpe = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PRE_TOKENIZE_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN, *CHAT_SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return Tokenizer(bpe.to_str(pretty=True), _tokenizer_config(eos_token=EOS_TOKEN))


def byte_tokenizer() -> "Tokenizer":
    """A token for each byte of UTF-8, after the special tokens."""
    return train_tokenizer([], MIN_VOCAB_SIZE)


def character_tokenizer(characters: Iterable[str]) -> "Tokenizer":
    """A token for each of these characters, in the order of their code points, after the special
    tokens.

    Other characters become one token that stands for no text.
    """
    tokens = [EOS_TOKEN, *CHAT_SPECIAL_TOKENS, UNKNOWN_TOKEN, *sorted(set(characters))]
    # A BPE without merges: the only model of the library that needs no regular expression to split
    # a text into characters.
    model = models.BPE({token: id for id, token in enumerate(tokens)}, [], unk_token=UNKNOWN_TOKEN)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([EOS_TOKEN, *CHAT_SPECIAL_TOKENS, UNKNOWN_TOKEN])
    return Tokenizer(
        backend.to_str(pretty=True), _tokenizer_config(eos_token=EOS_TOKEN, unk_token=UNKNOWN_TOKEN)
    )


def _tokenizer_config(**tokens: str) -> dict[str, str]:
    """The file that tells transformers the roles of tokens, by its name."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer_config.json": json.dumps(config, indent=2)}


class Tokenizer:
    """An opened tokenizer.

    Ids are ints below `vocab_size`; `eos_token_id` ends a document; `bos_token_id` may be None.

    named_ids     the ids of the tokens that end and begin a text
    configs       the contents of CONFIG_FILES by name, empty for a file that is not there
    roles         what they say of the roles of tokens, such as eos_token
    added_tokens  the tokens that are added to its vocabulary, special ones among them, as a
                  tokenizer.json lists them
    """

    def __init__(self, text: str, companions: dict[str, str], location: str = "tokenizer.json"):
        """`text` is the tokenizer.json, `companions` the files beside it by name.

        Raises UserError if one is invalid.
        """
        self._text = text
        self._companions = companions
        hint = "not a tokenizer.json this can open"
        self._json = parse_json(
            text.encode(), dict[str, Any], location, max_bytes=MAX_TOKENIZER_BYTES, hint=hint
        )
        self.configs = {
            name: parse_json(
                companions.get(name, "{}").encode(),
                dict[str, Any],
                str(Path(location).parent / name),
            )
            for name in CONFIG_FILES
        }
        if problem := tokenizer_json.tokenizer_problem(self._json):
            raise UserError(f"{location}: {problem}")
        self._location = location
        self._declared: list[dict[str, Any]] = []
        with self._library_errors(hint):
            self._backend = self._new_backend()
            steps = self._written_steps()
        if problem := tokenizer_json.tokenizer_problem(steps):
            raise UserError(f"{location}: {problem}")
        decoder = steps["decoder"]
        self._decoders: list[dict[str, Any]] = (
            decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        )
        self._backend.encode_special_tokens = True
        self.added_tokens: list[dict[str, Any]] = self._json.get("added_tokens") or []
        self._vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(self._vocab.values(), default=-1)
        if not 0 < self.vocab_size <= MAX_VOCAB_SIZE:
            raise UserError(
                f"{location}: its ids go up to {self.vocab_size - 1:,}: expected 1 to"
                f" {MAX_VOCAB_SIZE:,} tokens"
            )
        if problem := tokenizer_json.misplaced_token(
            self.added_tokens, self._vocab, self.vocab_size
        ):
            raise UserError(f"{location}: {problem}")
        self.roles = tokenizer_json.special_roles(self.configs)
        self._add_declared(str(Path(location).parent))
        with prefix_errors(location):
            self.eos_token_id = self._find_eos_token_id()
            self.bos_token_id = self._named_token_id("bos_token")
        self.named_ids = [id for id in (self.eos_token_id, self.bos_token_id) if id is not None]
        self._encoder = self._text_encoder()

    def _add_declared(self, location: str) -> None:
        """Add the tokens that other files declare; those that tokenizer.json does not have at all
        get the next ids.
        """
        self._declared = tokenizer_json.declared_tokens(
            self.configs, self._json, self._vocab, location
        )
        if self._declared:
            # The library goes on hiding what was special before.
            hidden = [token["content"] for token in self.added_tokens if token["special"]]
            with self._library_errors("cannot add what the files beside it declare"):
                self._backend.add_tokens(
                    [tokenizers.AddedToken(**token) for token in self._declared]
                )
            listed = tokenizer_json.as_listed(self._backend)
            self.added_tokens = [
                {**token, "special": token["special"] or token["content"] in hidden}
                for token in listed
            ]
            self._vocab = self._backend.get_vocab(with_added_tokens=True)
            self.vocab_size = 1 + max(self._vocab.values())

    def _new_backend(
        self, spellings: Mapping[str, str] = MappingProxyType({})
    ) -> tokenizers.Tokenizer:
        """The library's tokenizer, with the tokens that other files declare; some tokens get other
        `spellings`.
        """

        def spell(token: str) -> str:
            return spellings.get(token, token)

        table = {**self._json}
        if spellings:
            pieces = [[spell(token), score] for token, score in table["model"]["vocab"]]
            table["model"] = {**table["model"], "vocab": pieces}
            table["added_tokens"] = [
                {**token, "content": spell(token["content"])}
                for token in table.get("added_tokens") or []
            ]
        # Not the text of the file, in which a key may be there twice: the library must read what
        # was checked.
        backend = tokenizers.Tokenizer.from_str(json.dumps(table))
        backend.no_truncation()
        backend.no_padding()
        backend.add_tokens(
            [
                tokenizers.AddedToken(**{**each, "content": spell(each["content"])})
                for each in self._declared
            ]
        )
        return backend

    def _written_steps(self) -> dict[str, dict[str, Any]]:
        """Normalizer and decoder as the library writes them: a file may have lists of values, or
        leave some out.
        """
        parts = {"normalizer": self._backend.normalizer, "decoder": self._backend.decoder}
        return {
            name: json.loads(part.__getstate__()) if part else {} for name, part in parts.items()
        }

    def _text_encoder(self) -> tokenizers.Tokenizer:
        """What encodes a text: the same tokenizer, but no text spells a special token of its
        vocabulary.
        """
        if not isinstance(self._json["model"].get("vocab"), list):
            return self._backend
        # A unigram model matches everything in its vocabulary, so these tokens get spellings that
        # no text contains.
        return self._new_backend(
            {self.id_to_token(id): secrets.token_hex(16) for id in self.all_special_ids}
        )

    @contextmanager
    def _library_errors(self, what: str) -> Iterator[None]:
        """Turns the library's exceptions into UserError: it raises plain Exception, and Rust
        panics, which are not derived from Exception.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise UserError(f"{self._location}: {what}: {error}") from None
            raise

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a tokenizer.json, or a folder with one, with the files beside it.

        Raises UserError.
        """
        file = Path(path) if isinstance(path, str) else path  # a path in a store is not a string
        refuse_sentencepiece(file)
        if file.is_dir():
            file = file / "tokenizer.json"
        try:
            text = read_bounded(file, MAX_TOKENIZER_BYTES).decode("utf-8-sig")
            companions = {
                name: read_bounded(beside).decode("utf-8-sig")
                for name in COMPANION_FILES
                if (beside := file.parent / name).is_file()
            }
            others = (
                sorted(file.parent.glob(f"{ADDITIONAL_TEMPLATES}/*.jinja"))
                if isinstance(file, Path)
                else []
            )
            templates = {each.stem: read_bounded(each).decode("utf-8-sig") for each in others}
        except FileNotFoundError:
            raise UserError(
                f"{file}: no such tokenizer; name a tokenizer.json or a folder that holds one"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from None
        return cls(text, _with_named_templates(companions, templates, file), str(file))

    @property
    def files(self) -> dict[str, str]:
        """The texts of the files that it is saved as, by name; tokenizer.json last."""
        return {**self._companions, "tokenizer.json": self._text}

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and its companions, unchanged, into a folder; tokenizer.json
        last.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            atomic_write_text(folder / name, text)

    @cached_property
    def hash(self) -> str:
        """xxh3 of the tokenizer.json, regardless of its spacing and key order, and of the
        end-of-text token's id.
        """
        declared = (
            [self.added_tokens]
            if self.added_tokens != (self._json.get("added_tokens") or [])
            else []
        )
        canonical = json.dumps(
            [self._json, self.eos_token_id, *declared], sort_keys=True, separators=(",", ":")
        )
        return xxhash.xxh3_128_hexdigest(canonical.encode())

    def encode(self, text: str, *, parse_special_tokens: bool = False) -> list[int]:
        """The ids of a text, without additional ones; a special token's spelling is encoded as
        text, unless `parse_special_tokens`, as transformers encodes.
        """
        encoder = self._parsing_encoder if parse_special_tokens else self._encoder
        with self._library_errors("cannot encode a text"):
            return encoder.encode(text, add_special_tokens=False).ids

    @cached_property
    def _parsing_encoder(self) -> tokenizers.Tokenizer:
        """The same tokenizer, for texts that may spell special tokens."""
        return self._new_backend()

    @cached_property
    def prefix_ids(self) -> list[int]:
        """The ids that its post-processor puts before a text, usually the beginning-of-text token;
        often empty.
        """
        plain = self.encode("a")
        processed = self._backend.encode("a", add_special_tokens=True).ids
        starts = [at for at in range(len(processed)) if processed[at : at + len(plain)] == plain]
        return processed[: starts[0]] if starts else []

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        is_continuation: bool = False,
        parse_special_tokens: bool = False,
    ) -> list[list[int]]:
        """`encode` of each.

        `is_continuation`, of plain texts: as after other tokens, where some tokenizers put no blank
        before a word.
        """
        if not is_continuation or '"first"' not in json.dumps(self._json.get("pre_tokenizer")):
            encoder = self._parsing_encoder if parse_special_tokens else self._encoder
            with self._library_errors("cannot encode a text"):
                return [
                    each.ids
                    for each in encoder.encode_batch_fast(list(texts), add_special_tokens=False)
                ]
        tokens, before = self._continuation_tokenizer
        after = [before + text for text in texts]
        return [each.ids[1:] for each in tokens.encode_batch_fast(after, add_special_tokens=False)]

    def split_long_text(
        self,
        text: str,
        piece_characters: int = PIECE_CHARACTERS,
        *,
        parse_special_tokens: bool = False,
    ) -> Iterator[str]:
        """A long text in pieces of about `piece_characters` whose ids, joined, are those of the
        whole text.

        The library needs a hundred bytes of memory for each byte that it encodes at once. Pieces
        end at line ends that no token goes across, as encoding both sides shows. If there is no
        such line end, the text stays whole.
        """
        start = 0
        while len(text) - start > 2 * piece_characters and (
            end := self._find_safe_cut(
                text, start + piece_characters, piece_characters, parse_special_tokens
            )
        ):
            yield text[start:end]
            start = end
        yield text[start:]

    def _find_safe_cut(self, text: str, start: int, length: int, parse: bool) -> int | None:
        for line_end in islice(LINE_END.finditer(text, start, start + length), MAX_CUT_ATTEMPTS):
            at = line_end.end()
            whole = text[max(0, at - CUT_CONTEXT_CHARACTERS) : at + CUT_CONTEXT_CHARACTERS]
            before = min(at, CUT_CONTEXT_CHARACTERS)
            pieces = [
                self.encode(piece, parse_special_tokens=parse)
                for piece in (whole[:before], whole[before:], whole)
            ]
            if pieces[0] + pieces[1] == pieces[2]:
                return at
        return None

    def decode(self, ids: Sequence[int], *, include_special_tokens: bool = False) -> str:
        """The text of ids, without special tokens unless `include_special_tokens`."""
        with self._library_errors("cannot decode ids"):
            return self._backend.decode(list(ids), skip_special_tokens=not include_special_tokens)

    def token_byte_lengths(self) -> np.ndarray:
        """The number of UTF-8 bytes of text that each id stands for, int32 [vocab_size]; 0 for
        special tokens.
        """
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
        specials = [token["content"] for token in self.added_tokens if token["special"]]
        # A tokenizer.json does not tell which token ends a text; these names have no other meaning.
        known = [
            token for token in (EOS_TOKEN, "</s>", "<|end_of_text|>", "<eos>") if token in specials
        ]
        if len(known) == 1:
            return self._vocab[known[0]]
        hint = 'put a tokenizer_config.json beside it that says "eos_token"'
        raise UserError(f"cannot tell which token ends a document: {hint}")

    def _named_token_id(self, role: str) -> int | None:
        return self._vocab.get(tokenizer_json.named_token(self.configs, role, self._vocab) or "")

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for within a text; the spelling of a special token."""
        return self._bytes_of_id[token_id]

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """The ids that do not stand for text: tokens that the file marks as special, and those that
        begin and end a text.
        """
        return frozenset(
            [*self.named_ids, *(token["id"] for token in self.added_tokens if token["special"])]
        )

    @cached_property
    def _continuation_tokenizer(self) -> tuple[tokenizers.Tokenizer, str]:
        """The tokenizer with one more token, to put before a text, and its spelling, which no text
        contains.
        """
        tokens = tokenizers.Tokenizer.from_str(self._encoder.to_str())
        before = secrets.token_hex(16)
        tokens.encode_special_tokens = True
        tokens.add_tokens([tokenizers.AddedToken(before, normalized=False)])
        return tokens, before

    @cached_property
    def drops_leading_space(self) -> bool:
        """Whether a decoded text begins without the blank of its first token."""
        # Without a decoder the library puts a blank between tokens, and for WordPiece before words.
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
        added = {token["id"] for token in self.added_tokens}
        pieces = [b""] * self.vocab_size
        for token, id in self._vocab.items():
            if id in added:
                pieces[id] = token.encode()
            elif "ByteLevel" in kinds:
                known = all(character in tokenizer_json.BYTE_OF_CHARACTER for character in token)
                pieces[id] = (
                    bytes(map(tokenizer_json.BYTE_OF_CHARACTER.__getitem__, token))
                    if known
                    else token.encode()
                )
            elif "ByteFallback" in kinds and BYTE_TOKEN.fullmatch(token):
                pieces[id] = bytes([int(token[3:5], 16)])
            elif "WordPiece" in kinds:
                prefix = kinds["WordPiece"]["prefix"]
                pieces[id] = (
                    token.removeprefix(prefix) if token.startswith(prefix) else " " + token
                ).encode()
            elif None in kinds:
                pieces[id] = (" " + token).encode()
            else:
                if "Metaspace" in kinds:
                    token = token.replace(kinds["Metaspace"]["replacement"], " ")
                elif "Replace" in kinds:
                    token = token.replace("▁", " ")
                pieces[id] = token.encode()
        return pieces


def refuse_sentencepiece(path: Path) -> None:
    """Raise UserError for a SentencePiece model, or a folder with no other tokenizer, with the
    command that converts it.
    """
    if path.is_dir():
        if (path / "tokenizer.json").exists():
            return
        path = path / SENTENCEPIECE_FILE
    if path.suffix != ".model" or not path.is_file():
        return
    first = "" if path.name == SENTENCEPIECE_FILE else f"name it {SENTENCEPIECE_FILE}, and "
    folder = str(path.parent)
    program = (
        "from transformers import AutoTokenizer;"
        f" AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
    )
    raise UserError(
        f"{path}: a SentencePiece model is not read; {first}write a tokenizer.json beside it:"
        f" python -c {shlex.quote(program)}"
    )


def _with_named_templates(
    companions: dict[str, str], templates: dict[str, str], file: Path
) -> dict[str, str]:
    """The files beside a tokenizer.json, with several templates as transformers' list in its
    tokenizer_config.json.
    """
    if not templates:
        return companions
    source = str(file.parent / CONFIG_FILES[0])
    config = parse_json(companions.get(CONFIG_FILES[0], "{}").encode(), dict[str, Any], source)
    others = {name: text for name, text in companions.items() if name != "chat_template.jinja"}
    if "chat_template.jinja" in companions:
        templates = {"default": companions["chat_template.jinja"], **templates}
    config["chat_template"] = [
        {"name": name, "template": template} for name, template in templates.items()
    ]
    return {**others, CONFIG_FILES[0]: json.dumps(config, indent=2, ensure_ascii=False)}


class StreamDecoder:
    """Decodes one id at a time, and holds the bytes of an incomplete character.

    `is_continuation`: after other text, so that a leading blank counts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        is_continuation: bool = False,
        shown: frozenset[int] = frozenset(),
    ):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.all_special_ids - shown
        self._drop_space = tokenizer.drops_leading_space and not is_continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that is complete with `token_id`; special tokens have none, except those that
        are `shown`.
        """
        if token_id in self._hidden:
            return ""
        piece = self._tokenizer.id_to_bytes(token_id)
        if self._drop_space:
            piece = piece.removeprefix(b" ")
        self._drop_space = False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """The remaining text, with U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)
