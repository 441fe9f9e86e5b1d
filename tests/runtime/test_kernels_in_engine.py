"""The engine's programs with the Pallas kernels in them, interpreted: the same answers as with the XLA forms."""

from __future__ import annotations

import pytest

from lmjax.config import ConfigError
from lmjax.runtime import buckets
from lmjax.runtime.executor import build_executor
from pallas_kernels.platform import Target
from tests.fakes import request, run_requests
from tests.runtime.requests import Limited, scheduler_config
from tests.runtime.test_equality import check_equal
from tests.runtime.tiny import tiny_config, tiny_executor

H200 = Target("cuda", (9, 0), 132, interpret=True)


@pytest.fixture
def interpreted(monkeypatch):
    """Two buckets: one whose tokens all go to the decode kernel, one for ragged batches with prefill rows."""
    monkeypatch.setattr(buckets, "SMALL_TOKENS", (4,))
    monkeypatch.setattr(buckets, "MIXED_TOKENS", ())
    executor = build_executor(tiny_config(max_num_seqs=4, max_num_batched_tokens=32), target=H200)
    assert executor.info.token_buckets == (4, 32)
    yield executor
    executor.close()


def test_same_answers_as_the_xla_forms(interpreted):
    prompt = list(range(3, 40))
    requests = [
        request(0, prompt, max_tokens=5, temperature=0.0, logprobs=3),
        request(1, [*prompt[:33], 7, 8], max_tokens=4, temperature=0.9, seed=5),
        request(2, [9], max_tokens=6, temperature=0.0),
        request(3, prompt[5:17], max_tokens=4, temperature=0.0, prompt_logprobs=2),
        request(4, prompt[1:30], max_tokens=3, temperature=0.5, seed=1, n=2),
    ]
    arrivals = {r.handle: 2 * r.handle for r in requests}
    answers = []
    for executor in (Limited(tiny_executor(), max_num_seqs=4), Limited(interpreted)):
        config = scheduler_config(max_num_batched_tokens=32)
        found, scheduler = run_requests(requests, config, executor.info, executor, arrivals=arrivals, check=True)
        assert scheduler.stats().prefix_hits > 0
        answers.append(found)
    check_equal(requests, *answers)
    assert interpreted.stats()["compiles_total"] == 0


def test_a_backend_that_cannot_serve_is_refused():
    with pytest.raises(ConfigError, match=r"--attention-backend: got triton: .*card of compute capability 8\.0"):
        build_executor(tiny_config(attention_backend="triton"))
