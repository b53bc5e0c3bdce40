"""The HTTP front, on a real server with a real model."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_side import ServerProcess

from mamba_checkpoint_cache.serving.http.body import MAX_BODY_BYTES, MAX_PROMPTS

CHUNK = 32
GREEDY = {"max_new_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = ["serve", "--port", "0", "--threads", "1", "--chunk", str(CHUNK), "--codec", "none", "--checkpoint-slots", "200"]
    with ServerProcess(*options, "--drift-rate", "1", "--drift-checks-per-minute", "1000") as process:
        process.wait_until_listening()
        yield process


@pytest.fixture
def client(server: ServerProcess) -> httpx.Client:
    return server.client


def ids_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def generate(client: httpx.Client, prompt: str | list[int], **params: Any) -> dict[str, Any]:
    name = "text" if isinstance(prompt, str) else "input_ids"
    response = client.post("/generate", json={name: prompt, "sampling_params": GREEDY | params})
    assert response.status_code == 200, response.text
    return response.json()


def samples(client: httpx.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def total(values: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return sum(value for (found, have), value in values.items() if found == f"mamba_checkpoint_{name}" and labels.items() <= have)


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_what_it_says_at_start(server: ServerProcess) -> None:
    """The log names the model, what the probe found, what the pools come to, and what watches over the drift."""
    log = "".join(server.stderr)

    words = ("name=gdn-hybrid", "continues exactly in chunks", "codec=none", "checkpoint_slots=200", "drift guard", "rate=1.0")
    assert [word for word in words if word not in log] == []
    assert server.line.startswith("listening on http://127.0.0.1:")


def test_generate_answers_in_sglangs_shape(client: httpx.Client) -> None:
    """Text and ids of the output, and in meta_info why it ended and how many tokens were reused."""
    body = generate(client, "a word", max_new_tokens=4)

    assert set(body) == {"text", "output_ids", "meta_info"}
    assert len(body["output_ids"]) == 4
    assert body["text"] == bytes(i for i in body["output_ids"] if i < 256).decode(errors="replace")
    meta = body["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (6, 4, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert isinstance(meta["id"], str)
    assert meta["e2e_latency"] > 0


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK + 7])
def test_a_prompt_sent_twice_is_reused(client: httpx.Client, length: int) -> None:
    """The second time, at least the last chunk boundary below the prompt's length is reused, and the output is the same."""
    prompt = ids_of(length, seed=length)

    first, second = generate(client, prompt), generate(client, prompt)

    assert second["meta_info"]["cached_tokens"] >= (length - 1) // CHUNK * CHUNK
    assert first["output_ids"] == second["output_ids"]


def test_a_list_of_prompts_gives_a_list(client: httpx.Client) -> None:
    """Several prompts in one call come back in order, each as it would alone."""
    texts = ["one", "two", "three"]

    batch = client.post("/generate", json={"text": texts, "sampling_params": GREEDY}).json()
    ids = client.post("/generate", json={"input_ids": [[1, 2], [3]], "sampling_params": GREEDY}).json()

    assert [item["output_ids"] for item in batch] == [generate(client, text)["output_ids"] for text in texts]
    assert [item["meta_info"]["prompt_tokens"] for item in ids] == [2, 1]


def test_completions_answer_in_openais_shape(client: httpx.Client) -> None:
    """Choices, and in usage the reused tokens where OpenAI has them."""
    prompt = ids_of(2 * CHUNK + 3, seed=99)
    expected = generate(client, prompt)

    body = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5, "ignore_eos": True, "n": 1}).json()

    assert (body["object"], body["model"]) == ("text_completion", "gdn-hybrid")
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": expected["text"], "logprobs": None, "finish_reason": "length"}]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(prompt), 5, len(prompt) + 5)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 2 * CHUNK


def test_models_are_listed(client: httpx.Client) -> None:
    """The one model is listed and found by its name, and no other is."""
    listed = client.get("/v1/models").json()
    name = listed["data"][0]["id"]

    assert (listed["object"], listed["data"][0]["object"], len(listed["data"])) == ("list", "model", 1)
    assert client.get(f"/v1/models/{name}").json()["id"] == name
    assert client.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1}).status_code == 200
    for response in (client.get("/v1/models/gpt"), client.post("/v1/completions", json={"model": "gpt", "prompt": "a"})):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_streams_give_the_same_text(client: httpx.Client) -> None:
    """SGLang's stream repeats the text so far, OpenAI's gives what is new; both end with what the plain call gives."""
    params = GREEDY | {"max_new_tokens": 9}
    plain = generate(client, "stream this", **params)

    whole = events(client.post("/generate", json={"text": "stream this", "sampling_params": params, "stream": True}))
    options = {
        "prompt": "stream this",
        "max_tokens": 9,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    parts = events(client.post("/v1/completions", json=options))

    assert whole[-1]["text"] == plain["text"]
    assert whole[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 9}
    assert all(plain["output_ids"][: len(event["output_ids"])] == event["output_ids"] for event in whole)
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == plain["text"]
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]][-1] == "length"
    assert (parts[-1]["choices"], parts[-1]["usage"]["completion_tokens"]) == ([], 9)


