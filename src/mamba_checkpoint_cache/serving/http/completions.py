"""``/v1/completions`` and ``/v1/models`` in OpenAI's request and response shape."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mamba_checkpoint_cache.serving.http.body import Fields, Prompts, id_prompts, kind_of, read_fields, text_prompts
from mamba_checkpoint_cache.serving.http.errors import ApiError, bad_request
from mamba_checkpoint_cache.serving.http.generation import Generation, text_of, unless_disconnected
from mamba_checkpoint_cache.serving.http.service import Service, service_of
from mamba_checkpoint_cache.serving.http.sse import event_stream
from mamba_checkpoint_cache.serving.request import Request
from mamba_checkpoint_cache.serving.sampling import Sampling
from mamba_checkpoint_cache.serving.tokens import Tokens

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

Json = dict[str, Any]


async def completions(http: HttpRequest) -> Response:
    """A completion of one prompt or several; streamed, of one only."""
    service = service_of(http)
    tokens = service.engine().tokens
    fields = await read_fields(http)
    _check_model(fields.text("model"), service)
    prompts = _prompts(fields.raw("prompt"), tokens)
    sampling = _sampling(fields)
    stream, with_usage = fields.flag("stream"), _with_usage(fields.section("stream_options"))
    fields.text("user")
    fields.close()
    if stream and len(prompts.tokens) > 1:
        raise bad_request("a stream takes one prompt, not a list of them", "stream")
    generation = Generation(service, prompts.tokens, sampling)
    head = {
        "id": f"cmpl-{generation.requests[0].id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model_name,
    }
    if stream:
        return await event_stream(http, _stream(generation, tokens, head, with_usage=with_usage))
    body = await unless_disconnected(http, _completion(generation, tokens, head))
    return Response() if body is None else JSONResponse(body)


async def models(http: HttpRequest) -> JSONResponse:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_card(service_of(http))]})


async def model(http: HttpRequest) -> JSONResponse:
    """That model by its name; 404 for any other."""
    service = service_of(http)
    _check_model(http.path_params["name"], service)
    return JSONResponse(_card(service))


async def _completion(generation: Generation, tokens: Tokens, head: Json) -> Json:
    async with generation:
        requests = await generation.finished()
    choices = [_choice(index, text_of(request, tokens), request) for index, request in enumerate(requests)]
    return {**head, "choices": choices, "usage": _usage(requests)}


async def _stream(generation: Generation, tokens: Tokens, head: Json, *, with_usage: bool) -> AsyncGenerator[Json]:
    request, sent = generation.requests[0], 0
    async with generation:
        async for _ in generation.changes():
            text = text_of(request, tokens)
            yield {**head, "choices": [_choice(0, text[sent:], request)]}
            sent = max(sent, len(text))
    if with_usage:
        yield {**head, "choices": [], "usage": _usage(generation.requests)}


def _prompts(value: object, tokens: Tokens) -> Prompts:
    prompts = text_prompts(value, "prompt", tokens) or id_prompts(value, "prompt")
    if prompts is None:
        wanted = "a string, a list of token ids, or a list of either, and not empty"
        raise bad_request(f"prompt must be {wanted}; got {kind_of(value)}", "prompt")
    return prompts


def _check_model(name: str | None, service: Service) -> None:
    if name is not None and name != service.model_name:
        message = f"the model {name!r} does not exist: this server has {service.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _sampling(fields: Fields) -> Sampling:
    try:
        return Sampling(
            max_new_tokens=fields.integer("max_tokens", DEFAULT_MAX_TOKENS),
            temperature=fields.number("temperature", 0.0),
            top_p=fields.number("top_p", 1.0),
            seed=fields.integer("seed", None),
            stop_texts=fields.texts("stop"),
            ignore_eos=fields.flag("ignore_eos"),
        )
    except ValueError as error:
        raise bad_request(str(error).replace("max_new_tokens", "max_tokens")) from None


def _with_usage(options: Fields) -> bool:
    with_usage = options.flag("include_usage")
    options.close()
    return with_usage


def _choice(index: int, text: str, request: Request) -> Json:
    finish = request.finish
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None if finish is None else finish.reason}


def _usage(requests: Sequence[Request]) -> Json:
    prompt, completion = sum(len(r.tokens) for r in requests), sum(len(r.output) for r in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in requests)},
    }


def _card(service: Service) -> Json:
    config = service.engine().config
    card = {"id": config.name, "object": "model", "created": service.created, "owned_by": "mamba-checkpoint-cache"}
    return {**card, "max_model_len": config.max_context}
