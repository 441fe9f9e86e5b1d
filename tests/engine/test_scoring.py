"""``LLM.logprobs`` and processed log-probabilities against a plain flax decoder, on a real tiny engine."""

import numpy as np
import pytest

from lmjax import LLM, SamplingParams
from lmjax.types import ParameterError
from tests.engine.small import CONTEXT, TOP, log_softmax, plain_logits, small_llm
from tests.fixtures import model_dir
from tests.sampling.reference import kept_tokens

VOCAB = 512


def texts(*lengths):
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, length) for length in lengths]


def expect(scores, ids, logprobs=None, k=0, entropy=False):
    """``logprobs``: float64 [n, V] of the distributions (default: raw)."""
    logprobs = log_softmax(plain_logits(ids)) if logprobs is None else logprobs
    before, count = logprobs[:-1], len(ids) - 1
    wanted = before[np.arange(count), ids[1:]]
    assert scores.logprobs.dtype == np.float32 and scores.logprobs.shape == (count,)
    np.testing.assert_allclose(scores.logprobs, wanted, atol=1e-4)
    close = 1 + (before > wanted[:, None] + 1e-5).sum(1), 1 + (before > wanted[:, None] - 1e-5).sum(1)
    assert ((scores.ranks >= close[0]) & (scores.ranks <= close[1])).all()
    assert scores.top_ids.shape == scores.top_logprobs.shape == (count, k)
    best = -np.sort(-before, axis=1)[:, :k]
    np.testing.assert_allclose(scores.top_logprobs, best, atol=1e-4)
    real = np.isfinite(best)
    np.testing.assert_allclose(np.take_along_axis(before, scores.top_ids, 1)[real], best[real], atol=1e-4)
    if not entropy:
        assert scores.entropies is None
        return
    terms = np.where(np.isfinite(before), np.exp(before) * np.where(np.isfinite(before), before, 0.0), 0.0)
    np.testing.assert_allclose(scores.entropies, -terms.sum(1), atol=1e-4)


def test_many_sequences_up_to_the_whole_context():
    llm = small_llm()
    sequences = texts(CONTEXT, 2, 17, 1, 16, 33, 3, 40, CONTEXT)
    found = llm.logprobs(sequences, top_k=3, entropy=True)
    assert len(found) == len(sequences)
    for scores, ids in zip(found, sequences, strict=True):
        expect(scores, ids, k=3, entropy=True)
    stats = llm.stats()
    assert stats.compiles == 0 and stats.num_running == 0 and stats.kv_usage == 0
    again = llm.logprobs(sequences, top_k=3)  # what is in the prefix cache by now is scored all the same
    for scores, ids in zip(again, sequences, strict=True):
        expect(scores, ids, k=3)


def test_one_sequence_may_be_a_list_or_an_array():
    [ids] = texts(20)
    for given in (ids, ids.tolist(), ids.astype(np.uint16)):
        expect(small_llm().logprobs(given), ids)
    [one] = small_llm().logprobs([ids.tolist()])
    expect(one, ids)
    assert small_llm().logprobs([]) == []
    assert small_llm().logprobs([7], entropy=True).entropies.shape == (0,)


def test_the_sampler_and_the_scorer_agree():
    llm = small_llm()
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        for i, t in enumerate((0.0, 0.7, 1.3))
    ]
    outputs = llm.generate([ids.tolist() for ids in texts(9, 30, 3)], params, use_tqdm=False)
    whole = [np.array(out.prompt_token_ids + out.outputs[0].token_ids) for out in outputs]
    for scores, out, ids in zip(llm.logprobs(whole), outputs, whole, strict=True):
        entries = [*out.prompt_logprobs[1:], *out.outputs[0].logprobs]
        recorded = [entry[int(token)].logprob for entry, token in zip(entries, ids[1:], strict=True)]
        np.testing.assert_allclose(scores.logprobs, recorded, atol=1e-4)


