"""The gateway's HTTP face: OpenAI's paths and the ones operators look for. Knows routes; the exchange does the work."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fabric.errors import InvalidArgument, NotFound, ServiceError, Unavailable
from protos.deepinfer.v1 import gateway_pb2
from services.gateway import http_errors
from services.gateway.chat_body import ChatBody
from services.gateway.exchange import ChatExchange, PrefetchExchange
from services.gateway.front import Front
from services.gateway.pool import Pool
from services.gateway.settings import GatewaySettings


def create_app(
    front: Front, pool: Pool, settings: GatewaySettings, registry: CollectorRegistry, version: str
) -> FastAPI:
    """The HTTP application of one gateway."""
    app = FastAPI(title="deepinfer gateway", version=version, docs_url="/docs", redoc_url=None)
    schema, parts = _chat_schema()
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(HTTPException, _http_error)

    @app.post("/v1/chat/completions", openapi_extra=schema, response_class=Response)
    async def chat_completions() -> Response:
        """Answers a conversation, streaming or whole."""
        return ChatExchange(front, settings.max_body_bytes, settings.request_timeout_s)

    @app.post("/v1/prefetch", openapi_extra=schema, response_class=Response)
    async def prefetch() -> Response:
        """Says that a conversation will go on soon: what is kept of it is brought to memory."""
        return PrefetchExchange(front, settings.max_body_bytes, settings.request_timeout_s)

    _add_models(app, front, pool)
    _add_operations(app, pool, registry, version)
    document = app.openapi

    def openapi() -> dict[str, Any]:
        whole = document()
        whole.setdefault("components", {}).setdefault("schemas", {}).update(parts)
        return whole

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _add_models(app: FastAPI, front: Front, pool: Pool) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """Models that are served now."""
        front.tenants.identify(request.headers.get("authorization", ""))
        return JSONResponse({"object": "list", "data": [_model(served) for served in pool.models()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        """One of them."""
        front.tenants.identify(request.headers.get("authorization", ""))
        return JSONResponse(_model(pool.served(name)))


def _add_operations(app: FastAPI, pool: Pool, registry: CollectorRegistry, version: str) -> None:
    @app.get("/health")
    async def health() -> Response:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """A request would find every service it needs."""
        if not pool.ready():
            raise Unavailable("recipe, prefill or decode is missing", fix="start it, or wait", retry_after_s=1.0)
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def version_() -> Response:
        return JSONResponse({"version": version})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _model(served: gateway_pb2.ServedModel) -> dict[str, Any]:
    info = served.model
    return {
        "id": info.name,
        "object": "model",
        "created": 0,
        "owned_by": "deepinfer",
        "family": info.family,
        "revision": info.revision,
        "max_model_len": info.max_context_tokens,
        "max_prompt_tokens": served.max_prompt_tokens,
        "max_output_tokens": served.max_output_tokens,
    }


def _chat_schema() -> tuple[dict[str, Any], dict[str, Any]]:
    """The body's schema for /docs and the parts it refers to: the exchange reads bodies itself, FastAPI does not."""
    schema = ChatBody.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = schema.pop("$defs", {})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}, parts


async def _service_error(_: Request, error: Exception) -> Response:
    known = error if isinstance(error, ServiceError) else ServiceError("internal error")
    return _reply(known, http_errors.status_of(known))


async def _http_error(_: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the form of every other error."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    known: ServiceError = NotFound("no such path", fix="see /docs")
    if status != 404:
        known = InvalidArgument("this path does not take that method", fix="see /docs")
    return _reply(known, status)


def _reply(error: ServiceError, status: int) -> Response:
    headers = http_errors.headers_of(error)
    return Response(http_errors.body_of(error), status, headers=headers, media_type="application/json")
