"""llama-server's own shapes: `GET /props`, what is served and how, and `/slots`, what runs now."""

import dataclasses
import functools
import importlib.metadata
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.request import Sampling
from engine.served import ServedModel, Slot
from server.errors import ModelLoading, NoFreeSlot, json_response
from server.models import Served
from server.routes.common import loaded


async def props(request: Request) -> Response:
    served = loaded(request)
    model = _model(served)
    engine = served.engine
    params = settings_body(model.default_sampling, engine.n_predict)
    return json_response(
        {
            "default_generation_settings": {"n_ctx": model.context_length, "params": params},
            "total_slots": model.num_slots,
            "storage_backend": model.storage_backend,
            "storable": dataclasses.asdict(model.storable),
            "notes": list(model.notes),
            "model_alias": served.name,
            "model_path": str(engine.model),
            "modalities": {"vision": False, "audio": False, "video": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": model.template.source,
            "bos_token": model.tokens.bos,
            "eos_token": model.tokens.eos,
            "build_info": _build(),
        }
    )


async def slots(request: Request) -> Response:
    """`?fail_on_no_slot=1` asks for a 503 where none is free."""
    served = loaded(request)
    model = _model(served)
    running = served.bridge.slots()
    if request.query_params.get("fail_on_no_slot", "0") not in ("0", "") and None not in running:
        raise NoFreeSlot("all slots are taken")
    drafts = served.engine.drafting != "none"
    return json_response([_slot(number, slot, model, drafts=drafts) for number, slot in enumerate(running)])


def _model(served: Served) -> ServedModel:
    bridge = served.bridge
    if bridge.fault is not None:
        raise bridge.fault
    if bridge.model_now is None:
        raise ModelLoading("the model is being loaded")
    return bridge.model_now


def _slot(number: int, slot: Slot | None, model: ServedModel, *, drafts: bool) -> dict[str, Any]:
    """One slot, without a word of what was asked or answered."""
    shown: dict[str, Any] = {
        "id": number,
        "id_task": -1,
        "n_ctx": model.context_length,
        "speculative": drafts,
        "is_processing": slot is not None,
    }
    if slot is None:
        return shown
    request = slot.request
    return {
        **shown,
        "id_task": slot.task,
        "request_id": request.id,
        "n_prompt_tokens": len(request.prompt),
        "n_prompt_tokens_processed": slot.stored_tokens,
        "n_prompt_tokens_cache": slot.cached_tokens,
        "params": {
            **settings_body(request.sampling, request.max_tokens),
            "ignore_eos": request.ignore_eos,
        },
        "next_token": [
            {
                "has_next_token": slot.remaining_tokens > 0,
                "n_remain": slot.remaining_tokens,
                "n_decoded": slot.decoded_tokens,
            }
        ],
    }


def settings_body(sampling: Sampling, bound: int | None) -> dict[str, Any]:
    """How rows draw, and the bound on their new tokens; None is none."""
    bound = -1 if bound is None else bound
    return {**_sampling(sampling), "n_predict": bound, "max_tokens": bound}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """By llama-server's names. Sequence breakers are texts of the request's, and left out."""
    said = dataclasses.asdict(sampling)
    del said["dry_sequence_breakers"]
    return {
        "repeat_penalty": said.pop("repetition_penalty"),
        **said,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in sampling.logit_bias],
    }


@functools.cache
def _build() -> str:
    return f"mlxcel-{importlib.metadata.version('mlxcel')}"
