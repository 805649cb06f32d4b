"""What a checkpoint of sentence-transformers says of its vectors."""

import json

import mlx.core as mx
import numpy as np
import pytest

from engine.errors import ModelError
from engine.model.sentence import Sentence, sentence_of
from engine.request import Embedding
from tests.embedded import asked, vectors
from tests.engines import Watched
from tests.tiny import write_checkpoint

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def module(path, kind):
    return {"idx": 1, "name": "1", "path": path, "type": f"sentence_transformers.models.{kind}"}


def write(folder, *modules, **configs):
    folder.mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps([TRANSFORMER, *modules]))
    for name, said in configs.items():
        (folder / name.removeprefix("at_")).mkdir()
        (folder / name.removeprefix("at_") / "config.json").write_text(json.dumps(said))
    return folder


def write_dense(folder, weight, bias, activation):
    said = {"in_features": weight.shape[1], "out_features": weight.shape[0], "activation_function": activation}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said | {"bias": bias is not None}))
    weights = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def test_a_checkpoint_without_modules_says_nothing(tmp_path):
    assert sentence_of(tmp_path) == Sentence()
    assert Sentence().embedding(32) == Embedding(32, "last")
    assert Sentence().embedding(0) is None


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 32}, "last"),
    ],
)
def test_its_pooling(tmp_path, said, pooling):
    folder = write(tmp_path / "m", module("1_Pooling", "Pooling"), NORMALIZE, at_1_Pooling=said)
    assert sentence_of(folder) == Sentence(pooling)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "mean with cls"),
        ({"word_embedding_dimension": 32}, "of no kind"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_another_pooling_is_refused_by_name(tmp_path, said, named):
    sentence = sentence_of(write(tmp_path / "m", module("1_Pooling", "Pooling"), at_1_Pooling=said))
    assert named in sentence.refused
    assert sentence.embedding(32) is None


def test_another_module_is_refused_by_name(tmp_path):
    assert "its module LSTM" in sentence_of(write(tmp_path / "m", module("1_LSTM", "LSTM"))).refused


def test_a_folder_that_was_not_copied_is_missed_by_name(tmp_path):
    sentence = sentence_of(write(tmp_path / "m", module("1_Pooling", "Pooling")))
    assert sentence.refused == "1_Pooling/config.json is missing"


@pytest.mark.parametrize("text", ["{}", "[1]", "nothing"])
def test_what_cannot_be_read_is_an_error(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        sentence_of(tmp_path)


def test_dense_layers_come_behind_the_pooling(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    plain = Watched(folder)
    [mean] = vectors(plain, [asked(plain, "a", 9, "mean", normalizes=False)])
    first, second = (
        mx.random.normal((48, 32), key=mx.random.key(1)),
        mx.random.normal((8, 48), key=mx.random.key(2)),
    )
    bias = mx.random.normal((48,), key=mx.random.key(3))
    pooling = {"pooling_mode_mean_tokens": True}
    write(
        folder,
        module("1_Pooling", "Pooling"),
        module("2_Dense", "Dense"),
        module("3_Dense", "Dense"),
        at_1_Pooling=pooling,
    )
    write_dense(folder / "2_Dense", first, bias, "torch.nn.modules.activation.Tanh")
    write_dense(folder / "3_Dense", second, None, "torch.nn.modules.linear.Identity")
    watched = Watched(folder)
    whole = watched.engine.pooler.embedding
    assert whole == Embedding(8, "mean")
    [vector] = vectors(watched, [asked(watched, "a", 9, "mean", normalizes=False)])
    expected = np.array(second) @ np.tanh(np.array(first) @ mean + np.array(bias))
    assert np.allclose(vector, expected, atol=1e-5)


def test_a_dense_layer_of_another_activation_is_refused_by_name(tmp_path):
    folder = write(tmp_path / "m", module("2_Dense", "Dense"))
    write_dense(folder / "2_Dense", mx.zeros((4, 4)), None, "torch.nn.modules.activation.GELU")
    assert "the activation GELU" in sentence_of(folder).refused
    (folder / "2_Dense" / "config.json").write_text('{"activation_function": "torch.nn.modules.activation.Tanh"}')
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="2_Dense"):
        sentence_of(folder)
