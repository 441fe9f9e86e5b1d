"""Makes the goldens of the model tests with Hugging Face transformers (``pip install lmjax[oracle]``).

    python scripts/make_goldens.py tiny
    python scripts/make_goldens.py families [NAME ...]
    python scripts/make_goldens.py loras           # needs peft, too
    python scripts/make_goldens.py encoders
    python scripts/make_goldens.py minilm DIR      # DIR: all-MiniLM-L6-v2
    python scripts/make_goldens.py smollm2 DIR     # DIR: the embedded model as a float32 Hugging Face directory
    python scripts/make_goldens.py gemma3 DIR      # DIR: Gemma 3 270M

Everything runs in float32 on one thread, one sequence at a time, so that no padding and no batching enters.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
GOLDENS = ROOT / "tests" / "goldens"
NUM_TOKENS = 64


# transformers 5.24 adds ALiBi twice in eager attention: to the mask, and to the logits
NOT_EAGER = ("falcon_alibi",)


def load(path: Path, attention: str = "eager") -> Any:
    """The model in float32; fails if a tensor is missing, unexpected or of another shape."""
    config = AutoConfig.from_pretrained(path)
    model, info = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise SystemExit(f"{path}: {problems}")
    return model.eval()


def make_tiny() -> None:
    """Rotary frequencies, logits at some positions, and greedy tokens of every case of tests/tiny.py that asks for them
    -> tests/goldens/tiny.npz."""
    from tests import tiny, tiny_families

    arrays: dict[str, np.ndarray] = {}
    for name in (name for name in tiny.CASES if name not in tiny_families.FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            path = tiny.write(name, folder)
            arrays[f"{name}/checksum"] = np.array(tiny.checksum(tiny.tensors(name)))
            for i, (ids, at) in enumerate(zip(tiny.prompts(name), tiny.stored_positions(name), strict=True)):
                model = load(path)  # anew for each prompt: dynamic rope remembers the longest sequence it saw
                with torch.no_grad():
                    out = model(torch.tensor(ids, dtype=torch.long)[None], use_cache=False).logits[0]
                rotary = model.model.rotary_emb
                arrays[f"{name}/inv_freq"] = rotary.inv_freq.float().numpy()
                arrays[f"{name}/attention_factor"] = np.array(rotary.attention_scaling)
                arrays[f"{name}/{i}"] = out[torch.tensor(at, dtype=torch.long)].float().numpy()
                if tiny.CASES[name].greedy:
                    with torch.no_grad():
                        tokens, _, gaps = greedy(model, ids.tolist(), tiny.CASES[name].greedy)
                    arrays[f"{name}/greedy/{i}"] = np.array(tokens, np.int32)
                    arrays[f"{name}/gap/{i}"] = np.array(min(gaps), np.float32)
        spread = float(arrays[f"{name}/0"].std())
        print(f"{name}: logits' deviation {spread:.2f}")
    np.savez_compressed(GOLDENS / "tiny.npz", **arrays)
    print(f"{GOLDENS / 'tiny.npz'}: {(GOLDENS / 'tiny.npz').stat().st_size / 1e3:.0f} kB")


def make_families(names: list[str]) -> None:
    """Logits at some positions of every case of tests/tiny_families.py (or of some) -> tests/goldens/families.npz."""
    from tests import tiny, tiny_families

    path = GOLDENS / "families.npz"
    arrays = dict(np.load(path)) if names and path.exists() else {}
    for name in names or tiny_families.FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model = load(tiny.write(name, folder), "sdpa" if name in NOT_EAGER else "eager")
            arrays[f"{name}/checksum"] = np.array(tiny.checksum(tiny.tensors(name)))
            for i, (ids, at) in enumerate(zip(tiny.prompts(name), tiny.stored_positions(name), strict=True)):
                with torch.no_grad():
                    out = model(torch.tensor(ids, dtype=torch.long)[None], use_cache=False).logits[0]
                arrays[f"{name}/{i}"] = out[torch.tensor(at, dtype=torch.long)].float().numpy()
                if count := tiny.CASES[name].greedy:
                    with torch.no_grad():
                        tokens, _, gaps = greedy(model, ids.tolist(), count)
                    arrays[f"{name}/greedy/{i}"] = np.array(tokens, np.int32)
                    arrays[f"{name}/gap/{i}"] = np.array(min(gaps), np.float32)
        print(f"{name}: logits' deviation {float(arrays[f'{name}/0'].std()):.2f}")
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def make_loras() -> None:
    """Greedy tokens of the base model and of each of ``tiny_loras.MANY``, and the logits after a prompt of each of
    ``tiny_loras.FAMILIES``, all with the adapter merged into the weights -> tests/goldens/loras.npz."""
    from peft import PeftModel

    from tests import tiny, tiny_loras

    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = load(tiny.write(tiny_loras.MODEL, folder))
        for i, ids in enumerate(tiny_loras.prompts("base")):
            tokens, _, gaps = greedy(base, ids, tiny_loras.GREEDY)
            arrays[f"base/{i}"], arrays[f"base/gap/{i}"] = np.array(tokens, np.int32), np.array(min(gaps), np.float32)
    for name, adapter in tiny_loras.ADAPTERS.items():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as own:
            model = load(tiny.write(adapter.case, folder))
            beside = PeftModel.from_pretrained(model, str(tiny_loras.write(name, own)))
            arrays[f"{name}/checksum"] = np.array(tiny.checksum(tiny_loras.tensors(name)))
            given = torch.tensor(tiny_loras.prompts(name)[0], dtype=torch.long)[None]
            with torch.no_grad():
                unmerged, plain = beside(given, use_cache=False).logits[0, -1], None
                with beside.disable_adapter():
                    plain = beside(given, use_cache=False).logits[0, -1]
            merged = beside.merge_and_unload()
            with torch.no_grad():
                logits = merged(given, use_cache=False).logits[0, -1]
            assert torch.allclose(logits, unmerged, atol=2e-4), (name, (logits - unmerged).abs().max())
            print(f"{name}: logits' deviation {logits.std():.2f}, changed by {(logits - plain).std():.2f}")
            if name in tiny_loras.FAMILIES:
                arrays[name] = logits.float().numpy()
                continue
            for i, ids in enumerate(tiny_loras.prompts(name)):
                tokens, _, gaps = greedy(merged, ids, tiny_loras.GREEDY)
                arrays[f"{name}/{i}"] = np.array(tokens, np.int32)
                arrays[f"{name}/gap/{i}"] = np.array(min(gaps), np.float32)
    np.savez_compressed(GOLDENS / "loras.npz", **arrays)


def make_encoders() -> None:
    """Hidden states, or the score, of every case of tests/tiny_encoders.py -> tests/goldens/encoders.npz."""
    from tests import tiny_encoders as tiny

    arrays: dict[str, np.ndarray] = {}
    for name, config in tiny.CASES.items():
        scores = config["architectures"][0].endswith("Classification")
        kind = AutoModelForSequenceClassification if scores else AutoModel
        with tempfile.TemporaryDirectory() as folder:
            path = tiny.write(name, folder)
            model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        arrays[f"{name}/checksum"] = np.array(tiny.checksum(name))
        for i, (ids, split) in enumerate(zip(tiny.prompts(name), tiny.splits(name), strict=True)):
            given = {"input_ids": torch.tensor(ids, dtype=torch.long)[None]}
            if split:
                given["token_type_ids"] = (torch.arange(len(ids)) >= split).long()[None]
            with torch.no_grad():
                out = model(**given, attention_mask=torch.ones_like(given["input_ids"]))
            arrays[f"{name}/{i}"] = (out.logits if scores else out.last_hidden_state[0]).numpy()
        print(f"{name}: {arrays[f'{name}/0'].std():.2f} {arrays[f'{name}/0'].shape}")
    np.savez_compressed(GOLDENS / "encoders.npz", **arrays)


def make_minilm(path: Path) -> None:
    """Mean-pooled, normalised embeddings of tests/tiny_encoders.py's MINILM_TEXTS -> tests/goldens/minilm.npz."""
    from transformers import AutoTokenizer

    from tests.tiny_encoders import MINILM_TEXTS

    tokenizer, rows = AutoTokenizer.from_pretrained(path), []
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for text in MINILM_TEXTS:
        given = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            mean = model(**given).last_hidden_state[0].mean(0)
        rows.append((mean / mean.norm()).numpy())
    embeddings = np.stack(rows)
    np.savez_compressed(GOLDENS / "minilm.npz", embeddings=embeddings)
    print(f"similar {embeddings[0] @ embeddings[1]:.2f}, unrelated {embeddings[0] @ embeddings[2]:.2f}")


