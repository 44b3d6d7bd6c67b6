"""What the tokenizers library would not survive in a tokenizer.json, checked before it is opened.

And the tokens that the files beside it declare. How it is opened is in `tokenizer.py`.
"""

import base64
import re
from collections.abc import Container, Iterator
from contextlib import suppress
from typing import Any, NotRequired

import numpy as np
from tokenizers import AddedToken, Tokenizer
from typing_extensions import TypedDict

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import check_content, quoted

CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# transformers' names of special tokens, in the order in which it gives them ids.
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# The 256 characters in which byte-level tokenizers write bytes (Radford et al. 2019), each with its
# byte: bytes that print as themselves stay; the others, in order, take the characters from U+0100
# on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)
}


def tokenizer_problem(content: dict[str, Any]) -> str | None:
    """Why the library must not open this tokenizer.json; None if it may."""
    problems = (
        _step_problem(step)
        for name in ("normalizer", "decoder")
        for step in _steps(content.get(name))
    )
    return next(filter(None, problems), None) or _prefix_problem(content.get("model"))


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The objects of a tokenizer.json, those that a text goes through among them."""
    if isinstance(part, dict):
        yield part
    if isinstance(part, dict | list):
        for name, inner in part.items() if isinstance(part, dict) else enumerate(part):
            if name not in ("vocab", "merges", "added_tokens"):
                yield from _steps(inner)


def _step_problem(step: dict[str, Any]) -> str | None:
    """Why the library would panic in this step, and say so on standard error whoever catches it;
    None where it would not.
    """
    match step:
        case {"type": "Prepend", "prepend": ""}:
            return "normalizer: Prepend: prepends nothing"
        case {
            "type": "Replace",
            "pattern": {"String": "" as pattern} | {"Regex": str(pattern)},
        } if _matches_nothing(pattern):
            return f"Replace: its pattern {quoted(pattern)} matches without a character"
        case {"type": "Strip", "stop": stop} if stop:
            return (
                f"decoder: Strip: expected 0 as its stop, got {quoted(stop)}: a token may have"
                " fewer characters"
            )
        case {"type": "Precompiled"} if not _is_charsmap(step.get("precompiled_charsmap")):
            return (
                "normalizer: Precompiled: its precompiled_charsmap is damaged; copy the file again"
            )
    return None


def _matches_nothing(pattern: str) -> bool:
    """Whether an expression matches before a character, without it."""
    with suppress(re.error):  # the library has expressions that re lacks
        return any(
            match.end() == 0 for character in "a\0" if (match := re.match(pattern, character))
        )
    return False


def _is_charsmap(encoded: Any) -> bool:
    """Whether this is in base64 what SentencePiece compiles: the size of a double array, the array,
    and the texts it points to.

    The library goes where the array points without a check. A unit with the highest bit is the
    place of a text; any other is an offset to a block of 256 units.
    """
    try:
        content = base64.b64decode(encoded, validate=True)
        size = int.from_bytes(content[:4], "little")
        units = np.frombuffer(content[4 : 4 + size], "<u4").astype(np.int64)
        texts = content[4 + size :].decode().encode()
    except (TypeError, ValueError):
        return False
    offsets = (units >> 10) << ((units & 1 << 9) >> 6)
    is_place = units >> 31 == 1
    blocks = np.arange(len(units)) ^ offsets
    # Not within a character.
    begins = [place for place, byte in enumerate(texts) if byte & 0xC0 != 0x80]
    fits = np.where(is_place, np.isin(units - (1 << 31), begins), blocks | 255 < len(units))
    return 0 < 4 * len(units) == size and bool(fits.all())


def _prefix_problem(model: Any) -> str | None:
    """Why the library would end the process over this model: it cuts the continuing_subword_prefix
    off the second token of each merge, in bytes and whether or not the token begins with it. None
    where it would not.
    """
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if prefix else None
    for index, merge in enumerate(merges if isinstance(merges, list) else ()):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        second = pair[-1] if isinstance(pair, list) and pair else None
        if isinstance(second, str) and not second.startswith(str(prefix)):
            return (
                f"model.merges[{index}]: expected a second token that begins with the"
                f" continuing_subword_prefix {quoted(prefix)}, got {quoted(merge)}"
            )
    return None


def misplaced_token(
    added_tokens: list[dict[str, Any]], vocabulary: dict[str, int], vocab_size: int
) -> str | None:
    """Which added token has another id in the library than in its file; None where there is
    none.
    """
    for index, token in enumerate(added_tokens):
        # The library gives a token that is not in the vocabulary the next free id, whatever the
        # file says.
        id = vocabulary.get(token["content"])
        if token["id"] != id and (id is not None or token["id"] >= vocab_size):
            given = "no id" if id is None else f"the id {id}"
            return (
                f"added_tokens[{index}].id: {token['id']}, but the library gives"
                f" {quoted(token['content'])} {given}"
            )
    return None


class _Token(TypedDict):
    content: str
    single_word: NotRequired[bool]
    lstrip: NotRequired[bool]
    rstrip: NotRequired[bool]
    normalized: NotRequired[bool]
    special: NotRequired[bool]


_FLAGS = tuple(_Token.__annotations__)
_EXTRA = "extra_special_tokens"
_SPECIFIC = "model_specific_special_tokens"


def as_listed(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer as its tokenizer.json would list them."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return [{"id": id, **_as_dict(token)} for id, token in added]


def _as_dict(token: AddedToken) -> dict[str, Any]:
    return {name: getattr(token, name) for name in _FLAGS}


def special_roles(configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What transformers takes tokenizer_config.json to be: special_tokens_map.json replaces its
    fields, unless it has added_tokens_decoder.
    """
    config, mapped, _ = (configs[name] for name in CONFIG_FILES)
    return config if "added_tokens_decoder" in config else config | mapped


