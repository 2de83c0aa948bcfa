"""How each route dresses an answer: one file per route, listed in `SHAPES`."""

from __future__ import annotations

from .chat import Chat
from .completions import Completions
from .messages import Messages
from .responses import Responses
from .shape import Shape, Usage

SHAPES: dict[str, type[Shape]] = {
    "chat": Chat,
    "completions": Completions,
    "responses": Responses,
    "messages": Messages,
}

__all__ = ["SHAPES", "Shape", "Usage"]
