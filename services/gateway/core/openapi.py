"""The OpenAPI document, written by hand: what is checked here, and nothing that is merely forwarded.

Bodies are open objects: engines understand more fields than any list of ours, so `additionalProperties` is true.
"""

from __future__ import annotations

from typing import Any

_STR: dict[str, object] = {"type": "string"}
_EVENT = {"type": "object", "properties": {"data": _STR}}
_UNIX_S: dict[str, object] = {"type": "string", "pattern": "^[0-9]{1,12}$"}
_USAGE_BY: dict[str, object] = {
    "type": "string",
    "pattern": "^(hour|key|model|class)(,(hour|key|model|class)){0,7}$",
}
_BOOL = {"type": ["boolean", "null"]}
_NUMBER = {"type": ["number", "null"]}
_COUNT = {"type": ["integer", "null"], "minimum": 0, "maximum": (1 << 32) - 1}
_TOKENS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1},
    "minItems": 1,
}


def document(choice_count_max: int, *, open_metrics: bool, batches: bool) -> dict[str, object]:
    """The document as data. `open_metrics`: GET /metrics needs no key; `batches`: there are files and batches."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Mooncache gateway",
            "version": "1",
            "description": "OpenAI-compatible completions over engines that share a KV cache.",
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}],
        "paths": {**_paths(open_metrics), **(_offline_paths() if batches else {})},
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(choice_count_max),
        },
    }


def _paths(open_metrics: bool) -> dict[str, object]:
    def infer(name: str, summary: str, answer: str) -> dict[str, Any]:
        return {
            "post": {
                "operationId": name,
                "summary": summary,
                "parameters": [_header("X-Request-Id", "Goes through all logs; answered in x-request-id.")],
                "requestBody": {"required": True, "content": _json(f"{name}Request")},
                "responses": {
                    "200": {
                        "description": "The answer; with `stream` true, server-sent events of chunks.",
                        "content": {**_json(answer), "text/event-stream": {"schema": _EVENT}},
                    },
                    **_errors(
                        "400",
                        "401",
                        "403",
                        "404",
                        "408",
                        "413",
                        "415",
                        "422",
                        "429",
                        "500",
                        "502",
                        "503",
                        "504",
                    ),
                },
            }
        }

    return {
        "/v1/chat/completions": infer("ChatCompletion", "Continue a conversation.", "ChatCompletion"),
        "/v1/completions": infer("Completion", "Continue a text.", "Completion"),
        "/v1/models": {"get": _get("listModels", "Models that are served now.", _json("ModelList"), "401")},
        "/v1/models/{model}": {
            "get": {
                **_get("getModel", "One model.", _json("Model"), "401", "404"),
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": {**_STR, "minLength": 1}}
                ],
            }
        },
        "/v1/usage": {"get": _usage()},
        "/health": {
            "get": {**_get("health", "Whether the gateway serves.", _json("Health")), "security": []},
        },
        "/metrics": {
            "get": {
                **_get("metrics", "Prometheus metrics.", {"text/plain": {"schema": _STR}}, "401", "403"),
                "security": [] if open_metrics else [{"key": []}],
            }
        },
        "/openapi.json": {
            "get": {
                **_get("openapi", "This document.", {"application/json": {"schema": {"type": "object"}}}),
                "security": [],
            }
        },
    }


def _usage() -> dict[str, object]:
    """What a tenant has used."""
    anything: dict[str, object] = {"application/json": {"schema": {"type": "object"}}}
    schemas = {"since": _UNIX_S, "until": _UNIX_S, "by": _USAGE_BY}
    return {
        **_get("getUsage", "What your tenant has used.", anything, "400", "401", "403", "429"),
        "parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()],
    }


def _offline_paths() -> dict[str, object]:
    """Files and batches."""
    anything: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    content: dict[str, object] = {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
    }

    def named(name: str) -> list[dict[str, object]]:
        return [{"name": name, "in": "path", "required": True, "schema": {**_STR, "minLength": 1}}]

    def said(name: str, summary: str, *errors: str, gives: dict[str, Any] = anything) -> dict[str, Any]:
        return _get(name, summary, gives, "401", *errors)

    form = {"type": "object", "required": ["purpose", "file"], "properties": {"purpose": _STR, "file": _STR}}
    wanted = _object({"input_file_id": _STR, "endpoint": _STR, "completion_window": {"const": "24h"}})
    file, batch = named("file_id"), named("batch_id")
    refused = ("400", "408", "413", "415", "429")
    return {
        "/v1/files": {
            "get": said("listFiles", "Your files.", "400"),
            "post": {
                **said("createFile", "Take a file for a batch.", *refused),
                "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}},
            },
        },
        "/v1/files/{file_id}": {
            "get": {**said("getFile", "One file.", "404"), "parameters": file},
            "delete": {**said("deleteFile", "Delete a file.", "404", "409"), "parameters": file},
        },
        "/v1/files/{file_id}/content": {
            "get": {**said("getContent", "The bytes of a file.", "404", gives=content), "parameters": file}
        },
        "/v1/batches": {
            "get": said("listBatches", "Your batches, the newest first.", "400"),
            "post": {
                **said("createBatch", "Begin a batch.", "404", *refused),
                "requestBody": {"required": True, "content": {"application/json": {"schema": wanted}}},
            },
        },
        "/v1/batches/{batch_id}": {"get": {**said("getBatch", "One batch.", "404"), "parameters": batch}},
        "/v1/batches/{batch_id}/cancel": {
            "post": {**said("cancelBatch", "Send nothing further of it.", "404", "409"), "parameters": batch}
        },
    }


def _get(name: str, summary: str, content: dict[str, object], *errors: str) -> dict[str, object]:
    codes = (*errors, "503") if name == "health" else errors
    found = {"200": {"description": summary, "content": content}, **_errors(*codes)}
    if name == "health":
        found["503"] = {"description": "The gateway is shutting down.", "content": content}
    return {"operationId": name, "summary": summary, "responses": found}


def _errors(*codes: str) -> dict[str, object]:
    return {code: {"description": "An error.", "content": _json("Error")} for code in codes}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _header(name: str, text: str) -> dict[str, object]:
    return {"name": name, "in": "header", "required": False, "description": text, "schema": _STR}


def _schemas(choice_count_max: int) -> dict[str, object]:
    usage = {
        "type": "object",
        "properties": {
            "prompt_tokens": {"type": "integer", "minimum": 0},
            "completion_tokens": {"type": "integer", "minimum": 0},
            "total_tokens": {"type": "integer", "minimum": 0},
            "prompt_tokens_details": {
                "type": ["object", "null"],
                "properties": {"cached_tokens": {"type": ["integer", "null"], "minimum": 0}},
            },
        },
    }
    return {
        "ChatCompletionRequest": _request(choice_count_max, "messages", _messages()),
        "CompletionRequest": _request(choice_count_max, "prompt", _prompt(choice_count_max)),
        "ChatCompletion": _answer("chat.completion", usage),
        "Completion": _answer("text_completion", usage),
        "Model": _object(
            {"id": _STR, "object": {"const": "model"}, "created": {"type": "integer"}, "owned_by": _STR}
        ),
        "ModelList": _object(
            {
                "object": {"const": "list"},
                "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
            }
        ),
        "Health": _object({"status": _STR, "models": {"type": "integer"}, "conductor": {"type": "boolean"}}),
        "Error": _object(
            {
                "error": _object(
                    {
                        "message": _STR,
                        "type": _STR,
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "integer", "null"]},
                    }
                )
            }
        ),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _answer(kind: str, usage: dict[str, Any]) -> dict[str, Any]:
    found = _object(
        {
            "id": _STR,
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": _STR,
            "choices": {"type": "array", "items": {"type": "object"}},
        }
    )
    found["properties"]["usage"] = usage
    return found


def _messages() -> dict[str, object]:
    message = {"type": "object", "properties": {"role": _STR}, "required": ["role"]}
    return {"type": "array", "items": message, "minItems": 1}


def _prompt(choice_count_max: int) -> dict[str, object]:
    texts = {"type": "array", "items": _STR, "minItems": 1, "maxItems": choice_count_max}
    lists = {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": choice_count_max}
    return {"anyOf": [_STR, texts, _TOKENS, lists]}


def _request(choice_count_max: int, name: str, schema: dict[str, object]) -> dict[str, object]:
    extension = {
        "ttft_slo_ms": {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1},
        "tbt_slo_ms": {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1},
        "public_messages": {"type": "integer", "minimum": 0},
    }
    return {
        "type": "object",
        "required": ["model", name],
        "additionalProperties": True,
        "properties": {
            "model": {**_STR, "minLength": 1, "maxLength": 256},
            name: schema,
            "stream": _BOOL,
            "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _BOOL}},
            "n": {"type": ["integer", "null"], "minimum": 1, "maximum": choice_count_max},
            "max_tokens": _COUNT,
            "max_completion_tokens": _COUNT,
            "temperature": _NUMBER,
            "top_p": _NUMBER,
            "presence_penalty": _NUMBER,
            "frequency_penalty": _NUMBER,
            "seed": {"type": ["integer", "null"]},
            "cache_salt": {"type": ["string", "null"], "maxLength": 1024},
            "prompt_cache_key": {"type": ["string", "null"]},
            "mooncache": {"type": ["object", "null"], "properties": extension},
        },
    }
