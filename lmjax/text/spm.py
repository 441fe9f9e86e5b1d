"""Vocabularies of sentencepiece as byte-pair encoders of the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # as sentencepiece and GGUF number them


def merges_from_scores(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Merges that do what sentencepiece does: join the two neighbours whose join has the highest score.

    For each piece in id order its splits into two pieces, by their ids; all of them by the piece's score.
    """
    usable = {piece: i for i, piece in enumerate(pieces) if kinds[i] in (NORMAL, USER_DEFINED, UNUSED)}
    found: list[tuple[float, str, str]] = []
    for piece, i in usable.items():
        splits = []
        for cut in range(1, len(piece)):
            left, right = usable.get(piece[:cut]), usable.get(piece[cut:])
            if left is not None and right is not None:
                splits.append((left, right))
        found += [(-scores[i], pieces[left], pieces[right]) for left, right in sorted(splits)]
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]


def build(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    *,
    add_space_prefix: bool = True,
    merges: list[tuple[str, str]] | None = None,
) -> Tokenizer:
    """``merges``: where the file gives them. Byte pieces, where there are any, serve characters without a piece."""
    vocab = {piece: i for i, piece in enumerate(pieces)}
    unknown = next((piece for piece, kind in zip(pieces, kinds, strict=True) if kind == UNKNOWN), None)
    model = models.BPE(
        vocab,
        merges_from_scores(pieces, scores, kinds) if merges is None else merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback="<0x00>" in vocab,
    )
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_marked(tokenizer, pieces, kinds)
    return tokenizer


def add_marked(tokenizer: Tokenizer, pieces: Sequence[str], kinds: Sequence[int], rstrip: Sequence[str] = ()) -> None:
    """Control and unknown pieces become special tokens, user-defined ones are found whole in the text.

    ``rstrip``: those that swallow the white space behind them.
    """
    special = [p for p, kind in zip(pieces, kinds, strict=True) if kind in (CONTROL, UNKNOWN) and p]
    tokenizer.add_special_tokens([AddedToken(p, special=True, normalized=False, rstrip=p in rstrip) for p in special])
    user = [p for p, kind in zip(pieces, kinds, strict=True) if kind == USER_DEFINED and p]
    tokenizer.add_tokens([AddedToken(p, normalized=False, rstrip=p in rstrip) for p in user])
