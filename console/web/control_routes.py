"""The routes that change something: create, start, pause, resume, stop and remove a run."""

from __future__ import annotations

from fastapi import APIRouter

from penstock.console.web.problems import RESPONSES

router = APIRouter(prefix="/v1", tags=["control"], responses=RESPONSES)
