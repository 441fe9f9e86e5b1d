"""AWQ, version gemm: 4 bits with a zero a group.

Of a linear: ``qweight`` int32 [in, out / 8] and ``qzeros`` int32 [groups, out / 8] pack along the output, nibble i of a
word (lowest first) being feature ``ORDER[i]`` of its eight; ``scales`` [groups, out]. Source: AutoAWQ, ``gemm.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lmjax.models.hf_config import HfConfig
from lmjax.nn.packing import Packing
from lmjax.weights.codes import Codes, Infos, Stored, float32, nibbles, within
from lmjax.weights.quant_fields import check_fields, check_shape, check_stored, is_ignored, modules, names, tensor
from lmjax.weights.safetensors import Range, TensorInfo, read_tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PER_WORD = 8
APPLIED = (
    *("bits", "group_size", "zero_point", "version", "modules_to_not_convert", "format", "method"),
    *("checkpoint_format", "pack_dtype"),
)
OF_QUANTISER = ("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")


@dataclass(frozen=True)
class Awq:
    group: int  # 0: one for all of the input
    zero: bool
    ignored: tuple[str, ...]
    name: str = "awq"

    def packing(self, module: str, rows: int, columns: int) -> Packing | None:
        if is_ignored(module, self.ignored):
            return None
        return Packing("int4", self.group or columns, zero=True, scale_dtype="float16")

    def find(self, infos: Infos) -> dict[str, Stored]:
        return {
            f"{module}.weight": self._stored(infos, module, info) for module, info in modules(infos, "qweight").items()
        }

    def _stored(self, infos: Infos, module: str, weight: TensorInfo) -> Stored:
        check_stored(weight, "I32")
        columns, rows = weight.shape[0], weight.shape[1] * PER_WORD
        groups = -(-columns // (self.group or columns))
        scales = tensor(infos, module, "scales")
        check_shape(scales, (groups, rows))
        parts, zeros = [weight, scales], None
        if self.zero:
            zeros = tensor(infos, module, "qzeros")
            check_shape(zeros, (groups, rows // PER_WORD))
            parts.append(zeros)
        elif (found := infos.get(f"{module}.qzeros")) is not None:
            parts.append(found)
        read = partial(_read, weight, scales, zeros)
        return Stored((rows, columns), tuple(parts), read, self.packing(module, rows, columns))

    def harmless(self, name: str) -> bool:
        return False


def _read(weight: TensorInfo, scales: TensorInfo, zeros: TensorInfo | None, rows: Range | None) -> Codes:
    first, last = cut = within(rows, weight.shape[1] * PER_WORD)
    words = (first // PER_WORD, -(-last // PER_WORD))
    inner = slice(first - words[0] * PER_WORD, last - words[0] * PER_WORD)
    values = _in_order(read_tensor(weight, columns=words))[:, inner].T
    scale = float32(read_tensor(scales, columns=cut)).T
    if zeros is None:
        return Codes(values, scale, np.full_like(scale, 8))
    zero = _in_order(read_tensor(zeros, columns=words))[:, inner].T
    return Codes(values, scale, zero.astype(np.float32))


def _in_order(words: np.ndarray) -> np.ndarray:
    found = nibbles(words, 4, 1).reshape(len(words), -1, PER_WORD)
    out = np.empty_like(found)
    out[:, :, list(ORDER)] = found
    return out.reshape(len(words), -1)


def layout(config: HfConfig) -> Awq:
    check_fields(config, APPLIED, OF_QUANTISER)
    if config.get("bits", 4) != 4:
        raise config.error("bits", config.get("bits"), "4")
    config.choice("method", "awq", {"awq": None})
    if config.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise config.error("pack_dtype", config.get("pack_dtype"), "int32")
    for field in ("version", "format", "checkpoint_format"):
        version: Any = config.get(field, "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise config.error(field, version, "gemm")
    group: Any = config.get("group_size", 128)
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and group < 1):
        raise config.error("group_size", group, "-1 or an integer of at least 1")
    return Awq(
        group=0 if group == -1 else group,
        zero=config.boolean("zero_point", True),
        ignored=names(config, "modules_to_not_convert"),
    )
