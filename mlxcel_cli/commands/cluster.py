"""`mlxcel cluster`: keys for nodes, and a running router's nodes."""

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import UserError
from mlxcel_cli import render
from mlxcel_cli.address import shown
from mlxcel_cli.errors import Refused, WrongUsage

EXAMPLE = """\b
Examples:
  mlxcel cluster keygen decode-0.key
  mlxcel cluster status --server http://127.0.0.1:8080
  mlxcel cluster drain decode-0
"""
URL = "http://127.0.0.1:8080"


class Action(StrEnum):
    """What is to be done."""

    KEYGEN = "keygen"
    STATUS = "status"
    DRAIN = "drain"
    UNDRAIN = "undrain"


def cluster(
    action: Annotated[
        Action,
        typer.Argument(
            help="keygen FILE: write a node's key and print its public half; status: list a router's nodes; "
            "drain NODE: give a node nothing new, and let what it has end; undrain NODE: let it take part again",
            show_default=False,
        ),
    ],
    what: Annotated[str, typer.Argument(help="the FILE or the NODE", show_default=False)] = "",
    server: Annotated[str, typer.Option("--server", help="the router's URL")] = URL,
    api_key: Annotated[str, typer.Option("--api-key", help="the key that the router asks for")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="what the router says, as it is")] = False,
) -> None:
    """Keys of nodes, and the nodes of a running router."""
    if bool(what) == (action is Action.STATUS):
        wanted = {Action.KEYGEN: "a FILE", Action.STATUS: "nothing behind it"}.get(action, "a NODE")
        raise WrongUsage(f"{action} takes {wanted}")
    match action:
        case Action.KEYGEN:
            from server.roles.keys import keygen

            render.put(f"{keygen(Path(what))}\n")
            render.note(f"{what} holds the secret; the others' --node-peers take the line above and an address")
        case Action.STATUS:
            stats = asyncio.run(_stats(server, api_key))
            render.put(
                json.dumps(stats, indent=2) + "\n"
                if as_json
                else render.harmless(render.table(_rows(stats["nodes"])))
            )
            if not stats["nodes"]:
                render.note("the router is starting")
        case _:
            drains = action is Action.DRAIN
            asyncio.run(_drain(server, api_key, what, drains=drains))
            render.note(f"{what} {'gets nothing new' if drains else 'takes part again'}")


async def _stats(server: str, key: str) -> dict[str, Any]:
    from mlxcel_cli.client import Client

    async with Client.to(server, key=key) as client:
        try:
            return await client.router_stats()
        except Refused as refusal:
            if refusal.status != 404:
                raise
            raise UserError(f"the server at {shown(server)} is no router") from refusal


async def _drain(server: str, key: str, node: str, *, drains: bool) -> None:
    from mlxcel_cli.client import Client

    async with Client.to(server, key=key) as client:
        await client.drain(node, drains=drains)


def _rows(nodes: list[dict[str, Any]]) -> list[list[str]]:
    names = ("id", "status", "running", "slots", "sent", "lost", "address")
    return [list(names), *([str(node.get(name, "")) for name in names] for node in nodes)]