def named_token(
    configs: dict[str, dict[str, Any]], role: str, vocabulary: Container[str]
) -> str | None:
    """The spelling of the token that has a role.

    Raises UserError where it is not in the vocabulary.
    """
    named = special_roles(configs).get(role)
    token = _spelling(named)
    if token is not None and (not isinstance(token, str) or token not in vocabulary):
        file = next(name for name, config in configs.items() if config.get(role) == named)
        raise UserError(f"has no token {quoted(token)}, which {file} says is its {role}")
    return token


def declared_tokens(
    configs: dict[str, dict[str, Any]],
    content: dict[str, Any],
    vocabulary: Container[str],
    location: str,
) -> list[dict[str, Any]]:
    """What transformers 5 adds to a tokenizer.json of this `content` and `vocabulary`, in its
    order: the tokens that the files beside it declare, with their flags, unless it has them with
    the same flags.

    Raises UserError, naming the field, where one is no token.
    """
    config, mapped, added = (dict(configs[name]) for name in CONFIG_FILES)
    for name in (_EXTRA, "additional_special_tokens"):
        for given in (config.get(name), mapped.get(name)):
            if given and not isinstance(given, dict):
                check_content(given, list[Any], f"{location}: {name}")
    if not config.get(_EXTRA):
        config[_EXTRA] = config.pop("additional_special_tokens", None)
    specific = {
        name: config.pop(name) for name in _other_roles(config) if isinstance(config[name], str)
    }
    specific |= config.pop(_EXTRA) if isinstance(config.get(_EXTRA), dict) else {}
    source = f"{location}: {_SPECIFIC}"
    specific = specific or check_content(config.get(_SPECIFIC) or {}, dict[str, Any], source)
    listed = {
        token["id"]: AddedToken(**{name: token[name] for name in _FLAGS})
        for token in content.get("added_tokens") or []
    }
    unchanged = {token.content: _as_dict(token) for token in listed.values()}
    if "added_tokens_decoder" in config:
        decoder = check_content(
            config["added_tokens_decoder"], dict[int, _Token], f"{location}: added_tokens_decoder"
        )
        by_id = {id: AddedToken(**token) for id, token in decoder.items()}
    else:
        if isinstance(mapped.get(_EXTRA), list):
            mapped[_EXTRA] = [
                *(before := config.get(_EXTRA) or []),
                *(token for token in mapped[_EXTRA] if token not in before),
            ]
        config |= mapped
        specific |= config.pop(_EXTRA) if isinstance(config.get(_EXTRA), dict) else {}
        special = [
            _spelling(token) for token in (*map(config.get, ROLES), *(config.get(_EXTRA) or []))
        ]
        ids = check_content(added, dict[str, int], f"{location}: added_tokens.json")
        by_id = {
            id: AddedToken(text, special=text in special, normalized=text not in special)
            for text, id in ids.items()
        }
        by_id |= listed
    if isinstance(content.get("padding"), dict):
        config.setdefault("pad_token", content["padding"].get("pad_token"))
    named = {name: config.get(name) for name in (*ROLES, *_other_roles(config))} | specific
    extra = config.get(_EXTRA) or config.get("additional_special_tokens") or []
    fields = [(name, token) for name, token in named.items() if token is not None]
    fields += [(_EXTRA, token) for token in extra]
    tokens = [by_id[id] for id in sorted(by_id)]
    roles = [_spelling(token) for _, token in fields]
    for token in tokens:
        token.special = token.special or token.content in roles
    known = {token.content: token for token in (*listed.values(), *tokens)}
    for field, value in fields:
        given = check_content(
            {"content": value} if isinstance(value, str) else value, _Token, f"{location}: {field}"
        )
        flags: dict[str, Any] = {**given, "special": True}
        existing = known.get(given["content"])
        if existing is None and (
            field not in ("bos_token", "eos_token") or given["content"] in vocabulary
        ):
            tokens.append(AddedToken(**flags))
        elif existing is not None and not existing.special:  # a text must not spell it
            existing.special = True
            tokens.append(existing)
    return [token for token in map(_as_dict, tokens) if token != unchanged.get(token["content"])]


def _other_roles(config: dict[str, Any]) -> list[str]:
    """The names in a config of roles that only its model has."""
    return [
        name
        for name in config
        if name.endswith("_token") and name not in ROLES and isinstance(config[name], str | dict)
    ]


def _spelling(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
