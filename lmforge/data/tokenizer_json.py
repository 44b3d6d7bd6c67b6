"""What the tokenizers library would not survive in a tokenizer.json, or what would make a short text huge: checked before it
is opened. And the tokens that the files beside it declare. How it is opened is in `tokenizer.py`."""

import math
from collections.abc import Container, Iterator
from typing import Any, NotRequired

from tokenizers import AddedToken, Tokenizer
from typing_extensions import TypedDict

from lmforge.errors import UserError
from lmforge.untrusted import check_content, quoted

CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# transformers' names of special tokens, in the order in which it gives them ids.
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

MAX_GROWTH = 1000  # of a text in its normalizer and decoder

# The 256 characters in which byte-level tokenizers write bytes (Radford et al. 2019), each with its byte: bytes that print as
# themselves stay; the others, in order, take the characters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


def tokenizer_problem(content: dict[str, Any]) -> str | None:
    """Why the library must not open this tokenizer.json; None if it may."""
    if (growth := math.prod(_growths(content))) > MAX_GROWTH:
        return f"makes {growth:.3g} characters of one: expected at most {MAX_GROWTH:,}"
    return _prefix_problem(content.get("model"))


def _growths(part: Any) -> Iterator[float]:
    """The maximum factor by which each step of a tokenizer.json can lengthen a text."""
    if isinstance(part, dict) and part.get("type") in ("Replace", "Prepend"):
        pattern = part.get("pattern")
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        yield max(1.0, len(str(part.get("content", part.get("prepend")))) / max(1, len(str(replaced or ""))))
    elif isinstance(part, dict | list):
        for name, inner in part.items() if isinstance(part, dict) else enumerate(part):
            if name not in ("vocab", "merges", "added_tokens"):
                yield from _growths(inner)


def _prefix_problem(model: Any) -> str | None:
    """Why the library would end the process over this model: it cuts the continuing_subword_prefix off the second token of each
    merge, in bytes and whether or not the token begins with it. None where it would not."""
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if prefix else None
    for index, merge in enumerate(merges if isinstance(merges, list) else ()):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        second = pair[-1] if isinstance(pair, list) and pair else None
        if isinstance(second, str) and not second.startswith(str(prefix)):
            return (
                f"model.merges[{index}]: expected a second token that begins with the continuing_subword_prefix"
                f" {quoted(prefix)}, got {quoted(merge)}"
            )
    return None


def misplaced_token(added_tokens: list[dict[str, Any]], vocabulary: dict[str, int], vocab_size: int) -> str | None:
    """Which added token has another id in the library than in its file; None where there is none."""
    for index, token in enumerate(added_tokens):
        # The library gives a token that is not in the vocabulary the next free id, whatever the file says.
        id = vocabulary.get(token["content"])
        if token["id"] != id and (id is not None or token["id"] >= vocab_size):
            given = "no id" if id is None else f"the id {id}"
            return f"added_tokens[{index}].id: {token['id']}, but the library gives {quoted(token['content'])} {given}"
    return None


class _Token(TypedDict):
    content: str
    single_word: NotRequired[bool]
    lstrip: NotRequired[bool]
    rstrip: NotRequired[bool]
    normalized: NotRequired[bool]
    special: NotRequired[bool]


def as_listed(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer as its tokenizer.json would list them."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return [{"id": id, **{name: getattr(token, name) for name in _Token.__annotations__}} for id, token in added]


def special_roles(configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What transformers takes tokenizer_config.json to be: special_tokens_map.json replaces its fields, unless it has
    added_tokens_decoder."""
    config, mapped, _ = (configs[name] for name in CONFIG_FILES)
    return config if "added_tokens_decoder" in config else config | mapped


def named_token(configs: dict[str, dict[str, Any]], role: str, vocabulary: Container[str]) -> str | None:
    """The spelling of the token that has a role. Raises UserError where it is not in the vocabulary."""
    named = special_roles(configs).get(role)
    token = named.get("content") if isinstance(named, dict) else named
    if token is not None and (not isinstance(token, str) or token not in vocabulary):
        file = next(name for name, config in configs.items() if config.get(role) == named)
        raise UserError(f"has no token {quoted(token)}, which {file} says is its {role}")
    return token


def declared_tokens(configs: dict[str, dict[str, Any]], location: str) -> list[AddedToken]:
    """The tokens that the files beside a tokenizer.json add or make special, in the order in which transformers does.

    Raises UserError, naming the field, where one is no token.
    """
    config, mapped, added = (configs[name] for name in CONFIG_FILES)
    roles = special_roles(configs)
    named = {name: roles.get(name) for name in (*ROLES, *roles) if name.endswith("_token")}
    listed: list[Any] = []
    for each in (config,) if roles is config else (config, mapped):
        extra = each.get("extra_special_tokens") or (each is config and each.get("additional_special_tokens")) or []
        if isinstance(extra, dict):
            named |= extra
        else:
            listed += extra if isinstance(extra, list) else [extra]
    listed = listed or roles.get("additional_special_tokens") or []
    specials = [(name, token) for name, token in named.items() if isinstance(token, str | dict)]
    specials += [("extra_special_tokens", token) for token in listed]
    tokens: dict[str, AddedToken] = {}
    if roles is config:
        decoder = check_content(config["added_tokens_decoder"], dict[int, _Token], f"{location}: added_tokens_decoder")
        tokens = {token["content"]: AddedToken(**token) for _, token in sorted(decoder.items())}
    else:
        ids = check_content(added, dict[str, int], f"{location}: added_tokens.json")
        tokens = {text: AddedToken(text, normalized=True) for text in sorted(ids, key=ids.__getitem__)}
    for field, token in specials:
        given = check_content({"content": token} if isinstance(token, str) else token, _Token, f"{location}: {field}")
        if given["content"] in tokens:
            tokens[given["content"]].special = True
        elif field not in ("bos_token", "eos_token"):  # which must be in the vocabulary
            fields: dict[str, Any] = {"normalized": False, **given, "special": True}
            tokens[given["content"]] = AddedToken(**fields)
    return list(tokens.values())