def test_stop_texts_are_cut_off(client: httpx.Client) -> None:
    """The output ends before the stop text, in a stream as well."""
    output = generate(client, "stop here", max_new_tokens=30)
    stop = next(c for c in output["text"][3:] if c != "\ufffd")
    params = {"max_new_tokens": 30, "stop": [stop]}

    plain = generate(client, "stop here", **params)
    streamed = events(client.post("/generate", json={"text": "stop here", "sampling_params": GREEDY | params, "stream": True}))

    assert plain["text"] == output["text"].split(stop)[0] == streamed[-1]["text"]
    assert plain["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_seeded_sampling_repeats_itself(client: httpx.Client) -> None:
    """With a seed a draw can be repeated, and the temperature matters."""
    prompt = "draw"

    first, second, other = (
        generate(client, prompt, temperature=1.5, sampling_seed=seed, max_new_tokens=12)["output_ids"] for seed in (7, 7, 8)
    )

    assert first == second != other


PARAMS = {"max_new_tokens": 2}
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("{", 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        ("", 400, "not valid JSON"),
        (DEEP, 400, "nested too deeply"),
        ('{"text": "a", "sampling_params": {"temperature": NaN}}', 400, "NaN is not JSON"),
        ('{"input_ids": [' + "1" * 5000 + "]}", 400, "not valid JSON"),
        ([], 400, "a JSON object, got a list"),
        ("null", 400, "a JSON object, got null"),
        ({}, 400, "one of the two"),
        ({"text": "a", "input_ids": [1]}, 400, "one of the two"),
        ({"text": ""}, 400, "empty"),
        ({"text": []}, 400, "not empty"),
        ({"text": 5}, 400, "got a whole number"),
        ({"text": [1, 2]}, 400, "text must be a string"),
        ({"text": ["a", ""]}, 400, "empty"),
        ({"text": ["a"] * (MAX_PROMPTS + 1)}, 400, f"more than {MAX_PROMPTS}"),
        ('{"text": "\\ud800"}', 400, "not valid text"),
        ({"input_ids": []}, 400, "not empty"),
        ({"input_ids": "abc"}, 400, "input_ids must be a list"),
        ({"input_ids": [[1], []]}, 400, "empty"),
        ({"input_ids": [1.0]}, 400, "input_ids must be a list"),
        ({"input_ids": [True]}, 400, "input_ids must be a list"),
        ({"input_ids": [1, None]}, 400, "input_ids must be a list"),
        ({"input_ids": [257]}, 400, "0 … 256"),
        ({"input_ids": [-1]}, 400, "0 … 256"),
        ({"input_ids": [2**70]}, 400, "0 … 256"),
        (
            {"input_ids": [1] * 8190, "sampling_params": {"max_new_tokens": 3}},
            400,
            "8190 prompt tokens and 3 new ones exceed",
        ),
        ({"text": "a" * 10_000}, 400, "exceed the 8192"),
        ({"text": "a" * MAX_BODY_BYTES}, 413, "longer than"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, 400, "0 or more, got -1"),
        ({"text": "a", "sampling_params": {"max_new_tokens": True}}, 400, "a whole number, got true or false"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 2.0}}, 400, "a whole number, got a fraction"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "2"}}, 400, "a whole number, got a string"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**18}}, 400, "exceed the 8192"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, 400, "temperature"),
        ({"text": "a", "sampling_params": {"temperature": True}}, 400, "a number, got true or false"),
        ({"text": "a", "sampling_params": {"temperature": 10**400}}, 400, "fits a float"),
        ({"text": "a", "sampling_params": {"temperature": 1e999}}, 400, "not"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, 400, "top_p"),
        ({"text": "a", "sampling_params": {"stop": ""}}, 400, "none of them empty"),
        ({"text": "a", "sampling_params": {"stop": [1]}}, 400, "list of strings"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [True]}}, 400, "list of whole numbers"),
        ({"text": "a", "sampling_params": {"stop_token_ids": 3}}, 400, "list of whole numbers"),
        ({"text": "a", "sampling_params": {"sampling_seed": -3}}, 400, "seed"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, 400, "sampling_params.max_tokens is not supported"),
        ({"text": "a", "sampling_params": {"n": 2}}, 400, "sampling_params.n is not supported"),
        ({"text": "a", "sampling_params": []}, 400, "sampling_params must be a JSON object"),
        ({"text": "a", "stream": 1}, 400, "true or false"),
        ({"text": ["a", "b"], "stream": True}, 400, "one prompt"),
        ({"text": "a", "return_hidden_states": True}, 400, "return_hidden_states is not supported"),
        ({"text": "a", "top_logprobs_num": 2}, 400, "set return_logprob too"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(client: httpx.Client, body: Any, status: int, words: str) -> None:
    """Whatever is wrong with a body, the answer is a 4xx in OpenAI's shape that says so, and the server goes on."""
    content = body if isinstance(body, str | bytes) else json.dumps(body)

    response = client.post("/generate", content=content)

    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], words in error["message"]) == ("invalid_request_error", True), error["message"]
    assert client.post("/generate", json={"text": "a", "sampling_params": PARAMS}).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt must be"),
        ({"prompt": None}, "prompt must be"),
        ({"prompt": {"a": 1}}, "got an object"),
        ({"prompt": ["a", 1]}, "prompt must be"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens must be 0 or more, got -1"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be a whole number"),
        ({"prompt": "a", "model": 3}, "model must be a string"),
        ({"prompt": "a", "best_of": 3}, "best_of is not supported"),
        ({"prompt": "a", "echo": True}, "echo is not supported"),
        ({"prompt": "a", "stream_options": {"what": 1}}, "stream_options.what is not supported"),
    ],
)
def test_bad_completions_are_told_what_is_wrong(client: httpx.Client, body: dict[str, Any], words: str) -> None:
    """OpenAI's endpoint is as strict."""
    response = client.post("/v1/completions", json=body)

    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(client: httpx.Client) -> None:
    """What clients send by habit, at values that change nothing, is no error."""
    body = {"text": "a", "sampling_params": PARAMS | {"n": 1, "top_k": -1}, "return_logprob": False, "lora_path": None}

    assert client.post("/generate", json=body).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/generate", 405), ("GET", "/nothing", 404), ("DELETE", "/health", 405)]
)
def test_wrong_paths_and_methods(client: httpx.Client, method: str, path: str, status: int) -> None:
    """They too answer in OpenAI's shape."""
    response = client.request(method, path)

    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_many_at_a_time_get_what_each_would_alone(client: httpx.Client) -> None:
    """Twice as many clients as active slots, with prompts that share beginnings: each output is that of a server to itself."""
    prompts = [[*ids_of(40, seed % 3 + 50), *ids_of(seed, seed)] for seed in range(16)]

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda prompt: generate(client, prompt)["output_ids"], prompts))
    client.post("/flush_cache")
    alone = []
    for prompt in prompts:
        alone.append(generate(client, prompt)["output_ids"])
        client.post("/flush_cache")

    assert together == alone


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flush_empties_the_cache(client: httpx.Client, method: str) -> None:
    """After a flush every slot is free, and a prompt that was cached is computed afresh."""
    prompt = ids_of(80, seed=5)
    generate(client, prompt)

    response = client.request(method, "/flush_cache")

    assert response.status_code == 200
    assert response.text.startswith("Cache flushed.")
    assert total(samples(client), "slots", pool="checkpoint", state="free") == 200
    assert generate(client, prompt)["meta_info"]["cached_tokens"] == 0


