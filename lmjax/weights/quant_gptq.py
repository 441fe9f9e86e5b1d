"""GPTQ: AutoGPTQ's and GPTQModel's tensors, versions 1 and 2.

Of a linear: ``qweight`` int32 [in / p, out] packs p = 32 / bits integers along the input, lowest bits first; ``qzeros``
int32 [groups, out / p] along the output; ``scales`` [groups, out]; ``g_idx`` int32 [in], the group of each input
feature. Version 1 keeps zeros minus one. Source: AutoGPTQ, ``qlinear_torch``.
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

APPLIED = (
    *("bits", "group_size", "desc_act", "sym", "checkpoint_format", "lm_head", "modules_to_not_convert"),
    *("pack_dtype", "format", "method", "data_type"),
)
# how the weights were found, and which kernels run them elsewhere
OF_QUANTISER = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse", "act_group_aware", "meta"),
    *("model_name_or_path", "model_file_base_name", "tokenizer", "dataset", "batch_size", "pad_token_id", "quantizer"),
    *("use_cuda_fp16", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "backend"),
    *("modules_in_block_to_quantize", "cache_block_outputs", "max_input_length", "use_exllama", "exllama_config"),
    *("disable_exllama", "offload_to_disk", "adapter"),
    *("autoround_version", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "low_gpu_mem_usage", "amp", "scale_dtype"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "gradient_accumulate_steps"),
)


@dataclass(frozen=True)
class Gptq:
    bits: int
    group: int  # 0: one for all of the input
    act_order: bool
    symmetric: bool
    first_version: bool
    ignored: tuple[str, ...]
    name: str = "gptq"

    def packing(self, module: str, rows: int, columns: int) -> Packing | None:
        if is_ignored(module, self.ignored) or (self.act_order and self.group):
            return None
        group = self.group or columns
        if self.bits == 8:
            return Packing("int8", group % columns, scale_dtype="float16") if self.symmetric else None
        return Packing("int4", group, zero=not self.symmetric, scale_dtype="float16")

    def find(self, infos: Infos) -> dict[str, Stored]:
        return {
            f"{module}.weight": self._stored(infos, module, info) for module, info in modules(infos, "qweight").items()
        }

    def _stored(self, infos: Infos, module: str, weight: TensorInfo) -> Stored:
        check_stored(weight, "I32")
        per_word = 32 // self.bits
        columns, rows = weight.shape[0] * per_word, weight.shape[1]
        scales, zeros = tensor(infos, module, "scales"), tensor(infos, module, "qzeros")
        groups = -(-columns // (self.group or columns))
        check_shape(scales, (groups, rows))
        check_shape(zeros, (groups, -(-rows // per_word)))
        parts = [weight, scales, zeros]
        order = infos.get(f"{module}.g_idx")
        if order is not None:
            check_shape(order, (columns,))
            parts.append(order)
        read = partial(self._read, weight, scales, zeros, order)
        return Stored((rows, columns), tuple(parts), read, self.packing(module, rows, columns))

    def _read(
        self, weight: TensorInfo, scales: TensorInfo, zeros: TensorInfo, order: TensorInfo | None, rows: Range | None
    ) -> Codes:
        first, last = cut = within(rows, weight.shape[1])
        values = nibbles(read_tensor(weight, columns=cut), self.bits, 0).T
        scale = float32(read_tensor(scales, columns=cut)).T
        zero = nibbles(read_tensor(zeros), self.bits, 1)[:, first:last].T
        if self.first_version:
            zero = zero + np.uint8(1) & np.uint8(2**self.bits - 1)
        groups = None
        if order is not None:
            groups = read_tensor(order)
            # zeros: not in use, as exllama takes them
            if not groups.any() or (groups == np.arange(len(groups)) // (self.group or len(groups))).all():
                groups = None
        if self.bits == 8 and (zero == 128).all():
            return Codes((values ^ np.uint8(128)).view(np.int8), scale, None, groups)
        return Codes(values, scale, zero.astype(np.float32), groups)

    def harmless(self, name: str) -> bool:
        return False


def layout(config: HfConfig) -> Gptq:
    check_fields(config, APPLIED, OF_QUANTISER)
    config.choice("method", "gptq", {"gptq": None})
    config.choice("data_type", "int", {"int": None})
    bits: Any = config.integer("bits")
    if bits not in (4, 8):
        raise config.error("bits", bits, "4 or 8")
    group: Any = config.get("group_size", 128)
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and group < 1):
        raise config.error("group_size", group, "-1 or an integer of at least 1")
    formats = {"gptq": True, "gptq_v2": False}
    stored = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    first_version = config.choice(stored, "gptq", formats)
    if config.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise config.error("pack_dtype", config.get("pack_dtype"), "int32")
    config.boolean("lm_head", False)  # whether the head is quantised shows in its tensors
    return Gptq(
        bits=bits,
        group=0 if group == -1 else group,
        act_order=config.boolean("desc_act", False),
        symmetric=config.boolean("sym", True),
        first_version=first_version,
        ignored=names(config, "modules_to_not_convert"),
    )
