"""Checkpoint folders in and out: names, files, both styles, ties, everything that can be wrong with them."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import BASE, CONFIGS, DELTA, FAMILIES, ROOT, VOCAB, make_oracle, save_oracle
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from focus_jax.models import (
    CheckpointError,
    ConfigError,
    Decoder,
    ModelConfig,
    ValueModel,
    checkpoint_name,
    load_hf,
    make_mesh,
    parameter_path,
    save_hf,
)
from focus_jax.models import save as saving
from focus_jax.models.checkpoint import StoredTensor, stored_slices

INDEX = "model.safetensors.index.json"


def config_of(family="qwen3", **fields):
    kind, more = CONFIGS[family]
    return ModelConfig.from_hf(kind(**{**BASE, **more, **fields}).to_dict())


def abstract_of(config):
    return nnx.eval_shape(lambda: Decoder(config, key=jax.random.key(0)))


def decoder_of(family="qwen3", seed=0, **fields):
    """A decoder whose every parameter is noise."""
    random = np.random.default_rng(seed)
    model = abstract_of(config_of(family, **fields))
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape).astype(np.float32)), model)


def values_of(model):
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_equal(model, other):
    ours, theirs = values_of(model), values_of(other)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(value, theirs[path], path)


def tensors_in(folder):
    return {name: value for file in sorted(Path(folder).glob("*.safetensors")) for name, value in load_file(file).items()}


def write(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return folder


@pytest.fixture
def folder(tmp_path):
    """A checkpoint in several shards."""
    save_hf(decoder_of(), tmp_path / "source", max_shard_bytes=100_000)
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    return tmp_path / "source"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_transformers_saved(family, tmp_path):
    oracle = make_oracle(family, seed=1, tied=False)
    model = load_hf(save_oracle(oracle, tmp_path / "theirs", max_shard_size="100KB"))
    save_hf(model, tmp_path / "ours", max_shard_bytes=150_000)

    read, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert type(read) is type(oracle)
    expected, found = oracle.state_dict(), read.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(oracle(tokens).logits, read(tokens).logits)

    # The rule of names and its inverse, on every tensor.
    names = [name for path, value in values_of(model).items() for name, _ in stored_slices(path, value.shape, model.config)]
    assert sorted(names) == sorted(expected)
    for name in names:
        assert checkpoint_name(*parameter_path(name, model.config), model.config) == name
    module = "model.layers.1.mlp.up_proj"
    assert checkpoint_name(*parameter_path(module, model.config), model.config) == module


def test_saved_and_loaded_is_bit_equal_also_sharded(tmp_path):
    model = decoder_of("qwen3_5", num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
    save_hf(model, tmp_path / "a", max_shard_bytes=100_000)
    loaded = load_hf(tmp_path / "a")
    assert loaded.config == model.config
    assert_equal(loaded, model)
    assert nnx.graphdef(loaded) == nnx.graphdef(abstract_of(model.config))

    mesh = make_mesh(4, 2)
    with jax.set_mesh(mesh):
        reference = abstract_of(model.config)
        active = load_hf(tmp_path / "a")
    for sharded in (load_hf(tmp_path / "a", mesh=mesh), active):
        assert_equal(sharded, model)
        assert [x.sharding.spec for x in jax.tree.leaves(sharded)] == [x.sharding.spec for x in jax.tree.leaves(reference)]
        assert nnx.graphdef(sharded) == nnx.graphdef(reference)
    assert active.blocks.layers[0].mlp.up_proj.weight[...].addressable_shards[0].data.size * 8 == 2 * 64 * 96
    save_hf(sharded, tmp_path / "b")
    assert_equal(load_hf(tmp_path / "b"), model)


def test_no_device_is_given_more_than_its_part(folder, monkeypatch):
    sizes = []
    read = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda *args: sizes.append(out := read(*args)) or out)
    load_hf(folder, mesh=make_mesh(4, 2))
    assert max(out.size for out in sizes) == VOCAB * 64 // 8


def test_b52_half_precision_keeps_what_decays_in_float32(tmp_path):
    model = decoder_of("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    save_hf(model, tmp_path / "half", dtype="bfloat16")
    kinds = {name: value.dtype.name for name, value in tensors_in(tmp_path / "half").items()}
    exact = {name for name, kind in kinds.items() if kind == "float32"}
    assert exact == {"model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.dt_bias"}
    assert set(kinds.values()) == {"float32", "bfloat16"}
    fields = json.loads((tmp_path / "half" / "config.json").read_text())
    assert fields["dtype"] == fields["torch_dtype"] == "bfloat16"

    loaded = load_hf(tmp_path / "half", dtype=jnp.bfloat16)
    values = values_of(loaded)
    assert {value.dtype.name for value in values.values()} == {"float32"}
    assert jax.eval_shape(lambda model: model(jnp.zeros((1, 3), int)), loaded).dtype == jnp.bfloat16
    for path, value in values_of(model).items():
        exact = path.endswith(("A_log", "dt_bias"))
        np.testing.assert_array_equal(values[path], value if exact else value.astype(jnp.bfloat16).astype(np.float32))
    # Half precision on disk, transformers' and ours, is widened alike.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    np.testing.assert_array_equal(theirs.model.norm.weight.detach(), values["norm.weight"][0])


VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
TEXT = {**BASE, **DELTA, "head_dim": 32, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize("extras", [True, False])
def test_b54_the_vision_and_text_style_is_read_and_kept(extras, tmp_path):
    ids = dict(zip(("image", "video", "vision_start", "vision_end"), range(150, 154), strict=True))
    full = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=TEXT,
            vision_config={**VISION, "num_position_embeddings": 16},
            tie_word_embeddings=True,
            **{f"{name}_token_id": number for name, number in ids.items()},
        )
    )
    source = save_oracle(full, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    if extras:
        tensors |= {"mtp.fc.weight": np.ones((4, 8), np.float32), "mtp.layers.0.mlp.up_proj.weight": np.ones((4, 8), np.float16)}
    else:
        tensors = {name: value for name, value in tensors.items() if not name.startswith("model.visual")}
    write(source, tensors)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    (source / "pytorch_model.bin").write_text("not carried over")

    model = load_hf(source)
    assert model.config.tied
    plain = tmp_path / "plain"
    save_hf(model, plain)
    assert_equal(load_hf(plain), model)
    assert not any("language_model" in name or "visual" in name or "mtp" in name for name in tensors_in(plain))

    trained = jax.tree.map(lambda x: x + 1, model)
    out = tmp_path / "out"
    save_hf(trained, out, like=source, max_shard_bytes=60_000)
    found = tensors_in(out)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        ours = name.startswith("model.language_model.")
        np.testing.assert_array_equal(found[name], value + 1 if ours else value, name)
        assert found[name].dtype == value.dtype
    assert_equal(load_hf(out), trained)
    kept = json.loads((source / "config.json").read_text()) | {"torch_dtype": "float32"}
    assert json.loads((out / "config.json").read_text()) == kept
    carried = {"tokenizer.json", "chat_template.jinja", "generation_config.json"}
    assert {path.name for path in out.iterdir() if path.suffix != ".safetensors"} == carried | {"config.json", INDEX}
    if extras:
        _, report = Qwen3_5ForConditionalGeneration.from_pretrained(out, output_loading_info=True)
        assert not any(report.values())


def test_what_the_source_keeps_wider_than_its_embedding_stays_wider(tmp_path):
    model = decoder_of()
    save_hf(model, tmp_path / "source", dtype="bfloat16")
    tensors = tensors_in(tmp_path / "source")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    write(tmp_path / "source", tensors)
    save_hf(model, tmp_path / "out", dtype="bfloat16", like=tmp_path / "source")
    kinds = {name: value.dtype.name for name, value in tensors_in(tmp_path / "out").items()}
    assert {name for name, kind in kinds.items() if kind == "float32"} == {"model.norm.weight"}
    # A source that is float32 throughout asks for nothing.
    save_hf(model, tmp_path / "source")
    save_hf(model, tmp_path / "out", dtype="bfloat16", like=tmp_path / "source")
    assert {value.dtype.name for value in tensors_in(tmp_path / "out").values()} == {"bfloat16"}


def test_b55_tie_flag_and_head_in_all_four_combinations(tmp_path):
    model = decoder_of(tie_word_embeddings=False)
    save_hf(model, tmp_path / "untied")
    tensors = tensors_in(tmp_path / "untied")
    without = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    tied = config_of(tie_word_embeddings=True)
    embedding = tensors["model.embed_tokens.weight"]

    assert_equal(load_hf(tmp_path / "untied"), model)  # untied, present: separate
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight\n.*set `tie_word_embeddings` to true"):
        load_hf(write(tmp_path / "untied", without))
    for stored in (without, without | {"lm_head.weight": embedding}):  # tied: one shared parameter
        loaded = load_hf(write(tmp_path / "tied", stored, tied))
        assert loaded.lm_head is None
        np.testing.assert_array_equal(loaded.head_weight(), embedding)
    # Only the head is stored: it is the embedding, as for transformers.
    only_head = {name: value for name, value in without.items() if "embed" not in name} | {"lm_head.weight": embedding}
    assert_equal(load_hf(write(tmp_path / "tied", only_head, tied)), loaded)
    # Tied by its config, yet another head: transformers warns and unties; here nobody's head is lost in silence.
    with pytest.raises(CheckpointError, match=r"but lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_hf(write(tmp_path / "tied", tensors, tied))


def test_every_tensor_that_does_not_fit_is_named_in_one_error_before_data_is_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(StoredTensor, "read", lambda *_: pytest.fail("read"))
    tensors = tensors_in(folder)
    for layer in (0, 2):
        del tensors[f"model.layers.{layer}.self_attn.q_norm.weight"]
    del tensors["model.norm.weight"]
    tensors |= {"model.layers.3.mlp.up_proj.weight": np.zeros(3, np.float32), "score.weight": np.zeros(3, np.float32)}
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].T
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].astype(np.int8)
    with pytest.raises(CheckpointError) as caught:
        load_hf(write(tmp_path / "odd", tensors, config_of()))
    for part in (
        "missing: model.layers.{0,2}.self_attn.q_norm.weight, model.norm.weight",
        "unexpected: model.layers.3.mlp.up_proj.weight, score.weight",
        "model.layers.1.mlp.down_proj.weight: expected the shape (64, 96), got (96, 64)",
        "model.layers.1.mlp.up_proj.weight: expected one of F32, BF16, F16, got I8",
    ):
        assert part in str(caught.value)


def test_numbers_that_are_not_finite_are_neither_loaded_nor_saved(folder, tmp_path):
    tensors = tensors_in(folder)
    for layer, value in ((0, np.nan), (2, np.inf)):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[name] = tensors[name].copy()
        tensors[name][3, 5] = value
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], -np.inf)
    odd = write(tmp_path / "odd", tensors, config_of())
    for mesh in (None, make_mesh(2, 2)):
        with pytest.raises(
            CheckpointError, match=r"not finite: model\.layers\.\{0,2\}\.mlp\.up_proj\.weight, model\.norm\.weight$"
        ):
            load_hf(odd, mesh=mesh)

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = load_hf(folder)
    model.norm.weight[...] = model.norm.weight[...].at[0, 7].set(1e5)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: .* not finite in float16; nothing was saved"):
        save_hf(model, folder, dtype="float16")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "source"]


def test_what_a_decoder_cannot_compute_in_or_live_on_is_refused(folder):
    for dtype in ("int8", "float8_e4m3fn", bool):
        with pytest.raises(ValueError, match="`dtype`: expected float32, bfloat16 or float16"):
            load_hf(folder, dtype=dtype)
    auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    for axes, kind in ((("data", "model"), auto), (("fsdp", "tensor"), explicit)):
        with pytest.raises(ValueError, match="`mesh`: expected axes fsdp and tensor of type Auto"):
            load_hf(folder, mesh=jax.make_mesh((4, 2), axes, axis_types=(kind, kind)))


def test_a_tensor_in_both_styles_is_refused(folder, tmp_path):
    tensors = tensors_in(folder)
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"both with and without 'model\.language_model\.'"):
        load_hf(write(tmp_path / "odd", tensors, config_of()))


def test_rotary_frequencies_of_very_old_checkpoints_are_passed_over(folder, tmp_path):
    tensors = tensors_in(folder) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    assert_equal(load_hf(write(tmp_path / "old", tensors, config_of())), load_hf(folder))


def _truncate(folder, shards, index):
    shards[0].write_bytes(shards[0].read_bytes()[:-100])
    shards[1].write_bytes(b"")
    return rf"{shards[0].name} cannot be read, is it complete(.|\n)*{shards[1].name} cannot be read"


def _remove(folder, shards, index):
    shards[1].unlink()
    return rf"{shards[1].name} is missing"


def _promise(folder, shards, index):
    moved = {**index["weight_map"], "model.norm.weight": shards[0].name}
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": moved}))
    return rf"{shards[0].name} lacks tensors that {INDEX} promises: model\.norm\.weight"


def _repeat(folder, shards, index):
    with safe_open(shards[0], "numpy") as file:
        name = next(iter(file.keys()))
        twice = {name: file.get_tensor(name)}
    save_file(load_file(shards[1]) | twice, shards[1])
    return rf"{shards[1].name} repeats tensors of another shard: {name}"


def _garble(folder, shards, index):
    (folder / INDEX).write_text("{")
    return "expected a `weight_map`"


def _escape(folder, shards, index):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": f"../{folder.name}/{shards[0].name}"}}))
    return "expected plain file names"


def _keep_torch_only(folder, shards, index):
    for path in (*shards, folder / INDEX):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    return r"there is only pytorch_model\.bin: load it with transformers and call `save_pretrained`"


def _keep_config_only(folder, shards, index):
    for path in (*shards, folder / INDEX):
        path.unlink()
    return "found neither; give the folder"


@pytest.mark.parametrize("damage", [_truncate, _remove, _promise, _repeat, _garble, _escape, _keep_torch_only, _keep_config_only])
def test_damaged_files_are_named(damage, folder):
    shards = sorted(folder.glob("*.safetensors"))
    message = damage(folder, shards, json.loads((folder / INDEX).read_text()))
    with pytest.raises(CheckpointError, match=message):
        load_hf(folder)


def test_a_folder_that_is_not_there_or_has_no_config_says_so(tmp_path):
    (tmp_path / "model.safetensors").touch()
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / "model.safetensors"):
        with pytest.raises(ConfigError, match=r"expected a config\.json"):
            load_hf(place)


def test_a_checkpoint_is_replaced_as_a_whole_or_not_at_all(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = decoder_of(seed=1)

    def fail(*_):
        raise OSError("disk full")

    for name in ("_write_json", "_sync"):
        with monkeypatch.context() as patch:
            patch.setattr(saving, name, fail)
            with pytest.raises(OSError, match="disk full"):
                save_hf(other, folder, like=folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    save_hf(other, folder, like=folder)  # a source may be its own successor
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert_equal(load_hf(folder), other)
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_a_folder_that_holds_more_than_a_checkpoint_is_not_replaced(folder):
    model = decoder_of(seed=1)
    for name in ("optimizer.pt", "optimizer.safetensors"):
        (folder / name).write_text("precious")
        with pytest.raises(CheckpointError, match=rf"one that holds a checkpoint alone, found {name}"):
            save_hf(model, folder)
        (folder / name).unlink()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"found no config\.json"):
        save_hf(model, folder)
    with pytest.raises(CheckpointError, match="expected a folder, found a file"):
        save_hf(model, next(folder.iterdir()))


def test_only_a_plain_decoder_of_the_source_shape_is_saved(folder, tmp_path):
    model = decoder_of()
    with pytest.raises(CheckpointError, match="expected a checkpoint of the model's shape"):
        save_hf(decoder_of(intermediate_size=32), tmp_path / "out", like=folder)
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16, got int8"):
        save_hf(model, tmp_path / "out", dtype="int8")
    with pytest.raises(ValueError, match="`max_shard_bytes`: expected at least 1, got 0"):
        save_hf(model, tmp_path / "out", max_shard_bytes=0)
    with pytest.raises(TypeError, match="expected a Decoder, got ValueModel"):
        save_hf(ValueModel(model), tmp_path / "out")
    model.blocks.layers[0].mlp.up_proj.lora_a = nnx.Param(jnp.zeros((3, 2)))
    with pytest.raises(CheckpointError, match=r"no place for, or lacks: blocks\.layers\.0\.mlp\.up_proj\.lora_a; .*merged"):
        save_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


MEASURE = """
import sys
from pathlib import Path
import jax
from focus_jax.models import load_hf

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

jax.numpy.zeros(1).block_until_ready()
before = kilobytes("VmRSS")
model = load_hf(sys.argv[1])
parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(model)) // 1024
shard = max(file.stat().st_size for file in Path(sys.argv[1]).glob("*.safetensors")) // 1024
print((kilobytes("VmHWM") - before - parameters) / shard)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_holds_little_more_than_the_parameters(dtype, tmp_path):
    config = ModelConfig("qwen3", 32000, 1024, 3072, 16, 8, 64, ("full_attention",) * 16, tied=True)
    save_hf(Decoder(config, key=jax.random.key(0)), tmp_path / "big", dtype=dtype, max_shard_bytes=100_000_000)
    command = [sys.executable, "-c", MEASURE, tmp_path / "big"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(run.stdout) < 1.2
