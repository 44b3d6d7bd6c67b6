"""SentencePiece `.model` files (Kudo and Richardson 2018) as a tokenizer.json that gives the same ids. It does not train. A
file has pieces with scores and the normalization of a text: a table of replaced characters, runs of blanks that become one, a
blank before the text. The tokenizers library supports all of these except for a few settings, which are refused. Whatever is
converted is compared with SentencePiece on a few texts before it is used. What stays different: a letter that is normalized,
with an accent that Unicode has no single character for, loses the accent; and pieces of one score may be in another order.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from lmforge.core.errors import UserError, how_to_install
from lmforge.core.files.untrusted import quoted, read_bounded

MAX_MODEL_BYTES = 2**28
BLANK = "▁"
COMPOSING_RULES = ("nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf")
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE, UNUSED = 1, 2, 3, 4, 6, 5  # ModelProto.SentencePiece.Type
# Blanks at either end and in runs, line ends, letters of several scripts and sizes, symbols that few vocabularies have, and
# digits.
PROBES = (
    "The quick brown fox, isn't it?",
    "  two  blanks   and\ta tab \n\n a line end  ",
    "Ça va? Über ﬁve Ａ①, e\u0301 日本語 Привет עברית ☃️ 🏳️‍🌈 \u00a0x\u3000y",
    "3.14 = 22/7 ≈ 1,000,000 ▁a",
    "x",
    " ",
)


def convert_sentencepiece(file: Path) -> tuple[str, dict[str, str]]:
    """The tokenizer.json of a `.model` file, and the texts of the files beside it by name.

    Raises UserError without the package sentencepiece, and for a file that is damaged, or cannot be converted to give the same
    ids: other types than unigram and BPE, blanks after words instead of before, pieces out of use, and most BPE models with
    symbols that the user defined.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import SentencePieceProcessor
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    except ImportError as problem:
        raise UserError(f"{file}: needs {problem.name}, which is not installed; {how_to_install('sentencepiece')}") from None
    try:
        content = read_bounded(file, MAX_MODEL_BYTES)
    except FileNotFoundError:
        raise UserError(f"{file}: no such tokenizer; name a SentencePiece model or a tokenizer.json") from None
    proto = ModelProto()
    try:
        proto.ParseFromString(content)
        theirs = SentencePieceProcessor(model_proto=content)
    except (DecodeError, RuntimeError):
        raise UserError(f"{file}: not a SentencePiece model, or damaged; fetch it again") from None
    pieces = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    if reason := _unsupported(proto):
        raise UserError(f"{file}: {reason}; such models are not converted; give a tokenizer.json")
    if not proto.pieces:
        raise UserError(f"{file}: not a SentencePiece model, or damaged; fetch it again")
    if theirs.eos_id() < 0:
        raise UserError(
            f"{file}: no piece of it ends a text (eos_id is -1); give a tokenizer.json beside a tokenizer_config.json"
        )
    ours = _build(proto, pieces)
    plain = tokenizers.Tokenizer.from_str(ours.to_str())
    plain.encode_special_tokens = True
    symbols = [f"a{piece.piece} b{piece.piece}c" for piece in proto.pieces if piece.type == USER_DEFINED]
    for probe in (*PROBES, *symbols[:100]):
        # In a unigram model two orders of the same pieces have the same score, so the last bits of a sum decide: 0+00 or 00+0.
        if sorted(plain.encode(probe, add_special_tokens=False).ids) != sorted(theirs.encode(probe)):
            raise UserError(f"{file}: converted, it would encode {quoted(probe)} differently; give a tokenizer.json")
    named = {"eos_token": theirs.eos_id(), "bos_token": theirs.bos_id(), "unk_token": theirs.unk_id()}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {role: proto.pieces[number].piece for role, number in named.items() if number >= 0}
    return ours.to_str(pretty=True), {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False)}


def _unsupported(proto: Any) -> str | None:
    """The feature of a model that cannot be converted, or None. `proto` is a ModelProto here and below."""
    kinds = {piece.type for piece in proto.pieces}
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        return "of neither unigram nor BPE type"
    if proto.trainer_spec.treat_whitespace_as_suffix:
        return "has blanks after words (treat_whitespace_as_suffix)"
    if not proto.normalizer_spec.escape_whitespaces:
        return "keeps blanks as they are (escape_whitespaces is off)"
    if UNUSED in kinds:
        return "has pieces that are out of use"
    if len({piece.piece for piece in proto.pieces}) < len(proto.pieces):
        return "has a piece twice"
    return None


def _build(proto: Any, ids: dict[str, int]) -> tokenizers.Tokenizer:
    has_bytes = any(piece.type == BYTE for piece in proto.pieces)
    unknown = next(number for number, piece in enumerate(proto.pieces) if piece.type == UNKNOWN)
    is_unigram = proto.trainer_spec.model_type == UNIGRAM
    model: models.Model
    if is_unigram:
        model = models.Unigram(_scored_pieces(proto), unknown, has_bytes)
    else:
        unk_token = proto.pieces[unknown].piece
        model = models.BPE(ids, _merges(proto, ids), unk_token=unk_token, fuse_unk=True, byte_fallback=has_bytes)
    ours = tokenizers.Tokenizer(model)
    ours.normalizer = _normalizer(proto)
    steps: list[Any] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix or proto.normalizer_spec.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", 1, 0))
    ours.decoder = decoders.Sequence(steps)
    special = [piece.piece for piece in proto.pieces if piece.type in (UNKNOWN, CONTROL)]
    ours.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    if not is_unigram:
        symbols = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
        ours.add_tokens([AddedToken(piece, normalized=False) for piece in symbols])
    return ours


def _scored_pieces(proto: Any) -> list[tuple[str, float]]:
    """The scores by which SentencePiece divides a text."""
    scores = [piece.score for piece in proto.pieces if piece.type == NORMAL]
    highest, lowest = max(scores, default=0.0), min(scores, default=0.0)
    never = 10 * lowest - 100  # less than the sum of its characters' scores
    scored = []
    for piece in proto.pieces:
        if piece.type == USER_DEFINED:
            # SentencePiece's own formula, which always prefers a symbol.
            scored.append((piece.piece, len(piece.piece.encode()) * highest - 0.1))
        else:
            scored.append((piece.piece, piece.score if piece.type == NORMAL else never))
    return scored


def _merges(proto: Any, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Each pair of pieces that is a piece together, the pair of the highest score first."""
    merges = []
    mergeable = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    for piece, score in mergeable.items():
        for at in range(1, len(piece)):
            if piece[:at] in mergeable and piece[at:] in mergeable:
                merges.append((-score, ids[piece], at, (piece[:at], piece[at:])))
    return [pair for *_, pair in sorted(merges)]


def _normalizer(proto: Any) -> normalizers.Normalizer:
    spec = proto.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        if spec.name in COMPOSING_RULES:
            # The library looks up grapheme clusters, such as a letter with its accent or \r\n, and takes the shortest entry
            # that matches: that of the letter alone.
            steps.append(normalizers.NFC())
            if spec.name.startswith("nmt"):
                steps.append(normalizers.Replace("\r\n", "  "))
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # In the library's expressions ^ and $ are the ends of a line.
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(BLANK))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])
