"""``/generate`` in SGLang's request and response shape."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mamba_checkpoint_cache.serving.http.body import Fields, Prompts, id_prompts, kind_of, read_fields, text_prompts
from mamba_checkpoint_cache.serving.http.errors import bad_request
from mamba_checkpoint_cache.serving.http.generation import Generation, text_of, unless_disconnected
from mamba_checkpoint_cache.serving.http.logprobs import LogprobFields, read_logprobs
from mamba_checkpoint_cache.serving.http.service import service_of
from mamba_checkpoint_cache.serving.http.sse import event_stream
from mamba_checkpoint_cache.serving.request import Finish, Request
from mamba_checkpoint_cache.serving.sampling import Sampling
from mamba_checkpoint_cache.serving.tokens import Tokens

DEFAULT_NEW_TOKENS = 128


async def generate(http: HttpRequest) -> Response:
    """One prompt or several (``text`` or ``input_ids``); streamed, one prompt only, the text comes whole each time."""
    service = service_of(http)
    tokens = service.engine().tokens
    fields = await read_fields(http)
    prompts = _prompts(fields, tokens)
    sampling = _sampling(fields.section("sampling_params"))
    logprobs = read_logprobs(fields, prompts.tokens, sampling)
    stream = fields.flag("stream")
    fields.close()
    if stream and prompts.listed:
        raise bad_request("a stream takes one prompt, not a list of them", "stream")
    generation = Generation(service, prompts.tokens, sampling, None if logprobs is None else logprobs.wanted)
    if stream:
        return await event_stream(http, _stream(generation, tokens, logprobs))
    results = await unless_disconnected(http, _results(generation, tokens, logprobs))
    return Response() if results is None else JSONResponse(results if prompts.listed else results[0])


async def _results(generation: Generation, tokens: Tokens, logprobs: LogprobFields | None) -> list[dict[str, Any]]:
    begin = time.perf_counter()
    async with generation:
        return [_result(request, tokens, logprobs, begin) for request in await generation.finished()]


async def _stream(generation: Generation, tokens: Tokens, logprobs: LogprobFields | None) -> AsyncGenerator[dict[str, Any]]:
    begin = time.perf_counter()
    async with generation:
        async for _ in generation.changes():
            yield _result(generation.requests[0], tokens, logprobs, begin)


def _prompts(fields: Fields, tokens: Tokens) -> Prompts:
    text, ids = fields.raw("text"), fields.raw("input_ids")
    if (text is None) == (ids is None):
        raise bad_request("give the prompt as text or as input_ids, one of the two", "text")
    name, wanted, value = ("text", "a string", text) if ids is None else ("input_ids", "a list of token ids", ids)
    prompts = text_prompts(text, name, tokens) if ids is None else id_prompts(ids, name)
    if prompts is None:
        raise bad_request(f"{name} must be {wanted}, or a list of such, and not empty; got {kind_of(value)}", name)
    return prompts


def _sampling(params: Fields) -> Sampling:
    try:
        sampling = Sampling(
            max_new_tokens=params.integer("max_new_tokens", DEFAULT_NEW_TOKENS),
            temperature=params.number("temperature", 0.0),
            top_p=params.number("top_p", 1.0),
            seed=params.integer("sampling_seed", None),
            stop_ids=frozenset(params.integers("stop_token_ids")),
            stop_texts=params.texts("stop"),
            ignore_eos=params.flag("ignore_eos"),
        )
    except ValueError as error:
        raise bad_request(str(error), "sampling_params") from None
    params.close()
    return sampling


def _result(request: Request, tokens: Tokens, logprobs: LogprobFields | None, begin: float) -> dict[str, Any]:
    finish = request.finish  # read first: once it is there, the output is complete
    return {
        "text": text_of(request, tokens),
        "output_ids": list(request.output),
        "meta_info": {
            "id": request.id,
            "finish_reason": None if finish is None else _reason(finish, len(request.output)),
            "prompt_tokens": len(request.tokens),
            "completion_tokens": len(request.output),
            "cached_tokens": request.cached_tokens,
            "e2e_latency": time.perf_counter() - begin,
            **(logprobs.of(request, tokens) if logprobs else {}),
        },
    }


def _reason(finish: Finish, num_tokens: int) -> dict[str, Any]:
    detail = {"matched": finish.matched} if finish.reason == "stop" else {"length": num_tokens}
    return {"type": finish.reason, **detail}
