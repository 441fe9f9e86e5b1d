"""Any OpenAI-compatible server, through /v1/completions with prompts as token ids."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from channel import serve


def load(settings: dict):
    base = settings["url"].rstrip("/")
    key = {"Authorization": f"Bearer {settings['key']}"} if settings.get("key") else {}

    def call(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base + path, data, {"Content-Type": "application/json", **key})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    model = call("/v1/models")["data"][0]["id"]

    def one(prompt, max_tokens):
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = call("/v1/completions", body)
        if answer["usage"]["completion_tokens"] != max_tokens:
            raise RuntimeError(f"asked for {max_tokens} tokens, got {answer['usage']['completion_tokens']}")
        return answer["choices"][0].get("token_ids") or []

    def generate(prompts, max_tokens):
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda p: one(p, max_tokens), prompts))

    return generate


if __name__ == "__main__":
    serve(load)