def test_scores_come_beside_answers():
    """A generator in between: both use the same steps."""
    llm = small_llm()
    [ids] = texts(50)
    stream = llm.stream("outer", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    tokens = list(next(stream).deltas[0].token_ids)
    expect(llm.logprobs(ids), ids)
    for update in stream:
        tokens += update.deltas[0].token_ids
    [alone] = llm.generate("outer", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    assert tokens == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("token_ids", "options", "message"),
    [
        ("text", {}, "token_ids: got 'text'"),
        ([[1, 2], "ab"], {}, "token_ids: must be token ids"),
        ([[1, 2], []], {}, "token_ids: is empty"),
        ([1, VOCAB], {}, f"token_ids: got the token id {VOCAB}, must be at least 0 and below {VOCAB}"),
        ([1.5, 2], {}, "token_ids: must be token ids"),
        ([1] * (CONTEXT + 1), {}, f"token_ids: has {CONTEXT + 1} tokens, must be at most {CONTEXT}"),
        ([1, 2], {"top_k": TOP + 1}, f"top_k: got {TOP + 1}, must be an integer from 0 to {TOP}"),
        ([1, 2], {"top_k": True}, "top_k: got True"),
        ([1, 2], {"sampling_params": SamplingParams()}, "sampling_params: --logprobs-mode is raw_logprobs"),
        ([1, 2], {"priority": 1}, "priority: got 1"),
    ],
)
def test_what_cannot_be_scored_is_refused(token_ids, options, message):
    with pytest.raises(ParameterError, match=f"^{message}"):
        small_llm().logprobs(token_ids, **options)


def test_a_device_without_a_model_scores_too():
    """The core's part alone: preemption, chunks and prefix hits of tests/fakes.py's device."""
    with LLM(str(model_dir("RAND")), executor="tests.engine.factories:quick") as llm:
        sequences = texts(300, 20, 2, 77)
        for scores, ids in zip(llm.logprobs(sequences, top_k=1), sequences, strict=True):
            assert scores.logprobs.shape == (len(ids) - 1,) and (scores.ranks > 0).all()


# --- processed ----------------------------------------------------------------------------------------------------


def drawn_from(logits, params):
    """Log-probabilities float64 [n, V] after temperature and filters, row by row as the float64 pipeline has it; rows
    where the cut of top_p may fall on either side are NaN."""
    out = np.full(logits.shape, np.nan)
    for i, row in enumerate(logits):
        if params.temperature == 0:
            out[i] = log_softmax(row)
            continue
        kept, margin = kept_tokens(row, params)
        if margin > 1e-4:
            out[i] = log_softmax(np.where(kept, row / params.temperature, -np.inf))
    return out


FILTERS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=5, top_k=3),
    SamplingParams(temperature=0.6, max_tokens=20, ignore_eos=True, logprobs=5, seed=1),
    SamplingParams(temperature=1.4, max_tokens=20, ignore_eos=True, logprobs=5, seed=2, top_k=4, min_p=0.05),
    SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True, logprobs=5, seed=3, top_p=0.7),
]


def test_processed_logprobs_are_of_what_is_drawn_from():
    llm = small_llm("processed_logprobs")
    outputs = llm.generate([ids.tolist() for ids in texts(9, 30, 3, 12)], FILTERS, use_tqdm=False)
    for params, out in zip(FILTERS, outputs, strict=True):
        ids = np.array(out.prompt_token_ids + out.outputs[0].token_ids)
        wanted = drawn_from(plain_logits(ids), params)
        clear = np.isfinite(wanted.max(1))
        start, filtered = len(out.prompt_token_ids), 0
        assert clear.mean() > 0.7
        for i, (token, entry) in enumerate(zip(ids[start:], out.outputs[0].logprobs, strict=True), start - 1):
            if clear[i]:
                values = [e.logprob for e in entry.values()]
                np.testing.assert_allclose(values, wanted[i, list(entry)], atol=1e-4)
                assert entry[int(token)].logprob > -np.inf
                filtered += any(e.logprob == -np.inf for e in entry.values())
        assert (filtered > 0) == (params.top_k == 4)  # fewer than the five that are shown
        assert (wanted[clear] == -np.inf).any() == (params.top_k == 4 or params.top_p < 1)
        found = llm.logprobs(ids, sampling_params=params)
        inside = clear[:-1]
        picked = wanted[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(found.logprobs[inside], picked[inside], atol=1e-4)
    expect(llm.logprobs(ids, entropy=True), ids, entropy=True)  # temperature 1, no filters: as raw


def test_the_entropy_of_a_filtered_distribution():
    params = SamplingParams(temperature=1.4, top_k=4)
    [ids] = texts(40)
    found = small_llm("processed_logprobs").logprobs(ids, sampling_params=params, entropy=True, top_k=5)
    expect(found, ids, drawn_from(plain_logits(ids), params), k=5, entropy=True)
    assert (found.top_logprobs[:, 4] == -np.inf).all()


def test_what_needs_the_history_is_refused_for_given_tokens():
    llm = small_llm("processed_logprobs")
    params = SamplingParams(presence_penalty=0.5, logit_bias={3: 1.0}, prompt_logprobs=0, max_tokens=2)
    with pytest.raises(ParameterError, match=r"prompt_logprobs: .* presence_penalty, logit_bias cannot be applied"):
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
    with pytest.raises(ParameterError, match=r"sampling_params: .* min_tokens cannot be applied"):
        llm.logprobs([1, 2, 3], sampling_params=SamplingParams(min_tokens=2))