def greedy(model: Any, ids: list[int], count: int) -> tuple[list[int], list[float], list[float]]:
    """``count`` greedy tokens (not stopping at eos), their log-probabilities and the gap to the second best logit."""
    cache, feed = None, torch.tensor([ids], dtype=torch.long)
    tokens, logprobs, gaps = [], [], []
    for _ in range(count):
        out = model(feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, row = out.past_key_values, out.logits[0, -1].float()
        best = torch.topk(row, 2)
        tokens.append(int(best.indices[0]))
        logprobs.append(float(best.values[0] - torch.logsumexp(row, 0)))
        gaps.append(float(best.values[0] - best.values[1]))
        feed = best.indices[:1][None]
    return tokens, logprobs, gaps


def make_smollm2(path: Path) -> None:
    """Greedy tokens for the prompts of tests/goldens/prompts.json -> tests/goldens/smollm2_greedy.json."""
    from transformers import AutoTokenizer

    prompts = json.loads((GOLDENS / "prompts.json").read_text(encoding="utf-8"))
    tokenizer, model, rows = AutoTokenizer.from_pretrained(path), load(path), []
    start = time.monotonic()
    for i, item in enumerate(prompts):
        if "messages" in item:
            text = tokenizer.apply_chat_template(item["messages"], add_generation_prompt=True, tokenize=False)
        else:
            text = item["prompt"]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            tokens, logprobs, gaps = greedy(model, ids, NUM_TOKENS)
        rows.append(
            {
                "prompt_ids": ids,
                "token_ids": tokens,
                "logprobs": [round(x, 5) for x in logprobs],
                # where the two best logits almost tie, another correct engine may differ: tests may allow for it
                "min_gap": round(min(gaps), 5),
            }
        )
        print(f"{i + 1}/{len(prompts)} {len(ids)} tokens, {time.monotonic() - start:.0f} s", flush=True)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    (GOLDENS / "smollm2_greedy.json").write_text(f"[\n{lines}\n]\n")


def make_gemma3(path: Path) -> None:
    """Greedy tokens of Gemma 3 270M: 14 short prompts, 6 longer than its window of 512 -> gemma3_270m.json."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = [item.get("prompt", "") for item in json.loads((GOLDENS / "prompts.json").read_text(encoding="utf-8"))]
    short = [text for text in texts if text.strip() and "<|" not in text and len(text) < 300][:14]
    licence = (ROOT / "LICENSE").read_text()
    long = [licence[at : at + 2600 + 200 * i] for i, at in enumerate(range(0, 7200, 1200))]
    model, rows = load(path), []
    for text in short + long:
        ids = tokenizer.encode(text).ids
        with torch.no_grad():
            tokens, _, gaps = greedy(model, ids, 24)
        rows.append({"prompt_ids": ids, "token_ids": tokens, "min_gap": round(min(gaps), 5)})
        print(f"{len(rows)}: {len(ids)} tokens, gap {min(gaps):.4f}", flush=True)
    assert sum(len(row["prompt_ids"]) > 512 for row in rows) == len(long)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    (GOLDENS / "gemma3_270m.json").write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tiny", "families", "loras", "encoders", "minilm", "smollm2", "gemma3"])
    parser.add_argument("names", nargs="*", help="the model's directory (of smollm2 in float32); families: some")
    args = parser.parse_args()
    torch.set_num_threads(1)
    GOLDENS.mkdir(parents=True, exist_ok=True)
    if args.what == "tiny":
        make_tiny()
    elif args.what == "families":
        make_families(args.names)
    elif args.what == "loras":
        make_loras()
    elif args.what == "encoders":
        make_encoders()
    elif len(args.names) != 1:
        parser.error(f"{args.what} needs the model's directory")
    elif args.what == "minilm":
        make_minilm(Path(args.names[0]))
    elif args.what == "smollm2":
        make_smollm2(Path(args.names[0]))
    else:
        make_gemma3(Path(args.names[0]))


if __name__ == "__main__":
    main()
