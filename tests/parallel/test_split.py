"""How a model's spec is cut for pipeline stages (tensor parallel: test_sharded_forward.py, test_plan_costs.py)."""

from dataclasses import replace

import pytest

from lmjax.models import decoder
from lmjax.models.registry import spec_from_hf
from lmjax.parallel.split import Degree, SplitError, share, spread, stage_degrees
from tests.parallel.sharded_forward import COMMON, MODELS


def spec_of(name, **changes):
    return spec_from_hf({**COMMON, **MODELS[name], **changes}, None)


@pytest.mark.parametrize(("layers", "stages", "places"), [(30, 4, 8), (30, 3, 10), (7, 2, 4), (2, 2, 1)])
def test_stages_have_equally_many_places(layers, stages, places):
    spec = spec_of("llama", num_hidden_layers=layers)
    wide = spread(spec, Degree(2, stages))
    assert (wide.stages, len(wide.layers)) == (stages, places)
    assert wide.layers == spec.layers[:places]
    assert wide.num_vocab_rows % (2 * stages * 128) == 0 and wide.num_vocab_rows >= spec.vocab
    (kv,) = decoder.kv_specs(wide, "float32")
    assert kv.layers == tuple(range(stages * places))
    one = share(wide, Degree(2, stages))
    assert (one.stages, len(one.layers), one.num_vocab_rows) == (1, places, wide.num_vocab_rows // (2 * stages))
    assert one.layers[0].attention.heads == spec.layers[0].attention.heads // 2


def test_a_stage_without_layers_is_refused():
    spec = spec_of("llama", num_hidden_layers=5)
    assert stage_degrees(spec) == [1, 2, 3, 5]
    with pytest.raises(
        SplitError, match=r"got 4, but of 5 layers at 2 a stage none .* this model: 1, 2, 3, 5"
    ) as caught:
        spread(spec, Degree(pp=4))
    assert caught.value.axis == "pipeline"


def test_layers_of_other_kinds_have_to_fall_on_the_same_places():
    mixed = spec_of("qwen2_moe", num_hidden_layers=4, mlp_only_layers=[0])
    with pytest.raises(SplitError, match="layer 2 is of another kind than layer 0"):
        spread(mixed, Degree(pp=2))
    assert spread(spec_of("qwen2_moe", num_hidden_layers=4, mlp_only_layers=[0, 2]), Degree(pp=2)).stages == 2


def test_windows_keep_their_groups():
    """Layers with a window in turn with others: each stage has both groups, numbered as in the first."""
    spec = spec_of("llama", num_hidden_layers=4)
    kinds = [(None, 0, 0), (8, 1, 0), (None, 0, 1), (8, 1, 1)]
    layers = [
        replace(layer, attention=replace(layer.attention, window=window, group=group, index=index))
        for layer, (window, group, index) in zip(spec.layers, kinds, strict=True)
    ]
    wide = spread(replace(spec, layers=tuple(layers)), Degree(pp=2))
    full, windowed = decoder.kv_specs(wide, "float32")
    assert (full.layers, windowed.layers, windowed.window) == ((0, 2), (1, 3), 8)
