"""Which models a server is to have, and where they are."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.store import Store
from mlxcel_cli import checkpoint
from server.config import ServerConfig
from tests.tiny import write_checkpoint


@pytest.fixture
def store():
    """A store where `x` alone means one of two models, and `y` one."""
    store = Store()
    for name in ("local/x", "mlx-community/x", "mlx-community/y"):
        with store.begin(name) as folder:
            write_checkpoint(folder)
    return store


def server(model_id: str, *models: str, **settings: object) -> ServerConfig:
    return ServerConfig(EngineConfig(model=Path(model_id)), model_id, models=models, **settings)


@pytest.mark.parametrize(
    ("model_id", "models", "others"),
    [
        ("none", ["all"], ["local/x", "mlx-community/x", "y"]),
        ("x", ["all"], ["mlx-community/x", "y"]),
        ("local/x", ["all"], ["mlx-community/x", "y"]),
        ("mlx-community/x", ["all"], ["local/x", "y"]),
        ("mlx-community/y", ["all", "x"], ["x", "mlx-community/x"]),
        ("y", ["x", "mlx-community/x"], ["x", "mlx-community/x"]),
        ("y", ["y"], []),
    ],
    ids=str,
)
def test_all_are_there_once_and_each_name_means_what_it_means_elsewhere(model_id, models, others, store):
    references = dict(checkpoint.references_of(server(model_id, *models)))
    assert list(references) == others
    assert {name: checkpoint.folder(reference) for name, reference in references.items()} == {
        name: store.find(name).path for name in others
    }


def test_settings_for_several_models_are_refused_where_one_is_left(store):
    for setting, value in (("models_ttl", 5.0), ("models_pin", ("y",)), ("models_max", 1)):
        with pytest.raises(ConfigError, match=f"{setting} is for several models"):
            checkpoint.in_place(server("y", "y", **{setting: value}))
    alone = checkpoint.in_place(server("y", "y"))
    assert (alone.models, alone.others) == ((), ())
    assert checkpoint.in_place(server("y", "y", "x", models_ttl=5.0)).models == ("y", "x")