def test_the_metrics_move(client: httpx.Client) -> None:
    """Requests move the counters by what they did, and the slots of each pool add up to its capacity."""
    prompt = ids_of(3 * CHUNK + 5, seed=1234)
    before = samples(client)

    cached = [generate(client, prompt)["meta_info"]["cached_tokens"] for _ in range(2)]
    after = samples(client)

    def moved(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert (moved("lookups_total", outcome="miss"), moved("lookups_total", outcome="hit")) == (1, 1)
    assert (moved("tokens_total", kind="prompt"), moved("tokens_total", kind="reused")) == (2 * len(prompt), sum(cached))
    assert moved("compressions_total", outcome="stored") >= 4
    assert moved("operation_seconds_count", operation="restore") == 2
    assert total(after, "telemetry_errors_total") == 0
    for pool in ("active", "checkpoint"):
        assert total(after, "slots", pool=pool) == total(after, "slot_capacity", pool=pool) > 0
    assert total(after, "slots", pool="active", state="free") == 8


def test_hits_are_checked_while_nobody_asks(client: httpx.Client) -> None:
    """Sampled hits are recomputed when the server has time; exact checkpoints show no drift beyond the last bits."""
    prompt = ids_of(3 * CHUNK + 5, seed=123)
    before = total(samples(client), "drift_checks_total", outcome="ok")
    for _ in range(3):
        generate(client, prompt)

    deadline = time.monotonic() + 20
    while total(after := samples(client), "drift_checks_total", outcome="ok") == before and time.monotonic() < deadline:
        time.sleep(0.05)

    assert total(after, "drift_checks_total", outcome="ok") > before
    assert total(after, "logit_kl_nats_count") == total(after, "top1_agreement_total", agreed="yes") > 0
    assert total(after, "logit_kl_nats_sum") < 1e-9
    assert total(after, "drift_checks_total", outcome="failed") == 0
    assert total(after, "guard_mode", mode="normal") == 1


def test_openmetrics_for_who_asks(client: httpx.Client) -> None:
    """The format follows the Accept header."""
    plain = client.get("/metrics")
    openmetrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})

    assert plain.headers["content-type"].startswith("text/plain")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


def test_health_while_it_serves(client: httpx.Client) -> None:
    """200, and the word for it."""
    response = client.get("/health")

    assert (response.status_code, response.json()) == (200, {"status": "ready"})
