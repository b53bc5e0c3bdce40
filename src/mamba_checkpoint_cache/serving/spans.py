"""Where the server's spans go: to a receiver over OTLP, or nowhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry.trace import TracerProvider

from mamba_checkpoint_cache.serving.options import ServeOptions

SERVICE = "mamba-checkpoint-cache"
EXPORT_SECONDS = 1.5
"""What one batch may take. A receiver that hangs costs batches, and never a request."""
CLOSE_SECONDS = 2.0
"""What handing over the last spans may take, after which they are dropped."""


@contextmanager
def exported_spans(options: ServeOptions) -> Iterator[TracerProvider | None]:
    """What makes spans and exports a share of the traces, in the background; None if no endpoint is given."""
    if options.otlp_endpoint is None:
        yield None
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    provider = trace.TracerProvider(
        sampler=ParentBasedTraceIdRatio(options.otlp_ratio),
        resource=Resource.create({"service.name": SERVICE, "service.version": version(SERVICE)}),
        shutdown_on_exit=False,
    )
    traces = f"{options.otlp_endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(traces, timeout=EXPORT_SECONDS)))
    try:
        yield provider
    finally:
        closing = threading.Thread(target=provider.shutdown, name="spans", daemon=True)  # on its own it may take half a minute
        closing.start()
        closing.join(CLOSE_SECONDS)
