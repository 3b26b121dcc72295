"""``/v1/models``: the names that the model answers to."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.generation import Generation
from specdec.errors import NotFound


class Models:
    """The models of one generation module, as OpenAI lists them."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._created = int(time.time())

    async def list_all(self, request: Request) -> Response:
        """Answer ``GET /v1/models``."""
        self._generation.check_model("")
        return JSONResponse({"object": "list", "data": [self._describe(name) for name in self._generation.model_names]})

    async def get(self, request: Request) -> Response:
        """Answer ``GET /v1/models/{name}``."""
        name = request.path_params["name"]
        if not name:
            raise NotFound("the model's name is empty")
        return JSONResponse(self._describe(self._generation.check_model(name)))

    def _describe(self, name: str) -> dict[str, Any]:
        model = self._generation.router.model()
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "tandem", "root": model.name,
            "max_model_len": model.max_model_len,
        }  # fmt: skip
